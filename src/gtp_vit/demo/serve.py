"""serve: the page on this machine's own address, with nothing from outside.

Gradio asks a server of its own for its newest version and reports its use, unless it is told not to before it is
imported. Browsers are told to load nothing from elsewhere, whatever a page or a library asks for.
"""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gtp_vit.demo.guard import Guard
from gtp_vit.demo.upload import MAX_BYTES
from gtp_vit.errors import GTPError, check_range, first_line, printable

LOCAL = "127.0.0.1"
PORT = 7860
POLL_SECONDS = 0.05  # seconds
MAX_PORTS = 100  # ports, one after the other
FOLDER = Path(__file__).parent


def check_extra() -> None:
    """Raise with the command that installs Gradio, if it is missing."""
    if importlib.util.find_spec("gradio") is None:
        raise GTPError("gtp-vit demo needs gradio, which is not installed: pip install 'gtp-vit[demo]'")


@contextmanager
def gradio_without_telemetry() -> Iterator[None]:
    """Gradio without telemetry, with a folder of its own for uploads, which is deleted at the end."""
    folder = tempfile.mkdtemp(prefix="gtp-vit-demo-")  # readable by this user only
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["GRADIO_TEMP_DIR"] = folder
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def listen(host: str, first: int) -> socket.socket:
    """A socket that listens on the first free port from the wanted one on."""
    check_range("--port", first, 1, 65535, integer=True)
    last = min(first + MAX_PORTS, 65536)
    for port in range(first, last):
        server = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind((host, port))
            server.listen()
        except OSError as error:
            server.close()
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                continue
            raise GTPError(f"--host is {host}, which is not an address of this machine: {error.strerror}") from error
        return server
    raise GTPError(f"the ports {first} to {last - 1} are all in use; give another --port")


def address_of(host: str, listening: socket.socket) -> str:
    """Where a browser on this machine finds the page."""
    name = LOCAL if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}/"


def is_local(host: str) -> bool:
    """Can only this machine reach the address?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server_of(page: Any, host: str) -> Any:
    """A server for the page; its `run(sockets=[...])` serves until it is interrupted.

    Not `page.launch`, which asks itself over the network whether it is there, and fails behind some proxies.
    """
    import gradio as gr
    import uvicorn
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, folder=Path(os.environ["GRADIO_TEMP_DIR"]))
    if is_local(host):  # a name on the web that leads here is not us
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=[LOCAL, "localhost", "[::1]"])
    gr.mount_gradio_app(
        app,
        page,
        path="/",
        server_name=host,
        show_error=True,
        max_file_size=MAX_BYTES,
        allowed_paths=[],
        run_history=False,
        enable_monitoring=False,
        mcp_server=False,
        ssr_mode=False,
        pwa=False,
        footer_links=[],
        css_paths=FOLDER / "page.css",
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
    )
    # Gradio looks every millisecond for work, which keeps a tenth of a core busy; 50 are not noticed.
    page._queue.sleep_when_free = POLL_SECONDS
    _log_in_one_line()
    page.has_launched = True  # else Gradio does not check which files it may read: it does so after `launch` only
    return uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))


class _OneLine:
    """Stands for Python's module traceback where Gradio prints what programs made up that called it."""

    @staticmethod
    def print_exc() -> None:
        error = sys.exc_info()[1]
        if error is not None:
            print(printable(f"gtp-vit demo: {type(error).__name__}: {first_line(error)}"), file=sys.stderr)


def _log_in_one_line() -> None:
    """Gradio prints a traceback for every call that does not fit; a line says as much."""
    for name in ("gradio.queueing", "gradio.routes", "gradio.utils"):
        module = sys.modules.get(name)
        if hasattr(module, "traceback"):
            module.traceback = _OneLine  # type: ignore[union-attr]
