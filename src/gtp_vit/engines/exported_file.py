"""An exported file in the place of a model: read and checked, known again, compared with its model, and run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from gtp_vit.engines import engine_of
from gtp_vit.engines.engine import Engine
from gtp_vit.engines.metadata import ExportMetadata
from gtp_vit.engines.runtime import ExportedModel
from gtp_vit.errors import GTPError, first_line
from gtp_vit.patching import host_of
from gtp_vit.profiling.macs import macs
from gtp_vit.runs.fingerprint import tensors_fingerprint


@dataclass(frozen=True)
class ExportedFile:
    """A file for an engine, and what it says of itself; `read` makes one."""

    path: Path
    metadata: ExportMetadata

    @classmethod
    def read(cls, path: Path) -> ExportedFile:
        """An exported file whose graph does not contradict its metadata; raises GTPError for any other."""
        engine = engine_of(path)
        engine.check_installed()
        if not path.is_file():
            raise GTPError(f"there is no file {path}; make one with gtp-vit export")
        try:
            stored = engine.open(path)
            description = None if stored.metadata is None else json.loads(stored.metadata)
        except Exception as error:  # engines raise errors of many classes
            raise GTPError(f"{engine.name} cannot read {path}: {first_line(error)}; export it again") from error
        if not isinstance(description, dict) or "format" not in description:
            raise GTPError(f"{path} was not made by gtp-vit export: it does not say what is in it; export it again")
        try:
            metadata = ExportMetadata.from_dict(description, engine)
            problem = metadata.contradiction(stored.graph(), engine)
        except GTPError as error:
            raise GTPError(f"the description in {path} is not right: {first_line(error)}; export it again") from error
        except Exception as error:
            raise GTPError(f"the graph in {path} cannot be read: {first_line(error)}; export it again") from error
        if problem is not None:
            raise GTPError(f"{path} contradicts its metadata: {problem}; export it again")
        return cls(path, metadata)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def engine(self) -> Engine:
        return engine_of(self.path)

    def settings(self) -> dict[str, object]:
        """The settings that decide its outputs, for results and journals."""
        metadata = self.metadata
        method = None if metadata.method is None else metadata.method.to_dict()
        own = {"method": method, "precision": metadata.precision, "engine": metadata.engine}
        return {**own, "file": file_fingerprint(self.path)}

    def load(self, threads: int = 0) -> ExportedModel:
        """The file as a module, in a process of its own."""
        return ExportedModel(self.path, self.metadata.precision, threads)

    def check_model(self, model: nn.Module) -> None:
        """Raise GTPError unless this is the model it was made from: the same weights, sizes, output and MACs."""
        metadata, fingerprint = self.metadata, tensors_fingerprint(model.state_dict())
        if fingerprint != metadata.fingerprint:
            raise GTPError(
                f"{self.name} was made from other weights (fingerprint {metadata.fingerprint}, these: {fingerprint}), "
                "so agreement and KL would mean nothing; give the checkpoint that was exported"
            )
        host = host_of(model)
        for what, said, real in (
            ("channels", metadata.channels, host.inputs.channels),
            ("size of images", list(metadata.size), list(host.inputs.size)),
            ("output", list(metadata.output), host.output and list(host.output)),
            ("MACs unreduced", metadata.unreduced_macs, macs(model).total),
        ):
            self._check(what, said, [real])
        method = metadata.method
        if method is not None and not any(
            getattr(method, name) for name in method.weight_file_fields
        ):  # its parts may not be here
            totals = [macs(model, method, shorten_last_block=lossless).total for lossless in (True, False)]
            self._check("MACs", metadata.exported_macs, totals)

    def _check(self, what: str, stated: object, allowed: Sequence[object]) -> None:
        if stated not in allowed:
            raise GTPError(
                f"{self.name} says that its {what} is {stated}, and of {self.metadata.model} it is {allowed[0]}; "
                "export "
                "it again"
            )


def file_fingerprint(path: Path) -> str:
    """A hash of an exported file and of all files that running it reads, whatever their names."""
    digest = hashlib.sha256()
    for member in engine_of(path).files(path):
        content = hashlib.sha256()
        if member.is_file():  # what is missing the engine will name
            with member.open("rb") as file:
                while part := file.read(1 << 22):
                    content.update(part)
        digest.update(content.digest())
    return digest.hexdigest()[:16]
