"""What the operators are given is looked at before any pointer is taken: nonsense is refused on every way in."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gtp_vit import GTPError
from gtp_vit.kernels import Ops, native
from gtp_vit.kernels.arguments import GTPReduceInputs
from gtp_vit.methods.gtp import operators
from support.operators import LISTS, OPERATORS, good, reference

pytestmark = pytest.mark.skipif(native.LOAD_ERROR is not None, reason=f"no native library: {native.LOAD_ERROR}")


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


# operator -> what is changed in arguments that make sense, so that they no longer do
NONSENSE = {
    "attention": [
        {"k": tensor(2, 2, 10, 8), "v": tensor(2, 2, 10, 8)},  # q of 4 heads, k and v of 2: as with grouped queries
        {"k": tensor(2, 2, 10, 8)},
        {"v": tensor(2, 4, 10, 16)},
        {"v": tensor(2, 4, 9, 8)},
        {"q": tensor(1, 4, 10, 8)},
        {"q": tensor(2, 4, 10, 16)},
        {"q": tensor(4, 10, 8)},
        {"size": tensor(2, 3)},
        {"size": tensor(1, 10)},
        {"size": tensor(2, 10, 1)},
        {"removed": -1},
        {"removed": 101},
        {"queries": 11},
        {"queries": -1},
        {"statistic_mask": [True, True]},
        {"statistic_mask": [True, True, True, True]},
        {"heads": 3},
        {"first": -1},
        {"first": 11},
        {"q": tensor(2, 4, 5, 8), "queries": 5},  # all statistics, half of the queries
        {"q": tensor(2, 4, 5, 8), "queries": 5, "statistic_mask": [False] * 3, "removed": 7},
        {"q": tensor(2, 4, 0, 8), "queries": 0, "statistic_mask": [False, False, True]},
    ],
    "gtp_reduce": [
        {"x": tensor(3, 10, 16)},
        {"x": tensor(2, 10), "branch": tensor(2, 10)},
        {"branch": tensor(2, 9, 16)},
        {"scores": tensor(2, 8)},
        {"scores": tensor(1, 9)},
        {"position": torch.arange(9).repeat(1, 1), "scores": tensor(1, 9)},
        {"position": torch.arange(11).repeat(2, 1), "scores": tensor(2, 11)},
        {"position": torch.arange(9).repeat(2, 1).int()},
        {"size": tensor(2, 9)},
        {"size": tensor(1, 10)},
        {"neighbours": LISTS[0].int()},
        {"neighbours": LISTS[0][:, :8]},
        {"neighbours": LISTS[0][0]},
        {"neighbours": LISTS[0].repeat(2, 1, 1), "root": LISTS[1].repeat(2, 1)},
        {"root": LISTS[1][:1]},
        {"removed": -1},
        {"removed": 0},
        {"removed": 9},
        {"removed": 10},
        {"norm_weight": tensor(15)},
        {"norm_bias": tensor(15)},
        {"norm_weight": None},
    ],
    "gtp_plus_merge": [
        {"branch": tensor(2, 10, 15)},
        {"importance": tensor(2, 8)},
        {"importance": tensor(1, 9), "size": tensor(1, 9)},
        {"importance": tensor(2, 11), "size": tensor(2, 11)},
        {"size": tensor(2, 10)},
        {"size": tensor(2, 9, 1)},
        {"removed": 9},
        {"removed": -1},
        {"norm_weight": tensor(17)},
        {"norm_bias": tensor(1)},
        {"norm_weight": None},
    ],
    "neighbours": [
        {"similarity": tensor(2, 8, 8)},
        {"similarity": tensor(2, 9, 8)},
        {"similarity": tensor(9, 9)},
        {"rows": 9},
        {"rows": -3, "columns": -3},
        {"spatial": 5},
        {"semantic": 0},
        {"semantic": 9},
    ],
}
CASES = [(operator, change) for operator, changes in NONSENSE.items() for change in changes]


def text(value: object) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else str(value)


@pytest.mark.parametrize(
    ("operator", "change"), CASES, ids=lambda v: v if isinstance(v, str) else ",".join(f"{k}={text(v[k])}" for k in v)
)
def test_arguments_that_contradict_each_other_are_refused_on_every_way_in(operator, change):
    arguments = list((good(operator) | change).values())
    registered = getattr(torch.ops.gtp_vit, operator).default
    ours = OPERATORS[operator]
    with torch.no_grad():
        with pytest.raises(GTPError, match=f"gtp_vit.{operator}: .*; found "):
            registered(*arguments)
        for ops in Ops:
            with pytest.raises(GTPError, match=f"gtp_vit.{operator}: .*; found "):
                ours(ops, ours.inputs(*arguments))
    with FakeTensorMode() as fake, pytest.raises(GTPError, match=f"gtp_vit.{operator}"):
        registered(*(fake.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments))
    arguments[0] = arguments[0].clone().requires_grad_()
    with pytest.raises(GTPError, match=f"gtp_vit.{operator}"):
        registered(*arguments)
    elsewhere = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    with pytest.raises(GTPError, match=f"gtp_vit.{operator}"):
        registered(*elsewhere)


def dtype(kind: torch.dtype, *names: str):
    return lambda given: given | {name: given[name].to(kind) for name in names}


# operator -> sensible arguments that native code cannot take: another dtype, nothing to do, no bias
FOR_THE_REFERENCE = {
    "attention": [
        dtype(torch.float16, "q", "k", "v"),
        dtype(torch.float64, "q", "k", "v", "size"),
        lambda given: given | {"queries": 0},
        lambda given: given | {name: given[name][:0] for name in ("q", "k", "v", "size")},
        lambda given: given | {name: given[name][:, :, :0] for name in "qkv"}
        | {"size": None, "queries": 0, "statistic_mask": [False] * 3, "first": 0},
    ],
    "gtp_reduce": [
        dtype(torch.float16, "x", "branch", "norm_weight", "norm_bias"),
        dtype(torch.float64, "x", "branch", "norm_weight", "norm_bias"),
        dtype(torch.float64, "root"),
        dtype(torch.float64, "size"),
        lambda given: given | {"norm_bias": None},
    ],
    "gtp_plus_merge": [
        dtype(torch.float16, "x", "branch", "norm_weight", "norm_bias"),
        dtype(torch.float64, "size"),
        lambda given: given | {"removed": 0},
        lambda given: given | {"norm_bias": None},
    ],
    "gtp_plus_merge_by_probe": [
        dtype(torch.float16, "x", "branch", "norm_weight", "norm_bias"),
        lambda given: given | {"removed": 0},
        lambda given: given | {"norm_bias": None},
    ],
    "cluster": [dtype(torch.float64, "distance"), lambda given: given | {"distance": given["distance"][:0]}],
    "neighbours": [],
}  # fmt: skip


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_native_code_cannot_take_goes_to_the_reference(operator, monkeypatch):
    def never(*_):
        raise AssertionError("this went into native code")

    for name in ("_attention", "_gtp_reduce", "_gtp_plus_merge", "_graph", "_cluster"):
        monkeypatch.setattr(native, name, never)
    for change in FOR_THE_REFERENCE[operator]:
        arguments = change(good(operator))
        for found, wanted in zip(
            getattr(torch.ops.gtp_vit, operator)(*arguments.values()), reference(operator, arguments), strict=True
        ):
            assert torch.equal(found, wanted)
    with pytest.raises(AssertionError, match="native code"):  # and what it can take does go there
        getattr(torch.ops.gtp_vit, operator)(*good(operator).values())


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_tensor_on_another_device_never_reaches_native_code(operator):
    fits, inputs = OPERATORS[operator].checks.supports, OPERATORS[operator].inputs(**good(operator))
    assert fits(inputs)
    for name, value in inputs._asdict().items():
        if isinstance(value, torch.Tensor):
            assert not fits(inputs._replace(**{name: value.to("meta")})), name


@pytest.mark.parametrize("operator", OPERATORS)
def test_types_and_devices_that_make_no_sense_are_refused(operator):
    call = getattr(torch.ops.gtp_vit, operator)
    arguments = good(operator)
    for name, given in arguments.items():
        if isinstance(given, torch.Tensor) and name not in ("position", "neighbours"):
            for kind in (torch.int32, torch.complex64):
                with pytest.raises(GTPError, match="must be of floating point"):
                    call(*(arguments | {name: given.to(kind)}).values())
        if isinstance(given, torch.Tensor) and operator not in ("neighbours", "cluster"):  # of one tensor
            with pytest.raises(GTPError, match="all tensors must be on one device"):
                call(*(arguments | {name: given.to("meta")}).values())
    if operator == "attention":
        with pytest.raises(GTPError, match="q and k must be of one dtype"):
            call(*(arguments | {"k": arguments["k"].double()}).values())


@pytest.mark.parametrize("where", ["position", "neighbours"])
@pytest.mark.parametrize("value", [-1, 10, 2**40, -(2**62)])
def test_a_cell_outside_the_grid_is_reported_and_not_read(where, value):
    """9 stands for nobody in a list of neighbours; a token's own cell is 0 ... 8."""
    given = good("gtp_reduce")
    for place in (0, 4, 8):
        bad = given[where].clone()
        # the lists of tokens that leave are not looked at, so all nine get a bad entry
        bad[(1, place) if where == "position" else (1, slice(None), place)] = value
        with pytest.raises(IndexError, match="not a cell of the grid"):
            torch.ops.gtp_vit.gtp_reduce(*(given | {where: bad}).values())
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            operators.gtp_reduce(Ops.TORCH, GTPReduceInputs(**(given | {where: bad})))


def test_shapes_that_are_checked_are_enough_for_every_operator():
    for operator in OPERATORS:
        found = getattr(torch.ops.gtp_vit, operator)(*good(operator).values())
        with FakeTensorMode() as fake:
            arguments = [fake.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in good(operator).values()]
            promised = getattr(torch.ops.gtp_vit, operator)(*arguments)
        for one, other in zip(found, promised, strict=True):
            assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


TWICE = LISTS[0].clone()
TWICE[1, 4, 1] = TWICE[1, 4, 0]


def with_one(value: float, of: str):
    """One entry of the last image, or of its only row."""

    def change(arguments: dict) -> dict:
        changed = arguments[of].clone()
        changed.view(-1)[-3] = value
        return {of: changed}

    return change


def last_image(value: float, of: str):
    return lambda arguments: {of: torch.cat([arguments[of][:-1], torch.full_like(arguments[of][-1:], value)])}


# operator -> numbers on which native code and its reference would differ
VALUES = {
    "attention": [
        last_image(0, "size"),
        with_one(-1, "size"),
        with_one(torch.nan, "size"),
        with_one(torch.inf, "size"),
        lambda _: {"scale": torch.nan},
    ],
    "gtp_reduce": [
        lambda _: {"neighbours": TWICE},
        lambda _: {"alpha": torch.nan},
        lambda _: {"alpha": torch.inf},
        lambda _: {"position": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 7]] * 2)},
        lambda _: {"position": torch.tensor([[7, 1, 2, 3, 4, 5, 6, 0, 7]] * 2)},  # in no order
        with_one(torch.inf, "size"),
        with_one(torch.nan, "size"),
        with_one(torch.inf, "root"),
        with_one(torch.nan, "root"),
        with_one(3e38, "root"),
        with_one(-0.5, "root"),
        lambda _: {"epsilon": torch.nan},
    ],
    "gtp_plus_merge": [
        last_image(0, "size"),
        with_one(0, "size"),
        with_one(-1, "size"),
        with_one(torch.nan, "size"),
        with_one(torch.inf, "size"),
        lambda _: {"importance_floor": torch.nan},
        lambda _: {"importance_floor": -torch.inf},
        lambda _: {"epsilon": torch.nan},
    ],
    "gtp_plus_merge_by_probe": [
        last_image(0, "size"),
        with_one(-1, "size"),
        with_one(torch.nan, "size"),
        with_one(3e38, "size"),
        with_one(torch.nan, "protected"),
        with_one(torch.inf, "protected"),
        with_one(-1, "protected"),
        with_one(0.5, "protected"),
        with_one(torch.nan, "probe"),
        with_one(3e38, "probe"),
        lambda _: {"importance_floor": torch.nan},
    ],
    "neighbours": [with_one(-torch.inf, "similarity"), with_one(torch.inf, "similarity")],
    "cluster": [
        last_image(torch.inf, "distance"),
        with_one(torch.inf, "distance"),
        with_one(-torch.inf, "distance"),
        lambda given: {"distance": given["distance"].tril()},
        with_one(7, "distance"),  # from here to there it is not as far as back
    ],
}


@pytest.mark.parametrize(("operator", "change"), [(name, change) for name, each in VALUES.items() for change in each])
@pytest.mark.parametrize("gradients", [False, True])
def test_numbers_on_which_implementations_would_differ_are_refused(operator, change, gradients):
    arguments = good(operator)
    arguments |= change(arguments)
    first = next(iter(arguments))
    arguments[first] = arguments[first].clone().requires_grad_(gradients)
    with pytest.raises(GTPError, match=f"gtp_vit.{operator}: ") as refused:
        getattr(torch.ops.gtp_vit, operator)(*arguments.values())
    assert "\n" not in str(refused.value)


def test_lists_that_were_found_good_are_looked_at_again_when_they_change():
    arguments = good("gtp_reduce")
    arguments["neighbours"] = arguments["neighbours"].clone()
    torch.ops.gtp_vit.gtp_reduce(*arguments.values())
    arguments["neighbours"].copy_(TWICE)  # the same memory
    with pytest.raises(GTPError, match="no cell may be twice in a row of neighbours"):
        torch.ops.gtp_vit.gtp_reduce(*arguments.values())


@pytest.mark.parametrize("operator", VALUES)
def test_numbers_that_are_only_odd_get_the_references_result(operator):
    """NaN among features, similarities or distances has a meaning: it is similar to nobody."""
    odd = {
        "gtp_reduce": [lambda given: {"position": given["position"].flip(1)}, with_one(torch.nan, "scores")],
        "gtp_plus_merge": [with_one(torch.nan, "importance")],
        "gtp_plus_merge_by_probe": [with_one(1, "protected"), lambda _: {"protected": None}],
        "neighbours": [with_one(torch.nan, "similarity"), with_one(3e38, "similarity")],
        "cluster": [last_image(torch.nan, "distance"), last_image(3e38, "distance")],
    }
    for change in [lambda _: {}, *odd.get(operator, [with_one(0, "size"), lambda _: {"size": None}])]:
        arguments = good(operator)
        arguments |= change(arguments)
        found = getattr(torch.ops.gtp_vit, operator)(*arguments.values())
        for one, other in zip(found, reference(operator, arguments), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("change", [{"position": 9}, {"position": -1}, {"neighbours": 10}, {"neighbours": -1}])
def test_cells_beside_the_grid_are_refused_whoever_computes(change, gradients):
    arguments = good("gtp_reduce")
    ((name, cell),) = change.items()
    arguments[name] = arguments[name].clone()
    arguments[name].view(-1)[3] = cell
    arguments["x"] = arguments["x"].clone().requires_grad_(gradients)
    with pytest.raises(IndexError, match="not a cell of the grid"):
        torch.ops.gtp_vit.gtp_reduce(*arguments.values())


def test_lists_that_are_filled_up_are_no_duplicates():
    """M0 stands for no neighbour, and may be there often."""
    arguments = good("gtp_reduce")
    lists = arguments["neighbours"].clone()
    lists[:, :, 1:] = 9
    arguments |= {"neighbours": lists, "size": None}
    found = torch.ops.gtp_vit.gtp_reduce(*arguments.values())
    for one, other in zip(found, reference("gtp_reduce", arguments), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
