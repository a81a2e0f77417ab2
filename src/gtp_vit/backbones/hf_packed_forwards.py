"""The forward of a patched packed tower: its own arguments and outputs, with our loop over the blocks inside.

Imported once such a model is patched, so transformers is here.

Shapes: S patches of all frames, B frames of one grid, M patches of one frame, C channels.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.output_capturing import _active_collector

from gtp_vit.backbones.hf_packed import HuggingFacePackedViT, block_order, spec_of
from gtp_vit.core.loop import PatchedModel, run
from gtp_vit.core.restoring import restore_patches
from gtp_vit.core.tokens import Tokens
from gtp_vit.errors import InputError

# What transformers computes from grid_thw, and takes ready-made; here frames are found again from grid_thw.
READY_MADE = ("cu_seqlens", "position_ids", "interp_indices", "interp_weights")


class PackedForwards(PatchedModel):
    """Mixed into the class of a patched tower, before its own. Holds no state."""

    keeps_name = True  # transformers looks models up by the names of their classes

    config: Any
    patch_embed: Any
    merger: Any
    spatial_merge_size: int
    deepstack_visual_indexes: Any

    def forward(
        self,
        hidden_states: Tensor,
        grid_thw: Tensor,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **more: Any,
    ) -> Any:
        """The model's own output class, with all patches of all images, in the order in which they came."""
        for name in READY_MADE:
            if more.get(name) is not None:
                raise InputError(f"{name} cannot be combined with token reduction; remove it, grid_thw says the same")
        if output_attentions or (output_attentions is None and getattr(self.config, "output_attentions", False)):
            raise InputError(
                "attention maps of a reduced model change their size; output_attentions=True needs the original"
            )
        if output_hidden_states is None:
            output_hidden_states = getattr(self.config, "output_hidden_states", False)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        frames = self._frames(hidden_states, grid_thw)
        # Hooks on the blocks would add our hidden states to those of a model around this one.
        token = _active_collector.set({})
        try:
            outputs = self._outputs(hidden_states, frames, output_hidden_states)
        finally:
            _active_collector.reset(token)
        return outputs if return_dict else outputs.to_tuple()

    def _frames(self, patches: Any, grid_thw: Any) -> list[tuple[int, int]]:
        """The grid of each frame, in their order; refuses inputs that contradict each other."""
        if not isinstance(grid_thw, Tensor) or grid_thw.ndim != 2 or grid_thw.shape[1] != 3 or not len(grid_thw):
            shape = tuple(grid_thw.shape) if isinstance(grid_thw, Tensor) else type(grid_thw).__name__
            raise InputError(f"grid_thw is {shape}; give frames, rows and columns of each image, [images, 3]")
        merge = self.spatial_merge_size
        frames: list[tuple[int, int]] = []
        for number, (count, rows, columns) in enumerate(grid_thw.tolist()):
            if min(count, rows, columns) < 1 or rows % merge or columns % merge:
                raise InputError(
                    f"image {number} has a grid of {count} x {rows} x {columns} patches; rows and columns must be "
                    f"multiples of {merge}, the block that the merger joins, and none may be 0"
                )
            frames += [(rows, columns)] * count
        width = self.patch_embed.proj.weight[0].numel()
        total = sum(rows * columns for rows, columns in frames)
        if not isinstance(patches, Tensor) or patches.ndim != 2 or patches.shape != (total, width):
            shape = tuple(patches.shape) if isinstance(patches, Tensor) else type(patches).__name__
            raise InputError(f"hidden_states are {shape}, but grid_thw says {total} patches of {width} numbers each")
        return frames

    def _outputs(self, patches: Tensor, frames: list[tuple[int, int]], output_hidden_states: bool) -> Any:
        reduction, model = self.reduction, self
        backbone, depth, merge = reduction.backbone, reduction.vit.depth, self.spatial_merge_size
        assert isinstance(backbone, HuggingFacePackedViT)
        mergers: list[Any] = [*getattr(model, "deepstack_merger_list", ())]
        deep: list[int] = [*self.deepstack_visual_indexes] if mergers else []
        # 0 is the embedding, then one per layer
        state_numbers = {depth, *(range(depth + 1) if output_hidden_states else ()), *(layer + 1 for layer in deep)}
        pieces = self.patch_embed(patches).split([h * w for h, w in frames])
        states: dict[int, list[Any]] = {state: [None] * len(frames) for state in state_numbers}
        for grid in dict.fromkeys(frames):
            members = [number for number, frame in enumerate(frames) if frame == grid]
            order = block_order(grid, merge, patches.device)
            x = torch.stack([pieces[number] for number in members])[:, order.argsort()]
            number_of_state = 0

            def observe(tokens: Tokens, members: list[int] = members, order: Tensor = order) -> None:
                nonlocal number_of_state
                if number_of_state in state_numbers:
                    restored = restore_patches(tokens)[:, order]
                    for member, features in zip(members, restored, strict=True):
                        states[number_of_state][member] = features
                number_of_state += 1

            run(model, backbone.embed_frames(model, x, grid), observe=observe, restore=True)
        rows = {state: torch.cat(features) for state, features in states.items()}
        outputs: Any = {"last_hidden_state": rows[depth], "pooler_output": self.merger(rows[depth])}
        if mergers:
            kind = sys.modules[spec_of(model).module].BaseModelOutputWithDeepstackFeatures
            features = [mergers[deep.index(layer)](rows[layer + 1]) for layer in range(depth) if layer in deep]
            outputs = kind(**outputs, deepstack_features=features)
        else:
            outputs = BaseModelOutputWithPooling(**outputs)
        if output_hidden_states:  # behind the others, as the model has them
            outputs["hidden_states"] = tuple(rows[state] for state in range(depth + 1))
        return outputs
