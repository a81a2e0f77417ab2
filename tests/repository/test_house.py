"""Habits of the house: dependencies are declared, workflows and scripts are sound, stored formats stay readable."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest
import torch

import conftest
from gtp_vit import GTP, METHODS, GTPPlus, create_model, macs, method_from_dict, patch, read_recipe
from gtp_vit.testing import families

ROOT = Path(__file__).parents[2]
FORMATS = ROOT / "tests/formats"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def project():
    """pyproject.toml; Python 3.10 has no reader for it, pip brings one."""
    try:
        import tomllib
    except ImportError:
        from pip._vendor import tomli as tomllib
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(requirement):
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


def pins(file):
    """Distribution -> its versions in a file of constraints."""
    found = {}
    for line in (ROOT / file).read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r'([\w.-]+)==([\w.]+)(?:; python_version (?:<|>=) "3.11")?', line).groups()
            found.setdefault(name_of(name), []).append(version)
    return found


def third_party_imports(folder):
    """Top-level modules that the files of a folder import, anywhere; converters run in other environments."""
    found = set()
    for path in set((ROOT / folder).rglob("*.py")) - set((ROOT / folder).rglob("engines/*_script.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"gtp_vit"}


def test_the_package_declares_what_it_imports_and_nothing_else():
    distributions = metadata.packages_distributions()
    declared = project()["project"]
    required = {name_of(each) for each in declared["dependencies"]}
    optional = {name_of(each) for extra in declared["optional-dependencies"].values() for each in extra}
    by_torch = {"triton"}  # torch's wheels bring it where it works
    modules = third_party_imports("src") - by_torch
    imported = {name_of(distributions.get(module, [module])[0]) for module in modules}
    assert required <= imported <= required | optional


def test_core_needs_what_it_says():
    import gtp_vit.core

    assert third_party_imports("src/gtp_vit/core") == {"torch"}
    assert "Needs torch only." in gtp_vit.core.__doc__


def test_the_oldest_versions_that_are_tested_are_those_declared():
    oldest = pins("constraints-oldest.txt")
    for requirement in project()["project"]["dependencies"]:
        name, bound = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()
        (pinned,) = oldest[name]
        assert f"{pinned}.".startswith(f"{bound}."), requirement


def test_the_newest_versions_and_all_tools_are_pinned():
    declared = project()
    groups = [each for group in declared["dependency-groups"].values() for each in group if isinstance(each, str)]
    wanted = {name_of(each) for each in declared["project"]["dependencies"] + groups}
    assert {"include-group": "docs"} in declared["dependency-groups"]["dev"]  # a test builds the site
    assert wanted <= set(pins("constraints.txt"))


def tool(name):
    found = shutil.which(name, path=f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}")
    assert found, f"{name} is not installed; make test does it"
    return found


def lint(*workflows):
    words = [tool("zizmor"), "--offline", "--no-progress", "--strict-collection", "--persona=pedantic", *workflows]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_workflows_are_valid_have_few_rights_and_name_actions_by_their_commit():
    assert {path.name for path in WORKFLOWS} == {"tests.yml", "wheels.yml"}
    done = lint(*WORKFLOWS)
    assert done.returncode == 0, done.stdout + done.stderr
    for path in WORKFLOWS:
        assert "secrets." not in path.read_text()
        for used in re.findall(r"uses: (.*)", path.read_text()):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", used)


@pytest.mark.parametrize(("right", "wrong"), [("runs-on:", "run-on:"), ("permissions: {}", "permissions: write-all")])
def test_the_linter_finds_mistakes(tmp_path, right, wrong):
    workflow = tmp_path / "tests.yml"
    workflow.write_text((ROOT / ".github/workflows/tests.yml").read_text().replace(right, wrong))
    assert lint(workflow).returncode != 0


def test_workflows_run_on_the_oldest_python_and_call_what_exists():
    text = (ROOT / ".github/workflows/tests.yml").read_text()
    assert f'python-version: "{project()["project"]["requires-python"].removeprefix(">=")}"' in text
    assert "run: .ci/run" in text
    assert os.access(ROOT / ".ci/run", os.X_OK)
    for target in re.findall(r"make ([\w-]+)$", text + (ROOT / ".ci/run").read_text(), re.M):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) or target == "sanitize-short", target


def test_commits_are_checked_by_the_tools_of_make_lint():
    import yaml

    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    tools = {Path(hook["entry"].split()[0]).name for hook in local["hooks"]}
    makefile = (ROOT / "Makefile").read_text()
    checks = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.M)[1]
    assert tools == set(re.findall(r"bin/(\w+)", checks))
    assert re.search(r"^test: lint ", makefile, re.M)


@pytest.mark.parametrize("script", sorted(p for p in (ROOT / ".ci").iterdir() if not p.suffix), ids=lambda p: p.name)
def test_scripts_are_bash_that_can_be_run(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)


def test_a_test_that_ci_provides_for_may_not_skip():
    def report(reason, outcome="skipped"):
        where = ("test_browser.py", 1, f"Skipped: {reason}") if outcome == "skipped" else None
        return pytest.TestReport("id", ("test_browser.py", 1, "t"), {}, outcome, where, "setup")

    browser = "no Chromium here: install Debian's package chromium"
    assert conftest.unless_it_must_run(report(browser), "GTP_VIT_DATA Chromium").outcome == "failed"
    assert conftest.unless_it_must_run(report(browser), "GTP_VIT_DATA").outcome == "skipped"
    assert conftest.unless_it_must_run(report(browser), "").outcome == "skipped"
    assert conftest.unless_it_must_run(report("", "passed"), "Chromium").outcome == "passed"


def test_each_worker_has_one_thread_and_so_have_its_processes():
    assert torch.get_num_threads() == 1
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("method", [GTP(propagate=8), GTPPlus(remove=8)], ids=lambda method: method.name)
def test_two_threads_give_what_one_gives(method, two_threads):
    fast, images = patch(families.make("vit"), method), families.images("vit", 5)
    with torch.inference_mode():
        assert torch.get_num_threads() == 2
        together = fast(images)
        torch.set_num_threads(1)
        torch.testing.assert_close(together, fast(images), rtol=0, atol=1e-5)


def test_a_recipe_of_today_is_read_by_later_versions():
    """Never write this file anew: a new format gets a file of its own, and this one must still be read."""
    recipe, model = read_recipe(FORMATS / "recipe-1.json"), create_model("fashion_vit")
    schedule = (0, 0, 15, 21, 20, 19, 14, 8, 5, 9, 2, 0)
    assert recipe.method == GTPPlus(remove=schedule, importance_floor=0.5, preserve_norm=True, size_bias=0.9)
    assert recipe.model == "fashion_vit"
    assert recipe.provenance.target == {"macs": 0.65}
    fast = patch(model, FORMATS / "recipe-1.json")
    assert macs(fast).total == recipe.measured.macs == 88818560


def test_the_settings_of_every_method_of_today_are_read_by_later_versions():
    """Never change a line of this file; a new method adds one."""
    stored = json.loads((FORMATS / "methods-1.json").read_text())
    assert {settings["method"] for settings in stored} == set(METHODS)
    for settings in stored:
        method = method_from_dict(settings)
        assert json.loads(json.dumps(method.to_dict())).items() >= settings.items()
