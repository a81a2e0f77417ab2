"""guard: which requests reach the page, what they may load, and how much of what was uploaded is kept.

Any page on the web can make a browser send requests to this machine. Browsers say where a request comes from; what does
not come from the demo's own page is refused before anything of it is stored or computed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gtp_vit.demo.upload import MAX_BYTES
from gtp_vit.errors import first_line, printable

MAX_BODY_BYTES = 2 * MAX_BYTES  # of a request: one picture, and room for Gradio to say that it is too large
MAX_STORED_BYTES = 200 * 2**20  # of all uploads together; then the oldest go
INLINE = "'self' 'unsafe-inline'"  # Gradio's page has scripts and styles in it
POLICY = "; ".join(
    (
        "default-src 'self' data: blob:",
        f"script-src {INLINE} 'unsafe-eval' blob:",
        f"style-src {INLINE}",
        "img-src 'self' data: blob:",
        "media-src 'self' data: blob: mediastream:",
        "font-src 'self' data:",
        "connect-src 'self' data: blob:",
        "form-action 'self'",
        "base-uri 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    b"content-security-policy": POLICY.encode(),
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
}


class Guard:
    """Refuses requests of other pages, adds headers that keep a browser from loading from elsewhere, and tidies up."""

    def __init__(self, app: Any, folder: Path) -> None:
        """`folder` is where uploads lie; what is in it now belongs to the page and is kept."""
        self.app, self.folder = app, folder
        self.files_of_page = frozenset(_files(folder))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        method = scope.get("method", "GET")
        begun = False

        async def guarded(message: Any) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message["headers"], *HEADERS.items()]
            await send(message)

        refused = _refusal(method, headers)
        if refused is None:
            try:
                await self.app(scope, receive, guarded if scope["type"] == "http" else send)
            except Exception as error:  # Gradio's, on calls that somebody made up
                print(printable(f"gtp-vit demo: {type(error).__name__}: {first_line(error)}"), file=sys.stderr)
                if not begun and scope["type"] == "http":
                    await _answer(guarded, 500, "the demo cannot do that; reload the page")
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(guarded, *refused)
        if method == "POST":
            delete_oldest(self.folder, self.files_of_page)


def _refusal(method: str, headers: dict[str, str]) -> tuple[int, str] | None:
    """Status and text for a request that is refused; None for others."""
    if is_foreign(method, headers):
        return 403, "the demo takes requests of its own page only; open its address in the browser"
    if method != "POST":
        return None
    length = headers.get("content-length")
    if length is None or not length.isdigit() or "transfer-encoding" in headers:  # which overrules the length
        return 411, "say how long the request is (Content-Length)"
    if int(length) > MAX_BODY_BYTES:
        return 413, f"a request has at most {MAX_BODY_BYTES // 2**20} MB; send one picture at a time"
    return None


def is_foreign(method: str, headers: dict[str, str]) -> bool:
    """Was a request made by another page? Programs other than browsers do not say, and may come in."""
    origin, host = headers.get("origin"), headers.get("host", "").lower()
    if origin is not None and (not host or origin.partition("://")[2].lower() != host):
        return True
    if headers.get("sec-fetch-site") not in ("cross-site", "same-site"):
        return False
    return method not in ("GET", "HEAD") or headers.get("sec-fetch-mode") != "navigate"  # a link to the page is none


async def _answer(send: Any, status: int, text: str) -> None:
    body = text.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))  # what is left of the request is not read
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def delete_oldest(folder: Path, keep: Iterable[Path] = ()) -> None:
    """Delete the oldest uploads until all together are small enough."""
    known = []
    for path in _files(folder) - set(keep):
        with contextlib.suppress(FileNotFoundError):  # Gradio deletes old ones itself
            known.append((path, path.stat()))
    stored = sum(stat.st_size for _, stat in known)
    for path, stat in sorted(known, key=lambda pair: pair[1].st_mtime_ns):
        if stored <= MAX_STORED_BYTES:
            return
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # Gradio gives every upload a folder; it may hold others
            path.parent.rmdir()
        stored -= stat.st_size


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}
