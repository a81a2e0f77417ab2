"""Every sentence that the package says to people, in one list, for a reader who corrects the English.

    python docs/list_messages.py             # errors, warnings and what commands print, with file and line
    python docs/list_messages.py --help-texts  # the help of all commands

What is filled in while the program runs stands in braces, as in the sources.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "gtp_vit"
# Functions whose arguments are sentences, besides exceptions.
SPEAKING = {"warn", "print", "print_text", "say", "fail", "status"}


def text_of(node: ast.AST) -> str:
    """A string as it stands in the source, its parts joined; "" for what is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(
                text_of(value) if isinstance(value, ast.Constant) else f"{{{ast.unparse(value.value)}}}"  # type: ignore[attr-defined]
                for value in values
            )
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return text_of(left) + text_of(right)
        case ast.IfExp(body=body, orelse=orelse):
            return " | ".join(filter(None, (text_of(body), text_of(orelse))))
    return ""


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each sentence in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        calls = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            calls = [node.exc]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in SPEAKING:
            calls = [node]
        elif isinstance(node, ast.Return) and node.value is not None and " " in (text := text_of(node.value)):
            yield node.lineno, text  # reasons that somebody else raises
        for call in calls:
            for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
                if " " in (text := text_of(argument)):
                    yield node.lineno, text


def help_texts() -> Iterator[str]:
    """The help of each command, as people see it."""
    import contextlib
    import io

    from gtp_vit.cli.app import COMMANDS, main

    for words in ([], *([name] for name in COMMANDS)):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            main([*words, "--help"])
        yield f"$ gtp-vit {' '.join([*words, '--help'])}\n{out.getvalue()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--help-texts", action="store_true", help="the help of all commands instead")
    parser.add_argument("folder", nargs="?", default="", help="only this room of the package, e.g. cli")
    options = parser.parse_args()
    if options.help_texts:
        print(*help_texts(), sep="\n")
        return
    for path in sorted((PACKAGE / options.folder).rglob("*.py")):
        for line, text in sorted(set(messages(path))):
            print(f"{path.relative_to(PACKAGE)}:{line}: {' '.join(text.split())}")


if __name__ == "__main__":
    main()
