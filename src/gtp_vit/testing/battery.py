"""The battery: cases of methods and families, and one call that checks all promises of a case."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from gtp_vit.core.reducer import Method
from gtp_vit.methods import known_methods
from gtp_vit.testing import families
from gtp_vit.testing.promises import PROMISES, Promise, is_adaptive
from gtp_vit.testing.subject import Case, Subject


class BrokenPromisesError(AssertionError):
    """A case that does not hold what every method promises; `names` are the promises that it breaks."""

    def __init__(self, case: Case, errors: Mapping[str, Exception], checked: int) -> None:
        self.names = tuple(errors)
        texts = [f"{name}:\n{''.join(traceback.format_exception(error))}" for name, error in errors.items()]
        super().__init__(
            f"{case} breaks {len(errors)} of {checked} promises: {', '.join(errors)}\n\n" + "\n".join(texts)
        )


def cases(
    methods: Sequence[Method] | None = None, models: Mapping[str, Callable[[], nn.Module]] | None = None
) -> list[Case]:
    """Every method on every family that it is meant for.

    Args:
        methods: settings of methods, which need not be registered; None = every registered method with its defaults.
        models: name -> a function that makes a small model, such as four layers of 24 channels on 8 x 8 patches; its
            parameters are made random here, so that none can hide. None = small models of all supported families.
    """
    chosen = [method() for method in known_methods().values()] if methods is None else methods
    if models is None:
        models = families.factories()
    made = [Case(name, method, factory) for method in chosen for name, factory in models.items()]
    return [case for case in made if fits(case)]


def fits(case: Case) -> bool:
    """Is the method meant for such a model? `patch` refuses it if not."""
    vit = case.original.vit
    if case.method.needs_class_token and not vit.class_token:
        return False
    return not (is_adaptive(case.method) and vit.head_reads_image_tokens)


def check(case: Case, promises: Sequence[Promise] = PROMISES) -> None:
    """Check all promises of a case, also after one is broken; raises BrokenPromisesError, which names all that are."""
    subject = Subject(case)
    errors: dict[str, Exception] = {}
    for promise in promises:
        try:
            promise(subject)
        except Exception as error:
            errors[promise.__name__] = error
    if errors:
        raise BrokenPromisesError(case, errors, len(promises))
