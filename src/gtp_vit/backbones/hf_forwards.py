"""The forward of a patched Hugging Face ViT: its own arguments and outputs, with our loop over the blocks inside.

Imported once a Hugging Face model is patched, so transformers is here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling
from transformers.models.vit_mae.modeling_vit_mae import ViTMAEModelOutput
from transformers.utils.output_capturing import _active_collector

from gtp_vit.backbones.hf_architectures import ArchitectureSpec, spec_of
from gtp_vit.backbones.hf_vit import HuggingFaceViT, mask_unsupported_reason, pooler_output
from gtp_vit.core.loop import PatchedModel, run
from gtp_vit.core.restoring import restore_patches
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import InputError
from gtp_vit.tensors import select_rows


class HuggingFaceForwards(PatchedModel):
    """Mixed into the class of a patched model, before its own. Holds no state."""

    keeps_name = True  # transformers looks models up by the names of their classes

    config: Any

    def forward(
        self,
        pixel_values: Tensor | None = None,
        *,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: Tensor | None = None,
        patch_attention_mask: Tensor | None = None,
        noise: Tensor | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **ignored: Any,
    ) -> Any:
        """The model's own output class; last_hidden_state and hidden_states have the tokens that remain.

        With restore they have all patches; what the model pools is pooled from the tokens that remain.
        """
        if pixel_values is None:
            raise InputError("there are no pixel_values; give them, [batch, channels, height, width]")
        for name, mask in (("attention_mask", attention_mask), ("bool_masked_pos", bool_masked_pos)):
            if mask is not None:
                raise InputError(f"{name} cannot be combined with token reduction; call the original model for these")
        if patch_attention_mask is not None and not bool(patch_attention_mask.all()):
            raise InputError(
                "patch_attention_mask hides padding, which cannot be combined with token reduction; give images of one "
                "size, or one image at a time"
            )
        if output_attentions or (output_attentions is None and getattr(self.config, "output_attentions", False)):
            raise InputError(
                "attention maps of a reduced model change their size; output_attentions=True needs the original"
            )
        if output_hidden_states is None:
            output_hidden_states = getattr(self.config, "output_hidden_states", False)
        names = spec_of(self)
        if not names.interpolates:  # such models ignore it: they take images of any size
            interpolate_pos_encoding = None
        hidden_patches = mask_unsupported_reason(self)
        if hidden_patches is not None:
            raise InputError(hidden_patches)
        options: dict[str, Any] = {"interpolate_pos_encoding": interpolate_pos_encoding, "noise": noise}
        options = {name: value for name, value in options.items() if value is not None and value is not False}
        outputs = self._outputs(pixel_values, output_hidden_states, options, names)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        return outputs if return_dict else outputs.to_tuple()

    def _outputs(
        self,
        images: Tensor,
        output_hidden_states: bool | int | list[int] | None,
        options: dict[str, Any],
        names: ArchitectureSpec,
    ) -> Any:
        reduction, model = self.reduction, self
        backbone = reduction.backbone
        is_shuffled = names.model == "vit_mae"
        depth, all_layers = reduction.vit.depth, len(backbone.blocks(model))
        observed: list[Tokens] = []
        chosen = _layers_to_return(output_hidden_states, all_layers, depth)
        # Hooks on the blocks would add our hidden states to those of a model around this one.
        token = _active_collector.set({})
        try:
            is_short = not chosen and reduction.may_skip_image_tokens(model)
            observe = observed.append if chosen or is_shuffled else None
            whole = reduction.restore and not is_short
            assert isinstance(backbone, HuggingFaceViT)
            embedded = backbone.embed_with(model, images, options)
            tokens = run(model, embedded, prefix_only=is_short, observe=observe, restore=whole)
        finally:
            _active_collector.reset(token)
        hidden: Any = None
        order = observed[0].cell if is_shuffled else None
        if chosen:  # those that were not asked for, or not run, are None
            states = (_all(state, order) if index in chosen else None for index, state in enumerate(observed))
            hidden = (*states, *[None] * (all_layers - depth))
        if depth < all_layers:  # a model around this one reads an earlier layer only
            return BaseModelOutputWithPooling(hidden_states=hidden)
        last = self.reducer.finish(tokens, backbone.norm(model))
        pooled = pooler_output(model, last)
        if whole:
            last = backbone.norm(model)(_all(tokens, order))
        if names.model == "vit_msn":
            return BaseModelOutput(last, hidden)
        if is_shuffled:  # nothing is hidden, and the patches stand in random order
            back = observed[0].cell.argsort(dim=1)
            return ViTMAEModelOutput(last, torch.zeros_like(back, dtype=torch.float32), back, hidden)
        return BaseModelOutputWithPooling(last, pooled, hidden)


def _all(tokens: Tokens, order: Tensor | None) -> Tensor:
    """Features of all tokens; restored patches are in the `order` of their cells [B, M0], if that is not the grid's."""
    x = restore_patches(tokens)
    if order is None or x is tokens.x:
        return x
    return torch.cat([x[:, : tokens.prefix], select_rows(x[:, tokens.prefix :], order)], dim=1)


def _layers_to_return(output_hidden_states: bool | int | list[int] | None, all_layers: int, used: int) -> set[int]:
    """Indices of the hidden states to return: 0 is the embedding, then one per layer."""
    if output_hidden_states is None or output_hidden_states is False:
        return set()
    if output_hidden_states is True:
        return set(range(used + 1))
    indices = [output_hidden_states] if isinstance(output_hidden_states, int) else list(output_hidden_states)
    layers = {index % (all_layers + 1) for index in indices if -all_layers - 1 <= index <= all_layers}
    if any(index > used for index in layers):
        raise InputError(
            f"hidden state {max(layers)} was asked for, and only {used} layers are run, as the model around this ViT "
            "reads no more; set its config.vision_feature_layer, then patch again"
        )
    return layers
