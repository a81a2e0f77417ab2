"""timm's vision encoder of Qwen3-VL and its successors: Eva's blocks with rotary positions, no prefix token, no norm.

Behind it is the projector to a language model, which joins neighbouring patches, or the mean of all of them. Images
have the size that the model was created with.

Shapes: B batch, M image tokens, C channels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from gtp_vit.backbones.modules import class_unsupported_reason, unexpected_member
from gtp_vit.backbones.rotary import RotaryTable
from gtp_vit.backbones.timm_blocks import SupportedTypes, blocks_unsupported_reason, is_timm_layer
from gtp_vit.backbones.timm_eva import ATTENTION, BLOCK, TimmEva
from gtp_vit.backbones.timm_forwards import TimmForwards
from gtp_vit.core.backbone import Output
from gtp_vit.core.loop import all_features, run
from gtp_vit.core.tokens import Tokens


class QwenForwards(TimmForwards):
    """Mixed into the class of a patched encoder. Holds no state."""

    norm: Any = nn.Identity()  # it has none
    merger: Any
    global_pool: Any

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """The output: the projector's, the mean of all patches, or the patches themselves."""
        if self.reduction.restore and self.global_pool != "avg":
            features = self.forward_features(x)
            return features if self.merger is None else self.merger(features)
        pooled = self.reduction.backbone.head(self, self.reducer.finish(run(self, x), self.norm))
        return self._map(pooled) if self.global_pool == "" else pooled

    def forward_features(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """[B, rows, columns, C] where all patches are there, as with restore; else those that remain, [B, M, C]."""
        return self._map(all_features(self, x))

    def forward_intermediates(  # type: ignore[override]
        self,
        x: Tensor,
        indices: Any = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """timm's forward_intermediates, whose last features are as those of `forward_features`."""
        outputs = super().forward_intermediates(
            *(x, indices, return_prefix_tokens, norm, stop_early, output_fmt, intermediates_only), output_dict=True
        )
        if not intermediates_only:
            outputs["image_features"] = self._map(outputs["image_features"])
        if output_dict:
            return outputs
        images = outputs["image_intermediates"]
        return images if intermediates_only else (outputs["image_features"], images)

    def _map(self, features: Tensor) -> Tensor:
        grid = self.reduction.vit.grid
        return features.unflatten(1, grid) if features.shape[1] == grid[0] * grid[1] else features


class TimmQwen(TimmEva):
    """Backbone of timm's Qwen3VitEncoder."""

    module, classes = "qwen3_vit", ("Qwen3VitEncoder",)
    models = "the encoder of Qwen3-VL and Qwen3.5"
    forwards = QwenForwards

    def small_models(self, depth: int) -> dict[str, Callable[[], nn.Module]]:
        from gtp_vit.backbones.small_models import timm_qwens

        return timm_qwens(depth)

    def unsupported_reason(self, model: Any) -> str | None:
        qwen, eva, layers = (sys.modules[f"timm.{name}"] for name in ("models.qwen3_vit", "models.eva", "layers"))
        unknown = unexpected_member(model, {"patch_embed", "rope", "blocks", "merger"}, {"pos_embed"})
        reason = class_unsupported_reason(model, qwen.Qwen3VitEncoder) or unknown
        if reason is None and not is_timm_layer(model.patch_embed, "PatchEmbed"):
            reason = f"patch_embed is {type(model.patch_embed).__name__}; supported: PatchEmbed"
        if reason is None and model.merger is not None and type(model.merger) is not qwen.Qwen3VitPatchMerger:
            reason = f"merger is {type(model.merger).__name__}; supported: Qwen3VitPatchMerger"
        kinds = SupportedTypes((eva.EvaBlock,), (eva.EvaAttention, layers.AttentionRope), BLOCK, ATTENTION)
        return reason or self._rotary_unsupported_reason(model) or blocks_unsupported_reason(model.blocks, kinds)

    def needs_all_patches(self, model: Any) -> str | None:
        if model.merger is not None:
            return "joins the channels of neighbouring patches"
        return None if model.global_pool == "avg" else "returns a feature map"

    def any_size(self, model: Any) -> bool:
        return False

    def output(self, model: Any) -> Output:
        width = model.embed_dim if model.merger is None else model.merger.out_features
        return Output("features" if model.global_pool == "avg" else "tokens", width)

    def embed(self, model: Any, images: Tensor) -> Tokens:
        x, grid = self.patches(model, images)
        x, rope = model._pos_embed(x)
        cell = self.cells(x, grid)
        return Tokens(x, cell, 0, grid, position_table=RotaryTable.from_cells(rope, 0, cell))

    def norm(self, model: Any) -> nn.Module:
        return nn.Identity()

    def head(self, model: Any, features: Tensor) -> Tensor:
        """The projector always gets all patches, however many there are here."""
        if model.merger is not None:
            rows, columns = self.grid(model)
            whole = features if features.shape[1] == rows * columns else features[:, :1].expand(-1, rows * columns, -1)
            return model.merger(whole.unflatten(1, (rows, columns)))
        return features.mean(dim=1) if model.global_pool == "avg" else features

    def embedding_parameters(self, model: Any) -> set[str]:
        return {"pos_embed"}

    def classifier(self, model: Any) -> nn.Module:
        raise NotImplementedError("the classifier belongs to the model around the encoder")
