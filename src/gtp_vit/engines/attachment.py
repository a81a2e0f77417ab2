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


def attach(path: Path, metadata: str, graph: Graph, folder: str = "") -> None:
    """Append metadata and the graph to a file; if it is a zip archive itself, they are two more entries of it.

    Args:
        path: the file.
        metadata: JSON.
        graph: what the file was compiled from.
        folder: of the entries, for archives that must have all in one folder.
    """
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{folder}{METADATA}.json", metadata)
        archive.writestr(f"{folder}{GRAPH}.json", json.dumps(_graph_to_dict(graph)))


def read_attachment(path: Path) -> StoredFile:
    """The attached metadata; raises zipfile.BadZipFile if the end of the file is missing."""
    with zipfile.ZipFile(path) as archive:
        members = {name.rpartition("/")[2]: name for name in archive.namelist()}
        texts = {
            name: archive.read(members[f"{name}.json"]).decode()
            for name in (METADATA, GRAPH)
            if f"{name}.json" in members
        }
    return StoredFile(texts.get(METADATA), lambda: graph_from_dict(json.loads(texts.get(GRAPH, "{}"))))


def traced_graph(program: Program, *, eight_bits: bool) -> Graph:
    """The graph of a program of torch.export, whose products are counted by running it on one image."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from gtp_vit.engines.metadata import output_name

    batch = program.batch or 2  # a dynamic batch of one image would be another program
    run = program.exported.module()  # before counting: tracing runs the model, too
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        outputs = run(torch.zeros(batch, *program.images.shape[1:]))
    inputs = Port(INPUT, "float32", (program.batch, *program.images.shape[1:]))
    outputs = Port(output_name(program.output), "float32", (program.batch, *outputs.shape[1:]))
    return Graph((inputs,), (outputs,), counter.get_total_flops() // 2 // batch, eight_bits)


def _graph_to_dict(graph: Graph) -> dict[str, object]:
    ports = {name: [vars(port) for port in getattr(graph, name)] for name in ("inputs", "outputs")}
    return {**ports, "macs": graph.macs, "eight_bits": graph.eight_bits}


def graph_from_dict(stored: object) -> Graph:
    """A graph as it is stored; raises GTPError that names what is not right."""
    fields = Fields(stored, GRAPH)
    inputs, outputs = (tuple(map(_port, fields.list(name))) for name in ("inputs", "outputs"))
    return Graph(inputs, outputs, fields.integer("macs", 10**18), fields.take("eight_bits") is True)


def _port(stored: object) -> Port:
    fields = Fields(stored, "port")
    return Port(fields.text("name"), fields.text("type"), tuple(fields.list("shape")))  # type: ignore[arg-type]
