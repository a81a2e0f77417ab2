"""Hugging Face's ViTs: ViT, DeiT, ViTMSN, IJEPA, ViTMAE, CLIP, SigLIP, those of Idefics 2 and 3 and SmolVLM, DINOv2
(also with registers) and DINOv3.

One pre-norm block in three spellings (hf_architectures.py). As with timm, its arithmetic is repeated here, and
`unsupported_reason` compares every class, child and tensor with what this copy supports. Names are those of
transformers 5.18 and newer; it is never imported here: whoever has such a model has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.backbones.hf_architectures import FAMILIES, ArchitectureSpec, is_tower, spec_of, spec_of_block
from gtp_vit.backbones.modules import (
    HAS_HOOKS,
    call_unless_identity,
    check_images,
    has_hooks,
    hookless_eval_copy,
    is_overridden,
    plain_layer_norm,
    split_heads,
    unexpected_member,
    zero_features,
)
from gtp_vit.backbones.rotary import RotaryTable, keys_for_methods, rotate
from gtp_vit.core.attention import QKV
from gtp_vit.core.backbone import Backbone, Inputs, Library, Output, Part
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ViTInfo
from gtp_vit.tensors import is_quantized

MIN_TRANSFORMERS = (5, 18)  # older ones have other names
# Its hooks stay once hidden states were asked for; they only look.
OUTPUT_RECORDERS = "transformers.utils.output_capturing"
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class HuggingFaceViT(Backbone):
    """Backbone of Hugging Face's plain vision transformers."""

    classes = tuple(spec.name for spec in FAMILIES)

    def library(self) -> Library:
        from gtp_vit.backbones.hf_library import HUGGING_FACE

        return HUGGING_FACE

    @property
    def forwards(self) -> type:  # type: ignore[override]
        from gtp_vit.backbones.hf_forwards import HuggingFaceForwards  # needs transformers, which is here by now

        return HuggingFaceForwards

    def small_models(self, depth: int) -> dict[str, Callable[[], nn.Module]]:
        from gtp_vit.backbones.small_models import hf_vits

        return hf_vits(depth)

    def matches(self, model: nn.Module) -> bool:
        return is_tower(model)

    def unsupported_reason(self, model: Any) -> str | None:
        names = spec_of(model)
        version = sys.modules["transformers"].__version__
        if tuple(int(part) for part in version.split(".")[:2]) < MIN_TRANSFORMERS:
            minimum = ".".join(map(str, MIN_TRANSFORMERS))
            return f"transformers {version} names the parts of its models differently; update it: {minimum} or newer"
        devices = {str(device) for device in (getattr(model, "hf_device_map", None) or {}).values()}
        if len(devices) > 1:
            return f"the model is spread over {', '.join(sorted(devices))}; load it without device_map"
        if is_overridden(model, hooks=False):
            return "the model's forward was replaced on the instance, e.g. by device_map or a wrapper; load it without"
        for name, child in model.named_children():
            if name not in names.children:
                return f"the model has a module {name} ({type(child).__name__}) that is not known"
        hidden_patches = mask_unsupported_reason(model)
        if hidden_patches is not None:
            return hidden_patches
        inner = model.get_submodule(names.blocks.rpartition(".")[0])
        if inner is not model and (is_overridden(inner, hooks=False) or has_hooks(inner, besides=OUTPUT_RECORDERS)):
            return f"{names.blocks.split('.')[0]} has hooks or a forward of its own, which is not called; remove them"
        for index, block in enumerate(self.blocks(model)):
            reason = _block_unsupported_reason(block, names)
            if reason is not None:
                return f"{names.blocks}[{index}]{reason}"
        return None

    def vit_info(self, model: Any) -> ViTInfo:
        names = spec_of(model)
        attention = getattr(self.blocks(model)[0], names.projections)
        registers = getattr(model.embeddings, "register_tokens", None)
        prefix = names.prefix + (0 if registers is None else registers.shape[1])
        return ViTInfo(
            depth=len(self.blocks(model)),
            dim=model.config.hidden_size,
            heads=model.config.num_attention_heads,
            head_dim=attention.head_dim,
            grid=self.grid(model),
            prefix=prefix,
            class_token=names.prefix > 0,
            head_reads_image_tokens=True,  # last_hidden_state has them all
            head_averages_image_tokens=False,
        )

    def inputs(self, model: Any) -> Inputs:
        config, names = model.config, spec_of(model)
        stored = str(getattr(config, "name_or_path", "") or "").rstrip("/")
        return Inputs(
            name=stored.rsplit("/", 1)[-1] or type(model).__name__,
            size=_image_size(model),
            any_size=not names.interpolates,
            patch=_pair(config.patch_size),
            channels=config.num_channels,
            classes=0,
            preprocessing=None,
        )

    def output(self, model: Any) -> Output:
        with torch.no_grad():
            features = self.head(hookless_eval_copy(model), zero_features(self.vit_info(model), model))
        return Output("features" if features.ndim == 2 else "tokens", features.shape[-1])

    def grid(self, model: Any) -> tuple[int, int]:
        (height, width), (rows, columns) = _image_size(model), _pair(model.config.patch_size)
        return height // rows, width // columns

    def head_reads_image_tokens(self, model: Any) -> bool:
        return True

    def embed(self, model: Any, images: Tensor) -> Tokens:
        return self.embed_with(model, images, {})

    def embed_with(self, model: Any, images: Tensor, options: dict[str, Any]) -> Tokens:
        """The tokens in front of the first block; `options` are keywords of the model's own embedding."""
        names = spec_of(model)
        first, (rows, columns) = self.first_layer(model), _pair(model.config.patch_size)
        if isinstance(images, Tensor) and images.is_floating_point():
            images = images.to(first.weight.dtype)  # as these models do
        fixed = names.interpolates and not options.get("interpolate_pos_encoding")
        check_images(images, first, _image_size(model) if fixed else None, None)
        grid = (images.shape[2] // rows, images.shape[3] // columns)
        if names.masks_patches:  # padding was refused
            options["patch_attention_mask"] = images.new_ones((len(images), *grid), dtype=torch.bool)
        x = model.embeddings(images, **options)
        cell = torch.arange(grid[0] * grid[1], device=images.device).expand(images.shape[0], -1)
        owner = None
        if names.model == "vit_mae":  # it shuffles the patches, also where it hides none
            x, _, owner = x
            cell = owner.argsort(dim=1)
        if names.pre_norm is not None:
            x = getattr(model, names.pre_norm)(x)
        prefix, table = x.shape[1] - cell.shape[1], None
        if names.rotary:
            cosine, sine = model.rope_embeddings(images)
            table = RotaryTable.from_cells(torch.cat([sine, cosine], dim=-1), prefix, cell)
        return Tokens(x, cell, prefix, grid, owner=owner, position_table=table)

    def first_layer(self, model: Any) -> nn.Conv2d:
        """The convolution that makes patches."""
        return next(module for module in model.embeddings.modules() if isinstance(module, nn.Conv2d))

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        blocks: Any = model.get_submodule(spec_of(model).blocks)
        return blocks

    def run_block(self, block: Any, layer: int, tokens: Tokens) -> Tensor:
        more = {}
        if tokens.position_table is not None:
            sine, cosine = tokens.position_table.for_image_tokens(layer, tokens).chunk(2, dim=-1)
            more = {"position_embeddings": (cosine, sine)}
        if block.gradient_checkpointing and block.training:  # the loop around it does that already
            return block.forward(tokens.x, attention_mask=None, **more)
        return block(tokens.x, attention_mask=None, **more)

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None, part: Part = "all") -> QKV:
        names = spec_of_block(block)
        attention, y = getattr(block, names.projections), getattr(block, names.norms[0])(tokens.x)
        heads = attention.q_proj.out_features // attention.head_dim
        (q,) = split_heads(attention.q_proj(y[:, :queries]), 1, heads)
        (k,) = split_heads(attention.k_proj(y), 1, heads)
        (v,) = split_heads(attention.v_proj(y), 1, heads)
        scale, dropout = _scale(attention), _dropout(attention) if attention.training else 0.0
        if tokens.position_table is None:
            return QKV(q, k, v, scale, dropout)
        rows = tokens.position_table.for_all_tokens(layer, tokens)
        if queries is None or queries > tokens.prefix:
            q = rotate(q, rows[..., : q.shape[2], :], half=True)
        return QKV(q, rotate(k, rows, half=True), v, scale, dropout, method_keys=keys_for_methods(k))

    def attention_branch(self, block: Any, out: Tensor) -> Tensor:
        names = spec_of_block(block)
        return _branch(block, names, 0, getattr(getattr(block, names.projections), names.out)(out))

    def mlp_norm(self, block: Any) -> nn.LayerNorm | None:
        return plain_layer_norm(getattr(block, spec_of_block(block).norms[1]), (nn.LayerNorm,))

    def mlp_branch(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        names = spec_of_block(block)
        return _branch(block, names, 1, block.mlp(getattr(block, names.norms[1])(x) if normed is None else normed))

    def norm(self, model: Any) -> nn.Module:
        name = spec_of(model).last_norm
        return nn.Identity() if name is None else getattr(model, name)

    def head(self, model: Any, features: Tensor) -> Tensor:
        """pooler_output, or all features where a model has none."""
        pooled = pooler_output(model, features)
        return features if pooled is None else pooled

    def classifier(self, model: Any) -> nn.Module:
        raise NotImplementedError("the classifier belongs to the model around the ViT, which only transformers trains")

    def uses_grad_checkpointing(self, model: Any) -> bool:
        first: Any = self.blocks(model)[0]
        return bool(first.gradient_checkpointing and first.training)

    def set_grad_checkpointing(self, model: Any, enable: bool) -> None:
        name = f"checkpointing_{'enable' if enable else 'disable'}"
        switch = getattr(model, f"activation_{name}", None)  # since transformers 5.23
        (getattr(model, f"gradient_{name}") if switch is None else switch)()


def pooler_output(model: Any, last_hidden_state: Tensor) -> Tensor | None:
    """The pooled last hidden state; None if the model does not pool."""
    names = spec_of(model)
    if names.model == "clip":
        return model.post_layernorm(last_hidden_state[:, 0])
    if names.model == "siglip":
        return model.head(last_hidden_state) if model.use_head else None
    if names.layer_scales is not None:
        return last_hidden_state[:, 0]
    pooler = getattr(model, "pooler", None)
    return None if pooler is None else pooler(last_hidden_state)


def mask_unsupported_reason(model: Any) -> str | None:
    """ViTMAE hides patches of its own, unless its configuration says 0."""
    ratio = getattr(model.config, "mask_ratio", 0) if spec_of(model).model == "vit_mae" else 0
    if ratio == 0:
        return None
    return f"ViTMAE hides {ratio:.0%} of the patches at random; set model.config.mask_ratio = 0 first"


def _block_unsupported_reason(block: Any, names: ArchitectureSpec) -> str | None:
    own = sys.modules[f"transformers.models.{names.model}.modeling_{names.model}"]
    if type(block) is not getattr(own, names.block):
        return f" is {type(block).__name__}; supported: {names.block}"
    attention = getattr(block, names.projections)
    if type(attention) is not getattr(own, names.attention):
        return f".{names.projections} is {type(attention).__name__}; supported: {names.attention}"
    if not any(type(block.mlp) is getattr(own, name, None) for name in names.mlps):
        return f".mlp is {type(block.mlp).__name__}; supported: {', '.join(names.mlps)}"
    known = ((names.block_children, block, ""), ({*PROJECTIONS, names.out}, attention, f".{names.projections}"))
    for children, owner, path in known:
        unknown = unexpected_member(owner, children)
        if unknown is not None:
            return f"{path}.{unknown}"
        if is_overridden(owner, hooks=False) or has_hooks(owner, besides=OUTPUT_RECORDERS):
            return f"{path}{HAS_HOOKS}"
    for name, layer in block.named_modules():
        weight = getattr(layer, "weight", None)
        is_linear = "Linear" in type(layer).__name__ or name.endswith("_proj")
        is_plain = type(weight) in (Tensor, nn.Parameter) or (isinstance(weight, Tensor) and is_quantized(weight))
        if is_linear and (type(layer) is not nn.Linear or not is_plain):
            what = type(layer).__name__ if type(layer) is not nn.Linear else f"a Linear with a {type(weight).__name__}"
            return (
                f".{name} is {type(layer).__module__}.{what}; supported: torch.nn.Linear, also "
                "quantised by torchao. Merge adapters (merge_and_unload); shard, or quantise otherwise, after patching"
            )
    return None


def _image_size(model: Any) -> tuple[int, int]:
    return _pair(getattr(model, "described_size", model.config.image_size))


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return int(height), int(width)


def _scale(attention: Any) -> float:
    return attention.scaling if hasattr(attention, "scaling") else attention.scale


def _dropout(attention: Any) -> float:
    return attention.attention_dropout if hasattr(attention, "attention_dropout") else attention.dropout


def _branch(block: Any, names: ArchitectureSpec, number: int, x: Tensor) -> Tensor:
    """LayerScale and dropout or stochastic depth, behind either branch."""
    if names.layer_scales is not None:
        x = getattr(block, names.layer_scales[number])(x)
    return x if names.dropout is None else call_unless_identity(getattr(block, names.dropout), x)
