"""torchvision's VisionTransformer: vit_b_16, vit_b_32, vit_l_16, vit_l_32, vit_h_14, also with a convolutional stem.

The arithmetic of its block is repeated here, because attention must return statistics. This file never imports
torchvision: whoever created one of its models has imported it already.

Shapes: B batch, N tokens, C channels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gtp_vit.backbones import mha
from gtp_vit.backbones.modules import (
    HAS_HOOKS,
    call_unless_identity,
    check_images,
    class_unsupported_reason,
    is_overridden,
    module_unsupported_reason,
    plain_layer_norm,
    unexpected_member,
)
from gtp_vit.core.attention import QKV
from gtp_vit.core.backbone import Backbone, Inputs, Library, Output, Part
from gtp_vit.core.loop import PatchedModel, run
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import ViTInfo

# The model does not know its weights. Those of torchvision for 224 pixels are prepared as its own training does, those
# for larger images (SWAG) without a margin.
PREPARATION = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CENTER_CROP = {"crop_pct": 224 / 256, "interpolation": "bilinear"}
SWAG = {"crop_pct": 1.0, "interpolation": "bicubic"}
SWAG_SIZES = (384, 512, 518)


class TorchvisionForwards(PatchedModel):
    """Mixed into the class of a patched model, before torchvision's. Holds no state."""

    encoder: Any

    def forward(self, x: Tensor) -> Tensor:
        """Logits; the last block computes only the class token, which is all that the head reads."""
        backbone = self.reduction.backbone
        tokens = run(self, x, prefix_only=self.reduction.may_skip_image_tokens(self))
        return backbone.head(self, self.reducer.finish(tokens, self.encoder.ln))


class TorchvisionViT(Backbone):
    """Backbone of torchvision's vision transformers."""

    classes = ("VisionTransformer",)
    models = "`vit_b_16` to `vit_h_14`"
    forwards = TorchvisionForwards

    def library(self) -> Library:
        from gtp_vit.backbones.libraries import TORCHVISION

        return TORCHVISION

    def model_names(self) -> list[str]:
        from gtp_vit.backbones.libraries import TORCHVISION

        return TORCHVISION.names()

    def small_models(self, depth: int) -> dict[str, Callable[[], nn.Module]]:
        from gtp_vit.backbones.small_models import torchvision_vits

        return torchvision_vits(depth)

    def matches(self, model: nn.Module) -> bool:
        library = sys.modules.get("torchvision.models.vision_transformer")
        return library is not None and isinstance(model, library.VisionTransformer)

    def unsupported_reason(self, model: Any) -> str | None:
        library = sys.modules["torchvision.models.vision_transformer"]
        reason = class_unsupported_reason(model, library.VisionTransformer)
        if reason is not None:
            return reason
        unknown = unexpected_member(model, {"conv_proj", "encoder", "heads"}, {"class_token"})
        if unknown is not None:
            return f"the model's {unknown}"
        if not any(isinstance(module, nn.Conv2d) for module in model.conv_proj.modules()):
            return f"conv_proj is {type(model.conv_proj).__name__}; supported: Conv2d, and a stem of convolutions"
        encoder = model.encoder
        reason = module_unsupported_reason(encoder, (library.Encoder,), {"dropout", "layers", "ln"}, {"pos_embedding"})
        if reason is not None:
            return f"encoder{reason}"
        if is_overridden(encoder.layers, hooks=True):
            return f"encoder.layers{HAS_HOOKS}"
        for index, block in enumerate(encoder.layers):
            reason = self._block_unsupported_reason(block, library)
            if reason is not None:
                return f"encoder.layers[{index}]{reason}"
        return None

    def _block_unsupported_reason(self, block: Any, library: Any) -> str | None:
        known = {"ln_1", "self_attention", "dropout", "ln_2", "mlp"}
        reason = module_unsupported_reason(block, (library.EncoderBlock,), known)
        if reason is not None:
            return reason
        if type(block.mlp) is not library.MLPBlock:
            return f".mlp is {type(block.mlp).__name__}; supported: MLPBlock"
        unknown = unexpected_member(block.mlp, "01234")  # two linear layers, an activation and two dropouts
        if unknown is not None:
            return f".mlp.{unknown}"
        reason = mha.unsupported_reason(block.self_attention)
        return None if reason is None else f".self_attention{reason}"

    def vit_info(self, model: Any) -> ViTInfo:
        attn = model.encoder.layers[0].self_attention
        return ViTInfo(
            depth=len(model.encoder.layers),
            dim=model.hidden_dim,
            heads=attn.num_heads,
            head_dim=attn.head_dim,
            grid=self.grid(model),
            prefix=1,
            class_token=True,
            head_reads_image_tokens=False,
            head_averages_image_tokens=False,
        )

    def inputs(self, model: Any) -> Inputs:
        kind, width = self.output(model)
        size = model.image_size
        return Inputs(
            name=type(model).__name__,
            size=(size, size),
            any_size=False,
            patch=(model.patch_size, model.patch_size),
            channels=self.first_layer(model).in_channels,
            classes=width if kind == "classes" else 0,
            preprocessing={
                "input_size": (3, size, size),
                **PREPARATION,
                **(SWAG if size in SWAG_SIZES else CENTER_CROP),
            },
        )

    def output(self, model: Any) -> Output:
        # `num_classes` is not asked: users exchange the head and leave it as it was.
        layers = list(model.heads.modules())
        widths = [layer.out_features for layer in layers if isinstance(layer, nn.Linear)]
        removed = isinstance(layers[-1], (nn.Identity, nn.Sequential))  # a Sequential that is last is empty
        return Output("features" if removed else "classes", widths[-1] if widths else model.hidden_dim)

    def grid(self, model: Any) -> tuple[int, int]:
        side = model.image_size // model.patch_size
        return side, side

    def first_layer(self, model: Any) -> nn.Conv2d:
        """The first convolution of the model."""
        return next(module for module in model.conv_proj.modules() if isinstance(module, nn.Conv2d))

    def head_reads_image_tokens(self, model: Any) -> bool:
        return False

    def embed(self, model: Any, images: Tensor) -> Tokens:
        check_images(images, self.first_layer(model), (model.image_size, model.image_size), None)
        patches = model._process_input(images)
        x = torch.cat([model.class_token.expand(patches.shape[0], -1, -1), patches], dim=1)
        x = call_unless_identity(model.encoder.dropout, x + model.encoder.pos_embedding)
        cell = torch.arange(patches.shape[1], device=x.device)
        return Tokens(x, cell.expand(x.shape[0], -1), 1, self.grid(model))

    def blocks(self, model: Any) -> Sequence[nn.Module]:
        return model.encoder.layers

    def run_block(self, block: Any, layer: int, tokens: Tokens) -> Tensor:
        return block(tokens.x)

    def project(self, block: Any, layer: int, tokens: Tokens, queries: int | None, part: Part = "all") -> QKV:
        return mha.project(block.self_attention, block.ln_1(tokens.x), queries)

    def attention_branch(self, block: Any, out: Tensor) -> Tensor:
        return call_unless_identity(block.dropout, mha.output(block.self_attention, out))

    def mlp_norm(self, block: Any) -> nn.LayerNorm | None:
        return plain_layer_norm(block.ln_2, {nn.LayerNorm})

    def mlp_branch(self, block: Any, x: Tensor, normed: Tensor | None) -> Tensor:
        return block.mlp(block.ln_2(x) if normed is None else normed)

    def norm(self, model: Any) -> nn.Module:
        return model.encoder.ln

    def head(self, model: Any, features: Tensor) -> Tensor:
        return model.heads(features[:, 0])

    def remove_classifier(self, model: Any) -> None:
        model.heads = nn.Identity()

    def uses_grad_checkpointing(self, model: Any) -> bool:
        return getattr(model, "grad_checkpointing", False)  # not torchvision's: `set_grad_checkpointing` sets it

    def set_grad_checkpointing(self, model: Any, enable: bool) -> None:
        model.grad_checkpointing = enable

    def no_weight_decay(self, model: Any) -> set[str]:
        return self.embedding_parameters(model)

    def embedding_parameters(self, model: Any) -> set[str]:
        return {"class_token", "encoder.pos_embedding"}

    def classifier(self, model: Any) -> nn.Module:
        return model.heads
