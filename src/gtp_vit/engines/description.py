"""What an exported file says of itself, as a value whose every field has been checked; in the file it is JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gtp_vit.core.backbone import FIELDS
from gtp_vit.data.transforms import INTERPOLATIONS
from gtp_vit.engines.engine import INPUT, Engine
from gtp_vit.engines.graph import Graph, Port
from gtp_vit.errors import GTPError, shown
from gtp_vit.methods import method_from_dict

FORMAT = 1
LAYOUT = "batch, channels, height, width; 32-bit floats; any batch"
WORDS = ("mean", "std", "crop_pct", "crop_mode", "interpolation", "processor")  # of a preparation, as timm calls them
CROPS = ("center", "squash", "border")
FINGERPRINT = re.compile("[0-9a-f]{16}")
LARGEST = 10**6  # of sizes
MOST_MACS = 10**18
# Programs may need a little more than was counted: the portable form of GTP+ computes both halves of its similarities.
LEAST_SHARE, MOST_SHARE = 0.98, 1.25


@dataclass(frozen=True)
class Description:
    """The metadata of an exported file."""

    model: str
    weights: str  # where they are from
    fingerprint: str  # of the weights
    method: dict[str, Any] | None  # None = unreduced
    unreduced: int  # MACs
    exported: int
    precision: str
    engine: str
    channels: int
    size: tuple[int, int]  # height and width
    preparation: dict[str, Any]  # of images: WORDS; empty = not known
    kind: str  # of output
    width: int
    classes: tuple[str, ...] | None
    opset: int
    versions: dict[str, str]

    @property
    def share(self) -> float:
        return round(self.exported / self.unreduced, 4)

    @property
    def output(self) -> str:
        """The name of its output."""
        return "logits" if self.kind == "classes" else self.kind

    def to_dict(self) -> dict[str, Any]:
        """As it is stored."""
        return {
            "format": FORMAT,
            "model": self.model,
            "weights": {"from": self.weights, "fingerprint": self.fingerprint},
            "method": self.method,
            "macs": {"unreduced": self.unreduced, "exported": self.exported, "share": self.share},
            "precision": self.precision,
            "engine": self.engine,
            "input": {
                "name": INPUT,
                "layout": LAYOUT,
                "channels": self.channels,
                "size": list(self.size),
                **self.preparation,
            },
            "output": {"name": self.output, "kind": self.kind, "width": self.width},
            "classes": None if self.classes is None else list(self.classes),
            "opset": self.opset,
            "versions": self.versions,
        }

    def refusal(self, graph: Graph) -> str | None:
        """How this contradicts the graph of its file; None if it does not."""
        for what, ports, wanted in (
            ("input", graph.inputs, Port(INPUT, "float32", (None, self.channels, *self.size))),
            ("output", graph.outputs, self._port()),
        ):
            if len(ports) != 1:
                return f"its graph has {len(ports)} {what}s, and one is right"
            if not _fits(ports[0], wanted):
                return f"it says that its {what} is {wanted}, and in its graph it is {ports[0]}"
        if graph.eight_bits != (self.precision == "int8"):
            found = "products in 8 bits" if graph.eight_bits else "no product in 8 bits"
            return f"it says that its precision is {self.precision}, and its graph has {found}"
        if not graph.macs:
            return "the MACs of its graph cannot be counted"
        if not LEAST_SHARE <= graph.macs / self.exported <= MOST_SHARE:
            return f"it says that it takes {self.exported:.4g} MACs, and its graph takes {graph.macs:.4g}"
        return None

    def _port(self) -> Port:
        tokens = (None,) if self.kind == "tokens" else ()
        return Port(self.output, "float32", (None, *tokens, self.width))


def described(found: Any, engine: Engine) -> Description:
    """The description in JSON; raises GTPError that names the first field that is not right."""
    top = _Fields(found, "")
    if top.take("format") != FORMAT:
        raise GTPError(f"its format is {shown(found['format'])}; this version of gtp-vit reads {FORMAT}")
    weights, cost = _Fields(top.take("weights"), "weights."), _Fields(top.take("macs"), "macs.")
    given, output = _Fields(top.take("input"), "input."), _Fields(top.take("output"), "output.")
    kind, width, classes = output.one_of("kind", tuple(FIELDS)), output.whole("width", LARGEST), top.take("classes")
    if classes is not None:
        _check_classes(classes, kind, width)
    size, channels = given.take("size"), given.whole("channels", LARGEST)
    if not (isinstance(size, list) and len(size) == 2 and all(_is_whole(side, LARGEST) for side in size)):
        raise GTPError(f"input.size is {shown(size)}; it must be height and width")
    preparation = {word: found["input"][word] for word in WORDS if word in found["input"]}
    problem = preparation_problem(preparation, channels)
    if problem is not None:
        raise GTPError(f"input.{problem}")
    method, versions = top.take("method"), top.take("versions")
    if method is not None:
        method_from_dict(method)
    if not (isinstance(versions, dict) and all(isinstance(text, str) for text in versions.values())):
        raise GTPError(f"versions is {shown(versions)}; it must be a version for each package")
    made = Description(
        model=top.text("model"),
        weights=weights.text("from", empty=True),
        fingerprint=weights.text("fingerprint"),
        method=method,
        unreduced=cost.whole("unreduced", MOST_MACS),
        exported=cost.whole("exported", MOST_MACS),
        precision=top.one_of("precision", engine.precisions),
        engine=top.one_of("engine", (engine.name,)),
        channels=channels,
        size=(size[0], size[1]),
        preparation=preparation,
        kind=kind,
        width=width,
        classes=None if classes is None else tuple(classes),
        opset=top.whole("opset", 1000),
        versions=versions,
    )
    if not FINGERPRINT.fullmatch(made.fingerprint):
        raise GTPError(f"weights.fingerprint is {shown(made.fingerprint)}; it must be 16 hexadecimal digits")
    given.one_of("name", (INPUT,))
    output.one_of("name", (made.output,))
    share = cost.take("share")
    if share != made.share:
        raise GTPError(f"macs.share is {shown(share)}, and by macs.exported and macs.unreduced it is {made.share}")
    return made


def preparation_problem(words: Mapping[str, Any], channels: int) -> str | None:
    """What is wrong with a preparation of images in timm's words; None if nothing is."""
    for word in ("mean", "std"):
        if word in words and not _are_numbers(words[word], channels):
            return f"{word} is {shown(words[word])}; it must be a finite number for each of {channels} channels"
    if ("mean" in words) != ("std" in words):
        return f"{'mean' if 'mean' in words else 'std'} is there alone; mean and std belong together"
    if "std" in words and min(words["std"]) <= 0:
        return f"std is {shown(words['std'])}; its numbers must be above 0"
    crop = words.get("crop_pct", 1)
    if not _is_number(crop) or not 0 < crop <= 1:
        return f"crop_pct is {shown(crop)}; it must be a number above 0, at most 1"
    for word, allowed in (("crop_mode", CROPS), ("interpolation", INTERPOLATIONS)):
        if word in words and words[word] not in allowed:
            return f"{word} is {shown(words[word])}; it must be one of {', '.join(allowed)}"
    if not isinstance(words.get("processor", {}), dict):
        return f"processor is {shown(words['processor'])}; it must be the settings of an image processor"
    return None


class _Fields:
    """A dictionary of JSON whose fields are asked for by name and kind."""

    def __init__(self, found: Any, place: str) -> None:
        if not isinstance(found, dict):
            raise GTPError(f"{place.rstrip('.') or 'the description'} is {shown(found)}; it must have fields")
        self.found, self.place = found, place

    def take(self, name: str) -> Any:
        if name not in self.found:
            raise GTPError(f"{self.place}{name} is missing")
        return self.found[name]

    def text(self, name: str, *, empty: bool = False) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not (value or empty):
            raise GTPError(f"{self.place}{name} is {shown(value)}; it must be a text")
        return value

    def whole(self, name: str, most: int) -> int:
        value = self.take(name)
        if not _is_whole(value, most):
            raise GTPError(f"{self.place}{name} is {shown(value)}; it must be a whole number from 1 to {most}")
        return int(value)

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str:
        value = self.take(name)
        if value not in allowed:
            raise GTPError(f"{self.place}{name} is {shown(value)}; here it must be {' or '.join(allowed)}")
        return str(value)


def _check_classes(classes: Any, kind: str, width: int) -> None:
    if kind != "classes":
        raise GTPError(f"it names classes, and its output is {kind}")
    if not (isinstance(classes, list) and all(isinstance(name, str) for name in classes)):
        raise GTPError(f"classes is {shown(classes)}; it must be a list of names")
    if len(classes) != width:
        raise GTPError(f"it names {len(classes)} classes, and its output has {width}")


def _fits(found: Port, wanted: Port) -> bool:
    """Is this port what is wanted? The batch is free; where any number is wanted, of tokens, a fixed one fits."""
    if (found.name, found.type) != (wanted.name, wanted.type) or found.shape is None or wanted.shape is None:
        return False
    if len(found.shape) != len(wanted.shape) or found.shape[0] is not None:
        return False
    return all(size in (None, other) for other, size in zip(found.shape[1:], wanted.shape[1:], strict=True))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e30  # NaN is not


def _are_numbers(values: Any, count: int) -> bool:
    return isinstance(values, (list, tuple)) and len(values) == count and all(map(_is_number, values))


def _is_whole(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
