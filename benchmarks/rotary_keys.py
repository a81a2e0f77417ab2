"""Should methods that compare keys see them before or after rotation? Trains a small rotary ViT, then measures both.

    python benchmarks/rotary_keys.py --data-dir /usr/share/datasets/fashion-mnist

There are no pre-trained rotary weights here, so a small Eva with DINOv3's kind of positions is trained on Fashion-MNIST
(Debian's package dataset-fashion-mnist): 24,000 images, 6 epochs, some minutes. Reported is, on the 10,000 test images,
KL to the unreduced model with keys before and after rotation, and the paired difference with its 95 % interval.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from timm.models.eva import Eva
from torch import Tensor

from gtp_vit import ToMe, patch
from gtp_vit.backbones import rotary
from gtp_vit.metrics.classes import kl_per_image
from gtp_vit.models.bundled import normalise

BATCH, IMAGES = 128, 24_000


@dataclass(frozen=True)
class Options:
    """Measure keys before and after rotation."""

    data_dir: Path
    """Folder with Fashion-MNIST's four files."""
    epochs: int = 6
    """Epochs of training."""
    seed: int = 0
    """Of weights and batches."""
    removed: tuple[int, ...] = (2, 4, 6)
    """Tokens that ToMe merges in each layer."""


def read(folder: Path, name: str, header: int) -> Tensor:
    (path,) = folder.glob(f"{name}*")
    return torch.from_numpy(np.frombuffer(gzip.open(path).read(), np.uint8, offset=header).copy())


def train(options: Options) -> Eva:
    torch.manual_seed(options.seed)
    sizes = {"img_size": 28, "patch_size": 4, "in_chans": 1, "num_classes": 10, "embed_dim": 64, "depth": 6}
    rope = {"use_rot_pos_emb": True, "rope_type": "dinov3", "rope_temperature": 100.0, "rope_rotate_half": True}
    more = {"num_heads": 2, "mlp_ratio": 2.0, "attn_type": "rope", "global_pool": "token", "head_init_scale": 0}
    model = Eva(**sizes, **rope, **more, use_abs_pos_emb=False)
    images = normalise(read(options.data_dir, "train-images", 16).view(-1, 28, 28)[:IMAGES])
    labels = read(options.data_dir, "train-labels", 8)[:IMAGES].long()
    steps = options.epochs * (IMAGES // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.2)
    for epoch in range(options.epochs):
        order = torch.randperm(IMAGES)
        for chosen in order[: IMAGES // BATCH * BATCH].split(BATCH):
            some = images[chosen] if torch.rand(()) < 0.5 else images[chosen].flip(-1)
            loss = F.cross_entropy(model(some), labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1} of {options.epochs}: loss {float(loss.detach()):.3f}", flush=True)
    return model.eval()


def outputs(model: torch.nn.Module, images: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(part) for part in images.split(500)])


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    model = train(options)
    images = normalise(read(options.data_dir, "t10k-images", 16).view(-1, 28, 28))
    labels = read(options.data_dir, "t10k-labels", 8).long()
    whole = outputs(model, images)
    print(f"unreduced: top-1 {100 * float((whole.argmax(1) == labels).float().mean()):.2f} %")
    for removed in options.removed:
        fast, found = patch(model, ToMe(r=removed)), {}
        for rotary.METHODS_READ_ROTATED_KEYS in (False, True):
            found[rotary.METHODS_READ_ROTATED_KEYS] = kl_per_image(whole, outputs(fast, images))
        change = found[True] - found[False]
        half = 1.96 * float(change.std()) / len(change) ** 0.5
        print(
            f"r = {removed}: KL {float(found[False].mean()):.4f} before, {float(found[True].mean()):.4f} after rotation"
            f"; difference {float(change.mean()):+.4f} +- {half:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
