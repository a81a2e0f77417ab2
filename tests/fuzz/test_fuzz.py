"""What comes from outside is right, or it is refused in one line: metadata, recipes, shards, journals, words, numbers.

Each test runs for seven and a half seconds, a minute in all, with cases that are numbered. GTP_VIT_FUZZ_SECONDS makes
it longer, GTP_VIT_FUZZ_FIRST begins at the number that a failure has named.
"""

import json
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import support.operators
from gtp_vit import GTPError, kernels, read_embeddings, read_recipe
from gtp_vit.cli.app import COMMANDS, ExitCode, main
from gtp_vit.core.backbone import Output
from gtp_vit.data.dataset import InMemoryDataset
from gtp_vit.embeddings.batch_embedder import BatchEmbedder
from gtp_vit.embeddings.manifest import verify
from gtp_vit.embeddings.writer import Layout, embed_to_folder
from gtp_vit.engines import engine_of
from gtp_vit.engines.exported_file import ExportedFile
from gtp_vit.engines.graph import Graph, Port, StoredFile
from gtp_vit.kernels import native
from gtp_vit.kernels.arguments import NeighboursInputs
from gtp_vit.methods import METHODS, method_from_dict
from gtp_vit.methods.atc import cluster
from gtp_vit.methods.gtp import operators
from gtp_vit.methods.gtp_plus.merge import gtp_plus_merge
from gtp_vit.runs.journal import Journal
from support.fuzz import cases, damaged, harmed
from support.merging import check_merged

pytestmark = pytest.mark.slow


def one_line(error):
    """The text of an error of ours."""
    text = str(error)
    assert text
    assert len(text) < 3000
    return text


DESCRIPTION = {
    "format": 1,
    "model": "fashion_vit",
    "weights": {"from": "the package", "fingerprint": "0123456789abcdef"},
    "method": {"method": "gtp_plus", "remove": [0, 37, 40, 32], "importance_floor": 0.5},
    "macs": {"unreduced": 200, "exported": 100, "share": 0.5},
    "precision": "f32",
    "engine": "onnxruntime",
    "input": {
        "name": "images",
        "layout": "",
        "batch": None,
        "channels": 3,
        "size": [28, 32],
        "mean": [0.5] * 3,
        "std": [0.2] * 3,
    }
    | {"crop_pct": 0.9, "crop_mode": "center", "interpolation": "bicubic"},
    "output": {"name": "logits", "kind": "classes", "width": 3},
    "classes": ["a", "b", "c"],
    "versions": {"torch": "2.15"},
}
GRAPH = Graph(
    (Port("images", "float32", (None, 3, 28, 32)),), (Port("logits", "float32", (None, 3)),), macs=101, eight_bits=False
)


def has(stored, read):
    """Is all that was read in what was stored? The layout of an input is for people."""
    if isinstance(read, dict) and isinstance(stored, dict):
        return all(key == "layout" or (key in stored and has(stored[key], value)) for key, value in read.items())
    return stored == read


def test_metadata_is_as_its_graph_or_refused(tmp_path, monkeypatch):
    path = tmp_path / "x.onnx"
    path.touch()
    engine = engine_of(path)
    monkeypatch.setattr(type(engine), "check_installed", lambda _: None)
    accepted = 0
    for number, chance in cases():
        text = json.dumps(damaged(DESCRIPTION, chance) if number else DESCRIPTION)
        if chance.random() < 0.2:
            text = harmed(text.encode(), chance).decode(errors="replace")
        monkeypatch.setattr(type(engine), "open", lambda *_, text=text: StoredFile(text, lambda: GRAPH))
        try:
            found = ExportedFile.read(path).metadata
        except GTPError as error:
            refused = one_line(error)
        else:
            refused = None
        if refused is not None:
            assert refused.endswith("; export it again"), (number, text)
            continue
        accepted += 1
        assert (found.channels, found.size, found.output) == (3, (28, 32), Output("classes", 3)), (number, text)
        assert 80 <= found.exported_macs <= 104, (number, text)
        assert found.precision == "f32", (number, text)
        assert found.classes is None or len(found.classes) == 3, (number, text)
        stored, read = json.loads(text), json.loads(json.dumps(found.to_dict()))
        method = stored.pop("method")
        assert found.method == (None if method is None else method_from_dict(method)), (number, text)
        assert has(stored, {key: value for key, value in read.items() if key != "method"}), (number, text)
    assert accepted


def test_recipes_are_read_or_refused(tmp_path, pytestconfig):
    path = tmp_path / "recipe.json"
    good = (pytestconfig.rootpath / "tests" / "formats" / "recipe-1.json").read_text()
    read = 0
    for number, chance in cases():
        content = json.dumps(damaged(json.loads(good), chance)).encode() if number else good.encode()
        path.write_bytes(harmed(content, chance) if chance.random() < 0.3 and number else content)
        try:
            found = read_recipe(path)
        except GTPError as error:
            one_line(error)
            continue
        read += 1
        assert METHODS[found.method.name], number
        again = tmp_path / "again.json"
        again.write_text(found.to_json())
        assert read_recipe(again).method == found.method, number
    assert read


class First(nn.Module):
    """A model that returns the first numbers of each image."""

    def forward(self, images):
        return images.flatten(1)[:, :5]


@pytest.fixture(params=["safetensors", "parquet"])
def written(tmp_path, request):
    """A folder of embeddings in two files."""
    if request.param == "parquet":
        pytest.importorskip("pyarrow")
    images = torch.randn(6, 1, 2, 4, generator=torch.Generator().manual_seed(0))
    embedder = BatchEmbedder(First(), output=Output("features", 5))
    dataset, folder = InMemoryDataset(images, torch.arange(6)), tmp_path / "written"
    embed_to_folder(folder, embedder, dataset, {"what": 1}, Layout(request.param, 2, 4), workers=0)
    return folder


def content_of(folder):
    shards = list(read_embeddings(folder))
    return [(s.names, s.indices.tolist(), s.embeddings.tobytes(), s.labels.tolist(), s.header) for s in shards]


def test_files_of_embeddings_are_what_was_written_or_refused(tmp_path, written):
    wanted, manifest = content_of(written), verify(written)
    files = sorted(path.name for path in written.iterdir())
    assert len(files) == 3
    for number, chance in cases():
        shutil.copytree(written, tmp_path / "copy", dirs_exist_ok=True)
        path = tmp_path / "copy" / chance.choice(files)
        content = path.read_bytes()
        if path.suffix == ".json" and chance.random() < 0.5:
            path.write_text(json.dumps(damaged(json.loads(content), chance)))
        else:
            path.write_bytes(harmed(content, chance))
        for read, right in ((content_of, wanted), (verify, manifest)):
            try:
                assert read(tmp_path / "copy") == right, number
            except GTPError as error:
                one_line(error)


def test_journals_give_back_what_was_finished_or_are_refused(tmp_path):
    path, run = tmp_path / "x.journal", {"model": "m", "images": "7", "method": {"method": "gtp", "propagate": 2}}
    entries = [{"place": place, "values": [place / 3, None, "ä"]} for place in range(9)]
    with Journal(path, run) as journal:
        for entry in entries:
            journal.append(entry)
        journal.keep_when_done = True
    whole = path.read_bytes()
    for number, chance in cases():
        harm = harmed(whole, chance)
        path.write_bytes(harm)
        try:
            with Journal(path, run) as journal:
                found = journal.entries
                journal.append({"more": 1})
                journal.keep_when_done = True
        except GTPError as error:
            one_line(error)
            assert path.read_bytes() == harm, number  # what is refused is left as it is
            continue
        assert found == entries[: len(found)], number
        with Journal(path, run) as journal:
            assert journal.entries == [*found, {"more": 1}], number
            journal.keep_when_done = True


QUIET = sorted(set(COMMANDS) - {"demo", "check", "models", "reproduce"})  # others ask the machine, or run for long
FLAGS = ["--method", "--output", "--data-dir", "--checkpoint", "--img-size", "--num-classes", "--batch-size", "--limit"]
FLAGS += ["--workers", "--r", "--propagate", "--precision", "--format", "--verify", "--restart", "--json", "--device"]
FLAGS += ["--crop-pct", "--interpolation", "--results-file", "--html", "--shard-size", "--num-neighbours", "--measure"]
FLAGS += ["--macs", "--budgets", "--search-passes", "--threads", "--epochs", "--lr", "--images", "--split", "--dataset"]
WORDS = ["", "-1", "0", "1", "2", "1e400", "nan", "x", "../x", "gtp", "ToMe", "linear:2:14", "keep:0.5:0:1", "[1, 2]"]
WORDS += ["\x1b[31m", "ä", "0.5,0.6", "f32", "cuda", "fashion_vit", "test_vit", "hf:none", "a" * 5000, "none.onnx"]
WORDS += ["none.json", "torchvision:vit_b_16", "recipe.json", "--", "-"]


def test_every_command_line_gets_an_answer(tmp_path, monkeypatch, capsys):
    def no_model(*_, **__):
        raise GTPError("here the model would be made")

    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # ../x is in the folder of this test, too
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    (tmp_path / "here" / "recipe.json").write_text("{}")
    for room in ("cli.model_flags", "cli.commands.macs", "cli.commands.tour"):
        monkeypatch.setattr(f"gtp_vit.{room}.create_model", no_model)
    for number, chance in cases():
        words = [chance.choice(QUIET)]
        for _ in range(chance.randrange(1, 6)):
            word = chance.choice(FLAGS) if chance.random() < 0.6 else chance.choice(WORDS)
            words.append(f"{word}={chance.choice(WORDS)}" if chance.random() < 0.2 else word)
        code = main(words)
        out, err = capsys.readouterr()
        assert code in (ExitCode.OK, ExitCode.USAGE), (number, words, err)
        assert "Traceback" not in out + err, (number, words)
        if code == ExitCode.USAGE:
            assert err.strip() or out.strip(), (number, words)


def some(chance, *shape):
    """Numbers of one of many kinds."""
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    x = torch.randn(*shape, generator=generator)
    kind = chance.choice(("plain", "plain", "ties", "equal", "zeros", "tiny"))
    return {"plain": x, "ties": x.round(), "equal": torch.full(shape, 0.5), "zeros": 0 * x, "tiny": 1e-20 * x}[kind]


def spoilt(chance, tensor, values):
    """At times one number is odd."""
    if chance.random() < 0.2 and tensor.numel():
        tensor = tensor.clone()
        tensor.view(-1)[chance.randrange(tensor.numel())] = chance.choice(values)
    return tensor


def attention_of(chance):
    batch, heads, tokens, depth = (
        chance.randint(1, 3),
        chance.randint(1, 3),
        chance.randint(1, 20),
        chance.choice((1, 8, 9)),
    )
    q, k, v = (some(chance, batch, heads, tokens, depth) for _ in range(3))
    size = spoilt(chance, some(chance, batch, tokens).abs(), [0.0, -1.0, torch.nan, 1e30])
    size = None if chance.random() < 0.3 else size
    asked = [chance.random() < 0.5 for _ in range(3)]
    return [
        q,
        k,
        v,
        size,
        chance.choice((0.3, 1.0)),
        0,
        tokens,
        asked,
        chance.choice((0, 1, 2)),
        chance.randint(0, tokens),
    ]


def norm_of(chance, channels):
    return (some(chance, channels), some(chance, channels)) if chance.random() < 0.5 else (None, None)


def reduce_of(chance):
    batch, side, channels, prefix = (
        chance.randint(1, 3),
        chance.randint(2, 5),
        chance.choice((1, 8, 17)),
        chance.randint(0, 2),
    )
    patches = side * side
    left = chance.randint(2, patches)
    x, branch = some(chance, batch, prefix + left, channels), some(chance, batch, prefix + left, channels)
    similarity = torch.rand(batch, patches, patches, generator=torch.Generator().manual_seed(chance.randrange(2**31)))
    lists, root = operators.neighbours_reference(
        NeighboursInputs(similarity, side, side, chance.choice((0, 4, 8)), chance.randint(1, min(3, patches - 1)))
    )
    order = torch.rand(batch, patches, generator=torch.Generator().manual_seed(chance.randrange(2**31))).argsort(dim=1)
    position = spoilt(chance, order[:, :left].contiguous(), [0, patches, -1])
    lists = spoilt(chance, lists, [0, 1, patches, patches + 1, -5])
    scores = spoilt(chance, some(chance, batch, left), [torch.nan, torch.inf, -torch.inf])
    size = None if chance.random() < 0.3 else some(chance, batch, prefix + left).abs() + 0.5
    alpha = chance.choice((0.0, 0.1, 1.0, -0.3, torch.nan, torch.inf))
    weight, bias = norm_of(chance, channels)
    removed = chance.randint(1, left - 1)
    return [x, branch, scores, position, size, lists, root, removed, alpha, chance.random() < 0.5, weight, bias, 1e-6]


def neighbours_of(chance):
    rows, columns = chance.randint(1, 5), chance.randint(2, 5)
    similarity = some(chance, chance.randint(1, 2), rows * columns, rows * columns)
    return [similarity, rows, columns, chance.choice((0, 4, 8)), chance.randint(1, rows * columns - 1)]


def cluster_of(chance):
    count = chance.randint(2, 12)
    distance = some(chance, chance.randint(1, 3), count, count).abs()
    return [distance + distance.transpose(1, 2), chance.randint(0, count - 1), chance.randint(0, 2)]


def conserve_of(chance):
    batch, count, channels, prefix = (
        chance.randint(1, 3),
        chance.randint(2, 12),
        chance.choice((1, 8, 17)),
        chance.randint(0, 2),
    )
    x, branch = (
        torch.randn(batch, prefix + count, channels, generator=torch.Generator().manual_seed(chance.randrange(99)))
        for _ in range(2)
    )
    importance = torch.rand(batch, count, generator=torch.Generator().manual_seed(chance.randrange(99)))
    weight, bias = norm_of(chance, channels)
    size = None if chance.random() < 0.3 else importance + 0.5
    return [x, branch, importance, size, chance.randint(0, count - 1), 0.5, chance.random() < 0.5, weight, bias, 1e-6]


def same_decisions(found, wanted):
    """Have both kept the same tokens, and merged the others into the same?"""
    return all(torch.equal(one, other) for one, other in zip(found[3:], wanted[3:], strict=True))


def check_conserve(number, arguments, results):
    """Of equal costs or cosines rounding chooses, e.g. of tokens of one channel; then the definition is the judge."""
    x, branch, importance, size, *settings = arguments[:7]
    for b in range(len(x)):
        one = [None if each is None else each[b : b + 1] for each in (x, branch, importance, size)]
        own = [each[b : b + 1] if len(each) else each for each in results]
        try:
            check_merged((*one, *settings), arguments[7:], own)
        except AssertionError as error:
            raise AssertionError(f"case {number}, conserve, image {b}: {error}") from error


OPERATORS = {
    "attention": (kernels.attention, attention_of),
    "gtp_reduce": (operators.gtp_reduce, reduce_of),
    "neighbours": (operators.neighbours, neighbours_of),
    "cluster": (cluster, cluster_of),
    "gtp_plus_merge": (gtp_plus_merge, conserve_of),
}


@pytest.mark.skipif(native.LOAD_ERROR is not None, reason=f"no native library: {native.LOAD_ERROR}")
def test_operators_give_the_references_result_or_refuse():
    computed = dict.fromkeys(OPERATORS, 0)
    for number, chance in cases(least=100):
        name = chance.choice(list(OPERATORS))
        operator, make = OPERATORS[name]
        arguments = make(chance)
        copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
        try:
            found = getattr(torch.ops.gtp_vit, name)(*arguments)
        except (GTPError, IndexError) as error:
            one_line(error)
            continue
        for given, copy in zip(arguments, copies, strict=True):
            if isinstance(given, torch.Tensor):
                assert np.array_equal(given.numpy(), copy.numpy(), equal_nan=True), (number, name)
        computed[name] += 1
        wanted = operator.reference(operator.inputs(*arguments))
        if name == "gtp_plus_merge" and not same_decisions(found, wanted):
            for results in (found, wanted):
                check_conserve(number, arguments, results)
            continue
        for one, other in zip(found, wanted, strict=True):
            message = f"case {number}, {name}"
            torch.testing.assert_close(
                one, other, rtol=1e-3, atol=1e-3, equal_nan=True, msg=lambda m, t=message: f"{t}: {m}"
            )
    assert all(computed.values()), computed


ODD_NUMBERS = [torch.nan, torch.inf, -torch.inf, 0.0, -1.0, 0.5, 1.0, 7.0, 1e-45, 1e-38, 1e-30, 1e15, 2e15, 1e30, 3e38]
ODD_CELLS = [-1, 0, 3, 8, 9, 10, 2**40]
FEATURES = ("x", "branch", "q", "k", "v", "norm_weight", "norm_bias")  # not looked at where their squares overflow


def with_odd_numbers(operator, chance):
    """Arguments that make sense but for up to three, and those."""
    arguments = support.operators.good(operator)
    # docs/design.md: a removed token that is NaN, and entries at the threshold of the map, differ at the edge
    edge = {"gtp_reduce": FEATURES, "attention": ("removed",)}.get(operator, ())
    names = [name for name in arguments if name not in edge]
    changed = chance.choices(names, k=chance.choice((1, 1, 2, 3)))
    for name in changed:
        value = arguments[name]
        if isinstance(value, torch.Tensor):
            odd = [one for one in ODD_NUMBERS if name not in FEATURES or not 1e10 < one < torch.inf]
            number = chance.choice(odd if value.is_floating_point() else ODD_CELLS)
            value = value.clone()
            place = chance.choice(("one", "one", "image", "column", "all"))
            target = {"one": value.view(-1)[chance.randrange(value.numel()) :][:1], "image": value[-1:]}
            target |= {"column": value[..., -1:], "all": value}
            target[place].fill_(number)
            if name == "distance" and chance.random() < 0.7:
                value = value + value.transpose(1, 2)
        elif isinstance(value, bool):
            value = not value
        elif isinstance(value, float):
            value = chance.choice(ODD_NUMBERS[:6])
        elif isinstance(value, int):
            value = chance.choice(ODD_CELLS[:6])
        arguments[name] = value
    return arguments, changed


@pytest.mark.skipif(native.LOAD_ERROR is not None, reason=f"no native library: {native.LOAD_ERROR}")
def test_operators_refuse_odd_numbers_or_give_the_references_result():
    tried = refused = 0
    for number, chance in cases(least=100):
        name = chance.choice(sorted(support.operators.OPERATORS))
        arguments, changed = with_odd_numbers(name, chance)
        tried += 1
        try:
            found = getattr(torch.ops.gtp_vit, name)(*arguments.values())
        except (GTPError, IndexError) as error:
            one_line(error)
            refused += 1
            continue
        wanted = support.operators.reference(name, arguments)
        message = f"case {number}, {name}, {changed}"
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-3, atol=1e-3, equal_nan=True, msg=lambda m, t=message: f"{t}: {m}"
            )
    assert 0 < refused < tried
