"""Settings of all methods that the battery runs: the defaults, and options that take other paths through the code."""

from gtp_vit import ATC, ATS, GTP, MCTF, METHODS, PPT, DiffRate, EViT, EvoViT, GTPPlus, PiToMe, ToFu, ToMe, TriLevel
from gtp_vit.testing import families

GTP_OPTIONS = [
    GTP(propagate=6, theta=0.6, alpha=0.3),
    GTP(propagate=(0, 9, 0, 4), graph="spatial", heads="mean"),
    GTP(propagate="keep:0.7:1:2", graph="semantic", neighbours=3, select="broad"),
    GTP(propagate=5, graph="none", select="cosine_tokens"),
    GTP(propagate=5, select="cosine_attention", spatial_neighbours=4, renormalise_graph=True),
    GTP(propagate=5, select="random", proportional_attention=False),
    GTP(propagate=5, select="sum", conserve_sizes=True, edges="either", exclude_self=True),
    GTP(propagate=5, select="diagonal", theta=0.5, score_from="dense", sparsify_rows=True, renormalise_rows=True),
]
RIVAL_OPTIONS = [
    GTPPlus(remove=8, calibration=families.calibration()),
    ToMe(r="inflection:8:-1", prop_attn=False),
    EViT(keep_rate=0.5, fuse_token=False, drop_loc=(0, 3)),
    EvoViT(keep_ratio=0.4, representative_token=True, layer_wise=True),
    ATS(budget="keep:0.6:1:2"),
    TriLevel(keep_ratio=0.6, attn_ratio=0.3),
    PPT(r=9, threshold=0.0, pp_loc_list=(0, 2)),
    DiffRate(prune=(0, 5, 0, 7), merge=(3, 0, 6, 0)),
    MCTF(r=9, one_step_ahead=2, tau_info=0, pooling="size"),
    MCTF(r="keep:0.65:1:2", one_step_ahead=0, tau_sim=0.5, tau_size=0, pooling="mean", prop_attn=False),
    MCTF(r=(0, 7, 0, 5), bidirectional=False, pooling="max"),
    PiToMe(r=7, mode_order="energy_first", margin=0.9, margin_decay=0.4, prop_attn=True),
    ToFu(r="ratio:0.85:1", variant="pitome", first_merging_layer=1),
    ToFu(r=6, first_merging_layer=0, track_sizes=True),
    ATC(r=9, linkage="complete", variant="original"),
    ATC(r="geometric:0.7:1:2", linkage="single", prop_attn=False, track_sizes=False),
]
# Settings whose operators differ from those of all others: compilers and exporters see nothing new in the rest.
OTHER_OPERATORS = [
    GTP_OPTIONS[0],  # a threshold
    GTP_OPTIONS[2],  # a graph of similarities
    GTP_OPTIONS[7],  # scores and a threshold row by row
    RIVAL_OPTIONS[0],  # what was learned
    RIVAL_OPTIONS[3],  # attention that chooses in every layer
    RIVAL_OPTIONS[7],  # pruning before merging
    RIVAL_OPTIONS[10],  # merging one way
    RIVAL_OPTIONS[11],  # energy first
    RIVAL_OPTIONS[12],  # pruning, then merging by energy
]
OPTIONS = [*GTP_OPTIONS, *RIVAL_OPTIONS]
DEFAULTS = [method() for method in METHODS.values()]
EVERY = [*DEFAULTS, *OPTIONS]
