"""The demo as people meet it: the command, a real browser at two widths, several people at once, and ill will."""

import contextlib
import http.client
import importlib.util
import io
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.parse
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from gtp_vit import create_model
from gtp_vit.demo.demo_model import bundled_examples, make_demo_model
from gtp_vit.demo.inspection import inspect_picture
from gtp_vit.demo.markup import trace_data
from support.browser import CHROMEDRIVER, CHROMIUM, MISSING, Browser, wait
from support.pictures import bomb

pytestmark = [
    pytest.mark.slow,  # the server takes seconds to start; test_demo.py tests all but the browser
    pytest.mark.skipif(
        importlib.util.find_spec("gradio") is None, reason="gradio is not installed: pip install 'gtp-vit[demo]'"
    ),
]
in_a_browser = pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason=MISSING)
MEASURED = "return [...document.querySelectorAll('.gtp-card dl')].every(e => e.textContent.includes('rounds')) && "
PATIENCE = 120  # seconds, on a machine that does other work, too


@pytest.fixture(scope="module")
def address():
    """Where `gtp-vit demo` says it is."""
    words = [sys.executable, "-m", "gtp_vit.cli.app", "demo", "--port", "17860"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = [process.stdout.readline()]
    if "in use" in lines[0]:
        lines.append(process.stdout.readline())
    found = re.search(r"http://127.0.0.1:\d+/", lines[-1])
    assert found, process.communicate()
    yield found[0]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert rest == "Stopped.\n"


@pytest.fixture(scope="module")
def subject():
    return make_demo_model("fashion_vit", create_model("fashion_vit"), bundled_examples(), "")


def shows(browser, condition):
    """Wait until all cards are measured and a condition holds."""
    browser.until(f"{MEASURED} document.querySelector('.gtp-card') && ({condition})", PATIENCE)


def choose(browser, dropdown, name):
    """Choose a method as the keyboard does."""
    browser.click(f"{dropdown} input")
    browser.run("document.activeElement.select()")
    browser.type(f"{dropdown} input", name)
    browser.press("enter")


@in_a_browser
def test_at_a_desk(address, subject):
    with Browser() as browser:
        browser.open(address)
        shows(browser, "true")
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
        assert browser.run("return document.querySelectorAll('.gtp-card').length") == 2
        strips = "return document.querySelectorAll('.gtp-card:first-child .gtp-strip canvas').length"
        assert browser.run(strips) == 13

        # click a patch: what it says is what the trace says
        study = inspect_picture(subject, subject.examples[0].picture, ["gtp_plus", "tome"], 0.65)
        layer = trace_data(study.columns[0].trace)["layers"][-1]
        browser.point(".gtp-map", 0.5 / 14, 0.5 / 14, click=True)
        owner = layer["owner"][0]
        said = browser.text(".gtp-patch")
        assert said.startswith("Patch at row 1, column 1, after 12 layers: ")
        assert f"size {layer['size'][owner]:g}." in said
        assert layer["owner"].count(owner) == 1 or f"its group has {layer['owner'].count(owner)} patches" in said
        browser.run("document.querySelector('.gtp-map').focus()")
        browser.press("right")
        assert "row 1, column 2" in browser.text(".gtp-patch")
        browser.press("down")
        assert "row 2, column 2" in browser.text(".gtp-card:nth-child(2) .gtp-patch")  # of the other method as well

        # layers: by the keyboard, and by the strip
        browser.run("document.querySelector('.gtp-layer').focus()")
        browser.press("left")
        assert browser.text(".gtp-layer-name") == "11 of 12"
        browser.click(".gtp-strip button:nth-child(1)")
        assert browser.text(".gtp-layer-name") == "0 of 12"
        assert "its token is its own" in browser.text(".gtp-patch")

        # slide, with the keyboard; the layer stays
        browser.run("document.querySelector('#gtp-share input[type=range]').focus()")
        for _ in range(5):
            browser.press("left")
        shows(browser, "document.querySelector('.gtp-card dd').textContent.includes(': 60.')")
        assert browser.text(".gtp-layer-name") == "0 of 12"

        # switch both methods
        choose(browser, "#gtp-first", "evit")
        shows(browser, "document.querySelector('.gtp-card').getAttribute('aria-label') === 'evit'")
        choose(browser, "#gtp-second", "none")
        shows(browser, "document.querySelectorAll('.gtp-card').length === 1")

        # copy the recipe
        permissions = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
        browser.devtools("Browser.grantPermissions", permissions)
        browser.click("#gtp-recipe-button")
        browser.until("return document.querySelector('#gtp-recipe button')?.offsetParent", PATIENCE)
        assert "gtp_vit.create_model('fashion_vit')" in browser.text("#gtp-python .cm-content")
        browser.click("#gtp-recipe button[aria-label*='opy'], #gtp-recipe button[title*='opy']")
        read = (
            "const done = arguments[arguments.length - 1]; navigator.clipboard.readText().then(done, e => done('' + e))"
        )
        copied = wait(lambda: browser.driver.execute_async_script(read))
        stored = json.loads(copied)
        assert stored["method"]["method"] == "evit"
        assert stored["measured"]["fraction"] == pytest.approx(0.6, abs=0.01)
        choose(browser, "#gtp-first", "gtp")  # the recipe of something else is no longer shown
        browser.until("return !document.querySelector('#gtp-recipe')?.offsetParent", PATIENCE)

        assert [each for each in browser.requests() if not each.startswith(address)] == []
        assert browser.complaints() == []


@in_a_browser
def test_on_a_phone_with_files_good_and_bad(address, tmp_path):
    files = {"photo.png": None, "broken.png": b"hello", "bomb.png": bomb(20_000, 20_000)}
    with Browser(width=400, height=900, dark=True) as browser:
        browser.open(address)
        shows(browser, "true")
        assert browser.run("return document.documentElement.scrollWidth") <= 400
        assert browser.run("return getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
        for name, data in files.items():
            path = tmp_path / name
            Image.new("RGB", (1, 1), "white").save(path) if data is None else path.write_bytes(data)
            browser.run("document.querySelector('#gtp-upload button[aria-label=Clear]')?.click()")
            browser.find("#gtp-upload input[type=file]")
            browser.type("#gtp-upload input[type=file]", str(path))
            said = {
                "photo.png": "only 1 x 1 pixels",
                "broken.png": "not a readable image",
                "bomb.png": "far more than 89 million pixels",
            }[name]
            browser.until(f"return document.querySelector('#gtp-study').textContent.includes('{said}')", PATIENCE)
        assert browser.run("return document.querySelector('.gtp-card')") is None  # nothing of another picture is left


@in_a_browser
def test_two_people_at_once_and_one_who_leaves(address):
    with Browser() as one, Browser() as other, Browser() as leaving:
        for browser in (one, other, leaving):
            browser.open(address)
        for browser, place in ((leaving, 5), (one, 2), (other, 9)):
            browser.click(f"#gtp-examples [aria-label^='Thumbnail {place} ']")
        leaving.open("about:blank")  # in the middle of work
        classes = (
            "[...document.querySelectorAll('.gtp-classes tbody tr:first-child .gtp-name')].map(e => e.textContent)"
        )
        shows(one, f"{classes}[0] === 'trousers'")
        shows(other, f"{classes}[0] === 'bag'")
        assert one.run(f"return {classes}")[0] == "trousers"


# Without a browser: what a program may ask for


def ask(address, method, path, body=None, headers=None):
    where = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=2 * PATIENCE)
    with contextlib.closing(connection):
        connection.request(method, f"/gradio_api/{path}", body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()


def send(address, picture):
    """Upload a picture; returns how it is named from then on."""
    buffer, edge = io.BytesIO(), "edge"
    picture.save(buffer, "PNG")
    head = f'--{edge}\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    body = head.encode() + buffer.getvalue() + f"\r\n--{edge}--\r\n".encode()
    kind = {"Content-Type": f"multipart/form-data; boundary={edge}"}
    status, answer = ask(address, "POST", "upload", body, kind)
    assert status == 200
    return json.loads(answer)[0]


def call(address, path, method="gtp_plus", percent=65):
    """The last thing that the page would show."""
    data = {"data": [{"path": path, "meta": {"_type": "gradio.FileData"}}, method, "none", percent]}
    status, answer = ask(address, "POST", "call/look", json.dumps(data), {"Content-Type": "application/json"})
    if status != 200:
        return answer.decode()
    _, events = ask(address, "GET", f"call/look/{json.loads(answer)['event_id']}")
    return [line for line in events.decode().splitlines() if line.startswith("data: ")][-1]


def test_twenty_people_at_once_see_what_they_asked_for(address, subject):
    """Each with a picture and a share of their own."""
    start = threading.Barrier(20)

    def person(number):
        path = send(address, subject.examples[number % 16].picture)
        start.wait()
        return call(address, path, percent=40 + 2 * number)

    with ThreadPoolExecutor(20) as people:
        answers = list(people.map(person, range(20)))
    for number, answer in enumerate(answers):
        (html,) = json.loads(answer.removeprefix("data: "))
        (column,) = inspect_picture(
            subject, subject.examples[number % 16].picture, ["gtp_plus"], (40 + 2 * number) / 100
        ).columns
        data = json.loads(re.search(r"data-trace='(.*?)'", html)[1].replace("&quot;", '"'))
        assert data == trace_data(column.trace)
        assert f": {column.fraction:.1%}" in html
        assert f"<dd>{column.damage:.4f}</dd>" in html
        assert "rounds in turns" in html


def test_nothing_is_read_that_was_not_sent(address, tmp_path):
    secret = tmp_path / "secret.png"
    Image.new("RGB", (30, 30)).save(secret)
    for path in (str(secret), "/etc/hostname", f"{address}gradio_api/info", "http://192.0.2.1/a.png"):
        assert "gtp-card" not in call(address, path)
    for path in (secret, "/etc/hostname", __file__):
        status, answer = ask(address, "GET", f"file={path}")
        assert status in (403, 404)
        assert b"PNG" not in answer


def test_what_a_program_makes_up_is_refused(address, subject):
    path = send(address, subject.examples[0].picture)
    assert "gtp-card" not in call(address, path, method="../../recipe.json")
    assert "gtp-card" not in call(address, path, percent=-5)
    assert "gtp-card" in call(address, path)


def test_other_names_and_too_many_bytes_are_refused(address):
    status, _ = ask(address, "GET", "info", headers={"Host": "evil.example"})
    assert status == 400
    body = b'--e\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n' + bytes(21 * 2**20)
    kind = {"Content-Type": "multipart/form-data; boundary=e"}
    status, _ = ask(address, "POST", "upload", body + b"\r\n--e--\r\n", kind)
    assert status == 413


def test_other_pages_can_neither_upload_nor_call(address):
    body = b'--e\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\nx\r\n--e--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=e"}
    for foreign in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert ask(address, "POST", "upload", body, {**kind, **foreign})[0] == 403
        assert ask(address, "POST", "call/look", "{}", {"Content-Type": "application/json", **foreign})[0] == 403
    assert ask(address, "POST", "upload", body, {**kind, "Origin": address.rstrip("/")})[0] == 200
