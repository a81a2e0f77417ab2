"""Trains the model that ships with the package: a ViT with 14 x 14 patches, on Fashion-MNIST.

    python training/embedded.py --data-dir /usr/share/datasets/fashion-mnist --out build/embedded

The data is in Debian's package dataset-fashion-mnist (MIT licence). Most epochs see a random quarter or half of each
image's patches, which is several times as fast and regularises; the last ones see all. There are four rounds, each
with its own cosine; the first one's was cut before it reached zero, because the model could clearly learn more. Stopped
and started again, it resumes after the last finished epoch. `--export` writes weights and test images into the package.
"""

from __future__ import annotations

import gzip
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from safetensors.torch import save_file
from torch import Tensor

from gtp_vit.models.bundled import FOLDER, create, normalise


class Round(NamedTuple):
    """Epochs with one cosine."""

    lr: float  # the highest
    shares: tuple[float, ...]  # of the patches, that each epoch sees
    horizon: int  # epochs until the cosine reaches zero


ROUNDS = (
    Round(1.5e-3, (0.25,) * 10 + (0.5,) * 3, 14),
    Round(8e-4, (0.5, 1.0, 1.0), 3),
    Round(4e-4, (1.0,), 1),
    Round(7e-4, (0.5, 1.0), 2),
)
SHIPPED = 400  # test images in the package


@dataclass(frozen=True)
class Options:
    """Train the embedded model."""

    data_dir: Path = Path("/usr/share/datasets/fashion-mnist")
    """Folder with the four files of Fashion-MNIST."""
    out: Path = Path("build/embedded")
    """Where checkpoints and the log go."""
    batch_size: int = 64
    """Images in a step."""
    weight_decay: float = 0.05
    """Weight decay of AdamW."""
    threads: int = 2
    """CPU threads."""
    export: bool = False
    """Do not train: write the last checkpoint and test images into the package."""


def read(folder: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images [N, 28, 28] and labels [N], uint8, of split "train" or "test"."""
    name = {"train": "train", "test": "t10k"}[split]
    return read_idx(folder / f"{name}-images-idx3-ubyte", 3), read_idx(folder / f"{name}-labels-idx1-ubyte", 1)


def read_idx(path: Path, dimensions: int) -> Tensor:
    """A file of MNIST's kind, which may be gzipped: numbers of bytes and sizes, then the bytes."""
    packed = path.with_name(f"{path.name}.gz")
    content = gzip.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes()
    sizes = np.frombuffer(content, ">u4", dimensions, offset=4)
    return torch.tensor(np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(sizes))


def augment(images: Tensor) -> Tensor:
    """Mirror half of the images, and shift each by up to two pixels."""
    mirrored = torch.where(torch.rand(len(images), 1, 1) < 0.5, images.flip(2), images)
    padded = F.pad(mirrored, (2, 2, 2, 2))
    rows, columns = torch.randint(0, 5, (2, len(images)))
    row = (rows[:, None] + torch.arange(28))[:, :, None]
    column = (columns[:, None] + torch.arange(28))[:, None, :]
    return padded[torch.arange(len(images))[:, None, None], row, column]


def logits_of_some_patches(model: torch.nn.Module, images: Tensor, share: float) -> Tensor:
    """A forward pass that sees a random part of each image's patches."""
    if share == 1:
        return model(images)
    x = model._pos_embed(model.patch_embed(images))
    keep = torch.rand(len(x), x.shape[1] - 1).topk(int(share * (x.shape[1] - 1)), dim=1).indices + 1
    x = torch.cat([x[:, :1], x.gather(1, keep.unsqueeze(2).expand(-1, -1, x.shape[2]))], dim=1)
    return model.forward_head(model.norm(model.blocks(model.norm_pre(x))))


@torch.inference_mode()
def accuracy(model: torch.nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    right = sum(
        int((model(normalise(part)).argmax(1) == truth).sum())
        for part, truth in zip(images.split(500), labels.split(500), strict=True)
    )
    return right / len(labels)


def train(options: Options) -> None:
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    images, labels = read(options.data_dir, "train")
    test_images, test_labels = read(options.data_dir, "test")
    epochs = [(part, number) for part in ROUNDS for number in range(len(part.shares))]
    steps = len(images) // options.batch_size
    torch.manual_seed(0)
    model = create(pretrained=False)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups)
    checkpoint, finished = options.out / "last.pth", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        finished = state["epoch"]
        print(f"resuming after epoch {finished}")
    for epoch in range(finished, len(epochs)):
        part, number = epochs[epoch]
        torch.manual_seed(epoch)
        model.train()
        begin, total = time.time(), 0.0
        for step, batch in enumerate(torch.randperm(len(images))[: steps * options.batch_size].view(steps, -1)):
            done = (number + step / steps) / part.horizon
            rate = part.lr * min(done * 20, 0.5 + 0.5 * math.cos(math.pi * done))
            for group in optimiser.param_groups:
                group["lr"] = rate
            logits = logits_of_some_patches(model, normalise(augment(images[batch])), part.shares[number])
            loss = F.cross_entropy(logits, labels[batch].long(), label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            total += loss.item()
        line = {
            "epoch": epoch + 1,
            "patches": part.shares[number],
            "loss": total / steps,
            "seconds": time.time() - begin,
        }
        line["test_accuracy"] = accuracy(model, test_images, test_labels)
        print(json.dumps(line), flush=True)
        with (options.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        temporary = options.out / "last.tmp"
        torch.save({"model": model.state_dict(), "optimiser": optimiser.state_dict(), "epoch": epoch + 1}, temporary)
        temporary.rename(checkpoint)


def export(options: Options) -> None:
    """Weights in half the space, and the first test images of each class, into the package."""
    state = torch.load(options.out / "last.pth", weights_only=True)["model"]
    save_file({key: value.half().contiguous() for key, value in state.items()}, FOLDER / "weights.safetensors")
    images, labels = read(options.data_dir, "test")
    save_file(
        {"images": images[:SHIPPED].contiguous(), "labels": labels[:SHIPPED].contiguous()},
        FOLDER / "images.safetensors",
    )
    shipped = accuracy(create(), images, labels)
    print(f"accuracy of the shipped weights on the {len(labels)} test images: {shipped:.4f}")


if __name__ == "__main__":
    options = tyro.cli(Options, description=__doc__)
    export(options) if options.export else train(options)
