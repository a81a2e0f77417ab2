"""The documentation is true: the map of the paper, links, figures. test_snippets.py runs its commands and code."""

import importlib.util
import inspect
import json
import re
import subprocess
import textwrap
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from gtp_vit import METHODS
from gtp_vit.cli.app import COMMANDS
from gtp_vit.core.backbone import Backbone

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MAP = re.findall(
    r"^\| ((?:Eq\. \(\d+\)|Section [\d.]+)) \|.*\| `([\w.]+)` \|$",
    (ROOT / "docs/explanation/paper-map.md").read_text(),
    re.M,
)
FORMULAS = [f"gtp_vit.methods.gtp.{name}" for name in ("graph", "selection")]


def functions_of_the_paper():
    for module in map(importlib.import_module, FORMULAS):
        for function_name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and not function_name.startswith("_"):
                yield f"{module.__name__}.{function_name}", function


def resolve(path):
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


def test_every_equation_is_mapped():
    assert {place for place, _ in MAP if place.startswith("Eq")} == {f"Eq. ({number})" for number in range(1, 16)}


@pytest.mark.parametrize(("place", "path"), MAP)
def test_mapped_functions_exist_and_the_papers_own_name_their_equation(place, path):
    first = resolve(path).__doc__.splitlines()[0]
    if path.rsplit(".", 1)[0] not in FORMULAS:
        return  # shared by all methods, and by no means only the paper's
    numbers = re.findall(r"\((\d+)\)", first)
    assert place.split("(")[-1].rstrip(")") in numbers if place.startswith("Eq") else place in first


def test_every_function_of_the_paper_is_in_the_map():
    assert {path for path, _ in functions_of_the_paper()} <= {path for _, path in MAP}


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_the_readme_says_first_what_it_is_and_whether_it_works():
    assert README.count("\n") <= 90
    (code,) = blocks("python")
    assert len(code.splitlines()) <= 7
    order = ["faster in one call", "docs/picture.png", "<!-- headline -->", "```python", "make demo", "make test"]
    places = [README.index(text) for text in order]
    assert places == sorted(places)


def test_make_targets_of_the_readme_exist():
    targets = re.findall(r"^make (\S+)", blocks("sh")[0], re.M)
    assert targets == ["demo", "test"]
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_first_who_should_read_it(page):
    first = re.search(r"^# .*\n\n(.*)", page.read_text(), re.M)[1]
    assert first.startswith("For ") or page.name == "index.md"


def test_every_file_of_results_is_linked_by_a_page():
    linked = {name for page in PAGES for name in re.findall(r"results/([\w-]+\.json)\)", page.read_text())}
    assert linked == {path.name for path in (ROOT / "docs/results").iterdir()}


def test_links_of_the_documentation_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


DESIGN = (ROOT / "docs/design.md").read_text()


def section(title):
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## )", DESIGN, re.S | re.M).group(1)


def test_the_glossary_is_short():
    assert 2 < len(re.findall(r"^\| ", section("Glossary"), re.M)) - 1 <= 12


@pytest.mark.parametrize(
    ("title", "root"),
    [("Add a method", ROOT), ("Add a family", ROOT), ("Walk: what happens in patch(model)", "src/gtp_vit")],
)
def test_files_that_the_design_names_exist(title, root):
    title = next(line[3:] for line in DESIGN.splitlines() if line.startswith(f"## {title}"))
    named = set(re.findall(r"`([\w./-]+\.(?:py|md|json))`", section(title))) - {"README.md"}
    named = {name for name in named if "NAME" not in name}
    assert len(named) >= 8
    assert not [name for name in named if not (ROOT / root / name).exists()]


def test_the_method_on_the_page_is_one(monkeypatch):
    """The example as it stands, with the imports of tests/support/toy_method.py."""
    from gtp_vit import create_model, macs, patch
    from gtp_vit.profiling.budget import method_at_macs
    from gtp_vit.tensors import split_by_score
    from support import toy_method

    code = textwrap.dedent(re.search(r"```python\n(.*?)```", section("Add a method"), re.S).group(1))
    names = {**vars(toy_method), "split_by_score": split_by_score}
    exec(textwrap.dedent(code), names)
    model = create_model("fashion_vit")
    monkeypatch.setitem(METHODS, "shortest", names["Shortest"])
    fast = patch(model, method_at_macs(model, "shortest", 0.7 * macs(model).total))
    assert macs(fast).total == pytest.approx(0.7 * macs(model).total, rel=0.01)
    assert fast(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_a_backbone_defines_what_the_page_says():
    rows = re.findall(r"^   \| (`.*?) \|", section("Add a family"), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {name for name in [*vars(Backbone), *Backbone.__annotations__] if not name.startswith("_")}


def test_every_promise_is_on_the_page_of_the_test_kit_in_its_own_words():
    from gtp_vit.testing import PROMISES, SLOW_PROMISES

    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", (ROOT / "docs/guides/test-your-method.md").read_text(), re.M)
    promises = (*PROMISES, *SLOW_PROMISES)
    assert rows == [(promise.__name__, promise.__doc__.splitlines()[0]) for promise in promises]


def test_every_command_is_on_a_page():
    text = "".join(page.read_text() for page in PAGES)
    assert not [command for command in COMMANDS if not is_shown(command, text)]


def test_a_command_without_a_page_is_found(monkeypatch):
    monkeypatch.setitem(COMMANDS, "toy", "Say a word")
    text = (ROOT / "docs/reference/commands.md").read_text()
    assert [command for command in COMMANDS if not is_shown(command, text)] == ["toy"]
    assert is_shown("toy", f"{text}gtp-vit toy ping\n")


def is_shown(command, text):
    """Is it run on a page?"""
    return re.search(rf"^gtp-vit {command}\b", text, re.M) is not None


def maker(name):
    spec = importlib.util.spec_from_file_location(f"make_{name}", ROOT / f"docs/make_{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["comparison", "devices", "encoders", "measured", "methods"])
def test_generated_pages_are_what_their_sources_say(name):
    for file, text in maker(name).pages().items():
        assert (ROOT / "docs" / file).read_text() == text, f"run python docs/make_{name}.py"


@pytest.mark.slow
def test_the_pictures_of_how_it_works_are_what_the_method_does(monkeypatch, tmp_path):
    """Pixels depend on Pillow's version; the schedule does not, nor does whether the script still runs."""
    pictures = maker("pictures")
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main()
    for name in ("one-layer.png", "layers.png"):
        with Image.open(tmp_path / name) as drawn, Image.open(ROOT / "docs/pictures" / name) as stored:
            assert drawn.size == stored.size
    assert (tmp_path / "schedule.svg").read_text() == (ROOT / "docs/pictures/schedule.svg").read_text()


def test_the_page_of_models_is_what_the_code_says():
    """All of timm's names and tags; of the models themselves a sample, as building all of them takes a minute."""
    page, models = (ROOT / "docs/reference/models.md").read_text(), maker("models")
    if f"timm {timm.__version__};" not in page:
        pytest.skip("the page was made with another version of timm")
    known, stale = models.modules(), "run python docs/make_models.py"
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", page, re.M)
    of_timm = [(module.name, str(len(module.models)), str(sum(module.tags.values()))) for module in known]
    assert [(name, names, tags) for name, names, _, tags, _ in rows] == of_timm, stale
    tags = sum(int(row[3]) for row in rows)
    taken = tags - sum(int(row[4]) for row in rows)
    assert f"**{taken} can be patched: {100 * taken / tags:.0f} %**" in page, stale
    assert taken >= 0.8 * tags
    for reason, example in re.findall(r"^\| (.+?) \| \d+ \| \d+ \| `(\w+)` \|$", page, re.M):
        if "_5b_" not in example:  # some seconds even without weights
            assert models.unsupported_reason(example) == reason, stale
    for module, row in zip(known, rows, strict=True):
        if row[2] == "0":
            assert models.unsupported_reason(module.models[-1]) is None, stale


def test_the_table_of_the_readme_is_what_the_files_say():
    assert maker("measured").headline(README) == README, "run python docs/make_measured.py"


def test_the_tables_of_families_are_those_of_the_registries():
    guide = (ROOT / "docs/guides/speed-up.md").read_text()
    assert maker("models").with_tables(guide) == guide, "run python docs/make_models.py"


def cells(text, pattern):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if re.match(pattern, line)]


def results(part, model):
    return json.loads((ROOT / "docs/results/comparison.json").read_text())[part]["rows"][model]


@pytest.mark.parametrize("model", ["deit_tiny_patch16_224", "vit_tiny_patch16_224"])
def test_the_table_of_the_readme_has_the_damage_at_55_percent(model):
    column = 2 if model.startswith("deit") else 4
    unreduced, *paired = results("paired", model)
    rows = [row for row in paired if row["budget_gmacs"] == paired[3]["budget_gmacs"]][:3]
    rows.append(results("calibrated", model)[4])
    assert [row["method"] for row in rows] == ["gtp", "tome", "gtp_plus", "gtp_plus, calibrated"]
    assert {f"{row['gmacs'] / unreduced['gmacs']:.0%}" for row in rows} == {"55%"}
    shown = [row[column : column + 2] for row in cells(README, r"\| (GTP as|ToMe|\*\*GTP)")]
    assert shown == [[f"{row['agreement']:.1f}", f"{row['kl']:.4f}"] for row in rows]


def test_the_speed_ups_of_the_readme_are_of_one_run():
    """All four of the same run on the same machine: speed-ups of different runs cannot be compared."""
    runs = json.loads((ROOT / "docs/results/speed.json").read_text())
    shown = [row[1] for row in cells(README, r"\| (GTP as|ToMe|\*\*GTP)")]
    case = "deit_small_patch16_224:8:14"
    names = ["gtp native theta=1", "tome:r=14", "gtp_plus:remove=14", 'gtp_plus:remove=14:calibration="random"']
    measured = [
        [
            f"{row['speedup']:.2f}"
            for name in names
            for row in run["rows"]
            if (row["case"], row["candidate"]) == (case, name)
        ]
        for run in runs
    ]
    assert shown in measured


def test_the_readme_has_the_share_of_timms_models():
    share = re.search(r"can be patched: (\d+ %)", (ROOT / "docs/reference/models.md").read_text())[1]
    assert f"[{share} of its pre-trained plain ViTs](docs/reference/models.md)" in README


@pytest.mark.parametrize("model", ["deit_tiny_patch16_224", "vit_tiny_patch16_224"])
def test_the_results_say_what_we_claim_of_gtp_plus_and_tune(model):
    paired = results("paired", model)
    by_name = {name: [row for row in paired if row["method"] == name] for name in ("gtp", "tome", "gtp_plus")}
    recipe = paired[-1]
    gtp, tome = by_name["gtp"][1], by_name["tome"][1]  # at the MACs of P = 14
    assert recipe["gmacs"] <= tome["gmacs"]
    assert recipe["kl"] <= 0.4 * tome["kl"]
    assert recipe["kl"] <= 0.2 * gtp["kl"]
    assert recipe["agreement"] >= tome["agreement"] + 3
    assert recipe["top1"] > tome["top1"]
    assert by_name["gtp_plus"][0]["kl"] <= 0.6 * by_name["tome"][0]["kl"]  # at those of P = 8
    tuned, *others = json.loads((ROOT / "docs/results/schedules.json").read_text())[model]
    page = (ROOT / "docs/research/gtp-plus.md").read_text()
    for row in [tuned, *others]:
        assert f"{row['kl']:.4f} / {row['agreement']:.1f}" in page
    assert all(row["tuned minus this"][2] < 0 for row in others if row["schedule"] != "default")


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_no_page_has_a_placeholder(page):
    assert not re.search(r"\b(TODO|TBD|FIXME|[A-Z]+_TABLE)\b|\?\?", page.read_text())
