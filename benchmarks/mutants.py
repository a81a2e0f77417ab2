"""Do the tests find a defect? Plants small ones in core/ and methods/, one at a time, and runs the tests on each.

    python benchmarks/mutants.py list --count 150 --seed 0
    python benchmarks/mutants.py run --tree . --out all.json --workers 2 -- tests src
    python benchmarks/mutants.py compare before.json fast.json all.json

A mutant is a source file with one small change. It lives in memory only: nothing is written into the tree. One process
imports the slow libraries; each mutant gets a fork of it, which serves the changed source to everyone who imports the
module. Processes that tests start get it, too, through PYTHONPATH.

Killed: a test fails, cannot be collected, hangs, or the process dies. Survived: all tests pass. Anything else, e.g.
that no test was there, is an error of the run and counts as neither.

Results are written after each mutant; the same command again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NoReturn

import pytest

KINDS = ("end", "test", "fail")  # of events: pytest has returned, a test begins, something fails
FOLDERS = ("src/gtp_vit/core", "src/gtp_vit/methods")
OWN_CODES = {70: "this script failed", 71: "the module was tested without the change"}
# pytest would rather have loaded hypothesis itself.
EARLY = "ignore:Module already imported so cannot be rewritten:pytest.PytestAssertRewriteWarning"


# ------------------------------------------------------------------------------------------------ what to change


@dataclass(frozen=True)
class Mutant:
    """One change in one file."""

    path: str  # relative to the tree
    module: str
    key: str  # names the change whatever else is in the list
    source: str  # the whole file with the change
    description: str


OPERATOR = r"[-+*/<>=!]+|\b(not\s+in|is\s+not|in|is|and|or)\b"
SWAPS = {"<": ["<=", ">="], "<=": ["<", ">"], ">": [">=", "<="], ">=": [">", "<"]}
PAIRS = ["== !=", "+ -", "* /", "+= -=", "*= /=", "and or", "amax amin", "argmax argmin", "max min", "maximum minimum"]
for first, second in [*map(str.split, PAIRS), ("in", "not in"), ("is", "is not"), ("clamp_min", "clamp_max")]:
    SWAPS |= {first: [second], second: [first]}


class Places:
    """All nodes of a file that can be changed: (start, end) -> first line, texts the node can become."""

    def __init__(self, source: bytes) -> None:
        self.source = source
        self.line_starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
        self.choices: dict[tuple[int, int], tuple[int, list[str]]] = {}
        self.errors = {"warn"}  # what is called with words for people
        self.visit(ast.parse(source))

    def span(self, node: Any) -> tuple[int, int]:
        start, end = self.line_starts[node.lineno - 1], self.line_starts[node.end_lineno - 1]
        return start + node.col_offset, end + node.end_col_offset

    def text(self, node: Any) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def operand(self, node: Any) -> str:
        """The text of a node, safe to put anywhere."""
        atom = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
        return self.text(node) if atom else f"({self.text(node)})"

    def add(self, node: Any, *texts: str) -> None:
        if texts:
            self.choices.setdefault(self.span(node), (node.lineno, []))[1].extend(texts)

    def swap(self, node: Any, left: Any, right: Any) -> None:
        """Replace the operator between two parts of a node."""
        (start, end), first, last = self.span(node), self.span(left)[1], self.span(right)[0]
        between = self.source[first:last].decode()
        match = re.search(OPERATOR, between)
        if match and "#" not in between:
            before = self.source[start:first].decode() + between[: match.start()]
            after = between[match.end() :] + self.source[last:end].decode()
            self.add(node, *(before + new + after for new in SWAPS.get(" ".join(match[0].split()), [])))

    def visit(self, node: Any) -> None:
        """Add what a node can become, and its parts."""
        parts = list(ast.iter_child_nodes(node))
        match node:
            # What is never changed: annotations and words for people.
            case ast.JoinedStr() | ast.Raise() | ast.arg():
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                parts = [] if node.name in ("__repr__", "__str__") else [node.args, *node.body]
            case ast.ClassDef():
                parts = node.body
            case ast.AnnAssign():
                parts = [node.value] if node.value else []
            case ast.Assert():
                parts = [node.test]
            case ast.ImportFrom(module=str(module)) if module.endswith("errors"):
                self.errors |= {alias.asname or alias.name for alias in node.names if alias.name[0].isupper()}
            case ast.If() if re.search(r"\bTYPE_CHECKING\b|__name__", self.text(node.test)):
                return
            # What can be.
            case ast.If() | ast.IfExp() | ast.comprehension():
                for test in node.ifs if isinstance(node, ast.comprehension) else [node.test]:
                    self.add(test, f"(not {self.operand(test)})")  # in brackets, as it may span lines
            case ast.UnaryOp(op=ast.Not()):
                self.add(node, self.operand(node.operand))
            case ast.Compare():
                for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
                    self.swap(node, left, right)
            case ast.BoolOp(values=[left, right]):
                self.swap(node, left, right)
            case ast.BoolOp():
                new = " or " if isinstance(node.op, ast.And) else " and "
                self.add(node, f"({new.join(map(self.operand, node.values))})")
            case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div()) if not (
                is_text(node.left) or is_text(node.right)
            ):
                self.swap(node, node.left, node.right)
                self.add(node, self.operand(node.left))
                if isinstance(node.op, ast.Add | ast.Mult):
                    self.add(node, self.operand(node.right))
            case ast.AugAssign():
                self.swap(node, node.target, node.value)
                self.add(node, "pass")
            case ast.Expr(value=ast.Call()):
                self.add(node, "pass")
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                self.add(node.func, *(self.text(node.func).removesuffix(name) + new for new in SWAPS.get(name, [])))
                if name in self.errors or name.endswith(("Error", "Warning", "Exception")):
                    return
            case ast.keyword(arg="descending" | "largest" | "keepdim", value=ast.Constant(value=bool(flag))):
                self.add(node.value, str(not flag))
            case ast.keyword(arg="dim" | "axis") if (number := integer(node.value)) is not None:
                self.add(node.value, *(str(other) for other in (-1, 0, 1) if other != number))
                return
            case ast.Subscript():
                indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                parts = [node.value, *(index for index in indices if integer(index) is None)]
                for index in indices:
                    if (number := integer(index)) is not None:
                        self.add(index, str(number + 1), str(number - 1))
            case ast.Slice():
                for bound, sign in ((node.lower, "+"), (node.upper, "-")):
                    if bound is not None:
                        self.add(bound, f"{self.operand(bound)} {sign} 1")
            case ast.Constant(value=float(number)):
                self.add(node, repr(float(f"{number * 1.2 or 0.1:.6g}")))
            case ast.Constant() if (number := integer(node)) is not None:
                self.add(node, str(number + 1))
        for part in parts:
            self.visit(part)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def integer(node: ast.AST) -> int | None:
    """The value of an integer, also of a negative one."""
    negative = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    value = getattr(node.operand if negative else node, "value", None)
    return (-value if negative else value) if type(value) is int else None


def short(text: str) -> str:
    return text if len(text) <= 70 else f"{text[:67]}..."


def describe(old: str, new: str, line: str) -> str:
    old, new, line = (" ".join(text.split()) for text in (old, new, line))
    where = f" in {short(line)}" if len(old) < 12 and old != line else ""
    if short(old) == short(new):  # they differ behind what is shown
        same = next((at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
        old, new = (f"...{text[max(same - 20, 0) :]}" for text in (old, new))
    return f"{short(old)} -> {short(new)}{where}"


def program(source: bytes) -> str | None:
    """The same for sources that do the same, None for one that does not compile."""
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return None
    return ast.dump(ast.parse(source))


def mutants_of(tree: Path, path: str, places: list[Any], seed: int) -> Iterator[tuple[Any, Mutant]]:
    """One mutant for each node of a file that can be changed, in an order that the seed and the file's text decide."""
    original = (tree / path).read_bytes()
    chance = random.Random(f"{seed} {path} {hashlib.sha256(original).hexdigest()}")
    lines = original.decode().splitlines()
    module = ".".join(Path(path).with_suffix("").parts[1:]).removesuffix(".__init__")
    useless, sources = (None, program(original)), set()
    for (start, end), (line, choices) in chance.sample(places, len(places)):
        new = chance.choice(choices)
        source = original[:start] + new.encode() + original[end:]
        if source not in sources and program(source) not in useless:
            sources.add(source)
            where, what = f"{Path(path).name}:{line}", describe(original[start:end].decode(), new, lines[line - 1])
            key = f"{path}:{start}-{end}: {new}"
            yield (start, end), Mutant(path, module, key, source.decode(), f"{where}: {what}")


def choose(tree: Path, count: int, seed: int) -> list[Mutant]:
    """`count` mutants, from each file in proportion to what it has, sorted by place."""
    paths = sorted(str(path.relative_to(tree)) for folder in FOLDERS for path in (tree / folder).rglob("*.py"))
    places = {path: sorted(Places((tree / path).read_bytes()).choices.items()) for path in paths}
    total = sum(map(len, places.values()))
    if not total:
        sys.exit(f"{tree} has nothing to change in {' and '.join(FOLDERS)}")
    count = min(count, total)
    shares = {path: count * len(places[path]) / total for path in paths}
    counts = {path: int(share) for path, share in shares.items()}
    by_remainder = sorted(paths, key=lambda path: (counts[path] - shares[path], path))
    for path in by_remainder[: count - sum(counts.values())]:
        counts[path] += 1
    mutants = (sorted(islice(mutants_of(tree, path, places[path], seed), counts[path])) for path in paths)
    return [mutant for each in mutants for _, mutant in each]


# ------------------------------------------------------------------------------------------------ one run of pytest

# Runs in the fork and, as sitecustomize, in all Python processes that tests start.
HOOK = '''\
"""Serves one changed source file to whoever imports its module."""

import json
import linecache
import os
import sys
from importlib.machinery import PathFinder, SourceFileLoader


class MutantLoader(SourceFileLoader):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target) if name == MUTANT["module"] else None
        if spec is None or os.path.realpath(spec.origin) != MUTANT["path"]:
            return None  # another module, or the same one of another tree
        spec.loader, spec.cached = cls(name, spec.origin), None
        return spec

    def get_code(self, name):  # reads and writes no .pyc
        source = MUTANT["source"]
        linecache.cache[self.path] = (len(source), None, source.splitlines(keepends=True), self.path)
        open(MUTANT["sign"], "w").close()
        return compile(source, self.path, "exec")


if "GTP_VIT_MUTANT" in os.environ:
    with open(os.environ["GTP_VIT_MUTANT"], encoding="utf-8") as file:
        MUTANT = json.load(file)
    sys.meta_path.insert(0, MutantLoader)
'''


class PytestFork:
    """pytest on one mutant, or on none, in a fork of this process; in the fork also a plugin of pytest."""

    def __init__(self, options: argparse.Namespace, name: str, mutant: Mutant | None) -> None:
        self.options, self.mutant, self.log = options, mutant, options.logs / f"{name}.log"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=options.scratch))
        self.import_sign = self.folder / "import"  # there once the mutant was imported
        self.events = self.folder / "events"
        self.events.touch()
        self.start = time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self.test()

    def result(self) -> dict[str, Any] | None:
        """None while it runs."""
        seconds = time.monotonic() - self.start
        # WNOWAIT: its number must not be free before its group has ended.
        runs = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        if runs and seconds < self.options.timeout:
            return None
        code = self.end()
        events = [line.partition(" ") for line in self.events.read_text().splitlines()]
        ends, tests, failures = ([name for kind, _, name in events if kind == each] for each in KINDS)
        status, how = verdict(None if runs else code, bool(ends), tests, failures)
        if self.mutant is not None and not self.import_sign.exists():
            status, how = ("error" if status == "killed" else status), f"{how}, the mutant was not imported"
        if status != "survived" and tests + failures:
            how += f", at {[*failures, *tests[-1:]][0]}"
        shutil.rmtree(self.folder, ignore_errors=True)
        return {"status": status, "how": how, "seconds": round(seconds, 2), "tests": len(tests)}

    def end(self) -> int:
        """End it with all that it started. Its exit code, negative for a signal."""
        os.killpg(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    # In the fork.

    def add(self, event: str, name: str) -> None:
        with self.events.open("a") as file:
            file.write(f"{event} {name}\n")

    def pytest_configure(self) -> None:
        """The mutant comes first: pytest loads source files that its arguments name by itself, from the disk."""
        sys.meta_path.sort(key=lambda finder: getattr(finder, "__name__", "") != "MutantLoader")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.add("test", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.add("fail", report.nodeid)

    pytest_collectreport = pytest_runtest_logreport

    def test(self) -> NoReturn:
        """Ends with pytest's exit code or one of OWN_CODES."""
        code = 70
        try:
            os.setsid()  # a group of its own
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            sys.stdout.reconfigure(line_buffering=True)
            self.prepare()
            own = ["-x", "-p", "no:cacheprovider", "-q", f"--basetemp={self.folder / 'base'}", "-W", EARLY]
            sys.argv = ["pytest", *own, *self.options.arguments]
            code = int(pytest.main(sys.argv[1:], plugins=[self]))
            if self.mutant is not None and self.mutant.module in sys.modules and not self.import_sign.exists():
                code = 71
            self.add("end", f"{code}")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def prepare(self) -> None:
        """Make this process one that starts pytest in the tree, with folders of its own."""
        tree, hook, temporary = self.options.tree, self.folder / "hook", self.folder / "temporary"
        hook.mkdir()
        temporary.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK)
        folders = [str(hook), str(tree / "src"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # for processes that tests start
        os.environ["TMPDIR"] = str(temporary)
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(self.folder / "hypothesis")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.options.scratch / "inductor")
        tempfile.tempdir = None
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(self.options.scratch / "pycache")  # not into the tree
        sys.path[:1] = [str(tree / "src"), str(tree)]  # instead of the folder of this script
        os.chdir(tree)
        if self.mutant is not None:
            path, sign = os.path.realpath(self.mutant.path), str(self.import_sign)
            content = {"path": path, "module": self.mutant.module, "source": self.mutant.source, "sign": sign}
            (self.folder / "mutant.json").write_text(json.dumps(content))
            os.environ["GTP_VIT_MUTANT"] = str(self.folder / "mutant.json")
            exec(HOOK, {})


def verdict(code: int | None, complete: bool, tests: list[str], failures: list[str]) -> tuple[str, str]:
    """(status, why) from what is left of a fork; its code is None if it took too long."""
    if code is None:
        return "killed", "timeout"
    if code < 0:
        return "killed", f"signal {-code}"
    if code in OWN_CODES:
        return "error", OWN_CODES[code]
    if code != 0 and tests and not complete:
        return "killed", f"the process ended with code {code}"
    if code == 0 and tests and complete:
        return "survived", "all tests passed"
    if code == 1 and failures and complete:
        return "killed", "a test failed"
    if code == 2 and failures and complete and not tests:
        return "killed", "a file could not be collected"
    return "error", f"the process ended with code {code}, {len(tests)} tests were run"


def results(options: argparse.Namespace, mutants: dict[Any, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """What the tests say of each mutant, by its name, as soon as they say it."""
    queue, forks = list(mutants), {}
    try:
        while queue or forks:
            while queue and len(forks) < options.workers:
                name = queue.pop(0)
                forks[name] = PytestFork(options, name, mutants[name])
            time.sleep(0.05)
            for name in list(forks):
                result = forks[name].result()
                if result is not None:
                    del forks[name]
                    yield name, result
    finally:
        for fork in forks.values():
            fork.end()


# ------------------------------------------------------------------------------------------------ commands


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def fingerprint(tree: Path) -> str:
    """Names the sources and tests of a tree by what is in them."""
    paths = [tree / "pyproject.toml", *sorted((tree / "src").rglob("*")), *sorted((tree / "tests").rglob("*"))]
    files = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    return digest("".join(f"{path.relative_to(tree)} {digest(path.read_bytes())}\n" for path in files).encode())


def write(path: Path, report: dict[str, Any]) -> None:
    """All or nothing, should it be interrupted."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(report, indent=1))
    part.replace(path)


def summary(entries: list[dict[str, Any]]) -> str:
    statuses = [entry["status"] for entry in entries]
    return ", ".join(f"{statuses.count(status)} {status}" for status in ("killed", "survived", "error"))


def warm_up() -> None:
    """Import what is slow, on one thread, but nothing of the tree."""
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # as in tests/conftest.py
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("torch", "torchvision", "timm", "transformers", "hypothesis"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)


def report_so_far(options: argparse.Namespace) -> dict[str, Any]:
    """The results of the same tests on the same tree; others are put aside."""
    setting = {"tree": fingerprint(options.tree), "arguments": options.arguments, "timeout": options.timeout}
    setting["script"] = digest(Path(__file__).read_bytes())
    if options.out.exists():
        report = json.loads(options.out.read_text())
        if report["setting"] == setting:
            return report
        aside = options.out.replace(f"{options.out}.old")
        print(f"{options.out} was of another tree, other tests or other options: it is {aside} now")
    return {"setting": setting, "baseline": None, "mutants": {}}


def check_baseline(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """The tests must pass without a mutant, with time to spare."""
    if report["baseline"] is None:
        _, result = next(results(options, {"baseline": None}))
        if result["status"] != "survived":
            sys.exit(f"without a mutant: {result['how']}; see {options.logs / 'baseline.log'}")
        report["baseline"] = result
    seconds = report["baseline"]["seconds"]
    print(f"without a mutant: {report['baseline']['tests']} tests pass in {seconds:.1f} s", flush=True)
    if seconds > options.timeout / 2:
        sys.exit(f"--timeout {options.timeout:g} is less than twice that: slow may look like killed")


def run_tests(options: argparse.Namespace, mutants: dict[int, Mutant]) -> None:
    report = report_so_far(options)
    entries = report["mutants"]
    rest = {number: mutant for number, mutant in mutants.items() if mutant.key not in entries}
    for number in mutants.keys() - rest.keys():
        entries[mutants[number].key]["id"] = number
    options.logs = options.out.with_name(f"{options.out.name}.logs")
    options.logs.mkdir(exist_ok=True, parents=True)
    warm_up()
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as scratch:
        options.scratch = Path(scratch)
        check_baseline(options, report)
        write(options.out, report)
        print(f"{len(mutants) - len(rest)} mutants are done, {len(rest)} to run", flush=True)
        with contextlib.closing(results(options, rest)) as stream:
            for number, result in stream:
                mutant = mutants[number]
                entries[mutant.key] = {"id": number, "path": mutant.path, "description": mutant.description, **result}
                write(options.out, report)
                line = f"{number:4} {result['status']:8} {result['seconds']:6.1f} s  {mutant.description}"
                print(f"{line}  [{result['how']}]", flush=True)
    selection = [entries[mutant.key] for mutant in mutants.values()]
    print(summary(selection))
    if fingerprint(options.tree) != report["setting"]["tree"]:
        sys.exit(f"{options.tree} was changed while its mutants ran: these results are of no tree; run on a copy")
    if any(entry["status"] == "error" for entry in selection):
        sys.exit(2)


def compare(first: Path, *others: Path) -> None:
    """Which kills of the first file do the others have, too?"""
    reports = {path: json.loads(path.read_text())["mutants"] for path in (first, *others)}
    for path, entries in reports.items():
        print(f"{path}: {len(entries)} mutants, {summary(list(entries.values()))}")
    kills = {key: entry for key, entry in reports[first].items() if entry["status"] == "killed"}
    complete = True
    for path in others:
        entries = {key: reports[path].get(key, {"status": "error", "how": "was not run"}) for key in kills}
        statuses = [entry["status"] for entry in entries.values()]
        same, total = statuses.count("killed"), len(statuses) - statuses.count("error")
        print(f"\n{path} kills {same} of {total} that {first} kills: {100 * same / max(total, 1):.1f} %")
        for key, kill in sorted(kills.items(), key=lambda item: item[1]["id"]):
            where = f"{kill['id']:4} {kill['path'].removesuffix(Path(kill['path']).name)}{kill['description']}"
            if entries[key]["status"] == "survived":
                print(f"  missed {where}")
            elif entries[key]["status"] == "error":
                print(f"  not judged {where}: {entries[key]['how']}")
        complete = complete and "error" not in statuses
    if not complete:
        sys.exit(2)


def main() -> None:
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("list", "show the mutants"), ("run", "run the tests on each")):
        command = commands.add_parser(name, help=what)
        command.add_argument("--tree", type=Path, default=Path(), help="where src/ and tests/ are")
        command.add_argument("--count", type=int, default=150)
        command.add_argument("--seed", type=int, default=0)
        if name == "run":
            command.add_argument("--out", type=Path, required=True)
            command.add_argument("--workers", type=int, default=2)
            command.add_argument("--timeout", type=float, default=900, help="seconds")
            command.add_argument("--only", type=int, nargs="+", help="numbers of mutants")
    command = commands.add_parser("compare", help="what does each find of what the first finds?")
    command.add_argument("reports", type=Path, nargs=3, help="before, fast, all")
    options = parser.parse_args(words[:end])
    options.arguments = words[end + 1 :]
    if any(re.match(r"-n|--numprocesses|--dist|--basetemp", word) for word in options.arguments):
        parser.error("one mutant is one process with its own --basetemp: no -n, --dist or --basetemp")
    if options.command == "compare":
        compare(*options.reports)
        return
    options.tree = options.tree.resolve()
    mutants = dict(enumerate(choose(options.tree, options.count, options.seed)))
    if options.command == "run":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that forks and temporary folders go
        options.out = options.out.resolve()
        run_tests(options, {number: mutants[number] for number in options.only or mutants})
    else:
        print(*(f"{number:4} {mutant.description}" for number, mutant in mutants.items()), sep="\n")


if __name__ == "__main__":
    main()
