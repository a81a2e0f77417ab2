"""Which measure fits a model: chosen by what it returns, or by name. A new one is a file and a line here."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from gtp_vit.core.backbone import Output
from gtp_vit.errors import BadSetting, UnsupportedBackbone, check_name, check_range
from gtp_vit.metrics.base import Measure
from gtp_vit.metrics.classes import NEEDED, Classes
from gtp_vit.metrics.dense import Dense
from gtp_vit.metrics.embeddings import Embeddings
from gtp_vit.metrics.regression import Numbers
from gtp_vit.patching import host_of

MEASURES: dict[str, type[Measure]] = {each.name: each for each in (Classes, Embeddings, Numbers, Dense)}
Wanted = Literal["auto", "classes", "embedding", "numbers", "dense"]
NEIGHBOURS = Embeddings.k


def measure_of(
    model: nn.Module, wanted: str | Measure = "auto", *, neighbours: int = NEIGHBOURS, texts: Tensor | None = None
) -> Measure:
    """The measure for a model's outputs; no image is run.

    Args:
        model: a supported ViT or a model around one, patched or not. Of other models nothing is known: they must return
            scores of classes, unless `wanted` says otherwise.
        wanted: auto, or the name of a measure, if the model's outputs fit it.
        neighbours: how many nearest images of each are compared, for embeddings.
        texts: embeddings of texts [T, C], for embeddings.
    """
    if isinstance(wanted, Measure):
        return wanted
    check_name("measure", wanted, ("auto", *MEASURES))
    check_range("neighbours", neighbours, 1, 1000, whole=True)
    output = _output(model)
    chosen = wanted if wanted != "auto" else _fitting(output)
    _refuse(chosen, output)
    if texts is not None and chosen != Embeddings.name:
        raise BadSetting(f"embeddings of texts are for models whose outputs are embeddings; this one's are {chosen}")
    if chosen != Embeddings.name:
        return MEASURES[chosen]()
    return Embeddings(kind=Embeddings.kind if output is None else output.kind, k=neighbours, texts=texts)


def check_class_output(model: nn.Module) -> None:
    """Refuse a supported ViT without classes, from its head alone, for work that needs them, such as finetuning."""
    _refuse(Classes.name, _output(model))


def _output(model: nn.Module) -> Output | None:
    """What a model returns; None if nothing is known of it: it is then checked when it has run."""
    try:
        return host_of(model).output
    except UnsupportedBackbone:
        return None


def _fitting(output: Output | None) -> str:
    """The measure for a kind of output."""
    if output is None:
        return Classes.name
    if output.kind == "tokens":
        return Dense.name
    if output.kind in ("features", "embedding"):
        return Embeddings.name
    return Classes.name if output.width > 1 else Numbers.name


def _refuse(chosen: str, output: Output | None) -> None:
    """Raise BadSetting if outputs of this kind cannot be measured so."""
    if output is None or chosen == Dense.name:
        return
    kind, width = output
    if chosen == Classes.name:
        if kind == "tokens":
            raise BadSetting(
                f"the model has an output for every token, {width} numbers each; {NEEDED}: create it with pooling, "
                "e.g. global_pool='token'"
            )
        if kind == "features":
            raise BadSetting(
                f"the model has no classifier: its output is {width} features; {NEEDED}: create it with num_classes "
                "and weights that have them"
            )
        if kind == "embedding":
            raise BadSetting(
                f"the model's output is an embedding of {width} numbers, to be compared with those of texts; {NEEDED}: "
                "give weights that were finetuned on classes (timm has them as ..._ft_in1k)"
            )
        if width == 1:
            raise BadSetting(f"the model has one output, whose softmax is always 1; {NEEDED}: give two or more classes")
    if chosen == Embeddings.name and kind == "classes":
        raise BadSetting(
            f"the model scores {width} classes, which are no embedding; create it with num_classes=0, or measure "
            "classes"
        )
    if kind == "tokens":
        raise BadSetting(
            f"the model has an output for every token, {width} numbers each; measure it as dense, or create it with "
            "pooling, e.g. global_pool='token'"
        )
