"""The metadata of an exported file, as a value whose every field has been checked; in the file it is JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gtp_vit.core.backbone import FIELDS, Output
from gtp_vit.core.reducer import Method
from gtp_vit.engines.engine import INPUT, Engine
from gtp_vit.engines.fields import MAX_SIZE, Fields, is_integer
from gtp_vit.engines.graph import Graph, Port
from gtp_vit.engines.preprocessing import Preprocessing
from gtp_vit.errors import GTPError, short_repr
from gtp_vit.methods import method_from_dict

FORMAT = 1
FINGERPRINT = re.compile("[0-9a-f]{16}")
MAX_MACS = 10**18
# Programs may need a little more than was counted: the portable form of GTP+ computes both halves of its similarities.
MIN_MACS_RATIO, MAX_MACS_RATIO = 0.98, 1.25


def output_name(output: Output) -> str:
    """The name of an output of this kind in files."""
    return "logits" if output.kind == "classes" else output.kind


@dataclass(frozen=True)
class ExportMetadata:
    """The metadata of an exported file."""

    model: str
    weights: str  # where they are from; empty = not said
    fingerprint: str  # of the weights
    method: Method | None  # None = unreduced
    unreduced_macs: int
    exported_macs: int
    precision: str
    engine: str
    batch: int | None  # images that it takes at a time; None = any number
    channels: int
    size: tuple[int, int]  # height and width
    preprocessing: Preprocessing
    output: Output
    classes: tuple[str, ...] | None
    versions: Mapping[str, str]

    @property
    def macs_ratio(self) -> float:
        """The fraction of the unreduced model's MACs."""
        return round(self.exported_macs / self.unreduced_macs, 4)

    @property
    def batch_text(self) -> str:
        return "any batch" if self.batch is None else f"batch {self.batch}"

    def to_dict(self) -> dict[str, object]:
        """As it is stored."""
        return {
            "format": FORMAT,
            "model": self.model,
            "weights": {"from": self.weights, "fingerprint": self.fingerprint},
            "method": None if self.method is None else self.method.to_dict(),
            "macs": {"unreduced": self.unreduced_macs, "exported": self.exported_macs, "share": self.macs_ratio},
            "precision": self.precision,
            "engine": self.engine,
            "input": {
                "name": INPUT,
                "layout": f"batch, channels, height, width; 32-bit floats; {self.batch_text}",
                "batch": self.batch,
                "channels": self.channels,
                "size": list(self.size),
                **self.preprocessing.to_dict(),
            },
            "output": {"name": output_name(self.output), "kind": self.output.kind, "width": self.output.width},
            "classes": None if self.classes is None else list(self.classes),
            "versions": dict(self.versions),
        }

    @classmethod
    def from_dict(cls, stored: object, engine: Engine) -> ExportMetadata:
        """As it was stored; raises GTPError that names the first field that is not right."""
        top = Fields(stored)
        if top.take("format") != FORMAT:
            raise GTPError(f"its format is {short_repr(top.take('format'))}; this version of gtp-vit reads {FORMAT}")
        weights, macs, inputs = top.section("weights"), top.section("macs"), top.section("input")
        channels, output = inputs.integer("channels"), _output(top.section("output"))
        method = top.take("method")
        metadata = cls(
            model=top.text("model"),
            weights=weights.text("from", empty=True),
            fingerprint=weights.text("fingerprint"),
            method=None if method is None else method_from_dict(method),
            unreduced_macs=macs.integer("unreduced", MAX_MACS),
            exported_macs=macs.integer("exported", MAX_MACS),
            precision=top.one_of("precision", tuple(engine.precisions)),
            engine=top.one_of("engine", (engine.name,)),
            batch=None if inputs.take("batch") is None else inputs.integer("batch"),
            channels=channels,
            size=_size(inputs.take("size")),
            preprocessing=Preprocessing.from_dict(inputs.values, channels, "input."),
            output=output,
            classes=_classes(top.take("classes"), output),
            versions=_versions(top.take("versions")),
        )
        if not FINGERPRINT.fullmatch(metadata.fingerprint):
            raise GTPError(
                f"weights.fingerprint is {short_repr(metadata.fingerprint)}; it must be 16 hexadecimal digits"
            )
        inputs.one_of("name", (INPUT,))
        top.section("output").one_of("name", (output_name(output),))
        share = macs.take("share")
        if share != metadata.macs_ratio:
            raise GTPError(
                f"macs.share is {short_repr(share)}, and by macs.exported and macs.unreduced it is "
                f"{metadata.macs_ratio}"
            )
        return metadata

    def contradiction(self, graph: Graph, engine: Engine) -> str | None:
        """The first contradiction between this and the graph of its file; None if they agree."""
        tokens = (None,) if self.output.kind == "tokens" else ()
        for what, ports, said in (
            ("input", graph.inputs, Port(INPUT, "float32", (self.batch, self.channels, *self.size))),
            (
                "output",
                graph.outputs,
                Port(output_name(self.output), "float32", (self.batch, *tokens, self.output.width)),
            ),
        ):
            if len(ports) != 1:
                return f"its graph has {len(ports)} {what}s, expected one"
            if not _fits(ports[0], said):
                return f"its metadata give the {what} as {said}, its graph as {ports[0]}"
        if graph.eight_bits != engine.precisions[self.precision].eight_bits:
            products = "products in 8 bits" if graph.eight_bits else "no product in 8 bits"
            return f"its metadata give the precision as {self.precision}, and its graph has {products}"
        if not graph.macs:
            return "the MACs of its graph cannot be counted"
        if not MIN_MACS_RATIO <= graph.macs / self.exported_macs <= MAX_MACS_RATIO:
            return f"its metadata give {self.exported_macs:.4g} MACs, its graph {graph.macs:.4g}"
        return None


def _output(fields: Fields) -> Output:
    kind = fields.one_of("kind", tuple(FIELDS))
    return Output(kind, fields.integer("width"))  # type: ignore[arg-type]  # it is one of these


def _size(value: object) -> tuple[int, int]:
    if not (isinstance(value, list) and len(value) == 2 and all(is_integer(side, MAX_SIZE) for side in value)):
        raise GTPError(f"input.size is {short_repr(value)}; it must be height and width")
    return value[0], value[1]


def _classes(value: object, output: Output) -> tuple[str, ...] | None:
    if value is None:
        return None
    if output.kind != "classes":
        raise GTPError(f"it names classes, and its output is {output.kind}")
    if not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
        raise GTPError(f"classes is {short_repr(value)}; it must be a list of names")
    if len(value) != output.width:
        raise GTPError(f"it names {len(value)} classes, and its output has {output.width}")
    return tuple(value)


def _versions(value: object) -> dict[str, str]:
    if not (isinstance(value, dict) and all(isinstance(text, str) for text in value.values())):
        raise GTPError(f"versions is {short_repr(value)}; it must be a version for each package")
    return value


def _fits(port: Port, stated: Port) -> bool:
    """Is this port as it is said? The batch must be; where any number is said, of tokens, a fixed one fits."""
    if port.name not in (None, stated.name) or port.type != stated.type or port.shape is None or stated.shape is None:
        return False
    if len(port.shape) != len(stated.shape) or port.shape[0] != stated.shape[0]:
        return False
    return all(size in (None, other) for other, size in zip(port.shape[1:], stated.shape[1:], strict=True))
