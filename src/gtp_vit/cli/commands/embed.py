"""gtp-vit embed: embeddings of all images of a folder or data set, written to files."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import warnings
from collections.abc import Iterator, Sequence, Set, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from gtp_vit.backbones.host import remove_classifier
from gtp_vit.cli import render
from gtp_vit.cli.engine_flags import check_engine, exported_file_of, images_for_file
from gtp_vit.cli.flags import MethodChoice, MethodFlags, parse_with_method
from gtp_vit.cli.model_flags import (
    DataFlags,
    check_weights,
    make_dataset,
    make_model,
)
from gtp_vit.cli.output import JsonFlags, ResumeFlags, check_is_folder, check_readable, print_result
from gtp_vit.cli.parser import Choices
from gtp_vit.core.ranges import Range
from gtp_vit.data.dataset import ImageDataset, Images
from gtp_vit.data.stores import url_of
from gtp_vit.embeddings.batch_embedder import BatchEmbedder
from gtp_vit.embeddings.manifest import MANIFEST, verify
from gtp_vit.embeddings.npy import write_npy
from gtp_vit.embeddings.shards import FORMATS
from gtp_vit.embeddings.stages import time_stages
from gtp_vit.embeddings.writer import EmbedResult, Layout, embed_to_folder
from gtp_vit.engines import ENGINES, TORCH, engine_names, is_exported
from gtp_vit.engines.export import export
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.engines.runtime import ExportedModel
from gtp_vit.errors import GTPError, IncompleteError, plural
from gtp_vit.methods.identity import Identity
from gtp_vit.models.sources import public_name
from gtp_vit.patching import host_of, patch
from gtp_vit.runs import distributed
from gtp_vit.runs.files import check_writable
from gtp_vit.runs.identity import images_identity, run_identity
from gtp_vit.version import __version__

# Flags that an exported file does not take: it was exported with a value for each.
SET_BY_EXPORT = ("--engine", "--logits", "--unreduced", "--patches", "--checkpoint", "--pretrained")


@dataclass(frozen=True)
class Embed(JsonFlags, MethodFlags, ResumeFlags, DataFlags):
    """Write the embeddings of all images of a folder, WebDataset or Hugging Face data set, with the images' names.

    The embedding is the pooled features of a classifier, the image embedding of CLIP, or the output of any other
    model. Labels are not needed. --output gets safetensors or Parquet files, and manifest.json, which has the number
    of images, the model, the settings, and the images that could not be read.

    An interrupted run resumes when it is started again, also with a different number of processes: nothing is lost or
    duplicated, and the result is the same to the last bit. A run with other weights, images or settings is refused.
    Under torchrun each process, on one machine or many, writes some of the files.

    In place of a model, give a file that gtp-vit export has written; it runs in its engine.

    examples:
      gtp-vit embed --output vectors
      gtp-vit embed vit_small_patch14_dinov2 --pretrained --data-dir photos --output vectors
      gtp-vit embed open_clip:ViT-B-32/openai --pretrained --data-dir photos --normalise --dtype float16 --output v
      gtp-vit embed hf:facebook/dinov2-small --data-dir shards --dataset wds/ --format parquet --output vectors
      gtp-vit embed exported/vit_tiny_patch16_224-gtp_plus-f32.onnx --data-dir photos --output vectors
      gtp-vit embed vit_small_patch14_dinov2 --pretrained --data-dir photos --profile
      gtp-vit embed --verify vectors
      gtp-vit embed --to-npy vectors --output index
      torchrun --nproc-per-node 4 -m gtp_vit.cli.app embed vit_tiny_patch16_224 --pretrained --data-dir p --output v
    """

    output: Path | None = None
    """Folder for the files; required. An interrupted run resumes from it."""
    unreduced: bool = False
    """Embed with the unreduced model, for comparison."""
    logits: bool = False
    """Store class scores instead of features."""
    patches: bool = False
    """Store the features of all patches instead of one vector per image; removed tokens are restored."""
    normalise: bool = False
    """Scale every vector to length 1."""
    dtype: Literal["float32", "float16"] = "float32"
    """Dtype of the stored embeddings; the model computes in its own precision."""
    format: Literal["safetensors", "parquet"] = "safetensors"
    """File format; parquet needs pyarrow: pip install 'gtp-vit[parquet]'."""
    shard_size: Annotated[int, Range(0, 100_000)] = 0
    """Images in a file, rounded up to whole batches; 0: 4096, or 128 with --patches. After a run was killed, each
    process repeats at most one file."""
    engine: Annotated[str, Choices(engine_names)] = TORCH
    """Where the model runs. For engines other than torch it is exported to a temporary file first; to export it only
    once, use gtp-vit export, and give that file in place of the model."""
    split: str = ""
    """Split of the data set. Empty: all images below the folder, all tar files in it; hfds/... needs one."""
    verify: Path | None = None
    """Embed nothing; check that every file of this folder is as it was written: vectors, names, positions, labels."""
    profile: bool = False
    """Embed at most 512 images and keep nothing; print how long reading, decoding, resizing, model and writing take."""
    to_npy: Path | None = None
    """Embed nothing; copy this folder's vectors to .npy and metadata to Parquet in --output, which may be a URL."""


@dataclass(frozen=True)
class EmbedJob:
    """Embedder, data set and run identity of one `embed` run."""

    embedder: BatchEmbedder
    dataset: Images
    identity: dict[str, object]
    title: str


def main(arguments: Sequence[str]) -> None:
    flags, choice = parse_with_method(Embed, arguments)
    words = {word.partition("=")[0] for word in arguments}
    if flags.verify is not None:
        _verify(flags, flags.verify, words)
        return
    if flags.to_npy is not None:
        _to_npy(flags, flags.to_npy, words)
        return
    if flags.unreduced and ("--method" in words or choice.given_settings):
        raise GTPError("--unreduced cannot be combined with --method or its settings; remove one of them")
    if flags.profile:
        _profile(flags, choice, arguments)
        return
    output = flags.output
    if output is None:
        raise GTPError("--output is missing; give the folder to write to")
    url = url_of(output)
    if url is not None:
        raise GTPError(f"--output is {url}; a run locks and resumes its folder on a disk: --to-npy copies it to a URL")
    if output.exists() and not output.is_dir():
        raise GTPError(f"--output is {output}, which is a file; give a folder")
    check_is_folder(output)
    FORMATS[flags.format].check_installed()
    flags = dataclasses.replace(flags, split=_split(flags))
    if flags.patches and flags.logits:
        raise GTPError("--patches and --logits are two different outputs; leave one of them out")
    if flags.patches and flags.engine != TORCH:
        raise GTPError(
            f"{flags.engine} returns only the model's output, and --patches needs features before the head; remove "
            "--engine"
        )
    check_engine(flags.engine, "f32", flags.device)
    if not is_exported(flags.model):
        check_weights(flags)
    with distributed.process_group():
        _embed(flags, output, choice, arguments)


def _profile(flags: Embed, choice: MethodChoice, arguments: Sequence[str]) -> None:
    """Time the stages on the first images."""
    FORMATS[flags.format].check_installed()
    flags = dataclasses.replace(flags, split=_split(flags))
    if not is_exported(flags.model):
        check_weights(flags)
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(
            _from_file(flags, exported_file_of(flags, choice, arguments, *SET_BY_EXPORT))
            if is_exported(flags.model)
            else _from_model(flags, choice)
        )
        if not isinstance(job.dataset, ImageDataset):
            raise GTPError("--profile times files of pictures; give --data-dir with such, or tar or Parquet files")
        layout = Layout(flags.format, flags.batch_size)
        times = time_stages(job.embedder, job.dataset, job.identity, layout)
    total, timed = sum(times.seconds.values()), times.images
    rows = [
        [stage, f"{seconds:.3f}", f"{1000 * seconds / timed:.2f}", f"{100 * seconds / total:.0f} %"]
        for stage, seconds in times.seconds.items()
    ]
    text = (
        f"{plural(timed, 'image', 'images')}, one after another. A run reads, decodes and resizes in --workers "
        "processes beside the model, so what limits it is the larger of model and (read + decode + resize) / workers."
    )
    summary = {"flags": flags, "images": timed, "unreadable": times.unreadable, "seconds": times.seconds}
    print_result(flags, summary, (job.title, ["stage", "seconds", "ms/image", "share"], rows), text=text)


def _to_npy(flags: Embed, folder: Path, words: Set[str]) -> None:
    """Copy the vectors of a finished folder to .npy files, for programs that build an index."""
    allowed = ("--to-npy", "--output", "--json")
    others = [flags.model] if flags.model != Embed.model else []
    others += sorted(word for word in words if word.startswith("-") and word not in allowed)
    if others:
        raise GTPError(f"--to-npy copies a folder and embeds nothing; remove {others[0]}")
    if flags.output is None:
        raise GTPError("--output is missing; give the folder or URL to write to")
    names = write_npy(folder, flags.output)
    destination = url_of(flags.output) or str(flags.output)
    columns, row = ["files", "first", "last"], [str(len(names)), *(names[:1] or ["-"]), *(names[-1:] or ["-"])]
    result = {"flags": flags, "output": destination, "files": names}
    print_result(flags, result, (destination, columns, [row]), text="Written.")


def _verify(flags: Embed, folder: Path, words: Set[str]) -> None:
    """Check the files of a folder that an earlier run wrote."""
    others = sorted(word for word in words if word.startswith("-") and word not in ("--verify", "--json"))
    if others:
        raise GTPError(f"--verify checks a folder and embeds nothing; remove {others[0]}")
    if flags.model != Embed.model:
        raise GTPError(f"--verify checks a folder and embeds nothing; remove {flags.model}")
    manifest = verify(folder)
    columns = ["images", "embedded", "files"]
    row = [str(count) for count in (manifest["images"], manifest["embedded"], len(manifest["shards"]))]
    result = {"flags": flags, "manifest": manifest}
    print_result(flags, result, (str(folder), columns, [row]), text="All files are as they were written.")


def _split(flags: Embed) -> str:
    """The split, as timm's data set readers expect it."""
    if flags.split or not flags.dataset.startswith(("wds/", "hfds/", "hfids/")):
        return flags.split
    if flags.dataset.startswith("wds/"):
        return "*.tar"
    raise GTPError(f"--dataset {flags.dataset} needs a split; give --split, e.g. train or validation")


def _embed(flags: Embed, output: Path, choice: MethodChoice, arguments: Sequence[str]) -> None:
    """Embed in all processes; only the first one prints."""
    check_writable(output / MANIFEST)
    with contextlib.ExitStack() as stack:
        job = stack.enter_context(
            _from_file(flags, exported_file_of(flags, choice, arguments, *SET_BY_EXPORT))
            if is_exported(flags.model)
            else _from_model(flags, choice)
        )
        requested = flags.shard_size or (128 if flags.patches else 4096)
        shard_size = -(-requested // flags.batch_size) * flags.batch_size
        _warn_of_idle_processes(job.dataset, shard_size)
        first = distributed.is_rank_zero()
        progress = stack.enter_context(render.progress("embedding")) if first else None
        result = embed_to_folder(
            output,
            job.embedder,
            job.dataset,
            job.identity,
            Layout(flags.format, flags.batch_size, shard_size),
            workers=flags.workers,
            restart=flags.restart,
            progress=None
            if progress is None
            else lambda done, total, rate: progress(done, total, best=f"{rate:.1f} images/s"),
        )
    if result is not None:
        _print_summary(flags, job, result)


@contextlib.contextmanager
def _from_model(flags: Embed, choice: MethodChoice) -> Iterator[EmbedJob]:
    """The job for a model, reduced or not, in torch or in another engine; its exported file is deleted at the end."""
    model = make_model(flags)
    if not flags.logits:
        remove_classifier(model)
    method = None if flags.unreduced else choice.for_model(model)
    if flags.patches and method is None:
        method = Identity()
    runner = model if method is None else patch(model, method, restore=flags.patches)
    output = None if flags.patches else host_of(model).output
    embedder = BatchEmbedder(runner, output=output, patches=flags.patches, normalise=flags.normalise, dtype=flags.dtype)
    dataset = make_dataset(flags, model, labels=False)
    settings = {"method": None if method is None else method.to_dict(), "engine": flags.engine}
    identity = run_identity(public_name(flags.model), {"": runner}, dataset, **settings).to_dict()
    title = f"{public_name(flags.model)} {'unreduced' if method is None else f'with {method}'}"
    with tempfile.TemporaryDirectory(prefix="gtp-vit-") as folder:
        if flags.engine != TORCH:
            engine = ENGINES[flags.engine]
            identity["engine"] = {"name": engine.name, **engine.versions()}
            path = Path(folder) / f"model{engine.suffix}"
            export(runner, path)
            runner = ExportedModel(path, "f32", flags.threads)
            embedder = BatchEmbedder(runner, output=output, normalise=flags.normalise, dtype=flags.dtype)
        yield EmbedJob(embedder, dataset, identity, title)


@contextlib.contextmanager
def _from_file(flags: Embed, file: ExportedFile) -> Iterator[EmbedJob]:
    """The job for an exported file, whose metadata says how to preprocess images: its model is not needed."""
    metadata = file.metadata
    embedder = BatchEmbedder(
        file.load(flags.threads), output=metadata.output, normalise=flags.normalise, dtype=flags.dtype
    )
    dataset = images_for_file(flags, file, labels=False)
    identity: dict[str, object] = {
        "version": __version__,
        "model": metadata.model,
        "weights": metadata.fingerprint,
        **file.settings(),
        **images_identity(dataset).to_dict(),
    }
    yield EmbedJob(embedder, dataset, identity, file.name)


def _warn_of_idle_processes(dataset: Images, shard_size: int) -> None:
    """Warn if there are fewer files than processes, as a file is written by one of them."""
    rank, processes = distributed.rank_and_world_size()
    if not isinstance(dataset, Sized):
        return
    shards = -(-len(dataset) // shard_size)
    if rank == 0 and shards < processes:
        warnings.warn(
            f"{len(dataset)} images make {shards} files of {shard_size}, so {processes - shards} of {processes} "
            "processes have nothing to do; give a smaller --shard-size, and a --batch-size of at most that",
            stacklevel=2,
        )


def _print_summary(flags: Embed, job: EmbedJob, result: EmbedResult) -> None:
    """Print what was written; raises IncompleteError, which sets the exit code, if images have no embedding."""
    manifest = result.manifest
    rate = f"{result.images / result.seconds:.1f}" if result.images else "-"
    columns = ["embedding", "images", "embedded", "files", "new", "images/s"]
    counts = [manifest["images"], manifest["embedded"], len(manifest["shards"]), result.images]
    row = [f"{job.embedder.spec}, {flags.dtype}", *map(str, counts), rate]
    text = f"Written: {result.folder / MANIFEST} and {plural(len(manifest['shards']), 'file', 'files')} beside it"
    if is_exported(flags.model) and job.embedder.spec is not None and job.embedder.spec.kind == "classes":
        text += (
            f". {job.title} was exported with its classifier, so these embeddings are class scores. Of the model "
            "itself gtp-vit embed stores features; do not mix the two in one index"
        )
    summary = {"flags": flags, "seconds": result.seconds, "new": result.images, "manifest": manifest}
    print_result(flags, summary, (job.title, columns, [row]), text=text)
    if result.not_finite:
        names = "; ".join(result.not_finite[:5])
        more = f"; {len(result.unreadable)} of the images could not be read" if result.unreadable else ""
        raise IncompleteError(
            f"{len(result.not_finite)} of the images have no finite embedding and were left out: {names}{more}"
        )
    check_readable(result.unreadable)
