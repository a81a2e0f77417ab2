"""Every command and every line of code of the README and of the pages in docs/ is run, page by page, as a reader would.

There is no network here: pre-trained models become small ones, mostly the one in the package with its own images, and
everything is done on a few images. Files for OpenVINO, phones and 8 bits take long to make: of such lines only flags
are checked here, the tests of engines run them.
"""

import contextlib
import functools
import importlib.util
import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

import gtp_vit
from gtp_vit import METHODS
from gtp_vit.backbones import small_models
from gtp_vit.cli.app import COMMANDS, main
from gtp_vit.engines.program import torch_can_export
from gtp_vit.models import bundled
from gtp_vit.testing import families
from reproduction.__main__ import main as reproduction

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\S*)\n(.*?)^```", re.M | re.S)
INDENTED = re.compile(r"^    (gtp-vit .*)$", re.M)
COMMAND, CODE = ("sh", ""), ("python",)
OTHER = (
    "cpp",
    "toml",
    "{.python}",
)  # tests/docs/test_examples.py runs the scripts that docs/guides/examples.md takes in

WITHOUT_WEIGHTS = ("macs", "models", "methods", "check")  # nothing to replace
CLASSIFIER = re.compile(r"(deit|vit)_(tiny|small|base)_patch16_224")
ENCODER = re.compile(r"vit_small_patch14_dinov2|hf:facebook/dinov2-small|hf:google/\S+")
EXPORTED = re.compile(r"\S+-(f32|int8)\.(onnx|xml|tflite)")
CONVERTED = ("aotinductor", "litert", "executorch", "coreml")  # by a compiler, or in another Python: minutes
FEWER = {
    "benchmark": ["--rounds", "3"],
    "evaluate": ["--limit", "21"],
    "compare": ["--limit", "21", "--rounds", "0"],
    "tune": ["--images", "20", "--search-passes", "2"],
    "embed": ["--limit", "12"],
    "export": ["--images", "16"],
    "finetune": ["--epochs", "1", "--limit", "32", "--val-limit", "8", "--batch-size", "32", "--micro-batch", "32"],
}
# Code that would download, take hours, or is of another size.
REPLACED = [
    ('timm.create_model("deit_small_patch16_224", checkpoint_path=', 'gtp_vit.create_model("fashion_vit", checkpoint='),
    ('"deit_small_patch16_224"', '"test_vit"'),
    ('"vit_small_patch14_dinov2"', '"test_vit"'),
    ("pretrained=True", "pretrained=False"),
    ("3, 224, 224", "3, 160, 160"),
    ("google/vit-base-patch16-224", "small-vit"),
    ('"ViT-B-32", pretrained="openai"', '"small-clip"'),
    ("workers=4", "workers=0"),
    ("gtp_vit.SearchConfig()", "gtp_vit.SearchConfig(passes=2)"),
    ("epochs=30, batch_size=512", "epochs=1, batch_size=32, micro_batch=32"),
    ('output="tuned"', 'output="tuned-here"'),
    ("gtp_vit.patch(llava)", "gtp_vit.patch(llava, gtp_vit.GTPPlus(remove=(5, 5, 5)))"),
    ("gtp_vit.patch(gemma3, restore=True)", "gtp_vit.patch(gemma3, gtp_vit.GTPPlus(remove=5), restore=True)"),
]


def blocks(page):
    """What a page shows as code, in order: language and text."""
    text = page.read_text()
    found = [(block.start(), block[1], block[2]) for block in FENCE.finditer(text)]
    found += [(line.start(), "sh", line[1]) for line in INDENTED.finditer(text)]
    return [(language, code) for _, language, code in sorted(found)]


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_say_what_they_are(page):
    assert {language for language, _ in blocks(page)} <= {*COMMAND, *CODE, *OTHER}
    assert page.read_text().count("```") % 2 == 0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Pictures as the pages name them, and small models in place of those that would be downloaded."""
    root = tmp_path_factory.mktemp("reader")
    images, labels = bundled.sample_images()
    for label in range(10):
        (root / "photos" / str(label)).mkdir(parents=True)
        for index in torch.nonzero(labels == label)[:6].flatten().tolist():
            Image.fromarray(images[index].numpy()).convert("RGB").save(root / "photos" / str(label) / f"{index}.png")
    (root / "imagenet").mkdir()
    for name in ("calibration", "pictures", "imagenet/train", "imagenet/validation", "imagenet/val"):
        (root / name).symlink_to(root / "photos")
    Image.fromarray(images[0].numpy()).convert("RGB").save(root / "cat.jpg")
    shutil.copy(ROOT / "tests/formats/recipe-1.json", root / "recipe.json")
    torch.manual_seed(0)
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), root / "encoder.safetensors")
    if small_models.HAS_TRANSFORMERS:
        import transformers

        families.make("hf_vit").save_pretrained(root / "small-vit")
        transformers.ViTImageProcessor(size={"height": 64, "width": 64}).save_pretrained(root / "small-vit")
    if importlib.util.find_spec("open_clip") is not None:
        import open_clip

        vision = {"image_size": 160, "layers": 12, "width": 64, "head_width": 32, "patch_size": 16}
        text = {"context_length": 8, "vocab_size": 99, "width": 32, "heads": 2, "layers": 1}
        config = {"embed_dim": 32, "vision_cfg": vision, "text_cfg": text}
        (root / "small-clip.json").write_text(json.dumps(config))
        open_clip.add_model_config(root / "small-clip.json")
        save_file(open_clip.create_model("small-clip").state_dict(), root / "clip.safetensors")
    return root


@pytest.fixture
def here(folders, tmp_path, monkeypatch):
    """A folder of its own for each page."""
    for path in folders.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "recipe.json").unlink()  # some pages write it
    shutil.copy(folders / "recipe.json", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def without(words, *flags):
    """Words without these flags and their values."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in flags:
            skip = word != "--pretrained"
        else:
            kept.append(word)
    return kept


def changed(words, fashion):
    """A command line that does the same without a network and on little; None if only its flags can be checked."""
    command, *rest = words
    if command in WITHOUT_WEIGHTS:
        return words
    if {"openvino", "int8", *CONVERTED} & set(rest) or {"--engine", "--engines"} & set(rest):
        return None
    if "cuda" in rest:  # tests/profiling/test_verify.py does what can be done without a GPU
        return None
    if command == "demo":  # it ends by Ctrl+C: tests/demo/test_demo_browser.py
        return None
    if any(map(EXPORTED.fullmatch, rest)):
        if not torch_can_export():
            return None
        rest = [str(fashion() / "fashion_vit-gtp_plus-f32.onnx") if EXPORTED.fullmatch(word) else word for word in rest]
        return with_fewer(command, without(rest, "--data-dir"))
    if command == "export":
        fashion()
    if any(map(ENCODER.fullmatch, rest)):
        weights = ["--num-classes", "0", "--checkpoint", "encoder.safetensors"]
        rest = [word for each in rest for word in (["test_vit", *weights] if ENCODER.fullmatch(each) else [each])]
        rest = without(rest, "--pretrained", "--dataset", "--format")
        rest = ["photos" if word == "shards" else word for word in rest]
    elif "open_clip:ViT-B-32/openai" in rest:
        rest = ["open_clip:small-clip" if word.startswith("open_clip:") else word for word in rest]
        rest = [*without(rest, "--pretrained"), "--checkpoint", "clip.safetensors"]
    else:
        trained = "tuned/weights.safetensors"
        rest = without(
            rest, "--pretrained", "--data-dir", "--val-dir", "--dataset", *([] if trained in rest else ["--checkpoint"])
        )
        rest = ["fashion_vit" if CLASSIFIER.fullmatch(word) else word for word in rest]
        rest = ["recipe.json" if re.fullmatch(r"(deit|vit)_tiny\S+-0\.\d+", word) else word for word in rest]
    if "recipe.json" in rest and "--recipes" in rest:
        rest = [word for place, word in enumerate(rest) if word != "recipe.json" or "recipe.json" not in rest[:place]]
    if command == "compare" and "--methods" not in rest:
        rest += ["--methods", "gtp_plus", "tome"]
    return with_fewer(command, rest)


def with_fewer(command, rest):
    """On few images, without processes that read them, and never into the folder of another run."""
    fewer = FEWER.get(command, [])
    if "--min-neighbours" in rest:
        fewer = ["--images", "60", "--search-passes", "2"]  # ten neighbours among a fifth of them
    if command == "finetune" and "--output" not in rest:
        rest = [*rest, "--output", "finetuned"]
    if "--output" in rest:
        place = rest.index("--output") + 1
        if Path(rest[place]).is_dir():
            rest = [*rest[:place], f"{rest[place]}-{len(list(Path().iterdir()))}", *rest[place + 1 :]]
    workers = ["-j", "0"] if command in ("evaluate", "compare", "tune", "embed", "finetune") else []
    return [command, *without(rest, *fewer[::2]), *fewer, *workers]


@functools.cache
def flags_of(command, *method):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main([command, *method, "--help"])
    return {"--help", *re.findall(r"(?<![\w-])--?[a-z][\w-]*", out.getvalue())}


def check_flags(words):
    """The command has these flags, or its method has."""
    assert words[0] in COMMANDS
    place = words.index("--method") if "--method" in words else len(words)
    method = words[place : place + 2] if words[place + 1 : place + 2] and words[place + 1] in METHODS else []
    unknown = {word.split("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)} - flags_of(words[0], *method)
    assert not unknown, words


DONE: set[tuple[str, ...]] = set()  # the same line on another page is not run again


def run_line(line, fashion, variables):
    """A line of a shell."""
    for name, value in variables.items():
        line = line.replace(f"${name}", value)
    words = shlex.split(line, comments=True)
    if not words:
        return
    if "=" in words[0] and not words[0].startswith("-"):
        name, _, value = words[0].partition("=")
        variables[name] = value
    elif words[0] == "make":
        subprocess.run(["make", "--dry-run", words[1]], cwd=ROOT, check=True, capture_output=True)
    elif words[:2] == ["pip", "install"]:
        extras = re.findall(r"\[([\w,]+)\]", words[2])
        assert set(extras) <= set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
        assert re.fullmatch(r"(\.|gtp-vit)(\[[\w,]+\])?", words[2])
    elif words[:3] == ["python", "-m", "reproduction"]:
        with contextlib.redirect_stdout(io.StringIO()):
            assert reproduction(words[3:]) == 0, line
    else:
        words = words[words.index("gtp_vit.cli.app") :] if words[0] == "torchrun" else words
        assert words[0] in ("gtp-vit", "gtp_vit.cli.app"), line
        check_flags(words[1:])
        ready = changed(words[1:], fashion)
        key = None if ready is None else tuple(without(ready, "--output"))
        if ready is not None and key not in DONE:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
                assert main(ready) == 0, f"{line}\n{ready}\n{said.getvalue()}"
            DONE.add(key)


def names_for(page):
    """What a page takes as given."""
    names = {"gtp_vit": gtp_vit, "timm": timm, "torch": torch, "data_dir": Path("imagenet")}
    names["model"] = gtp_vit.create_model("fashion_vit")
    names["images"] = bundled.normalise(bundled.sample_images()[0][:40])
    if page.name == "features.md":
        names["images"] = torch.randn(2, 3, 160, 160)
    if page.name == "speed-up.md" and small_models.HAS_TRANSFORMERS:
        from support.vlms import gemma3, llava, llava_processor

        names |= {"llava": llava(), "processor": llava_processor(), "gemma3": gemma3()}
    return names


def lacks(code):
    return any(
        importlib.util.find_spec(name) is None and (name in code or (name == "transformers" and "llava" in code))
        for name in ("transformers", "open_clip")
    )


@pytest.fixture
def fashion_when_needed(request, monkeypatch):
    """The exported file of the embedded model; what is exported here is not traced again."""
    from gtp_vit.engines import program

    def folder():
        made = request.getfixturevalue("fashion")

        def traced(_, path):
            import onnx

            stored = onnx.load(made / "fashion_vit-gtp_plus-f32.onnx")
            del stored.metadata_props[:]
            onnx.save(stored, path)

        monkeypatch.setattr(program, "write_onnx", traced)
        return made

    return folder


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DynamicViT's predictors are untrained")
@pytest.mark.filterwarnings("ignore:__array__ implementation")  # transformers' processor, of NumPy 2
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name_of)
def test_commands_and_code_run(page, here, fashion_when_needed):
    variables, names = {}, None
    for language, text in blocks(page):
        if language in COMMAND:
            for line in text.splitlines():
                if not (line.startswith("gtp-vit export") and not torch_can_export()):
                    run_line(line, fashion_when_needed, variables)
        elif language in CODE and not lacks(text):
            names = names_for(page) if names is None else names
            for old, new in REPLACED:
                text = text.replace(old, new)
            exec(compile(text, name_of(page), "exec"), names)
    if page.name == "README.md":
        assert names["logits"].shape == (1, 1000)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_inside_sentences_have_flags_that_exist(page):
    text = FENCE.sub("", page.read_text())
    for line in re.findall(r"`gtp-vit ([^`\n]*)`", text):
        words = shlex.split(line.replace("\n", " "))
        if words[0] in COMMANDS:
            check_flags(words)
        else:
            assert words[0] in ("COMMAND",), line


HEADERS = {"ov::": ("openvino/openvino.hpp", "openvino"), "Ort::": ("onnxruntime_cxx_api.h", "onnxruntime")}


@pytest.mark.slow
@pytest.mark.parametrize("prefix", HEADERS)
def test_the_code_in_cpp_compiles(prefix, tmp_path):
    """Of pip's packages only OpenVINO's has its headers."""
    header, module = HEADERS[prefix]
    found = importlib.util.find_spec(module)
    places = [Path("/usr/include"), Path("/usr/include/onnxruntime")]
    places += [] if found is None else [Path(found.origin).parent / "include"]
    folder = next((place for place in places if (place / header).is_file()), None)
    if folder is None or shutil.which("g++") is None:
        pytest.skip(f"{header} or g++ is not here")
    (code,) = [
        text for language, text in blocks(ROOT / "docs/guides/deploy.md") if language == "cpp" and prefix in text
    ]
    source = tmp_path / "snippet.cpp"
    source.write_text(
        f"#include <array>\n#include <vector>\n#include <{header}>\n"
        f"int main() {{ int64_t batch = 1; std::vector<float> pixels(3 * 224 * 224);\n{code}}}\n"
    )
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", "-w", f"-I{folder}", source], check=True)
