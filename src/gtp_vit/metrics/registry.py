"""The registry of measures: chosen by a model's output, or by name. A new one is a file and a line here."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from gtp_vit.core.backbone import Output
from gtp_vit.errors import SettingError, UnsupportedModelError, check_name
from gtp_vit.metrics.base import Measure
from gtp_vit.metrics.classes import Classification
from gtp_vit.metrics.dense import PatchFeatures
from gtp_vit.metrics.embeddings import Embeddings
from gtp_vit.metrics.regression import Regression
from gtp_vit.patching import host_of

MEASURES: dict[str, type[Measure]] = {
    measure.name: measure for measure in (Classification, Embeddings, Regression, PatchFeatures)
}


def select_measure(model: nn.Module, name: str | Measure = "auto", **settings: Any) -> Measure:
    """The measure for a model's outputs; no image is run.

    Args:
        model: a supported ViT or a model around one, patched or not. Of other models nothing is known: they must return
            scores of classes, unless `name` says otherwise.
        name: auto, or the name of a measure, if the model's outputs fit it; a measure itself is returned unchanged.
        **settings: of the measure, e.g. neighbours and texts of the one for embeddings.
    """
    if isinstance(name, Measure):
        return name
    check_name("measure", name, ("auto", *MEASURES))
    output = _output(model)
    if name != "auto":
        chosen = MEASURES[name]
        reason = None if output is None else chosen.unsupported_reason(output)
        if reason is not None:
            raise SettingError(f"{reason}, or measure it as {measure_for_output(output).name}")
    else:
        chosen = measure_for_output(output)
    for name in settings:
        owners = [
            key for key, measure in MEASURES.items() if name in {field.name for field in dataclasses.fields(measure)}
        ]
        if chosen.name not in owners:
            raise SettingError(
                f"{name} is a setting of {' and '.join(owners) or 'no measure'}, and this model's outputs are measured "
                f"as {chosen.name}; remove it"
            )
    return chosen(**settings) if output is None else chosen(kind=output.kind, **settings)


def measure_for_output(output: Output | None) -> type[Measure]:
    """The measure for such an output; None: nothing is known of it."""
    return next(measure for measure in MEASURES.values() if measure.fits(output))


def check_class_output(model: nn.Module) -> None:
    """Refuse a supported ViT without classes, from its head alone, for work that needs them, such as finetuning."""
    output = _output(model)
    reason = None if output is None else Classification.unsupported_reason(output)
    if reason is not None:
        raise SettingError(reason)


def _output(model: nn.Module) -> Output | None:
    """The kind of a model's output; None if it is unknown, and then checked when the model has run."""
    try:
        return host_of(model).output
    except UnsupportedModelError:
        return None
