"""What reaches the demo: requests of its own page, of a bounded size, and a bounded total of uploads."""

import asyncio
import os

import pytest

from gtp_vit.demo import guard
from gtp_vit.demo.guard import Guard, delete_oldest

HOST = "127.0.0.1:7860"
PAGE = f"http://{HOST}"


def ask(method="POST", app=None, folder=None, **headers):
    """Status of a request, and whether it reached the page."""
    reached, sent = [], []

    async def page(scope, receive, send):
        reached.append(scope)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        sent.append(message)

    given = {"host": HOST, "content-length": "10", **{key.replace("_", "-"): value for key, value in headers.items()}}
    scope = {"type": "http", "method": method, "path": "/gradio_api/upload"}
    scope["headers"] = [(key.encode(), value.encode()) for key, value in given.items() if value is not None]
    asyncio.run(Guard(app or page, folder)(scope, None, send))
    return sent[0]["status"], bool(reached), dict(sent[0]["headers"])


@pytest.fixture
def folder(tmp_path):
    return tmp_path


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "null", "host": ""},
        {"origin": "http://["},  # no address at all
        {"origin": HOST},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "http://localhost:7860"},  # the page is at 127.0.0.1
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"},  # a form of another page
        {"origin": "http://evil.example", "sec_fetch_site": "same-origin"},
    ],
    ids=str,
)
def test_requests_of_other_pages_are_refused(folder, headers):
    status, reached, answered = ask(folder=folder, **headers)
    assert (status, reached) == (403, False)
    assert b"content-security-policy" in answered


@pytest.mark.parametrize("headers", [{"sec_fetch_site": "cross-site"}, {"origin": "http://evil.example"}], ids=str)
def test_so_are_calls_that_only_read(folder, headers):
    assert ask("GET", folder=folder, **headers)[:2] == (403, False)


@pytest.mark.parametrize(
    "headers",
    [{}, {"origin": PAGE, "sec_fetch_site": "same-origin"}, {"origin": PAGE}, {"sec_fetch_site": "none"}],
    ids=str,
)
def test_the_page_itself_and_programs_come_in(folder, headers):
    for method in ("GET", "POST"):
        status, reached, answered = ask(method, folder=folder, **headers)
        assert (status, reached) == (200, True)
        assert b"content-security-policy" in answered


def test_a_link_to_the_page_may_be_followed(folder):
    assert ask("GET", folder=folder, sec_fetch_site="cross-site", sec_fetch_mode="navigate")[:2] == (200, True)


def test_requests_without_a_length_or_with_a_large_one_are_refused(folder):
    assert ask(folder=folder, content_length=None)[:2] == (411, False)
    assert ask(folder=folder, content_length="many")[:2] == (411, False)
    assert ask(folder=folder, transfer_encoding="chunked")[:2] == (411, False)  # the length is not that of the body
    assert ask(folder=folder, content_length=str(guard.MAX_BODY_BYTES + 1))[:2] == (413, False)
    assert ask(folder=folder, content_length=str(guard.MAX_BODY_BYTES))[:2] == (200, True)


def test_an_error_of_gradio_is_a_line_in_the_log_and_an_answer(folder, capsys):
    async def broken(scope, receive, send):
        raise KeyError("fn\x1b[31m")

    assert ask(app=broken, folder=folder)[0] == 500
    said = capsys.readouterr().err
    assert said == "gtp-vit demo: KeyError: 'fn\\x1b[31m'\n"
    assert "Traceback" not in said


def upload(folder, name, size, age):
    path = folder / name / "a.png"
    path.parent.mkdir()
    path.write_bytes(bytes(size))
    os.utime(path, (1_000_000 - age, 1_000_000 - age))
    return path


def test_the_oldest_uploads_go_when_there_are_too_many_bytes(folder, monkeypatch):
    monkeypatch.setattr(guard, "MAX_STORED_BYTES", 250)
    own = upload(folder, "examples", 500, age=99)  # of the page itself
    old, middle, new = (upload(folder, name, 100, age) for name, age in (("x", 30), ("y", 20), ("z", 10)))
    delete_oldest(folder, {own})
    assert [path.exists() for path in (own, old, middle, new)] == [True, False, True, True]
    assert not old.parent.exists()
    delete_oldest(folder, {own})
    assert middle.exists()


def test_an_upload_that_somebody_else_deletes_meanwhile_is_no_error(folder, monkeypatch):
    monkeypatch.setattr(guard, "MAX_STORED_BYTES", 50)
    here = upload(folder, "x", 100, age=1)
    monkeypatch.setattr(guard, "_files", lambda _: {here, folder / "y" / "gone.png"})
    delete_oldest(folder)
    assert not here.exists()


def test_every_upload_is_followed_by_tidying(folder, monkeypatch):
    monkeypatch.setattr(guard, "MAX_STORED_BYTES", 150)
    own = upload(folder, "examples", 500, age=99)
    arrived = []

    async def page(scope, receive, send):
        arrived.append(upload(folder, f"u{len(arrived)}", 100, age=-len(arrived)))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def many():
        gate = Guard(page, folder)
        scope = {"type": "http", "method": "POST", "headers": [(b"host", HOST.encode()), (b"content-length", b"9")]}

        async def send(_):
            pass

        for _ in range(4):
            await gate(scope, None, send)

    asyncio.run(many())
    assert own.exists()
    assert [path.exists() for path in arrived] == [False, False, False, True]
