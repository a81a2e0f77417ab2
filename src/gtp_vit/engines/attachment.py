"""The metadata of a compiled file, in a zip archive at its end, which any unzip reads and engines ignore.

Compiled programs have no operators left that could be counted. So the graph that they were compiled from is described
there, too: inputs, outputs, multiply-accumulates.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from gtp_vit.engines.engine import INPUT, METADATA
from gtp_vit.engines.fields import Fields
from gtp_vit.engines.graph import Graph, Port, StoredFile

if TYPE_CHECKING:
    from gtp_vit.engines.program import Program

GRAPH = "graph"
PLACE = f"in `{METADATA}.json`, in the zip archive at its end"


def attach(path: Path, metadata: str, graph: Graph) -> None:
    """Append metadata and the graph to a file; if it is a zip archive itself, they are two more entries of it."""
    with zipfile.ZipFile(path, "a") as archive:
        folder = _folder(archive)
        archive.writestr(f"{folder}{METADATA}.json", metadata)
        archive.writestr(f"{folder}{GRAPH}.json", json.dumps(_graph_to_dict(graph)))


def read_attachment(path: Path) -> StoredFile:
    """The attached metadata; raises zipfile.BadZipFile if the end of the file is missing."""
    with zipfile.ZipFile(path) as archive:
        folder, names = _folder(archive), archive.namelist()
        metadata = archive.read(f"{folder}{METADATA}.json").decode() if f"{folder}{METADATA}.json" in names else None
        graph = archive.read(f"{folder}{GRAPH}.json").decode() if f"{folder}{GRAPH}.json" in names else "{}"
    return StoredFile(metadata, lambda: _graph_from_dict(json.loads(graph)))


def traced_graph(program: Program, *, eight_bits: bool) -> Graph:
    """The graph of a program of torch.export, whose products are counted by running it on one image."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from gtp_vit.engines.metadata import output_name

    batch = program.batch or 2  # a dynamic batch of one image would be another program
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        outputs = program.exported.module()(torch.zeros(batch, *program.images.shape[1:]))
    inputs = Port(INPUT, "float32", (program.batch, *program.images.shape[1:]))
    outputs = Port(output_name(program.output), "float32", (program.batch, *outputs.shape[1:]))
    return Graph((inputs,), (outputs,), counter.get_total_flops() // 2 // batch, eight_bits)


def _folder(archive: zipfile.ZipFile) -> str:
    """Where the entries are: the archives of torch have one folder at the top."""
    first = next(iter(archive.namelist()), "")
    return f"{first.split('/')[0]}/extra/" if "/" in first else ""


def _graph_to_dict(graph: Graph) -> dict[str, object]:
    ports = {name: [vars(port) for port in getattr(graph, name)] for name in ("inputs", "outputs")}
    return {**ports, "macs": graph.macs, "eight_bits": graph.eight_bits}


def _graph_from_dict(stored: object) -> Graph:
    fields = Fields(stored, GRAPH)
    inputs, outputs = (tuple(map(_port, fields.list(name))) for name in ("inputs", "outputs"))
    return Graph(inputs, outputs, fields.integer("macs", 10**18), fields.take("eight_bits") is True)


def _port(stored: object) -> Port:
    fields = Fields(stored, "port")
    return Port(fields.text("name"), fields.text("type"), tuple(fields.list("shape")))  # type: ignore[arg-type]
