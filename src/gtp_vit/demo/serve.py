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
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gtp_vit.demo.upload import MOST_BYTES
from gtp_vit.errors import GTPError, check_range

LOCAL = "127.0.0.1"
PORT = 7860
TRIED = 100  # ports, one after the other
FOLDER = Path(__file__).parent
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


def check_extra() -> None:
    """Raise with the command that installs Gradio, if it is missing."""
    if importlib.util.find_spec("gradio") is None:
        raise GTPError("gtp-vit demo needs gradio, which is not installed: pip install 'gtp-vit[demo]'")


@contextmanager
def quiet_gradio() -> Iterator[None]:
    """Gradio without telemetry, with a folder of its own for uploads, which is deleted at the end."""
    folder = tempfile.mkdtemp(prefix="gtp-vit-demo-")  # readable by this user only
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["GRADIO_TEMP_DIR"] = folder
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def free_port(host: str, wanted: int) -> int:
    """The first free port from the wanted one on."""
    check_range("--port", wanted, 1, 65535, whole=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = min(wanted + TRIED, 65536)
    for port in range(wanted, last):
        with socket.socket(family, socket.SOCK_STREAM) as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                taken.bind((host, port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise GTPError(f"--host is {host}, which is no address of this machine: {error.strerror}") from error
            return port
    raise GTPError(f"the ports {wanted} to {last - 1} are all in use; give another --port")


def is_local(host: str) -> bool:
    """Can only this machine reach the address?"""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def launch(page: Any, host: str, port: int) -> str:
    """Serve a page in threads of this process; returns its address."""
    import gradio as gr
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    middleware = [Middleware(Guard)]
    if is_local(host):  # a name on the web that leads here is not us
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=[LOCAL, "localhost", "[::1]"]))
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        share=False,
        inbrowser=False,
        prevent_thread_lock=True,
        quiet=True,
        show_error=True,
        max_file_size=MOST_BYTES,
        allowed_paths=[],
        enable_monitoring=False,
        mcp_server=False,
        ssr_mode=False,
        pwa=False,
        footer_links=[],
        css_paths=FOLDER / "page.css",
        theme=gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]),
        app_kwargs={"middleware": middleware, "docs_url": None, "redoc_url": None, "openapi_url": None},
    )
    return str(address)


class Guard:
    """Adds the headers that keep a browser from loading anything from elsewhere."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *HEADERS.items()]
            await send(message)

        await self.app(scope, receive, guarded if scope["type"] == "http" else send)
