"""The MACs of a model: its parts are measured once, on a few tokens, and added up for any schedule.

Embedding, blocks and head run under a counter of torch's operators, so a new family needs no formulas of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from gtp_vit.core.backbone import Backbone
from gtp_vit.core.reducer import Method, Reducer
from gtp_vit.core.tokens import Tokens
from gtp_vit.core.vit import BlockCosts, ForwardPass, LayerTokens, ViTInfo
from gtp_vit.errors import SettingError

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Convention:
    """A convention of counting MACs."""

    name: str
    operators: Mapping[object, Callable[..., int]]  # MACs of operators besides matrix products and convolutions
    block_costs: Callable[[BlockCosts], BlockCosts]  # the costs of a block as they were measured -> as they count
    overhead_macs: Callable[[Reducer, ForwardPass], int]  # of the method's own work


def _as_measured(costs: BlockCosts) -> BlockCosts:
    return costs


def _overhead_macs(reducer: Reducer, forward_pass: ForwardPass) -> int:
    return reducer.overhead_macs(forward_pass)


TORCH_CONVENTION = Convention("torch", {}, _as_measured, _overhead_macs)  # what torch's FlopCounterMode sees


@dataclass(frozen=True)
class Macs:
    """MACs for one image, part by part."""

    embed: int
    layers: tuple[int, ...]
    head: int
    overhead: int  # the method's own work; 0 if it was not counted

    @property
    def total(self) -> int:
        return self.embed + sum(self.layers) + self.head + self.overhead

    def __int__(self) -> int:
        return self.total

    def __str__(self) -> str:
        return f"{self.total / 1e9:.3f} GMACs"


@dataclass(frozen=True)
class Costs:
    """MACs of the parts of one model on one grid of patches."""

    vit: ViTInfo
    grid: tuple[int, int]
    convention: Convention
    embed: int
    blocks: tuple[BlockCosts, ...]
    head: int  # last norm, pooling and classifier: the part that does not depend on the number of tokens
    head_per_token: int  # the part for each token, prefix tokens included

    def macs(
        self, reducer: Reducer, steps: Sequence[LayerTokens], *, shorten_last_block: bool, include_overhead: bool = True
    ) -> Macs:
        """MACs of a forward pass that returns the model's output.

        Args:
            reducer: reduces its tokens.
            steps: image tokens of each layer.
            shorten_last_block: does the last block compute prefix tokens only, where nothing reads the others?
            include_overhead: count the method's own work too.
        """
        shorten_last_block = shorten_last_block and not (self.vit.head_reads_image_tokens or reducer.reads_image_tokens)
        prefix, layers = self.vit.prefix, []
        for layer, (cost, step) in enumerate(zip(self.blocks, steps, strict=True)):
            keys, rows, mlp = (prefix + number for number in (step.keys, step.queries, step.mlp))
            queries = rows
            last = shorten_last_block and layer == len(steps) - 1
            if last:  # an edit of the map has to see the whole map, so queries of all tokens are needed then
                queries, rows, mlp = keys if reducer.edits_map else prefix, prefix, prefix
            # One product makes the map, of all queries; the other one the output, of the rows that are wanted.
            if step.map_tokens:
                inputs, products = cost.map_of(prefix + step.map_tokens) + keys * cost.values_only, rows * keys
            else:
                inputs = keys * cost.keys + (queries if last else keys) * cost.queries
                products = (queries + rows) * keys
            layers.append(inputs + products * cost.pairs // 2 + rows * cost.output + mlp * cost.mlp)
        left = prefix if shorten_last_block else prefix + steps[-1].out
        run = ForwardPass(self.grid, tuple(steps), self.blocks, shortened=shorten_last_block)
        own = self.convention.overhead_macs(reducer, run) if include_overhead else 0
        return Macs(self.embed, tuple(layers), self.head + left * self.head_per_token, own)

    @property
    def unreduced(self) -> int:
        """MACs of the unreduced model, every block in full."""
        reducer = Reducer(self.vit)
        return self.macs(reducer, reducer.steps(self.grid), shorten_last_block=False).total

    def macs_with(self, method: Method) -> int:
        """MACs of the model with these settings, the shortened last block and the method's own work counted."""
        reducer = method.build(self.vit)
        return self.macs(reducer, reducer.steps(self.grid), shorten_last_block=True).total

    def bracket(self, method: type[Method], target: float) -> tuple[Method, Method]:
        """Two neighbouring settings of a method: one costs a little more than `target` MACs, one at most that."""
        cost = functools.cache(self.macs_with)
        low, high = 0.0, 1.0
        dearest, cheapest = cost(method.at_strength(self.vit, low)), cost(method.at_strength(self.vit, high))
        if not cheapest <= target <= dearest * 1.0001:
            # On the smallest models a method's own work costs more than it saves.
            least, most = sorted((cheapest, dearest))
            raise SettingError(
                f"{target / 1e9:.4g} GMACs cannot be reached by {method.name} here; it takes {least / 1e9:.4g} to "
                f"{most / 1e9:.4g}: ask for a share of {least / self.unreduced:.2f} to {most / self.unreduced:.2f}"
            )
        low, high = bisect(lambda strength: cost(method.at_strength(self.vit, strength)) <= target, low, high)
        return method.at_strength(self.vit, low), method.at_strength(self.vit, high)


def bisect(fits: Callable[[float], bool], low: float, high: float, steps: int = 24) -> tuple[float, float]:
    """Two numbers next to each other, of which the first does not fit and the second does, if any does.

    24 halvings of 0 to 1 are finer than any method's settings.
    """
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low, high


def measure_costs(
    backbone: Backbone,
    model: nn.Module,
    vit: ViTInfo,
    head: Callable[[Tensor], object],
    grid: tuple[int, int] | None = None,
    convention: Convention = TORCH_CONVENTION,
) -> Costs:
    """Run each part of a model on a few tokens, of zeros or without data, and count.

    Args:
        backbone: the model's.
        model: the ViT, on any device including meta; a copy that may be run, see `Host.costs`.
        vit: its sizes; blocks behind its depth are not counted.
        head: what follows the last norm.
        grid: rows and columns of the patch grid; None = the model's own.
        convention: what is counted.
    """
    # A few tokens of zeros are quicker than tensors without data. Not in half precision, whose products end some
    # processes with SIGILL, nor on other devices; but there, too, where a module looks at its data.
    kinds = {(parameter.device.type, parameter.dtype) for parameter in model.parameters()}
    if not kinds <= {("cpu", torch.float32), ("cpu", torch.float64)}:
        with contextlib.suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True):
            return _measure(backbone, model, vit, head, grid, convention)
    return _measure(backbone, model, vit, head, grid, convention)


def _measure(
    backbone: Backbone,
    model: nn.Module,
    vit: ViTInfo,
    head: Callable[[Tensor], object],
    grid: tuple[int, int] | None,
    convention: Convention,
) -> Costs:
    inputs = backbone.inputs(model)
    # Images are in the precision of the first convolution; some models keep their embeddings in another one.
    weight = next((parameter for parameter in model.parameters() if parameter.ndim == 4), next(model.parameters()))
    meter = MacCounter(convention.operators)
    grid = grid or vit.grid
    rows, columns = grid if inputs.any_size else vit.grid
    size = (rows * inputs.patch[0], columns * inputs.patch[1]) if inputs.any_size else inputs.size
    # In inference mode composite operators reach the counter whole, not as the operators they consist of.
    with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
        images = torch.zeros(1, inputs.channels, *size, dtype=weight.dtype, device=weight.device)
        embedded, embed = meter.count_macs(lambda: backbone.embed(model, images))
        one, three = (_repeated(embedded, number) for number in (1, 3))
        known: dict[tuple[object, ...], BlockCosts] = {}
        blocks = []
        for layer, block in enumerate(list(backbone.blocks(model))[: vit.depth]):
            kind = tuple((name, p.shape) for name, p in block.named_parameters())
            if kind not in known:
                known[kind] = convention.block_costs(_block(backbone, block, layer, three, meter))
            blocks.append(known[kind])
        short, long = (
            meter.count_macs(lambda x=tokens.x: head(backbone.norm(model)(x)))[1]  # type: ignore[misc]
            for tokens in (one, three)
        )
    per_token = (long - short) // 2
    return Costs(
        vit=vit,
        grid=grid,
        convention=convention,
        embed=embed * grid[0] * grid[1] // (rows * columns),
        blocks=tuple(blocks),
        head=short - (vit.prefix + 1) * per_token,
        head_per_token=per_token,
    )


def _repeated(tokens: Tokens, number: int) -> Tokens:
    """Tokens with this many image tokens: what they are does not matter, and an image may have but one."""
    image, cell = tokens.image[:, :1].expand(-1, number, -1), tokens.cell[:, :1].expand(-1, number)
    return tokens.replace(x=torch.cat([tokens.x[:, : tokens.prefix], image], dim=1), cell=cell)


def _block(backbone: Backbone, block: nn.Module, layer: int, tokens: Tokens, counter: MacCounter) -> BlockCosts:
    count = tokens.x.shape[1]
    projections, all_queries = counter.count_macs(lambda: backbone.project(block, layer, tokens, None))
    one_query = counter.count_macs(lambda: backbone.project(block, layer, tokens, 1))[1]
    queries = (all_queries - one_query) // (count - 1)
    q, v = projections.q, projections.v
    out = v.new_empty(1, count, v.shape[1] * v.shape[3])
    return BlockCosts(
        keys=all_queries // count - queries,
        queries=queries,
        pairs=q.shape[1] * (q.shape[3] + v.shape[3]),
        output=counter.count_macs(lambda: backbone.attention_branch(block, out))[1] // count,
        mlp=counter.count_macs(lambda: backbone.mlp_branch(block, tokens.x, None))[1] // count,
        map_only=counter.count_macs(lambda: backbone.project(block, layer, tokens, None, "map"))[1] // count,
        values_only=counter.count_macs(lambda: backbone.project(block, layer, tokens, 0, "values"))[1] // count,
    )


class MacCounter(TorchDispatchMode):
    """Counts MACs of matrix products and convolutions, and of the operators that `more` has formulas for."""

    def __init__(self, more: Mapping[object, Callable[..., int]]) -> None:
        super().__init__()
        self.more, self.count = more, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # torch 2.6 has no formula for it
            self.count += sdpa_flop_count(*(tensor.shape for tensor in args[:3])) // 2
        elif packet in flop_registry:
            self.count += flop_registry[packet](*args, **(kwargs or {}), out_val=result) // 2
        elif packet in self.more:
            self.count += self.more[packet](*args)
        return result

    def count_macs(self, part: Callable[[], Result]) -> tuple[Result, int]:
        """The return value of `part`, and its MACs."""
        before = self.count
        with self:
            result = part()
        return result, self.count - before
