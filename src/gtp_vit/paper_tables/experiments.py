"""The tables and figures of the paper, as cells: which model with which method, and what is printed there.

Accuracies of the main tables are the paper's best over several settings; ours are at the settings given here. Figures
are pictures without numbers in the paper's source: their cells have settings, and nothing printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gtp_vit.core.reducer import Method
from gtp_vit.methods.gtp import GTP
from gtp_vit.methods.tome import ToMe
from gtp_vit.paper_tables.published import GMACS, HYPERPARAMETERS

DEIT_S, DEIT_B = "deit_small_patch16_224", "deit_base_patch16_224"
LVVIT_S, LVVIT_M, MEDIUM = "lvvit_s", "lvvit_m", "vit_medium_patch16_gap_256"
VIT_B8, VIT_L, EVA_L = (
    "vit_base_patch8_224.augreg_in21k_ft_in1k",
    "vit_large_patch16_224.augreg_in21k_ft_in1k",
    "eva_large_patch14_196.in22k_ft_in1k",
)
FULL = {DEIT_S: 79.8, DEIT_B: 81.8}


@dataclass(frozen=True)
class Cell:
    """One entry of a table, or one point of a figure."""

    row: str
    column: str
    model: str
    method: Method | None  # None = the unreduced model
    top1: float | None = None  # printed accuracy in percent; None = not printed
    gmacs: float | None = None  # printed; None = not printed
    finetuned: bool = False  # was the printed accuracy reached by finetuning?


@dataclass(frozen=True)
class Experiment:
    """One table or figure."""

    title: str
    cells: Callable[[], Iterator[Cell]]


MAIN_TOP1 = {
    DEIT_S: (79.8, 79.9, 79.8, 79.8, 79.8, 79.8, 79.7, 79.7, 79.5, 79.4, 79.2, 79.1, 78.8, 78.6, 78.3),
    DEIT_B: (81.8, 81.9, 81.9, 81.8, 81.8, 81.7, 81.6, 81.6, 81.5, 81.4, 81.1, 80.9, 80.7, 80.4, 80.0),
    LVVIT_S: (83.3, 83.0, 82.8, 82.6, 82.4, 82.4, 82.2, 82.1, 81.9, 81.7, 81.5, 80.8, 80.0),
    LVVIT_M: (84.0, 83.8, 83.7, 83.6, 83.4, 83.3, 83.2, 83.0, 82.8, 82.5),
    MEDIUM: (84.0, 84.1, 84.0, 83.8, 83.8, 83.7, 83.7, 83.7, 83.6, 83.5, 83.4, 83.3, 83.1, 82.7, 82.3),
}


def _main(*models: str) -> Iterator[Cell]:
    for model in models:
        for number, (top1, gmacs) in enumerate(zip(MAIN_TOP1[model], GMACS[model], strict=True)):
            yield Cell(model, f"P={number}", model, GTP(propagate=number) if number else None, top1, gmacs)


# accuracy without finetuning, column by column; DeiT-S also with finetuning
COMPARED_S = {
    "DynamicViT": ((74.0, 67.4, 58.3, 51.7), (79.6, 79.3, 78.5, 77.5)),
    "EViT": ((79.2, 78.5, 76.8, 74.1), (79.8, 79.5, 78.9, 78.5)),
    "Evo-ViT": ((79.0, 77.4, 75.0, 72.1), (78.4, 78.2, 78.0, 77.7)),
    "Tri-Level": ((67.6, 67.6, 67.6, 67.6), (79.5, 79.1, 78.8, 78.1)),
    "ToMe": ((79.4, 79.2, 78.6, 78.1), (79.7, 79.4, 78.9, 78.4)),
    "ATS": ((79.5, 79.2, 78.6, 78.2), (79.7, 79.7, 79.0, 78.6)),
    "GTP": ((79.5, 79.1, 78.3, 77.8), (79.7, 79.5, 79.1, 78.6)),
}
COMPARED_B = {
    "DynamicViT": (79.9, 77.7, 75.5, 69.5, 50.2),
    "EViT": (81.7, 81.3, 80.5, 78.7, 75.1),
    "Evo-ViT": (81.5, 80.9, 79.1, 75.8, 60.6),
    "Tri-Level": (64.6, 64.6, 64.6, 64.6, 64.6),
    "ToMe": (81.6, 81.2, 80.6, 79.5, 77.8),
    "ATS": (81.8, 81.7, 81.4, 80.5, 79.6),
    "GTP": (81.8, 81.5, 80.9, 80.0, 78.3),
}


def _compared_s() -> Iterator[Cell]:
    table = HYPERPARAMETERS["deit_s"]
    for name, (plain, finetuned) in COMPARED_S.items():
        for method, gmacs, top1 in zip(table.methods[name], table.gmacs, plain, strict=True):
            yield Cell(name, f"{gmacs} GMACs", table.model, method, top1, gmacs)
        for method, gmacs, top1 in zip(table.methods[name], table.gmacs, finetuned, strict=True):
            yield Cell(f"{name}, finetuned", f"{gmacs} GMACs", table.model, method, top1, gmacs, finetuned=True)


def _compared_b() -> Iterator[Cell]:
    table = HYPERPARAMETERS["deit_b"]
    for name, plain in COMPARED_B.items():
        for method, gmacs, top1 in zip(table.methods[name], table.gmacs, plain, strict=True):
            yield Cell(name, f"{gmacs} GMACs", table.model, method, top1, gmacs)


def _settings() -> Iterator[Cell]:
    for table in HYPERPARAMETERS.values():
        for name, methods in table.methods.items():
            for method, gmacs in zip(methods, table.gmacs, strict=True):
                yield Cell(f"{table.title}, {name}", f"{gmacs} GMACs", table.model, method, None, gmacs)


NUMBERS = (4, 8, 11, 14)
GRAPHS = {
    DEIT_S: {
        "mixed": (79.8, 79.5, 79.1, 78.3),
        "spatial": (79.8, 79.5, 78.9, 78.1),
        "semantic": (79.8, 79.4, 79.0, 78.2),
        "none": (79.6, 79.2, 78.7, 77.6),
    },
    DEIT_B: {
        "mixed": (81.7, 81.5, 80.9, 80.0),
        "spatial": (81.8, 81.4, 80.9, 79.8),
        "semantic": (81.8, 81.5, 80.9, 80.0),
        "none": (81.7, 81.4, 80.7, 79.6),
    },
}


def _graphs() -> Iterator[Cell]:
    for model, theta in ((DEIT_S, 0.6), (DEIT_B, 0.5)):
        for graph, row in GRAPHS[model].items():
            for number, top1 in zip(NUMBERS, row, strict=True):
                method = GTP(propagate=number, graph=graph, theta=theta)  # type: ignore[arg-type]
                yield Cell(f"{model}, {graph}", f"P={number}", model, method, top1)


# the paper's "sparsity" is the share of the map that is kept; at 1.0 it has no proportional attention
SPARSITY = {
    DEIT_S: {
        1.0: (79.7, 79.2, 78.7, 77.6),
        0.9: (79.7, 79.3, 79.0, 78.2),
        0.8: (79.7, 79.4, 79.0, 78.1),
        0.7: (79.8, 79.4, 79.1, 78.2),
        0.6: (79.8, 79.5, 79.0, 78.3),
        0.5: (79.8, 79.4, 79.0, 78.0),
    },
    DEIT_B: {
        1.0: (81.7, 81.4, 80.7, 79.8),
        0.9: (81.7, 81.4, 80.9, 80.0),
        0.8: (81.7, 81.5, 80.9, 79.9),
        0.7: (81.7, 81.5, 80.9, 79.9),
        0.6: (81.8, 81.4, 80.9, 79.9),
        0.5: (81.8, 81.5, 80.9, 80.0),
    },
}
BEST_WITHOUT = {
    DEIT_S: ((0.6, 0.6, 0.7, 0.6), (79.7, 79.3, 78.8, 77.8)),
    DEIT_B: ((0.5,) * 4, (81.8, 81.5, 80.9, 79.9)),
}


def _sparsity() -> Iterator[Cell]:
    for model, rows in SPARSITY.items():
        for theta, row in rows.items():
            for number, top1 in zip(NUMBERS, row, strict=True):
                method = GTP(propagate=number, theta=theta, proportional_attention=theta < 1)
                yield Cell(f"{model}, theta {theta}", f"P={number}", model, method, top1)
        for number, theta, top1 in zip(NUMBERS, *BEST_WITHOUT[model], strict=True):
            method = GTP(propagate=number, theta=theta, proportional_attention=False)
            yield Cell(f"{model}, best theta, no proportional attention", f"P={number}", model, method, top1)


LARGER = {
    VIT_L: (85.8, (85.8, 85.7, 85.5, 85.3, 85.0, 84.7, 84.2, 83.7), (85.8, 85.8, 85.8, 85.5, 85.3, 85.0, 84.3, 83.7)),
    EVA_L: (87.9, (87.7, 87.6, 87.3, 87.0, 86.5, 85.6, 84.0, 80.1), (87.9, 87.8, 87.8, 87.7, 87.5, 87.2, 86.5, 85.4)),
}
MORE = {VIT_B8: (85.8, (85.8, 85.7, 85.5, 85.3, 84.9), (85.9, 85.8, 85.7, 85.5, 85.3))}


def _two_methods(rows: Mapping[str, tuple[float, Sequence[float], Sequence[float]]], step: int) -> Iterator[Cell]:
    for model, (full, tome, gtp) in rows.items():
        yield Cell(model, "P=0", model, None, full)
        for index, (one, other) in enumerate(zip(tome, gtp, strict=True), start=1):
            number = index * step
            yield Cell(f"{model}, ToMe", f"P={number}", model, ToMe(r=number), one)
            yield Cell(f"{model}, GTP", f"P={number}", model, GTP(propagate=number), other)


def _selections() -> Iterator[Cell]:
    for model in (DEIT_S, DEIT_B):
        for select in ("mixed", "diagonal", "broad", "class", "cosine_tokens", "random"):
            for number in (2, 4, 6, 8, 10, 12, 14):
                yield Cell(f"{model}, {select}", f"P={number}", model, GTP(propagate=number, select=select))


def _alphas() -> Iterator[Cell]:
    for model, theta in ((DEIT_S, 0.6), (DEIT_B, 0.5)):
        for number in NUMBERS:
            for tenth in range(11):
                method = GTP(propagate=number, alpha=tenth / 10, theta=theta)
                yield Cell(f"{model}, P={number}", f"alpha={tenth / 10}", model, method)


def _neighbours() -> Iterator[Cell]:
    for model in (DEIT_S, DEIT_B):
        for graph in ("semantic", "mixed"):
            for number in NUMBERS:
                for count in (1, 2, 4, 8, 16, 32):
                    method = GTP(propagate=number, graph=graph, neighbours=count, theta=0.5, alpha=0.2)
                    yield Cell(f"{model}, {graph}, P={number}", f"M={count}", model, method)


EXPERIMENTS: dict[str, Experiment] = {
    "main": Experiment("Main results without finetuning", lambda: _main(DEIT_S, DEIT_B, LVVIT_S, LVVIT_M)),
    "no-class-token": Experiment("ViT without class token", lambda: _main(MEDIUM)),
    "compare-deit-s": Experiment("Comparison on DeiT-S", _compared_s),
    "compare-deit-b": Experiment("Comparison on DeiT-B", _compared_b),
    "graph-type": Experiment("Graph types", _graphs),
    "sparsity": Experiment("Attention sparsity", _sparsity),
    "more-tokens": Experiment("ViT-B with patches of 8: 785 tokens", lambda: _two_methods(MORE, 10)),
    "larger": Experiment("Larger backbones", lambda: _two_methods(LARGER, 1)),
    "hyperparameters": Experiment("Settings of the compared methods", _settings),
    "figure-trade-off": Experiment("Figure: accuracy over cost", _compared_s),
    "figure-selection": Experiment("Figure: selection strategies", _selections),
    "figure-alpha": Experiment("Figure: alpha", _alphas),
    "figure-neighbours": Experiment("Figure: number of semantic neighbours", _neighbours),
}
# These two have no cells of accuracy; paper_tables/reproduce.py computes them by themselves.
COMPUTED = {
    "figure-complexity": "Figure: extra MACs of ToMe and GTP by the appendix's formulas",
    "figure-oversmoothing": "Figure: mean cosine similarity of image tokens in each layer",
}
