"""Measure a model in eval mode, and restore its own mode afterwards.

timm.create_model returns models in train mode, where dropout and stochastic depth make every pass a different one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from torch import nn

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@contextlib.contextmanager
def eval_mode(*models: object) -> Iterator[None]:
    """Every module of the models in eval mode; afterwards each is in its own mode again.

    Patched models share blocks with their originals and users freeze single blocks, so each module counts for itself.
    Arguments that are no modules are ignored.
    """
    modules = {module for model in models if isinstance(model, nn.Module) for module in model.modules()}
    before = {module: module.training for module in modules}
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in before.items():
            module.training = training


def in_eval_mode(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorator for functions whose first argument, `model`, is a model: they run with it in eval mode."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with eval_mode(*args[:1], kwargs.get("model")):
            return function(*args, **kwargs)

    return call
