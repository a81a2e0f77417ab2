"""The operators with native code, and arguments of each that make sense."""

import torch

from gtp_vit import kernels
from gtp_vit.kernels.arguments import NeighboursInputs
from gtp_vit.methods.atc import cluster
from gtp_vit.methods.gtp import operators
from gtp_vit.methods.gtp_plus.merge import gtp_plus_merge, gtp_plus_merge_by_probe

OPERATORS = {
    each.name: each
    for each in (
        kernels.attention,
        operators.gtp_reduce,
        gtp_plus_merge,
        gtp_plus_merge_by_probe,
        operators.neighbours,
        cluster,
    )
}
LISTS = operators.neighbours_reference(
    NeighboursInputs(torch.rand(2, 9, 9, generator=torch.Generator().manual_seed(0)), 3, 3, 8, 2)
)


def reference(operator: str, arguments: dict) -> tuple:
    """What torch makes of arguments by name."""
    return OPERATORS[operator].reference(OPERATORS[operator].inputs(**arguments))


def good(operator: str) -> dict:
    """Arguments that make sense: 2 images, 10 tokens, 9 of them image tokens on a grid of 3 x 3."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 10, 8).unbind(0)
    x, branch = torch.randn(2, 2, 10, 16).unbind(0)
    scores, size = torch.rand(2, 9), torch.rand(2, 10) + 0.5
    norm = {"norm_weight": torch.rand(16), "norm_bias": torch.rand(16), "epsilon": 1e-6}
    asked = {"statistic_mask": [True, True, True], "heads": 1, "first": 1}
    position, (neighbours, root) = torch.arange(9).repeat(2, 1), LISTS
    distance = torch.rand(2, 9, 9)
    return {
        "attention": {"q": q, "k": k, "v": v, "size": size, "scale": 0.3, "removed": 0, "queries": 10, **asked},
        "gtp_reduce": {"x": x, "branch": branch, "scores": scores, "position": position, "size": size}
        | {"neighbours": neighbours, "root": root, "removed": 3, "alpha": 0.2, "with_size": True, **norm},
        "gtp_plus_merge": {"x": x, "branch": branch, "importance": scores, "size": size[:, 1:].contiguous()}
        | {"removed": 3, "importance_floor": 0.5, "preserve_norm": True, **norm},
        "gtp_plus_merge_by_probe": {
            "x": x,
            "branch": branch,
            "probe": torch.randn(16),
            "size": size[:, 1:].contiguous(),
        }
        | {
            "protected": (torch.arange(9) == 4).float().repeat(2, 1),
            "removed": 3,
            "importance_floor": 0.5,
            "preserve_norm": True,
        }
        | norm,
        "cluster": {"distance": distance + distance.transpose(1, 2), "removed": 3, "linkage": 0},
        "neighbours": {"similarity": torch.rand(2, 9, 9), "rows": 3, "columns": 3, "spatial": 8, "semantic": 2},
    }[operator]
