"""A hook of mkdocs: pages and files that are linked but lie outside docs/ come along, so that no link breaks.

CHANGELOG.md and CONTRIBUTING.md become pages; every other file that a page links to, e.g. examples/serve.py, is copied.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PAGES = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)((?:#[^)\s]*)?)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add what is outside."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for file in list(files.documentation_pages()):
        for target, _ in LINK.findall(file.content_string):
            outside = _outside(file.src_uri, target)
            name = None if outside is None else _in_site(outside)
            if name is not None and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(ROOT / outside)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to where things are in the site."""
    here = page.file.src_uri

    def moved(link: re.Match[str]) -> str:
        target, anchor = link.groups()
        where = _outside(here, target)
        if where is None:
            at_root = here in PAGES and target.startswith("docs/")
            return f"]({target.removeprefix('docs/')}{anchor})" if at_root else link[0]
        return f"]({posixpath.relpath(_in_site(where), posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(moved, markdown)


def _outside(page: str, target: str) -> str | None:
    """Where in the repository a link of a page leads, if that is outside docs/."""
    start = "" if page in PAGES else posixpath.join("docs", posixpath.dirname(page))
    path = posixpath.normpath(posixpath.join(start, target))
    return None if path == "docs" or path.startswith(("docs/", "..")) or not (ROOT / path).is_file() else path


def _in_site(path: str) -> str:
    """Where the site has a file of the repository; other pages are shown as text."""
    pages = {source: name for name, source in PAGES.items()}
    return pages.get(path, f"files/{path}{'.txt' if path.endswith('.md') else ''}")
