"""Work as torch's own FLOP counter counts it."""

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count


def torch_flops(model: torch.nn.Module, images: torch.Tensor) -> int:
    model.requires_grad_(False)  # the counter's module tracker stumbles over expanded parameters
    # torch 2.6 has no formula for the attention that a CPU runs
    formulas = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _sdpa_flops}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter, torch.no_grad():
        model(images)
    return counter.get_total_flops()


def _sdpa_flops(query, key, value, *args, out_shape=None, **kwargs) -> int:
    return sdpa_flop_count(query, key, value)
