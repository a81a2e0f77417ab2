"""gtp-vit tour: in half a minute, what token reduction does to a small model that is in the package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from PIL import Image
from torch import Tensor, nn

from gtp_vit.cli import render
from gtp_vit.cli.flags import parse_flags
from gtp_vit.cli.output import JsonFlags, check_complete, check_is_folder, print_result, write_page
from gtp_vit.core.ranges import Range
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.models import bundled
from gtp_vit.models.factory import create_model
from gtp_vit.patching import patch
from gtp_vit.profiling.macs import macs
from gtp_vit.profiling.trace import trace
from gtp_vit.report.page import Section, paragraph, table
from gtp_vit.report.tokens import token_picture
from gtp_vit.runs.files import check_writable
from gtp_vit.tuning.compare import ComparisonRow, compare, models_of, plan_comparison, with_timings

METHODS = ("gtp", "tome", "gtp_plus")
NAMES = {"gtp": "GTP (the paper)", "tome": "ToMe", "gtp_plus": "GTP+ (ours)"}
SHARE = 0.55  # cost of each method, as a share of the unreduced model's MACs
BATCH = 16  # images in a batch while timing
PICTURES = 3
COLUMNS = ["method", "MACs", "top-1 %", "same answer %", "KL", "speed-up"]
LEGEND = (
    "MACs: work per image. Same answer: how often the class is that of the unreduced model. KL: how far the "
    "probabilities move, 0 is best. Speed-up: measured here, median; in brackets the middle half of the rounds."
)
NEXT_STEPS = """\
Next, with your own model:
  gtp-vit benchmark deit_small_patch16_224        is it faster on this machine?
  gtp-vit compare MODEL --pretrained --data-dir FOLDER --output compared
                                                  all methods, on your images
  gtp-vit --help                                  all commands"""


@dataclass(frozen=True)
class Tour(JsonFlags):
    """A small model that is in the package, unreduced and with GTP, ToMe and GTP+ at the same cost: what it does to its
    answers, how much faster it is here, and a page with pictures of the tokens. It needs no network and no data.

    examples:
      gtp-vit tour
    """

    limit: Annotated[int, Range(0, 10**6)] = 0
    """Evaluate only this many images; 0 means all."""
    rounds: Annotated[int, Range(3, 10**6)] = 15
    """Timing rounds per model, interleaved."""
    output: Path = Path("tour")
    """Folder for report.html, the page with the pictures."""


def main(arguments: Sequence[str]) -> None:
    flags = parse_flags(Tour, arguments)
    page = flags.output / "report.html"
    check_is_folder(flags.output)
    check_writable(page)
    model = create_model(bundled.NAME)
    images, labels = (tensor[: flags.limit or None] for tensor in bundled.sample_images())
    pixels = bundled.normalise(images)
    plans, _ = plan_comparison(model, METHODS, [SHARE * macs(model).total])
    models = models_of(model, plans)
    with render.progress("evaluating") as progress:
        rows, evaluation = compare(models, plans, InMemoryDataset(pixels, labels), workers=0, progress=progress)
    rows = with_timings(rows, models, pixels[:BATCH], flags.rounds)
    lines = [_line(row, rows[0]) for row in rows]
    title = f"{bundled.NAME} on {len(images)} images of Fashion-MNIST, at {SHARE:.0%} of the work"
    lesson = in_one_sentence({row.entry.label: row.score["kl"].value for row in rows[1:]})
    sections = [
        Section("What it does to the answers", table(COLUMNS, lines) + paragraph(lesson) + paragraph(LEGEND)),
        Section("What is left of an image", "".join(_pictures(model, rows, images, pixels))),
        Section("Next", f"<pre>{NEXT_STEPS}</pre>"),
    ]
    write_page(flags, arguments, page, title, "Less work, nearly the same answers, no training.", sections)
    result = {"flags": flags, "rows": [dict(zip(COLUMNS, line, strict=True)) for line in lines], "page": page}
    text = "\n".join(["", lesson, "", LEGEND, "", f"Pictures of the tokens: {page}", ""])
    print_result(flags, result, (title, COLUMNS, lines), text=text)
    if not flags.json:
        print(NEXT_STEPS)
    check_complete(evaluation)


def _line(row: ComparisonRow, unreduced: ComparisonRow) -> list[str]:
    """A row of the table."""
    name = NAMES.get(row.entry.label, row.entry.label)
    figures = [f"{row.entry.macs / unreduced.entry.macs:.0%}", f"{row.score['top1'].value:.1f}"]
    if row is unreduced:
        return [name, *figures, "", "", "1"]
    assert row.timing is not None
    low, high = row.timing.speedup_quartiles
    speed = f"{row.timing.speedup:.2f} ({low:.2f}-{high:.2f})"
    return [name, *figures, f"{row.score['agreement'].value:.1f}", f"{row.score['kl'].value:.3f}", speed]


def in_one_sentence(damage: dict[str, float]) -> str:
    """Who changes the model least, and how much more the others do.

    >>> in_one_sentence({"tome": 0.2, "gtp_plus": 0.1})
    'What to see: at the same cost GTP+ (ours) moves the answers least; ToMe moves them 2.0 times as far.'
    """
    best, *others = sorted(damage, key=damage.__getitem__)
    if damage[best] == 0:
        return f"What to see: at the same cost {NAMES[best]} does not move the answers at all."
    times = [f"{NAMES[name]} moves them {damage[name] / damage[best]:.1f} times as far" for name in others]
    return f"What to see: at the same cost {NAMES[best]} moves the answers least; {', '.join(times)}."


def _pictures(model: nn.Module, rows: Sequence[ComparisonRow], images: Tensor, pixels: Tensor) -> Sequence[str]:
    """A few images through each method."""
    drawn = []
    for index in range(min(PICTURES, len(images))):
        for row in rows[1:]:
            assert row.entry.method is not None
            fast = patch(model, row.entry.method, quiet=True)
            traced = trace(fast, pixels[index : index + 1])
            caption = f"{NAMES[row.entry.label]}: above what is left, with the sizes of tokens; below, patches of one "
            image = Image.fromarray(images[index].numpy())
            drawn.append(token_picture(image, traced, f"{caption}colour share a token."))
    return drawn
