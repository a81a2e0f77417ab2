"""The entry points of a patched timm model: timm's own signatures, with our loop over the blocks inside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gtp_vit.core.loop import PatchedModel, all_features, run
from gtp_vit.core.restoring import restore_patches
from gtp_vit.errors import GTPError, InputError


class TimmForwards(PatchedModel):
    """Mixed into the class of a patched model, before timm's. Holds no state."""

    norm: Any
    forward_head: Any

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
        """Logits; the last block computes only the tokens that the head reads."""
        _refuse_masks(attn_mask, is_causal)
        if self.reduction.restore and _returns_tokens(self):
            return self.forward_head(all_features(self, x))
        tokens = run(self, x, prefix_only=self.reduction.may_skip_image_tokens(self))
        return self.forward_head(self.reducer.finish(tokens, self.norm))

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """The normed features of all tokens that remain, [B, prefix + remaining, C]; with restore of all patches."""
        _refuse_masks(attn_mask, is_causal)
        return all_features(self, x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        """timm's forward_intermediates: features after the chosen blocks, of all tokens that remain there.

        With restore, of all patches.
        """
        from gtp_vit.backbones.intermediates import intermediates

        _refuse_masks(attn_mask, is_causal)
        images, prefixes, last = intermediates(
            self, x, indices, self.norm if norm else None, stop_early=stop_early, output_fmt=output_fmt
        )
        with_prefix = return_prefix_tokens and last.prefix > 0
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": images}
            if with_prefix:
                result["image_intermediates_prefix"] = prefixes
            if not intermediates_only:
                result["image_features"] = self.norm(restore_patches(last))
            return result
        features: list[Any] = list(zip(images, prefixes, strict=True)) if with_prefix else images
        return features if intermediates_only else (self.norm(restore_patches(last)), features)

    def get_intermediate_layers(
        self,
        x: Tensor,
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        attn_mask: Tensor | None = None,
    ) -> Any:
        """timm's DINO-style interface to forward_intermediates."""
        return self.forward_intermediates(
            x,
            n,
            return_prefix_tokens=return_prefix_tokens,
            norm=norm,
            output_fmt="NCHW" if reshape else "NLC",
            intermediates_only=True,
            attn_mask=attn_mask,
        )

    def set_input_size(self, *args: Any, **kwargs: Any) -> None:
        """Refused: it would change the patch embedding that is shared with the original model."""
        raise GTPError("set_input_size would change the shared original; call it on the original, then patch again")

    def prune_intermediate_layers(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the schedule was made for all layers."""
        raise GTPError("prune_intermediate_layers does not fit the schedule; call it on the original, then patch again")


def _returns_tokens(model: Any) -> bool:
    """Is there no pooling, so that a forward pass returns all tokens?"""
    return getattr(model, "global_pool", None) == "" and getattr(model, "attn_pool", None) is None


def _refuse_masks(attn_mask: Tensor | None, is_causal: bool) -> None:
    if attn_mask is not None or is_causal:
        raise InputError("attention masks cannot be combined with token reduction; call the original model for these")
