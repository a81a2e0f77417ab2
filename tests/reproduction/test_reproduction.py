"""python -m reproduction: the paper's tables beside our values; it resumes, and says why a figure is missing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from gtp_vit import GTP, METHODS, create_model
from gtp_vit.cli.app import COMMANDS, ExitCode
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.data.open import DataSettings, open_images
from gtp_vit.metrics import evaluate as evaluation
from gtp_vit.runs.journal import Journal
from reproduction.__main__ import main
from reproduction.experiments import EXPERIMENTS, Cell, Experiment
from reproduction.measure import NO_IMAGES, Inputs, reproduce

ROOT = Path(__file__).parents[2]


def weights(path, seed):
    torch.manual_seed(seed)
    save_file(timm.create_model("test_vit", num_classes=4).state_dict(), path)


def pictures(folder, count):
    """Pictures of four classes."""
    for number in range(count):
        path = folder / f"class{number % 4}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 50), (20 * number, 99, 7 * number)).save(path)


@pytest.fixture
def four_classes(monkeypatch):
    """test_vit with four classes, as its weights here have."""
    real = create_model
    monkeypatch.setattr("reproduction.measure.create_model", lambda *a, **k: real(*a, **k, num_classes=4))


def complaint(capsys, *words):
    """The one line that a wrong call gets."""
    assert main(words) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.slow
def test_it_runs_from_the_repository():
    words = [sys.executable, "-m", "reproduction", "--json"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {*EXPERIMENTS, "figure-complexity", "figure-oversmoothing"} == set(json.loads(done.stdout))


def test_it_is_no_command_of_the_package(capsys):
    assert "reproduce" not in COMMANDS
    assert main(["--help"]) == ExitCode.OK
    assert "usage: python -m reproduction" in capsys.readouterr().out


def test_results_as_json(capsys):
    assert main(["figure-complexity", "--json"]) == ExitCode.OK
    records = json.loads(capsys.readouterr().out)
    assert records[0]["deviation"] == pytest.approx(records[0]["by the formula"] / 20.1 - 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mian"], "unknown table or figure 'mian'; did you mean 'main'"),
        (["main", "--weights-dir", "nowhere"], "there is no folder nowhere"),
        (["main", "--results-file", "x.txt"], "must end in .csv or .json"),
        (["main", "--nonsense"], "unknown flag"),
        (["figure-oversmoothing", "--batch-size", "0"], "--batch-size is 0; it must be an integer"),
        (["figure-oversmoothing", "--limit", "-1"], "--limit is -1; it must be an integer"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_get_one_line(capsys, words, message):
    assert message in complaint(capsys, *words)


def test_places_that_cannot_be_written_are_refused_before_the_work(capsys, tmp_path):
    (tmp_path / "file").write_text("no folder")
    assert "cannot write" in complaint(capsys, "main", "--results-file", str(tmp_path / "file/x.csv"))


def test_the_page_says_how_it_was_made(tmp_path):
    assert main(["figure-complexity", "--html", str(tmp_path / "x.html")]) == ExitCode.OK
    page = (tmp_path / "x.html").read_text()
    assert "python -m reproduction figure-complexity" in page
    for what in ("torch", "cpu", "commit", "date"):
        assert f"<td>{what}</td>" in page


def test_a_figure_that_is_missing_says_why():
    absent = Cell("r", "a", "test_vit", None, absent=True)
    finetuned = Cell("r", "b", "test_vit", GTP(propagate=4), finetuned=True)
    plain = Cell("r", "c", "test_vit", None)
    found, _ = reproduce([absent, finetuned, plain], Inputs())
    reasons = ["missing: the method is not in this package", "missing: needs a finetuned checkpoint", NO_IMAGES]
    assert [cell.top1 for cell in found] == reasons
    assert found[0].gmacs == "the method is not in this package"
    assert found[1].gmacs < found[2].gmacs
    (without,), _ = reproduce([plain], Inputs(images_for=lambda model: InMemoryDataset(torch.zeros(1, 3, 160, 160))))
    assert without.top1 == "missing: no weights of test_vit (--weights-dir or --pretrained)"


def test_what_is_finished_is_kept_and_unreadable_images_are_named(four_classes, tmp_path):
    weights(tmp_path / "test_vit.safetensors", 0)
    pictures(tmp_path / "data", 10)
    (tmp_path / "data/class1/5.png").write_bytes(b"no picture")
    cells = [Cell("GTP", "4", "test_vit", GTP(propagate=4)), Cell("unreduced", "", "test_vit", None)]
    journal = Journal(tmp_path / "x.journal", {})

    def measured(images_for):
        return reproduce(cells, Inputs(tmp_path, images_for=images_for, batch_size=8, journal_for=lambda *_: journal))

    settings = DataSettings(data_dir=tmp_path / "data", labels=True)
    found, unreadable = measured(lambda model: open_images(model, settings))
    journal.close(finished=False)
    assert [isinstance(cell.top1, float) for cell in found] == [True, True]
    assert len(unreadable) == 1
    with Journal(tmp_path / "x.journal", {}) as journal:
        assert measured(lambda model: Unread(10))[0] == found


class Unread(torch.utils.data.Dataset):
    """Images that nobody may ask for."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count


def test_other_weights_under_the_same_name_are_refused(four_classes, tmp_path, capsys, monkeypatch):
    cells = [Cell("r", "c", "test_vit", None), Cell("r", "d", "test_vit", GTP(propagate=4))]
    monkeypatch.setitem(EXPERIMENTS, "graph-type", Experiment("toy", tuple(cells)))
    pictures(tmp_path / "data", 12)
    (tmp_path / "weights").mkdir()
    weights(tmp_path / "weights/test_vit.safetensors", 0)
    line = ["graph-type", "--weights-dir", str(tmp_path / "weights"), "--data-dir", str(tmp_path / "data")]
    line += ["--batch-size", "3", "--workers", "0", "--results-file", str(tmp_path / "r.json")]
    calls, real = [], evaluation._run

    def stop(*arguments):
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "_run", stop)
        assert main(line) == ExitCode.INTERRUPTED
    assert "with --results-file what was finished is kept" in capsys.readouterr().err
    weights(tmp_path / "weights/test_vit.safetensors", 1)
    assert "different run: weights was" in complaint(capsys, *line)
    assert main([*line, "--restart"]) == ExitCode.OK


def test_no_figure_that_is_not_finite_is_shown(tmp_path, capsys):
    model = create_model("fashion_vit")
    model.blocks[1].mlp.fc1.weight.data *= 1e30
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    words = ["figure-oversmoothing", "--checkpoint", str(tmp_path / "w.safetensors"), "--propagate", "1"]
    assert "tokens are not finite after layer " in complaint(capsys, *words)


def test_it_ends_with_a_code_if_figures_could_not_be_measured(tmp_path, capsys):
    torch.save({"not": torch.zeros(1)}, tmp_path / "deit_small_patch16_224.pth")
    pictures(tmp_path / "data", 1)
    assert (
        main(["graph-type", "--weights-dir", str(tmp_path), "--data-dir", str(tmp_path / "data")])
        == ExitCode.INCOMPLETE
    )
    assert "figures could not be measured; the first: missing: " in capsys.readouterr().err


def test_every_figure_of_the_field_has_a_source():
    cells = EXPERIMENTS["field"].cells
    assert len({cell.model for cell in cells}) == 8
    for cell in cells:
        assert cell.source
        assert cell.counts == "torch"
        assert cell.at_cost is None or (cell.at_cost in METHODS and cell.gmacs is not None and cell.method is None)
        assert not (cell.absent and (cell.at_cost or cell.method))
    stated = {(cell.row, cell.gmacs): cell.top1 for cell in cells}
    assert stated["DeiT-B, MCTF", 10.95] == 80.8
    assert stated["ViT-L AugReg, ToMe", 42.4] == 85.0


@pytest.mark.slow
def test_the_field_on_the_ti_models(data, capsys, monkeypatch):
    """End to end: weights and images in, rows out; a method whose settings are not printed runs at the printed cost."""
    assert {"deit_tiny_patch16_224"} < {cell.model for cell in EXPERIMENTS["field"].cells}
    cells = [cell for cell in EXPERIMENTS["field"].cells if "_tiny_" in cell.model]
    few = [cell for cell in cells if cell.absent or "MCTF" in cell.row or "unreduced" in cell.row]
    few += [cell for cell in EXPERIMENTS["field"].cells if cell.row == "DeiT-S, EViT"]
    monkeypatch.setitem(EXPERIMENTS, "field", Experiment("field", tuple(few)))
    assets = data / "assets"
    flags = ["--weights-dir", str(assets / "weights"), "--data-dir", str(assets / "imagenet/val"), "--limit", "4"]
    assert main(["field", *flags, "--workers", "0", "--json"]) == ExitCode.OK
    rows = {row["row"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 6
    assert rows["DeiT-Ti, SAD-TM-DM"]["top1"] == "missing: the method is not in this package"
    for model in ("DeiT-Ti", "ViT-Ti AugReg"):
        assert rows[f"{model}, MCTF"]["gmacs"] == pytest.approx(0.716, abs=0.001)
        assert rows[f"{model}, unreduced"]["gmacs"] == pytest.approx(1.254, abs=0.001)
        assert all(rows[f"{model}, {name}"]["top1"] in (0, 25, 50, 75, 100) for name in ("MCTF", "unreduced"))
    small = rows["DeiT-S, EViT"]
    assert small["top1"].startswith("missing: no weights of deit_small_patch16_224")
    assert abs(small["gmacs_deviation"]) < 0.005
    assert small["top1_printed"] == 73.83
