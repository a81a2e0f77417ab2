"""GTP: graph-based token propagation, the paper's method. Settings first, then what they do in a forward pass.

Where paper and released code disagree, the default is the released code's reading, from which all published figures
come, and an option has the other one. Bugs of the released code are fixed, and no option brings them back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from gtp_vit.core.attention import Adjustments, AttentionStats
from gtp_vit.core.layer_attention import LayerAttention
from gtp_vit.core.reducer import Method, Reducer, Source
from gtp_vit.core.schedule import Schedule
from gtp_vit.core.tokens import Tokens, receivers
from gtp_vit.core.vit import ForwardPass, ViTInfo
from gtp_vit.errors import SettingError, check_name, check_range
from gtp_vit.kernels import Ops
from gtp_vit.kernels.arguments import GTPReduceInputs, NeighboursInputs
from gtp_vit.methods.gtp import graph as graphs
from gtp_vit.methods.gtp import operators
from gtp_vit.methods.gtp.graph import Sparsify
from gtp_vit.methods.gtp.selection import AGGREGATES, PAPER_NAMES, SELECTORS, SelectionInputs, random_scores
from gtp_vit.tensors import select_rows, split_by_score

Graph = Literal["mixed", "spatial", "semantic", "none"]
Edges = Literal["receiver", "giver", "either"]
Scores = Literal["edited", "dense"]


@dataclass(frozen=True, kw_only=True, repr=False)
class GTP(Method):
    """Remove the least important image tokens of each layer and propagate them to their neighbours in a graph.

    >>> from gtp_vit import GTP, create_model, macs
    >>> print(macs(create_model("deit_tiny_patch16_224", meta=True), GTP(propagate=8)))
    0.934 GMACs
    """

    name: ClassVar[str] = "gtp"
    source: ClassVar[Source] = Source("arXiv 2311.03035 (WACV 2024)", "Ackesnal/GTP-ViT", "Apache-2.0")
    attention_inputs: ClassVar[str] = "diagonal and column sums; the map where theta < 1"
    schedule_field: ClassVar[str | None] = "propagate"

    propagate: Schedule = 8
    """Tokens removed and propagated in each layer (the paper's P): a number, one per layer, or a named schedule."""
    select: str = "mixed"
    """How tokens are scored: mixed, diagonal, broad, sum, class, cosine_tokens, cosine_attention or random."""
    heads: str = "max"
    """How scores are aggregated over the heads: max or mean."""
    graph: Graph = "mixed"
    """The graph along which tokens are propagated: spatial, semantic, mixed (their union), or none (plain pruning)."""
    neighbours: int = 8
    """Neighbours of a token in the semantic graph (the paper's M)."""
    spatial_neighbours: int = 8
    """Neighbours of a patch in the spatial graph: 8, or 4 without the corners."""
    alpha: float = 0.2
    """How strongly tokens are propagated."""
    theta: float = 1.0
    """Share of the attention map that is kept; 1 switches sparsification off."""
    proportional_attention: bool = True
    """Track token sizes and let attention favour large tokens by log size."""
    seed: int = 0
    """Seed of select=random, whose choice depends on seed, layer and grid cell: it is the same for every image."""

    exclude_self: bool = False
    """Broadcasting ability leaves out the token's attention to itself (the paper's formula; the code includes it)."""
    count_class_row: bool = True
    """Broadcasting ability counts the class token's attention."""
    score_from: Scores = "edited"
    """Score on the sparsified map (as the code does), or on the dense one, which has fewer ties."""
    sparsify_rows: bool = False
    """Sparsify each row of the attention map by itself instead of the whole map."""
    renormalise_rows: bool = False
    """Make the rows of a sparsified map sum to 1 again."""
    edges: Edges = "receiver"
    """Whose list of semantic neighbours counts: the receiver's (as the code does), the giver's, or either's."""
    renormalise_graph: bool = False
    """Normalise the graph of the remaining tokens in every layer, not once."""
    conserve_sizes: bool = False
    """Sizes add up to the number of patches, instead of following the features' formula."""
    official_offbyone: bool = False
    """One semantic neighbour more on models without class token, as the released code has it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "select", PAPER_NAMES.get(self.select, self.select))

    def build(self, vit: ViTInfo) -> GTPReducer:
        check_name("selection", self.select, SELECTORS)
        check_name("heads", self.heads, ("max", "mean"))
        check_name("graph", self.graph, get_args(Graph))
        check_name("score_from", self.score_from, get_args(Scores))
        check_name("edges", self.edges, get_args(Edges))
        if self.spatial_neighbours not in (4, 8):
            raise SettingError(f"spatial_neighbours is {self.spatial_neighbours!r}; it must be 4 or 8")
        check_range("alpha", self.alpha, 0, 10)
        check_range("theta", self.theta, 0, 1, exclude_low=True, why="(the share of the map that is KEPT)")
        check_range("seed", self.seed, 0, 2**63 - 1, integer=True)
        if self.graph in ("mixed", "semantic"):
            fewest = 1 if self.graph == "semantic" else 0
            others = vit.image_tokens - 1 - self._extra_neighbour(vit)
            check_range("neighbours", self.neighbours, fewest, others, integer=True, why="(other tokens of this model)")
        if not vit.class_token and (self.select == "class" or not self.count_class_row):
            setting = "select='class'" if self.select == "class" else "count_class_row=False"
            raise SettingError(f"{setting} needs a class token, and this model has none; use select='mixed' or 'broad'")
        return GTPReducer(self, vit)

    def _extra_neighbour(self, vit: ViTInfo) -> int:
        return int(self.official_offbyone and not vit.class_token)


class NeighbourLists(NamedTuple):
    """The graph as lists of neighbours."""

    neighbours: Tensor  # [B or 1, M0, W]
    root: Tensor  # [B or 1, M0]: the weight of an edge is the product of its ends' factors


class GTPState(NamedTuple):
    """GTP's state between layers."""

    removals: tuple[int, ...]  # tokens to remove in each layer
    idle: bool  # none at all: P = 0 is the plain model, whatever theta is
    lists: NeighbourLists | None = None  # the graph
    matrix: Tensor | None = None  # or, for options that lists cannot express, [B or 1, M0, M0], receiver as row


class GTPReducer(Reducer):
    """GTP in a forward pass. Shapes: B batch, M image tokens, M0 patches, W neighbours, K kept, P propagated."""

    noise: Tensor | None  # [L, cells] ranks, for select="random"; integers, which no change of the model's dtype rounds

    def __init__(self, method: GTP, vit: ViTInfo) -> None:
        super().__init__(vit, method)
        self.plan = self.removals(vit.grid)
        edit = Sparsify(method.theta, method.sparsify_rows, method.renormalise_rows)
        self.edit = edit if method.theta < 1 else None
        self.edits_map = self.edit is not None and sum(self.plan) > 0
        needs = set(SELECTORS[method.select].required_stats)
        if "column_sums" in needs and method.exclude_self:
            needs.add("diagonal")
        if "column_sums" in needs and not method.count_class_row:
            needs.add("class_row")
        # Attention aggregates over the heads, unless the statistics are changed first.
        apart = method.exclude_self or not method.count_class_row
        self.aggregate_in_attention: Any = "each" if apart else method.heads
        self.aggregate = method.heads if apart or method.select == "cosine_attention" else "done"
        self.statistics = tuple(sorted(needs))
        self.needs_matrix = method.edges != "receiver" or method.renormalise_graph
        self.register_buffer("noise", self._draw_noise() if method.select == "random" else None, persistent=False)

    def _draw_noise(self) -> Tensor:
        return random_scores(
            self.vit.depth, max(self.vit.image_tokens, 4096), torch.Generator("cpu").manual_seed(self.method.seed)
        )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Move the noise with the model; to_empty() would lose it, so it is drawn once more, the same."""
        super()._apply(fn, recurse)
        if self.noise is not None:
            self.noise = self._draw_noise().to(self.noise.device)
        return self

    def start(self, tokens: Tokens) -> Tokens:
        plan = self.removals_of(tokens)
        idle = sum(plan) == 0
        if idle or self.method.graph == "none":
            return tokens.replace(method_state=GTPState(plan, idle))
        lists = self._build_graph(tokens)
        if self.needs_matrix or tokens.ops is Ops.LEAN:  # looked up in two calls, not in ten
            return tokens.replace(method_state=GTPState(plan, idle, matrix=self._matrix(lists)))
        return tokens.replace(method_state=GTPState(plan, idle, lists))

    def adjust(self, layer: int, tokens: Tokens) -> Adjustments | None:
        carry, weights = tokens.method_state, tokens.key_sizes
        edit = None if carry.idle else self.edit
        return Adjustments(weights, edit) if carry.removals[layer] or edit or weights is not None else None

    def reduce(self, attention: LayerAttention) -> Tokens:
        layer, tokens, method = attention.layer, attention.tokens, self.method
        removed = tokens.method_state.removals[layer]
        if removed == 0:
            return attention.add()
        before_edit = method.score_from == "dense"
        stats = attention.statistics(*self.statistics, heads=self.aggregate_in_attention, before_edit=before_edit)
        if tokens.method_state.lists is None or method.conserve_sizes:
            tokens = attention.add()
            return self._reduce_step_by_step(tokens, self._scores(layer, tokens, tokens.image, stats), removed)
        branch, norm = attention.branch(), attention.mlp_norm
        features = tokens.add(branch).image if method.select == "cosine_tokens" else None
        scores = self._scores(layer, tokens, features, stats)
        lists, sizes = tokens.method_state.lists, tokens.key_sizes
        inputs = (tokens.x, branch, scores, tokens.cell, sizes, lists.neighbours, lists.root, removed, method.alpha)
        reduced = operators.gtp_reduce(tokens.ops, GTPReduceInputs(*inputs, method.proportional_attention, *norm))
        owner = None
        if tokens.owner is not None:
            keep, drop = split_by_score(scores, removed)
            weights = self._weights(tokens, keep, drop, reduced.cell)
            owner = tokens.owners_after(keep, drop, receivers(method.alpha * weights))
        return tokens.replace(
            x=reduced.x,
            cell=reduced.cell,
            size=reduced.size[:, tokens.prefix :] if method.proportional_attention else None,
            owner=owner,
            normed=None if norm.weight is None else reduced.normed,
        )

    def _reduce_step_by_step(self, tokens: Tokens, scores: Tensor, removed: int) -> Tokens:
        """Selection and propagation, for the options that have no kernel."""
        method = self.method
        keep, drop = split_by_score(scores, removed)
        if method.graph == "none":
            return tokens.keep(keep)
        cells = tokens.cell.gather(1, keep)
        weights = self._weights(tokens, keep, drop, cells)
        size = None
        if method.proportional_attention:
            flow, strength = (
                (normalise_over_receivers(weights), 1.0) if method.conserve_sizes else (weights, method.alpha)
            )
            size = graphs.summarise(tokens.sizes.unsqueeze(-1), 0, keep, drop, flow, strength).squeeze(-1)
        x = graphs.summarise(tokens.x, tokens.prefix, keep, drop, weights, method.alpha)
        owner = None if tokens.owner is None else tokens.owners_after(keep, drop, receivers(method.alpha * weights))
        return tokens.replace(x=x, cell=cells, size=size, owner=owner)

    def _scores(self, layer: int, tokens: Tokens, features: Tensor | None, stats: AttentionStats) -> Tensor:
        """Section 3.2.1: the importance of each image token, [B, M]."""
        method, column_sums = self.method, stats.column_sums
        if column_sums is not None and method.exclude_self:
            assert stats.diagonal is not None
            column_sums = column_sums - stats.diagonal
        if column_sums is not None and not method.count_class_row:
            assert stats.class_row is not None
            column_sums = column_sums - stats.class_row
        noise = self._noise(layer, tokens) if method.select == "random" else None
        rows = None if stats.map is None else stats.map[:, :, tokens.prefix :]
        inputs = SelectionInputs(features, noise, stats.diagonal, column_sums, stats.class_row, rows)
        return SELECTORS[method.select].score(inputs, AGGREGATES[self.aggregate])

    def _noise(self, layer: int, tokens: Tokens) -> Tensor:
        assert self.noise is not None  # it was drawn, as this selection needs it
        if tokens.grid[0] * tokens.grid[1] > self.noise.shape[1]:
            raise SettingError(
                f"select='random' was drawn for at most {self.noise.shape[1]} patches, but the image has "
                f"{tokens.grid[0]} x {tokens.grid[1]}; patch a model created with this img_size"
            )
        return self.noise[layer][tokens.cell]

    def _build_graph(self, tokens: Tokens) -> NeighbourLists:
        """Section 3.2.2: built once from the embedded tokens, and static from then on."""
        method, count = self.method, tokens.cell.shape[1]
        if method.graph == "spatial" or (method.graph == "mixed" and method.neighbours == 0):
            near = graphs.spatial(tokens.grid, method.spatial_neighbours, tokens.x.device).unsqueeze(0)
            return NeighbourLists(near, graphs.normalise(graphs.degrees(near)))
        neighbours = method.neighbours + method._extra_neighbour(self.vit)
        if neighbours >= count:
            raise SettingError(f"neighbours is {method.neighbours}, but the image has only {count} patches")
        similarity = graphs.cosine_similarity(tokens.image)
        spatial = method.spatial_neighbours if method.graph == "mixed" else 0
        return NeighbourLists(
            *operators.neighbours(tokens.ops, NeighboursInputs(similarity, *tokens.grid, spatial, neighbours))
        )

    def _matrix(self, lists: NeighbourLists) -> Tensor:
        """The graph as a matrix, for options that change its edges or their weights from layer to layer."""
        edges = graphs.adjacency(lists.neighbours)
        if self.method.edges == "giver":
            edges = edges.transpose(-2, -1)
        elif self.method.edges == "either":
            edges = edges | edges.transpose(-2, -1)
        return edges if self.method.renormalise_graph else graphs.normalise_matrix(edges)

    def _weights(self, tokens: Tokens, keep: Tensor, drop: Tensor, keep_cells: Tensor) -> Tensor:
        """A^p of Eq. (10): what each keep token takes from each propagated one, [B, K, P]."""
        lists, matrix = tokens.method_state.lists, tokens.method_state.matrix
        drop_cells = tokens.cell.gather(1, drop)
        if lists is not None:
            return graphs.receive(lists.neighbours, lists.root, keep_cells, drop_cells)
        matrix = matrix.expand(keep.shape[0], -1, -1)
        if self.method.renormalise_graph:
            present = _submatrix(matrix, tokens.cell, tokens.cell)
            return _submatrix(graphs.normalise_matrix(present), keep, drop)
        return _submatrix(matrix, keep_cells, drop_cells)

    def overhead_macs(self, forward_pass: ForwardPass) -> int:
        """The graph once, then selection and propagation in every layer."""
        method, total = self.method, 0
        if method.graph in ("mixed", "semantic") and method.neighbours > 0 and any(self.removals(forward_pass.grid)):
            total += (forward_pass.grid[0] * forward_pass.grid[1]) ** 2 * self.vit.dim
        for step in forward_pass.reducing:
            removed = step.keys - step.out
            if removed and method.theta == 1 and method.select == "class":
                total += self.class_row_macs(step.keys)
            if method.graph != "none":  # prefix tokens are in the product, with weights of zero
                total += (step.out + self.vit.prefix) * removed * (self.vit.dim + int(method.proportional_attention))
        return total


def _submatrix(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """matrix[b, rows[b]][:, columns[b]], [B, R, C]."""
    return select_rows(matrix, rows).gather(2, columns.unsqueeze(1).expand(-1, rows.shape[1], -1))


def normalise_over_receivers(weights: Tensor) -> Tensor:
    """Weights [B, K, P] scaled to sum to 1 over the receivers: each propagated token gives away exactly 1, or 0.

    Not in the paper: sizes then add up to the number of patches.
    """
    total = weights.sum(dim=-2, keepdim=True)
    return torch.where(total > 0, weights / total, 0.0)
