"""The battery that every registered method passes on every registered backbone: gtp_vit.testing.

A new method is tested with its default settings by being in METHODS; more settings are in support/settings.py.
"""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gtp_vit import (
    ATS,
    METHODS,
    GTPError,
    Identity,
    Method,
    patch,
    trace,
)
from gtp_vit.backbones import BACKBONES
from gtp_vit.core.backbone import Backbone
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.loop import run
from gtp_vit.core.tokens import Tokens
from gtp_vit.patching import tower_of
from gtp_vit.testing import Case, cases, check, families, fits
from gtp_vit.testing.promises import (
    COST_PROMISES,
    MODEL_PROMISES,
    TOKEN_PROMISES,
    close,
    gradients_with_checkpointing_are_equal,
    is_adaptive,
    it_can_be_traced_by_torchscript,
    it_compiles_as_one_graph,
    it_exports_with_a_dynamic_batch,
    nothing_removed_equals_the_original,
    token_counts_follow_the_schedule,
)
from gtp_vit.testing.subject import Subject, output
from support.precision import half_precision_is_near_full_precision
from support.settings import DEFAULTS, EVERY, OPTIONS, OTHER_OPERATORS

# Untrained predictors are all that DynamicViT has here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:DynamicViT's predictors are untrained"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node"),  # torch 2.6's export, about constants
    pytest.mark.filterwarnings("ignore:Node .* does not reference an nn.Module"),
]


def on(names: list[str], methods: list[Method]) -> list[Case]:
    return cases(methods, {name: families.factory_of(name) for name in names})


def each(made: list[Case], quick: tuple[str, ...] | None = None) -> pytest.MarkDecorator:
    """A test of these cases; slow for all but `quick` methods, with their defaults, on a plain ViT."""

    def marks(case: Case) -> list[pytest.MarkDecorator]:
        is_quick = quick is None or (case.method in named(*quick) and case.family == "vit")
        return [] if is_quick else [pytest.mark.slow]

    return pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case)) for case in made], ids=str)


def named(*names: str) -> list[Method]:
    return [method for method in DEFAULTS if method.name in names]


def can_be_exported(method: Method) -> bool:
    return method.not_exported is None and not is_adaptive(method)  # what the others say is in test_rivals.py


def promises_of(case: Case) -> tuple:
    """What patching does to a model depends on the model; all that a method adds is settings and learned parts."""
    promises = TOKEN_PROMISES
    if case.method.name in ("gtp_plus", "dynamicvit") or case.family in ("vit", "gap", "lvvit"):
        promises += MODEL_PROMISES
    if case.family in families.DIVERSE:
        promises += COST_PROMISES
    return promises


@each([*on(families.THOROUGH, DEFAULTS), *on(["vit", "gap"], OPTIONS)])
def test_every_method_keeps_its_promises(case):
    check(case, promises_of(case))


@pytest.mark.slow
@each(on([name for name in families.DIVERSE if name not in ("vit", "gap")], OPTIONS))
def test_every_option_keeps_its_promises_on_every_kind_of_family(case):
    check(case, promises_of(case))


@each(on([name for name in families.NAMES if name in families.LIGHT], DEFAULTS))
def test_every_method_keeps_the_main_promises_in_every_other_family(case):
    check(case, (nothing_removed_equals_the_original, token_counts_follow_the_schedule))


def test_every_registered_backbone_has_families_here():
    without = [name for name, backbone in BACKBONES.items() if type(backbone).small_models is Backbone.small_models]
    assert without == ["hf_packed"]  # which takes no images: tests/families/test_packed.py


@pytest.mark.slow
def test_models_a_method_is_not_meant_for_are_refused():
    pairs = [(family, method) for method in EVERY for family in families.NAMES]
    refused = [pair for pair in pairs if not fits(Case(*pair, families.factory_of(pair[0])))]
    assert len(refused) > 10
    for family, method in refused:
        with pytest.raises(GTPError, match=r"use (GTP or ToMe|ATS\(budget=\.\.\.\))"):
            patch(families.make(family), method)


def test_batches_of_adaptive_methods_are_traced_one_by_one():
    fast = patch(families.make("vit"), ATS())
    with pytest.raises(GTPError, match="one by one"):
        trace(fast, families.images("vit"))


@each(on(families.REPRESENTATIVE, EVERY), quick=tuple(METHODS))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_near_full_precision(case, dtype):
    half_precision_is_near_full_precision(case.family, case.method, dtype)


@pytest.mark.parametrize("method", EVERY, ids=str)
def test_a_patched_model_can_be_moved_to_half_precision(method):
    images = families.images("vit").bfloat16()
    moved = patch(families.make("vit"), method).bfloat16()
    assert torch.equal(output(moved, images), output(patch(families.make("vit").bfloat16(), method), images))


class Recorded(LayerAttention):
    """A layer's attention that gives a method the same tensors whenever it reads them again."""

    def __init__(self, attention: LayerAttention, read: dict) -> None:
        self.__dict__ |= {**vars(attention), "read": read}

    @property
    def qkv(self):
        key = "projections", self.tokens.x.shape[1]
        self.read[key] = self.read.get(key) or super().qkv
        return self.read[key]

    def statistics(self, *names, **how):
        if "statistics" not in self.read:
            self.read["statistics"] = super().statistics(*names, **how), self._output
        found, self._output = self.read["statistics"]
        return found

    def branch(self, output=None):
        if output is not None:
            same(self.read.setdefault("output", output), output)
        self._branch = self.read.get("branch")
        self.read["branch"] = super().branch(output)
        return self.read["branch"]

    def map_only(self):
        self.read["map"] = self.read["map"] if "map" in self.read else super().map_only()
        return self.read["map"]

    def values_only(self):
        self.read["values"] = self.read["values"] if "values" in self.read else super().values_only()
        return self.read["values"]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize(
    "method", [m for m in EVERY if m.trained_parts == "none" and not isinstance(m, Identity)], ids=str
)
def test_autocast_changes_nothing_that_a_method_does_itself(method, kernels):
    """Each step of a float32 pass is done again under autocast, with the same tensors: not a bit is different."""
    fast, images = patch(families.make("vit"), method, kernels=kernels), families.images("vit")
    reducer, done = fast.reducer, []

    def watch(name: str):
        step = getattr(reducer, name)

        def watched(*arguments):
            done.append((lambda: step(*arguments), step(*arguments)))
            return done[-1][1]

        setattr(reducer, name, watched)

    def watched_attend(attention: LayerAttention):
        before, read = copy.copy(attention), {}
        first = Recorded(attention, read)
        done.append((lambda: attend(Recorded(before, read)), attend(first)))
        attention.tokens = first.tokens
        return done[-1][1]

    attend, reducer.add_and_reduce = reducer.add_and_reduce, watched_attend
    for name in ("start", "before", "after"):
        watch(name)
    with torch.no_grad():
        run(tower_of(fast), images, track_owners=not is_adaptive(method))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            again = [step() for step, _ in done]
    for (_, result), repeated in zip(done, again, strict=True):
        same(result, repeated)


def same(one: object, other: object) -> None:
    """Equal bit by bit, whatever the tensors are wrapped in."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, (Tokens, tuple)):
        parts = [tuple(vars(each).values()) if isinstance(each, Tokens) else each for each in (one, other)]
        for a, b in zip(*parts, strict=True):
            same(a, b)
    else:
        assert one == other


# One method for each way through the loop: a kernel of its own, attention's map, merging in torch.
@each(
    [
        *on(["vit"], [m for m in (*DEFAULTS, *OTHER_OPERATORS) if not is_adaptive(m)]),
        *on(["gap", "lvvit"], named("gtp", "gtp_plus")),
    ],
    quick=("gtp_plus", "gtp", "mctf"),
)
@pytest.mark.time_limit(6)
def test_compiles_as_one_graph(case):
    check(case, [it_compiles_as_one_graph])


# Of the other methods' defaults the files are run: tests/engines/test_engines.py.
@each(
    on(["vit"], [*named("gtp_plus"), *(method for method in OTHER_OPERATORS if can_be_exported(method))]),
    quick=("gtp_plus",),
)
@pytest.mark.time_limit(12)
def test_exports_with_a_dynamic_batch(case):
    check(case, [it_exports_with_a_dynamic_batch])


# Strictly means by torch's compiler, whose test above has every method.
@pytest.mark.slow
@each(on(["vit", "gap"], named("gtp_plus")))
def test_exports_strictly_with_a_dynamic_batch(case):
    it_exports_with_a_dynamic_batch(Subject(case), strict=True)


@each(on(["vit"], [method for method in DEFAULTS if can_be_exported(method)]), quick=("gtp_plus", "tome"))
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace.*")
def test_every_method_can_be_traced(case):
    check(case, [it_can_be_traced_by_torchscript])


@each(on(families.REPRESENTATIVE, EVERY), quick=tuple(METHODS))
def test_checkpointed_gradients_are_equal(case):
    check(case, [gradients_with_checkpointing_are_equal])


@each(on(families.REPRESENTATIVE, DEFAULTS), quick=tuple(METHODS))
def test_two_threads_share_one_model(case):
    fast = Subject(case).fast
    inputs = [torch.randn_like(case.images(3)) for _ in range(12)]
    expected = [output(fast, images) for images in inputs]
    with ThreadPoolExecutor(2) as pool:
        for one, other in zip(pool.map(lambda images: output(fast, images), inputs), expected, strict=True):
            close(one, other, 1e-6)
