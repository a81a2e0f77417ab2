"""Hugging Face's packed towers: the ViTs of Qwen2-VL, Qwen3-VL (also MoE) and Qwen3.5 (also MoE).

The patches of all images, and of all frames of videos, lie in one row, block by block of the 2 x 2 patches that the
merger joins; each frame attends to itself. Frames of the same grid become one batch here, in the order of the grid, and
run through the loop; behind it they are packed again. A schedule is of 32 x 32 patches, and removes the same
share of the tokens of any other grid. The merger needs all patches, so these are patched with `restore` only.

Shapes: S patches of all frames, B frames of one grid, M image tokens, C channels, D head dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.backbones.modules import (
    HAS_HOOKS,
    check_images,
    has_hooks,
    is_overridden,
    plain_layer_norm,
    project,
    unexpected_member,
)
from gtp_vit.backbones.rotary import RotaryTable, keys_for_methods, rotate
from gtp_vit.backbones.wrappers import JOINS_PATCHES
from gtp_vit.core.attention import QKV
from gtp_vit.core.backbone import Backbone, Inputs, Library, Output, Part
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ViTInfo
from gtp_vit.tensors import is_quantized

MIN_TRANSFORMERS = (5, 23)  # older ones compute positions otherwise
OUTPUT_RECORDERS = "transformers.utils.output_capturing"  # its hooks stay, and only look
DESCRIBED_GRID = (32, 32)  # what schedules and MACs are of, as these models have no image size of their own


@dataclass(frozen=True)
class PackedSpec:
    """The names of a family's classes."""

    model: str  # transformers.models.THIS
    tower: str
    block: str
    attention: str
    mlp: str
    merger: str

    @property
    def module(self) -> str:
        return f"transformers.models.{self.model}.modeling_{self.model}"


def _qwen3(model: str, name: str) -> PackedSpec:
    return PackedSpec(model, *(f"{name}Vision{part}" for part in ("Model", "Block", "Attention", "MLP", "PatchMerger")))


FAMILIES = (
    PackedSpec(
        "qwen2_vl",
        *("Qwen2VisionTransformerPretrainedModel", "Qwen2VLVisionBlock", "VisionAttention", "VisionMlp", "PatchMerger"),
    ),
    _qwen3("qwen3_vl", "Qwen3VL"),
    _qwen3("qwen3_vl_moe", "Qwen3VLMoe"),
    _qwen3("qwen3_5", "Qwen3_5"),
    _qwen3("qwen3_5_moe", "Qwen3_5Moe"),
)
TOWERS = {f"{spec.module}.{spec.tower}": spec for spec in FAMILIES}


def is_packed_tower(model: nn.Module) -> bool:
    """Is it a ViT of these families? A patched one is, as it keeps the name of its class."""
    return f"{type(model).__module__}.{type(model).__qualname__}" in TOWERS


def spec_of(tower: nn.Module) -> PackedSpec:
    """The names of the classes of a ViT of these families."""
    return TOWERS[f"{type(tower).__module__}.{type(tower).__qualname__}"]


class HuggingFacePackedViT(Backbone):
    """Backbone of Hugging Face's towers that take the patches of all images in one row."""

    classes = tuple(spec.tower for spec in FAMILIES)
    models = "the towers of Qwen2-VL, Qwen3-VL and Qwen3.5; images of different sizes and videos in one call"

    def library(self) -> Library:
        from gtp_vit.backbones.hf_library import HUGGING_FACE

        return HUGGING_FACE

    @property
    def forwards(self) -> type:  # type: ignore[override]
        from gtp_vit.backbones.hf_packed_forwards import PackedForwards  # needs transformers, which is here by now

        return PackedForwards

    def matches(self, model: nn.Module) -> bool:
        return is_packed_tower(model)

    def unsupported_reason(self, model: Any) -> str | None:
        spec, version = spec_of(model), sys.modules["transformers"].__version__
        if tuple(int(part) for part in version.split(".")[:2]) < MIN_TRANSFORMERS:
            minimum = ".".join(map(str, MIN_TRANSFORMERS))
            return f"transformers {version} computes the positions of this ViT otherwise; update it: {minimum} or newer"
        devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
        if len(devices) > 1:
            return f"the model is spread over {', '.join(sorted(devices))}; load it without device_map"
        if is_overridden(model, hooks=False):
            return "the model's forward was replaced on the instance, e.g. by device_map or a wrapper; load it without"
        known = {"patch_embed", "pos_embed", "rotary_pos_emb", "blocks", "merger", "deepstack_merger_list"}
        unknown = unexpected_member(model, known)
        if unknown is not None:
            return unknown
        if type(model.patch_embed.proj) is not nn.Conv3d:
            return f"patch_embed.proj is {type(model.patch_embed.proj).__name__}; supported: Conv3d"
        own = sys.modules[spec.module]
        for merger in (model.merger, *getattr(model, "deepstack_merger_list", ())):
            if type(merger) is not getattr(own, spec.merger):
                return f"a merger is {type(merger).__name__}; supported: {spec.merger}"
        for index, block in enumerate(model.blocks):
            reason = _block_unsupported_reason(block, spec)
            if reason is not None:
                return f"blocks[{index}]{reason}"
        return None

    def vit_info(self, model: Any) -> ViTInfo:
        attention = model.blocks[0].attn
        return ViTInfo(
            depth=len(model.blocks),
            dim=attention.dim,
            heads=attention.num_heads,
            head_dim=attention.head_dim,
            grid=self.grid(model),
            prefix=0,
            class_token=False,
            head_reads_image_tokens=True,
            head_averages_image_tokens=False,
            mixed_sizes=True,
        )

    def inputs(self, model: Any) -> Inputs:
        config = model.config
        stored = str(getattr(config, "name_or_path", "") or "").rstrip("/")
        patch, (rows, columns) = _pair(config.patch_size), self.grid(model)
        return Inputs(
            name=stored.rsplit("/", 1)[-1] or type(model).__name__,
            size=(rows * patch[0], columns * patch[1]),
            any_size=True,
            patch=patch,
            channels=config.in_channels,
            classes=0,
        )

    def output(self, model: Any) -> Output:
        return Output(
            "tokens", next(reversed([m for m in model.merger.modules() if isinstance(m, nn.Linear)])).out_features
        )

    def grid(self, model: Any) -> tuple[int, int]:
        return DESCRIBED_GRID

    def needs_all_patches(self, model: Any) -> str | None:
        return JOINS_PATCHES

    def head_reads_image_tokens(self, model: Any) -> bool:
        return True

    def embed(self, model: Any, images: Tensor) -> Tokens:
        """Tokens of images of one size, [B, channels, height, width]; the model's own input is `embed_frames`'."""
        first, (rows, columns) = model.patch_embed.proj, _pair(model.config.patch_size)
        check_images(images, first, None, (rows, columns))
        grid = (images.shape[2] // rows, images.shape[3] // columns)
        parts = images.unflatten(3, (grid[1], columns)).unflatten(2, (grid[0], rows)).permute(0, 2, 4, 1, 3, 5)
        frames = parts.unsqueeze(4).expand(-1, -1, -1, -1, first.kernel_size[0], -1, -1)  # a picture stands still
        x = model.patch_embed(frames.reshape(-1, frames[0, 0, 0].numel()))
        return self.embed_frames(model, x.unflatten(0, (len(images), -1)), grid)

    def embed_frames(self, model: Any, x: Tensor, grid: tuple[int, int]) -> Tokens:
        """Tokens of embedded patches [B, M, C] of frames of one grid, row by row."""
        places = torch.tensor([[1, *grid]], device=x.device)
        if hasattr(model, "pos_embed"):
            index, weights = sys.modules["transformers.vision_utils"].get_vision_interpolation_indices_and_weights(
                places,
                num_grid_per_side=model.num_grid_per_side,
                mode=model.interpolation_mode,
                align_corners=model.interpolation_align_corners,
            )
            x = x + (model.pos_embed(index) * weights[:, :, None]).sum(1).to(x.dtype)
        down, right = (torch.arange(side, device=x.device) for side in grid)
        cosine, sine = model.rotary_pos_emb(x, torch.cartesian_prod(down, right).reshape(-1, 2))
        cell = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        table = RotaryTable.from_cells(torch.cat([sine, cosine], dim=-1), 0, cell)
        return Tokens(x, cell, 0, grid, position_table=table)

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.blocks

    def run_block(self, block: Any, layer: int, tokens: Tokens) -> Tensor:
        """The block on a row, in which the frames have one length."""
        frames, count, _ = tokens.x.shape
        rows = tokens.position_table.for_image_tokens(layer, tokens)[:, 0].expand(frames, -1, -1).flatten(0, 1)
        sine, cosine = rows.chunk(2, dim=-1)
        lengths = torch.arange(0, (frames + 1) * count, count, dtype=torch.int32, device=rows.device)
        # The loop around it computes again for gradients, where that is asked for.
        call = block.forward if block.gradient_checkpointing and block.training else block
        return call(tokens.x.flatten(0, 1), lengths, position_embeddings=(cosine, sine)).unflatten(0, (frames, count))

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None, part: Part = "all") -> QKV:
        q, k, v = project(block.attn, block.norm1(tokens.x), queries, part)
        rows = tokens.position_table.for_all_tokens(layer, tokens)
        # In float32, as these models rotate.
        turned = rotate(k.float(), rows, half=True).to(k.dtype)
        if q.shape[2] > 0:
            q = rotate(q.float(), rows[..., : q.shape[2], :], half=True).to(q.dtype)
        return QKV(q, turned, v, block.attn.scaling, 0.0, method_keys=keys_for_methods(k))

    def attention_branch(self, block: Any, out: Tensor) -> Tensor:
        return block.attn.proj(out)

    def mlp_norm(self, block: Any) -> nn.LayerNorm | None:
        return plain_layer_norm(block.norm2, (nn.LayerNorm,))

    def mlp_branch(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        return block.mlp(block.norm2(x) if normed is None else normed)

    def norm(self, model: Any) -> nn.Module:
        return nn.Identity()

    def head(self, model: Any, features: Tensor) -> Tensor:
        """The output of the merger for all patches, however many there are here, [B, M / 4, channels].

        Mergers of earlier layers (deepstack) run as well, as MACs are counted from this.
        """
        grid = self.grid(model)
        count, order = grid[0] * grid[1], block_order(grid, model.spatial_merge_size, features.device)
        whole = features if features.shape[1] == count else features[:, :1].expand(-1, count, -1)
        row = whole[:, order].flatten(0, 1)
        merged, *_ = [merger(row) for merger in (model.merger, *getattr(model, "deepstack_merger_list", ()))]
        return merged.unflatten(0, (len(features), -1))

    def classifier(self, model: Any) -> nn.Module:
        raise NotImplementedError("a tower of a model of images and language has no classes")

    def uses_grad_checkpointing(self, model: Any) -> bool:
        first = model.blocks[0]
        return bool(first.gradient_checkpointing and first.training)

    def set_grad_checkpointing(self, model: Any, enable: bool) -> None:
        name = f"activation_checkpointing_{'enable' if enable else 'disable'}"
        getattr(model, name)()


def block_order(grid: tuple[int, int], merge: int, device: torch.device) -> Tensor:
    """The cells of a grid in the order of the row: block by block of merge x merge patches."""
    rows, columns = grid
    cells = torch.arange(rows * columns, device=device).view(rows // merge, merge, columns // merge, merge)
    return cells.transpose(1, 2).flatten()


def _block_unsupported_reason(block: Any, spec: PackedSpec) -> str | None:
    own = sys.modules[spec.module]
    kinds = {"": spec.block, "attn": spec.attention, "mlp": spec.mlp}
    for path, kind in kinds.items():
        module = block.get_submodule(path)
        if type(module) is not getattr(own, kind):
            return f"{_dotted(path)} is {type(module).__name__}; supported: {kind}"
    children = {"": {"norm1", "norm2", "attn", "mlp"}, "attn": {"qkv", "proj"}}
    for path, names in children.items():
        module = block.get_submodule(path)
        unknown = unexpected_member(module, names)
        if unknown is not None:
            return f"{_dotted(path)}.{unknown}"
        if is_overridden(module, hooks=False) or has_hooks(module, besides=OUTPUT_RECORDERS):
            return f"{_dotted(path)}{HAS_HOOKS}"
    for name, layer in block.named_modules():
        weight = getattr(layer, "weight", None)
        is_plain = type(weight) in (Tensor, nn.Parameter) or (isinstance(weight, Tensor) and is_quantized(weight))
        is_linear = "Linear" in type(layer).__name__ or name in ("attn.qkv", "attn.proj")
        if is_linear and (type(layer) is not nn.Linear or not is_plain):
            return (
                f".{name} is {type(layer).__module__}.{type(layer).__name__}; supported: torch.nn.Linear, also "
                "quantised by torchao. Merge adapters (merge_and_unload); shard, or quantise otherwise, after patching"
            )
    return None


def _dotted(path: str) -> str:
    return f".{path}" if path else ""


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return int(height), int(width)
