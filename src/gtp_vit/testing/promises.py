"""The promises of a reduced model: one function each, which raises AssertionError where the promise is broken.

A promise is added by writing its function and naming it in PROMISES, or in SLOW_PROMISES if it takes seconds.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gtp_vit.core.costs import Costs
from gtp_vit.core.reducer import Method
from gtp_vit.core.vit import LayerTokens, ViTInfo
from gtp_vit.errors import GTPError
from gtp_vit.methods.gtp import GTP
from gtp_vit.methods.identity import Identity
from gtp_vit.patching import host_of, patch, unpatch
from gtp_vit.profiling.macs import macs
from gtp_vit.profiling.trace import trace
from gtp_vit.testing.subject import Subject, output

# Operators that ONNX or OpenVINO do not have.
ONLY_IN_TORCH = {
    *("aten.sort.stable", "aten.sort.default", "aten.argsort.default", "aten.argsort.stable", "aten.kthvalue.default"),
    *("aten.view.dtype", "aten.scatter_reduce.two"),
}


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    """Raise AssertionError unless two tensors are equal up to rounding."""
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def refuses(action: Callable[[], object], word: str) -> None:
    """Raise AssertionError unless `action` raises a GTPError whose text has this word."""
    message = "nothing was refused"
    try:
        action()
    except GTPError as error:
        message = str(error)
    assert word in message, f"{message}; expected a GTPError that says {word!r}"


# --- what a method does to the tokens --------------------------------------------------------------------------------


def nothing_removed_equals_the_original(subject: Subject) -> None:
    """At no strength a reduced model computes what the original computes."""
    for nothing in removing_nothing(subject.method, subject.vit):
        fast: Any = patch(subject.model, nothing, quiet=True)
        close(output(fast, subject.images), subject.original.output, 1e-6)
        if subject.original.features is not None:
            with torch.no_grad():
                close(fast.forward_features(subject.images), subject.original.features, 1e-6)


def removing_nothing(method: Method, vit: ViTInfo) -> list[Method]:
    """The settings at no strength, and those of `at_strength` with strength 0."""
    if isinstance(method, Identity):
        return [method]
    adaptive: Any = method  # counts follow the image: without layers nothing is removed
    weakest = dataclasses.replace(adaptive, layers=()) if is_adaptive(method) else method.scaled(vit, 0)
    return [weakest, type(method).at_strength(vit, 0)]


def is_adaptive(method: Method) -> bool:
    """Does the number of tokens depend on the image?"""
    return getattr(method, "budget", "") is None


def token_counts_follow_the_schedule(subject: Subject) -> None:
    """After each layer there are as many tokens as the plan says, and no patch twice."""
    reducer, grid = subject.fast.reducer, subject.fast.reduction.vit.grid
    if is_adaptive(subject.method):
        refuses(lambda: reducer.steps(grid), "a different number of tokens in each image")
        return
    for layer, step in zip(subject.trace.layers, reducer.steps(grid), strict=True):
        assert layer.kept.shape == (len(subject.images), step.out)
        for image in layer.kept:
            assert len(set(image.tolist())) == step.out
    assert subject.layers[-1].x.shape[1] == subject.vit.prefix + step.out


def a_shortened_last_block_changes_nothing(subject: Subject) -> None:
    """`shorten_last_block` skips only what nobody reads."""
    whole = patch(subject.model, subject.method, shorten_last_block=False, quiet=True)
    close(subject.output, output(whole, subject.images), 1e-6)


def prefix_tokens_stay_as_they_are(subject: Subject) -> None:
    """A reduction touches neither class token nor registers, and gives them weight 1."""
    for before, after in subject.reductions:
        assert torch.equal(before.x[:, : before.prefix], after.x[:, : after.prefix])
        adjustments = subject.fast.reducer.adjust(0, after)
        if adjustments is not None and adjustments.key_weights is not None:
            assert torch.equal(
                adjustments.key_weights[:, : after.prefix], torch.ones(len(subject.images), after.prefix)
            )


def every_patch_has_one_owner(subject: Subject) -> None:
    """Each patch belongs to one token or is lost; a patch that stays belongs to itself; sizes count the patches."""
    patches = subject.layers[0].cell.shape[1]
    for tokens in subject.layers:
        count = tokens.cell.shape[1]
        assert tokens.owner is not None
        assert tokens.owner.shape == (len(subject.images), patches)
        assert int(tokens.owner.min()) >= -1
        assert int(tokens.owner.max()) < count
        assert int(tokens.cell.min()) >= 0
        assert int(tokens.cell.max()) <= patches
        for image in range(len(subject.images)):
            in_grid = tokens.cell[image] < patches
            places = torch.arange(count)[in_grid]
            assert torch.equal(tokens.owner[image][tokens.cell[image][in_grid]], places)
            if subject.method.name in COUNT_PATCHES and tokens.size is not None:
                owners = tokens.owner[image]
                assert torch.equal(torch.bincount(owners[owners >= 0], minlength=count).float(), tokens.size[image])


COUNT_PATCHES = ("gtp_plus", "tome", "evit", "mctf", "pitome", "atc")  # whose sizes are numbers of whole patches


def an_image_alone_equals_the_image_in_a_batch(subject: Subject) -> None:
    """The other images of a batch make no difference."""
    for index in range(len(subject.images)):
        image = subject.images[index : index + 1]
        if not is_adaptive(subject.method):
            for one, many in zip(trace(subject.fast, image).layers, subject.trace.layers, strict=True):
                assert torch.equal(one.kept[0], many.kept[index])
        close(output(subject.fast, image)[0], subject.output[index], 1e-5)


def nan_stays_in_its_image(subject: Subject) -> None:
    """NaN in, NaN out, as with the original; other images of the batch are unharmed."""
    images = subject.images.clone()
    images[0, 0, 0, 0] = torch.nan
    reduced, original = output(subject.fast, images), output(subject.model, images)
    assert torch.equal(reduced.isnan().flatten(1).any(1), original.isnan().flatten(1).any(1))
    close(reduced[1:], subject.output[1:], 1e-5)


# --- what a method costs ---------------------------------------------------------------------------------------------


def macs_without_overhead(costs: Costs, method: Method) -> int:
    """MACs without what begins with the first token that leaves: the method's own work, or a last block in full."""
    reducer = method.build(costs.vit)
    return costs.macs(reducer, reducer.steps(costs.grid), shorten_last_block=False, include_overhead=False).total


def assert_falling(counts: list[int], method: Method) -> None:
    """Raise AssertionError unless MACs, the first of them without any reduction, fall with the strength."""
    # Where a family cannot compute values by themselves, MCTF's look at the map costs more than the first tokens save.
    first = 1 if method.name == "mctf" and counts[1] > counts[0] else 0
    assert counts[first:] == sorted(counts[first:], reverse=True), counts


def cost_falls_with_strength(subject: Subject) -> None:
    """The stronger, the fewer MACs; at full strength fewer than the original's, with the method's own work."""
    if isinstance(subject.method, Identity):
        return
    costs = subject.original.costs
    settings = [type(subject.method).at_strength(subject.vit, step / 16) for step in range(17)]
    counts = [macs_without_overhead(costs, method) for method in settings]
    assert counts[0] == macs_without_overhead(costs, Identity())
    assert_falling(counts, subject.method)
    assert macs(subject.model, settings[-1]).total < costs.unreduced


def a_share_of_the_strength_is_between_nothing_and_all(subject: Subject) -> None:
    """`scaled` goes from the settings themselves down to nothing."""
    method, vit = subject.method, subject.vit
    assert method.scaled(vit, 1) == method
    if is_adaptive(method):
        refuses(lambda: method.scaled(vit, 0), "has no strength that could grow")
        return
    weakened = [method.scaled(vit, share) for share in (0, 0.2, 0.4, 0.6, 0.8, 1)]
    assert_falling([macs_without_overhead(subject.original.costs, weaker) for weaker in weakened], method)
    for step in method.scaled(vit, 0).build(vit).steps(vit.grid):
        assert step == LayerTokens(*(vit.image_tokens,) * 4)


# --- what patching does to a model -----------------------------------------------------------------------------------


def two_runs_are_equal(subject: Subject) -> None:
    """The same model, and the same model patched anew, give the same bits."""
    assert torch.equal(output(subject.fast, subject.images), subject.output)
    again = patch(subject.make(), subject.method, quiet=True)
    assert torch.equal(output(again, subject.images), subject.output)


def the_original_is_untouched_and_the_weights_are_shared(subject: Subject) -> None:
    """Patching changes no attribute of the model, and copies no weight."""
    model = subject.make()
    attributes, kind = copy.copy(vars(model)), type(model)
    tables = {name: dict(vars(model)[name]) for name in ("_parameters", "_buffers", "_modules")}
    fast: Any = patch(model, subject.method, quiet=True)
    output(fast, subject.images)
    assert type(model) is kind
    assert vars(model) == attributes
    assert {name: dict(vars(model)[name]) for name in tables} == tables
    assert torch.equal(output(model, subject.images), subject.original.output)
    learned = {id(parameter) for parameter in fast.reducer.parameters()}
    assert bool(learned) == (subject.method.trained_parts != "none")
    shared = [id(parameter) for parameter in fast.parameters() if id(parameter) not in learned]
    assert shared == [id(parameter) for parameter in model.parameters()]
    assert learned <= {id(parameter) for parameter in fast.parameters()}
    assert isinstance(fast, kind)


def state_dicts_load_both_ways(subject: Subject) -> None:
    """Weights of the original load into the reduced model and the other way round; only learned parts are added."""
    model, method, fast = subject.model, subject.method, subject.fast
    learned = list(fast.reducer.state_dict())
    # Each is stored in a file that a setting names.
    assert {key.split(".")[0] for key in learned} == set(method.weight_file_fields)
    assert bool(learned) == (method.trained_parts != "none")
    path = host_of(model).path
    added = [f"{path}.reducer.{key}" if path else f"reducer.{key}" for key in learned]
    assert [key for key in fast.state_dict() if key not in added] == list(model.state_dict())
    assert [key for key in fast.state_dict() if key in added] == added
    other = patch(subject.make(), method, quiet=True)
    assert other.load_state_dict(model.state_dict(), strict=False).missing_keys == added
    assert subject.make().load_state_dict(fast.state_dict(), strict=False).unexpected_keys == added


def copies_are_equal(subject: Subject) -> None:
    """Pickled, deep-copied and copied models give the same bits."""
    fast = subject.fast
    for again in (pickle.loads(pickle.dumps(fast)), copy.deepcopy(fast), copy.copy(fast)):
        assert again.reduction.method == subject.method
        assert torch.equal(output(again, subject.images), subject.output)


def patching_again_starts_from_the_original(subject: Subject) -> None:
    """Patching a reduced model replaces its method; `unpatch` gives the original."""
    again = patch(patch(subject.model, GTP(propagate=3, alpha=0.7)), subject.method, quiet=True)
    assert torch.equal(output(again, subject.images), subject.output)
    plain = unpatch(again)
    assert type(plain) is type(subject.model)
    assert torch.equal(output(plain, subject.images), subject.original.output)


# --- compilers and exporters: seconds each ---------------------------------------------------------------------------


def it_compiles_as_one_graph(subject: Subject) -> None:
    """torch.compile needs no graph break."""
    torch.compiler.reset()
    compiled = torch.compile(subject.fast, fullgraph=True, backend="eager")
    assert torch.equal(output(compiled, subject.images), subject.output)


def it_exports_with_a_dynamic_batch(subject: Subject, *, strict: bool = False) -> None:
    """torch.export takes any number of images, and uses only operators that ONNX and OpenVINO have."""
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    program = torch.export.export(subject.fast, (subject.images,), dynamic_shapes=shapes, strict=strict)
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    if not strict or hasattr(torch.compiler, "is_exporting"):  # torch 2.6 does not say that it exports strictly
        assert not operators & ONLY_IN_TORCH
    exported = program.module()
    for batch in (1, 2, 5):
        images = subject.case.images(batch)
        # Below 1 an entry of the map within rounding of the threshold may be kept by one and not by the other.
        tolerance = 1e-6 if getattr(subject.method, "theta", 1) == 1 else 1e-4
        close(output(exported, images), output(subject.fast, images), tolerance)


def it_can_be_traced_by_torchscript(subject: Subject) -> None:
    """torch.jit.trace records it."""
    with torch.no_grad():
        traced = torch.jit.trace(subject.fast, (subject.images,))
    close(output(traced, subject.images), subject.output, 1e-6)


def gradients_with_checkpointing_are_equal(subject: Subject) -> None:
    """`set_grad_checkpointing` changes no gradient."""

    def gradients(checkpointing: bool) -> list[Tensor]:
        fast: Any = patch(subject.make(), subject.method, quiet=True)
        fast.set_grad_checkpointing(checkpointing)
        fast(subject.images).square().sum().backward()
        return [p.grad for p in fast.parameters() if p.grad is not None]

    plain, checkpointed = gradients(False), gradients(True)
    assert len(plain) == len(checkpointed) > 10
    for one, other in zip(plain, checkpointed, strict=True):
        assert one.isfinite().all()
        close(other, one, 1e-6)


Promise = Callable[[Subject], None]
TOKEN_PROMISES: tuple[Promise, ...] = (
    nothing_removed_equals_the_original,
    token_counts_follow_the_schedule,
    a_shortened_last_block_changes_nothing,
    prefix_tokens_stay_as_they_are,
    every_patch_has_one_owner,
    an_image_alone_equals_the_image_in_a_batch,
    nan_stays_in_its_image,
)
COST_PROMISES: tuple[Promise, ...] = (cost_falls_with_strength, a_share_of_the_strength_is_between_nothing_and_all)
MODEL_PROMISES: tuple[Promise, ...] = (
    two_runs_are_equal,
    the_original_is_untouched_and_the_weights_are_shared,
    state_dicts_load_both_ways,
    copies_are_equal,
    patching_again_starts_from_the_original,
)
PROMISES = (*TOKEN_PROMISES, *COST_PROMISES, *MODEL_PROMISES)
SLOW_PROMISES: tuple[Promise, ...] = (it_compiles_as_one_graph, it_exports_with_a_dynamic_batch)
