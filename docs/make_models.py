"""Which models can be patched, for reference/models.md and guides/speed-up.md: python docs/make_models.py (two minutes)

Tables of families and of models around a ViT come from the registries; of timm's models each is built and checked.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import timm

from gtp_vit.backbones import known_backbones
from gtp_vit.backbones.host import find_vit
from gtp_vit.backbones.libraries import TIMM
from gtp_vit.backbones.wrappers import WRAPPERS, Wrapper
from gtp_vit.errors import UnsupportedModelError

# timm's modules of plain ViTs: all tokens are alike from the first block to the last. Pyramids (Swin, PVT) are not.
MODULES = (
    *("vision_transformer", "deit", "eva", "beit", "vision_transformer_hybrid", "qwen3_vit", "deepseek_vit"),
    *("gemma4_vit", "vision_transformer_relpos", "cait", "naflexvit", "vision_transformer_sam", "convit", "tnt"),
)
PAGE = """\
# Models of timm

For readers who want to know whether `patch` takes a timm model. Written by
`python docs/make_models.py` with timm {version}; a test compares a sample of it with the code.

{share}

{table}

"Names" are architectures that `timm.create_model` knows, "tags" their pre-trained weights. Every name was built without
weights and given to `patch`, so this says that a model is understood, not how well it can be reduced: that was measured
for the models of [the comparison](../comparison.md) only. The encoders of `qwen3_vit` return or join all patches and
need `patch(..., restore=True)`. timm's other modules are pyramids, which merge tokens
themselves, or keep them in windows.

## What is refused, and why

{reasons}
"""


class Module(NamedTuple):
    """The models of one module of timm."""

    name: str
    models: tuple[str, ...]
    tags: dict[str, int]  # pre-trained weights of each model


def modules() -> list[Module]:
    found, tags = [], Counter(tag.split(".")[0] for tag in timm.list_pretrained())
    for name in MODULES:
        models = tuple(timm.list_models(module=name))
        found.append(Module(name, models, {model: tags[model] for model in models}))
    return [module for module in found if module.models]


def unsupported_reason(name: str) -> str | None:
    """Why `patch` refuses this model; None if it takes it. One block is enough: timm makes all of them alike."""
    try:
        find_vit(TIMM.create_without_weights(name))
    except UnsupportedModelError as error:
        return _general(str(error))
    return None


def _general(reason: str) -> str:
    """The reason without what is different from model to model."""
    reason = re.sub(r"timm\.models\.\w+\.(\w+) is not a supported ViT.*", r"the class \1 is not supported", reason)
    reason = re.sub(r"\. The model was not changed$|; supported: .*$", "", reason)
    reason = re.sub(r"blocks\[\d+\]", "a block", reason).replace("a block.attn", "its attention")
    return re.sub(r"has \d+ heads of keys for \d+ of queries", "has fewer heads of keys than of queries", reason)


def page() -> str:
    known = modules()
    refused = {name: unsupported_reason(name) for module in known for name in module.models}
    return PAGE.format(
        version=timm.__version__,
        share=_share(known, refused),
        table=_table(known, refused),
        reasons=_reasons(known, refused),
    )


def _share(known: Sequence[Module], refused: dict[str, str | None]) -> str:
    taken, all_tags = _tags(known, refused), sum(sum(module.tags.values()) for module in known)
    return (
        f"Of the {all_tags} pre-trained weights in timm's {len(known)} modules of plain vision transformers, "
        f"**{taken} can be patched: {100 * taken / all_tags:.0f} %**."
    )


def _tags(known: Sequence[Module], refused: dict[str, str | None]) -> int:
    """Pre-trained weights of the models that are not refused."""
    return sum(count for module in known for name, count in module.tags.items() if refused[name] is None)


def _table(known: Sequence[Module], refused: dict[str, str | None]) -> str:
    rows = [["module of timm", "names", "refused", "tags", "refused"], ["---", *["---:"] * 4]]
    for module in known:
        names, tags = len(module.models), sum(module.tags.values())
        taken = sum(refused[name] is None for name in module.models)
        rows.append([f"`{module.name}`", *map(str, (names, names - taken, tags, tags - _tags([module], refused)))])
    totals = [sum(int(row[column]) for row in rows[2:]) for column in range(1, 5)]
    rows.append(["all", *map(str, totals)])
    return _lines(rows)


def _reasons(known: Sequence[Module], refused: dict[str, str | None]) -> str:
    names, tags = defaultdict(list), {name: count for module in known for name, count in module.tags.items()}
    for name, reason in refused.items():
        if reason is not None:
            names[reason].append(name)
    rows = [["reason", "names", "tags", "for example"], ["---", "---:", "---:", "---"]]
    for reason, group in sorted(names.items(), key=lambda item: (-len(item[1]), item[0])):
        rows.append([reason, str(len(group)), str(sum(tags.get(name, 0) for name in group)), f"`{group[0]}`"])
    return _lines(rows)


def _lines(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def families() -> str:
    """A table of the families, from the registry."""
    rows = [["library", "classes", "models"], ["---"] * 3]
    for family in known_backbones().values():
        rows.append([family.library().title, ", ".join(f"`{name}`" for name in family.classes), family.models or "-"])
    return _lines(rows)


def around() -> str:
    """A table of the models around a ViT that are known, from their registry."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    classes = {path.rpartition(".")[2] for path in WRAPPERS}
    for path in WRAPPERS:
        library, name = path.split(".")[0], path.rpartition(".")[2]
        if f"{name.removesuffix('Model')}ForConditionalGeneration" in classes:
            continue  # it is inside that one
        needs_grid = _inner(path).needs_all_patches
        always = "`restore=True`" if isinstance(needs_grid, str) else "`restore=True` with some configurations"
        found[library, "" if needs_grid is None else always].append(f"`{name}`")
    rows = [["library", "needs", "models that contain a ViT"], ["---"] * 3]
    return _lines([*rows, *([library, how or "-", ", ".join(names)] for (library, how), names in found.items())])


def _inner(path: str) -> Wrapper:
    """What a class does with its ViT, or the model in it that has the ViT."""
    return WRAPPERS.get(path.replace("ForConditionalGeneration", "Model"), WRAPPERS[path])


def with_tables(text: str) -> str:
    """A page with its tables as they should be now; comments in it say where."""
    for name, table in (("families", families()), ("around", around())):
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n\n{table}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


if __name__ == "__main__":
    folder = Path(__file__).parent
    (folder / "reference/models.md").write_text(page())
    guide = folder / "guides/speed-up.md"
    guide.write_text(with_tables(guide.read_text()))
