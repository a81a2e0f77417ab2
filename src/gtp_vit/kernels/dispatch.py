"""An operator: one computation, its implementations, and its registration with torch.

Operators are registered as `torch.ops.gtp_vit.*`, so compile, export, the profiler and the FLOP counter see them.
Every way to call an operator checks its arguments first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gtp_vit.kernels import native
from gtp_vit.kernels.checks import check_dtypes_and_devices

Inputs = TypeVar("Inputs", bound="tuple[object, ...]")
Result = TypeVar("Result", bound="tuple[Tensor, ...]")
TRUSTED = "trusted"  # the overload for this package's own calls, which need no check of values
_LIBRARY = torch.library.Library("gtp_vit", "DEF")
# Not torch.library.infer_schema: it turns int into SymInt, and programs exported with int would not match.
_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", int: "int", float: "float", bool: "bool", list[bool]: "bool[]"}


class Ops(Enum):
    """The set of implementations that a forward pass uses; `kernels.select_ops` picks one."""

    TORCH = "torch"  # the reference implementations
    NATIVE = "native"  # C++ on a CPU
    PORTABLE = "portable"  # for export to an engine: only operators that engines have, too
    TRITON = "triton"  # kernels on a GPU
    LEAN = "lean"  # torch operators for accelerators, where every call costs a launch: few calls, no gradients

    @property
    def fuses_norm(self) -> bool:
        """Should an operator also compute the LayerNorm that follows it? Only kernels of our own gain from that."""
        return self is Ops.NATIVE or self is Ops.TRITON


@dataclass(frozen=True)
class Checks(Generic[Inputs]):
    """The checks that run before an operator."""

    check: Callable[[Inputs], None]
    """Raises if the arguments contradict each other."""
    supports: Callable[[Inputs], bool]
    """Can native code take these arguments? Called after `check`."""
    values: Callable[[Inputs], None]
    """Raises for numbers in the tensors on which the implementations would disagree. It runs only when users call
    torch.ops.gtp_vit.* themselves. The package's own calls never pass such numbers, so they use a second overload
    without this check, torch.ops.gtp_vit.*.trusted; compiled, exported and profiled programs show that name."""
    integer_args: Collection[str] = ()
    """Names of the tensors that may be integers."""
    supports_triton: Callable[[Inputs], bool] | None = None
    """Can the Triton kernels take these arguments? None: the operator has no Triton kernel."""


class Operator(Generic[Inputs, Result]):
    """One computation with an implementation per set; a caller passes the set to use and the arguments.

    Native code runs where `checks.supports` allows it, and the reference everywhere else. Implementations of the other
    sets are plain calls, not registered operators, so exported programs contain nothing but torch's own operators.

    Args:
        name: the name in torch.ops.gtp_vit.
        inputs: the NamedTuple of its arguments, whose fields are torch's schema.
        results: the NamedTuple of its results.
        by_set: the implementations; a set that is not listed uses the reference, Ops.TORCH.
        checks: the checks of the arguments.
        fake: makes tensors of the results' shapes and dtypes, with any values (torch's fake implementation).
        flops: counts the floating-point operations; None = not counted.
    """

    def __init__(
        self,
        name: str,
        inputs: Callable[..., Inputs],
        results: Callable[..., Result],
        by_set: dict[Ops, Callable[[Inputs], Result]],
        checks: Checks[Inputs],
        *,
        fake: Callable[[Inputs], Result],
        flops: Callable[[Inputs], int] | None = None,
    ) -> None:
        types = get_type_hints(inputs)
        names = tuple(types)
        self.name, self.inputs, self.results, self.by_set, self.checks = name, inputs, results, by_set, checks
        self.reference, self.native, self.fake = by_set[Ops.TORCH], by_set[Ops.NATIVE], fake
        self.integer_args = [names.index(argument) for argument in checks.integer_args]
        parameters = ", ".join(f"{_TYPES[kind]} {argument}" for argument, kind in types.items())
        schema = f"({parameters}) -> ({', '.join('Tensor' for _ in get_type_hints(results))})"
        for overload, wrap in ((name, self._with_value_checks), (f"{name}.{TRUSTED}", self._without_value_checks)):
            _LIBRARY.define(f"{overload}{schema}")
            _LIBRARY.impl(overload, wrap(self._by_reference), "CompositeExplicitAutograd")
            _LIBRARY.impl(overload, wrap(self._by_native), "CPU")
            _LIBRARY.impl(overload, self._with_gradients(overload, wrap(self._by_reference)), "Autograd")
            torch.library.register_fake(
                f"gtp_vit::{overload}", lambda *flat: self._checked(fake, self.inputs(*flat)), lib=_LIBRARY
            )
        registered = getattr(torch.ops.gtp_vit, name)
        self.registered, self.trusted = registered.default, getattr(registered, TRUSTED)
        if flops is not None:
            register_flop_formula(registered, get_raw=True)(lambda *flat, **_: int(flops(self.inputs(*flat))))

    def __call__(self, ops: Ops, inputs: Inputs) -> Result:
        """The result, computed by the implementation of the set `ops`, or by the reference where it has none."""
        if ops is Ops.NATIVE:
            return self._by_native(inputs) if _unobserved() else self.results(*self.trusted(*inputs))
        self.checks.check(inputs)
        if ops is Ops.TRITON and not (self.checks.supports_triton and self.checks.supports_triton(inputs)):
            return self.reference(inputs)
        return self.by_set.get(ops, self.reference)(inputs)

    def _by_native(self, inputs: Inputs) -> Result:
        self.checks.check(inputs)
        can_run = native.LOAD_ERROR is None and self.checks.supports(inputs)
        return self.native(inputs) if can_run else self._by_reference(inputs)

    def _by_reference(self, inputs: Inputs) -> Result:
        return self._checked(self.reference, inputs)

    def _checked(self, function: Callable[[Inputs], Result], inputs: Inputs) -> Result:
        """Call `function` after the checks, also of dtypes and devices, which `supports` makes for native code."""
        self.checks.check(inputs)
        check_dtypes_and_devices(self.name, inputs, self.integer_args)
        return function(inputs)

    def _with_value_checks(self, function: Callable[[Inputs], Result]) -> Callable[..., Result]:
        """Wrap `function` for users' calls through torch's dispatcher, which passes the arguments one by one."""

        def call(*flat: object) -> Result:
            inputs = self.inputs(*flat)
            self.checks.check(inputs)  # before the others, which rely on the shapes
            check_dtypes_and_devices(self.name, inputs, self.integer_args)
            if torch.is_grad_enabled():
                with torch.no_grad():
                    self.checks.values(inputs)
            else:
                self.checks.values(inputs)
            return function(inputs)

        return call

    def _without_value_checks(self, function: Callable[[Inputs], Result]) -> Callable[..., Result]:
        """Wrap `function` for the package's own calls through the dispatcher."""
        return lambda *flat: function(self.inputs(*flat))

    @staticmethod
    def _with_gradients(overload: str, by_reference: Callable[..., Result]) -> Callable[..., Result]:
        """Call the reference where a gradient is needed: autograd can differentiate torch's operators, not kernels."""
        name, _, overload_name = overload.partition(".")

        def call(*flat: object) -> Result:
            if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in flat):
                return by_reference(*flat)
            with torch._C._AutoDispatchBelowAutograd():
                result: Result = getattr(getattr(torch.ops.gtp_vit, name), overload_name or "default")(*flat)
            return result

        return call


def _unobserved() -> bool:
    """May a native kernel be called without torch's dispatcher, which takes as long as a small kernel?

    Not where something must see the operator: compile, export, the FLOP counter and other dispatch modes.
    """
    return not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() == 0
