"""An operator: one computation, its implementations, and its registration with torch.

Operators are registered as `torch.ops.gtp_vit.*`, so compile, export, the profiler and the FLOP counter see them.
However an operator is called, its arguments are checked first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

from gtp_vit.kernels import native
from gtp_vit.kernels.checks import check_kinds

Result = TypeVar("Result")
TRUSTED = "trusted"  # the overload of every operator that the package itself calls
_LIBRARY = torch.library.Library("gtp_vit", "DEF")
# Not torch.library.infer_schema: it makes SymInt of int, which programs exported before would not match.
_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", float: "float", bool: "bool", list[bool]: "bool[]"}


class NormParams(NamedTuple):
    """A LayerNorm as three arguments of an operator; without a weight there is none."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    epsilon: float = 0.0

    @classmethod
    def of(cls, norm: nn.LayerNorm | None) -> NormParams:
        return cls() if norm is None else cls(norm.weight, norm.bias, norm.eps)

    def apply(self, x: Tensor) -> Tensor:
        """x after the norm; empty if there is none."""
        if self.weight is None:
            return x.new_empty(0)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


class Ops(Enum):
    """The set of implementations that a forward pass uses; `kernels.choose` picks one."""

    TORCH = "torch"  # the twins
    NATIVE = "native"  # C++ on a CPU
    PORTABLE = "portable"  # for programs that an engine will run: no operator that only torch has

    @property
    def fuses_norm(self) -> bool:
        """Should an operator compute the LayerNorm after it as well? Only native code gains from that."""
        return self is Ops.NATIVE


class Operator(Generic[Result]):
    """One computation: a pure-torch twin and implementations of other sets; called with the set to use.

    Native code runs where its tensors fit, and the twin everywhere else. Sets other than the native one are called
    directly, so that exported programs contain nothing but torch's own operators.

    Args:
        name: the name in torch.ops.gtp_vit.
        twin: the pure-torch implementation; its signature is the operator's.
        by_set: implementations of other sets; a set that is not listed uses the twin.
        check: raises where arguments contradict each other.
        fits: can native code take these arguments, which have passed `check`?
        fake: tensors of the results' shapes and dtypes, with any content.
        flops: the number of operations, given shapes in place of tensors; None = not counted.
        whole: names of the tensors that may be integers.
        check_values: raises for numbers on which implementations would differ. They are looked at only where others
            call (torch.ops.gtp_vit.*), as the package's own calls never have them. In what it compiles, exports and
            profiles these are therefore calls of a second overload, torch.ops.gtp_vit.*.trusted.

    `check`, `fits`, `fake`, `flops` and `check_values` get only the arguments that they have parameters of the same
    name for.
    """

    def __init__(
        self,
        name: str,
        twin: Callable[..., Result],
        by_set: dict[Ops, Callable[..., Result]],
        *,
        check: Callable[..., None],
        fits: Callable[..., bool],
        fake: Callable[..., Result],
        flops: Callable[..., int] | None = None,
        whole: Collection[str] = (),
        check_values: Callable[..., None] | None = None,
    ) -> None:
        types = get_type_hints(twin)
        results = ", ".join("Tensor" for _ in get_args(types.pop("return")))
        names = tuple(types)
        self.name, self.twin, self.by_set = name, twin, by_set
        self.check, self.fits, self.fake = (_with_some(each, names) for each in (check, fits, fake))
        self.check_values = None if check_values is None else _with_some(check_values, names)
        self.whole = [names.index(each) for each in whole]
        parameters = ", ".join(f"{_TYPES[kind]} {each}" for each, kind in types.items())
        self._by_twin = self._checked(twin)
        fake_results = self._checked(self.fake)
        for overload, prepared in ((name, self._of_others), (f"{name}.{TRUSTED}", lambda function: function)):
            _LIBRARY.define(f"{overload}({parameters}) -> ({results})")
            _LIBRARY.impl(overload, prepared(self._by_twin), "CompositeExplicitAutograd")
            _LIBRARY.impl(overload, prepared(self._by_native), "CPU")
            _LIBRARY.impl(overload, self._with_gradients(overload, prepared(self._by_twin)), "Autograd")
            torch.library.register_fake(f"gtp_vit::{overload}", fake_results, lib=_LIBRARY)
        registered = getattr(torch.ops.gtp_vit, name)
        self.registered, self.trusted = registered.default, getattr(registered, TRUSTED)
        if flops is not None:
            count = _with_some(flops, names)
            register_flop_formula(registered)(lambda *arguments, **_: int(count(*arguments)))

    def __call__(self, ops: Ops, *arguments: Any) -> Result:
        """The result, by the implementation that belongs to the set `ops`."""
        if ops is Ops.NATIVE:
            return self._by_native(*arguments) if _unobserved() else self.trusted(*arguments)
        self.check(*arguments)
        return self.by_set.get(ops, self.twin)(*arguments)

    def _by_native(self, *arguments: Any) -> Result:
        self.check(*arguments)
        fits = native.PROBLEM is None and self.fits(*arguments)
        return self.by_set[Ops.NATIVE](*arguments) if fits else self._by_twin(*arguments)

    def _checked(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """`function` after all checks, including those of dtypes and devices, which `fits` makes for native code."""

        def call(*arguments: Any) -> Result:
            self.check(*arguments)
            check_kinds(self.name, arguments, self.whole)
            return function(*arguments)

        return call

    def _of_others(self, function: Callable[..., Result]) -> Callable[..., Result]:
        """`function` after a look at the numbers as well, for calls through torch's dispatcher."""
        check_values = self.check_values
        if check_values is None:
            return function

        def call(*arguments: Any) -> Result:
            self.check(*arguments)  # shapes first
            check_kinds(self.name, arguments, self.whole)
            if torch.is_grad_enabled():
                with torch.no_grad():
                    check_values(*arguments)
            else:
                check_values(*arguments)
            return function(*arguments)

        return call

    @staticmethod
    def _with_gradients(overload: str, by_twin: Callable[..., Result]) -> Callable[..., Result]:
        """The twin if a gradient is needed, since autograd knows torch's operators."""
        name, _, kind = overload.partition(".")

        def call(*arguments: Any) -> Result:
            if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in arguments):
                return by_twin(*arguments)
            with torch._C._AutoDispatchBelowAutograd():
                result: Result = getattr(getattr(torch.ops.gtp_vit, name), kind or "default")(*arguments)
            return result

        return call


def _with_some(function: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """`function`, callable with one argument for each of `names`; those it has no parameter for are dropped."""
    places = tuple(names.index(each) for each in inspect.signature(function).parameters)
    return lambda *arguments: function(*[arguments[place] for place in places])


def _unobserved() -> bool:
    """May a native kernel be called directly? Torch's dispatcher takes as long as a small kernel.

    Not if something wants to see the operator: compile, export, the FLOP counter and other dispatch modes.
    """
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0
