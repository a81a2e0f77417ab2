"""gtp-vit macs: tokens and MACs of each layer, from the sizes of the model alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gtp_vit.cli.flags import MethodFlags, parse_with_method
from gtp_vit.cli.output import OutputFlags, print_table_result
from gtp_vit.cli.parser import Positional
from gtp_vit.models import bundled
from gtp_vit.models.factory import create_model
from gtp_vit.patching import patch
from gtp_vit.profiling.macs import ConventionName, layer_costs
from gtp_vit.report.timing import cost_table


@dataclass(frozen=True)
class Macs(OutputFlags, MethodFlags):
    """Count the multiply-accumulates of a model with and without token reduction, for one image.

    examples:
      gtp-vit macs deit_base_patch16_224 --remove 8
      gtp-vit macs deit_small_patch16_224 --method evit --keep-rate 0.6 --json
      gtp-vit macs deit_small_patch16_224 --method gtp --propagate 8 --convention torchprofile
    """

    model: Positional[str] = bundled.NAME
    """The name of a model, as `gtp-vit models` lists them."""
    convention: ConventionName = "torch"
    """torch: what torch's counter sees. torchprofile: how the paper counts, norms and the released code included."""
    img_size: int | None = None
    """Height and width of the images, if different from the model's own."""
    shorten_last_block: bool = True
    """The last block computes only what the head reads."""


def main(arguments: Sequence[str]) -> None:
    flags, chosen = parse_with_method(Macs, arguments)
    model = create_model(flags.model, meta=True, img_size=flags.img_size)
    method = chosen.for_model(model)
    fast = patch(model, method, shorten_last_block=flags.shorten_last_block)
    costs = layer_costs(model, fast, convention=flags.convention)
    totals = {"unreduced": costs.unreduced.total, method.name: costs.reduced.total}
    result = {"flags": flags, **totals, "parts": costs.reduced, "settings": method.to_dict()}
    columns, rows = cost_table(costs)
    print_table_result(flags, arguments, f"{flags.model}, {method.name}", columns, rows, result)
