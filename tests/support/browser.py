"""A real browser for tests: Chromium through chromedriver's own protocol (W3C WebDriver), a few calls of it."""

import base64
import contextlib
import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
MISSING = "no Chromium with chromedriver here: install Debian's packages chromium and chromium-driver"
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key under which the protocol names an element
KEYS = {"right": "\ue014", "left": "\ue012", "up": "\ue013", "down": "\ue015", "tab": "\ue004", "enter": "\ue007"}


class Refused(Exception):
    """What the driver says when it cannot do something."""


@contextlib.contextmanager
def chromedriver():
    """The address of a driver, which may open several browsers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([CHROMEDRIVER, f"--port={port}"], **quiet)
    try:
        address = f"http://127.0.0.1:{port}"
        wait(lambda: _send(f"{address}/status")["ready"], (OSError, urllib.error.URLError))
        yield address
    finally:
        process.terminate()
        process.wait()


class Browser:
    """One browser with a profile of its own. No name but this machine's leads anywhere in it."""

    def __init__(self, driver, width=1280, height=1400, dark=False):
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"]
        words += [f"--window-size={width},{height}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        words += ["--use-fake-device-for-media-stream", "--disable-background-networking", "--disable-component-update"]
        words += ["--force-dark-mode"] if dark else []
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": words},
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }
        found = _send(f"{driver}/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"{driver}/session/{found['sessionId']}"
        if dark:
            media = [{"name": "prefers-color-scheme", "value": "dark"}]
            self.devtools("Emulation.setEmulatedMedia", features=media)
        if width < 500:  # Chromium makes no window that narrow
            self.devtools(
                "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        _send(self.session, method="DELETE")

    def call(self, path, **given):
        return _send(f"{self.session}/{path}", given)

    def devtools(self, command, **given):
        return self.call("goog/cdp/execute", cmd=command, params=given)

    def open(self, address):
        self.call("url", url=address)

    def run(self, script, *given):
        """What a script returns."""
        return self.call("execute/sync", script=script, args=list(given))

    def find(self, css, seconds=30):
        """The first element, once it is there."""
        return wait(lambda: self.call("element", using="css selector", value=css)[ELEMENT], Refused, seconds)

    def click(self, css):
        self.call(f"element/{self.find(css)}/click")

    def type(self, css, text):
        """Type into an element; of a file input, choose the file of this path."""
        self.call(f"element/{self.find(css)}/value", text=text)

    def text(self, css):
        """Text of the first element; '' if there is none."""
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", css)

    def until(self, script, seconds=30):
        """What a script returns, once that is true."""
        return wait(lambda: self.run(script), (), seconds)

    def press(self, key):
        """A key, for whatever has the focus."""
        key = KEYS.get(key, key)
        actions = [{"type": kind, "value": key} for kind in ("keyDown", "keyUp")]
        self.call("actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def point(self, css, x, y, click=False):
        """Move the mouse to a place in an element, in shares of its size, and perhaps click."""
        script = "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
        box = self.run(f"{script} const b = e.getBoundingClientRect(); return [b.left, b.top, b.width, b.height]", css)
        place = {"x": round(box[0] + x * box[2]), "y": round(box[1] + y * box[3]), "origin": "viewport"}
        actions = [{"type": "pointerMove", "duration": 0, **place}]
        actions += [{"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp")] if click else []
        self.call("actions", actions=[{"type": "pointer", "id": "mouse", "actions": actions}])

    def requests(self):
        """Addresses that the browser has asked for since it was asked last."""
        entries = [json.loads(entry["message"])["message"] for entry in self.call("se/log", type="performance")]
        sent = [each["params"] for each in entries if each["method"] == "Network.requestWillBeSent"]
        found = [each["request"]["url"] for each in sent]
        return [each for each in found if not re.match("(data|blob|about|chrome):", each)]

    def complaints(self):
        """What the browser's console has to say: errors only."""
        return [entry["message"] for entry in self.call("se/log", type="browser") if entry["level"] == "SEVERE"]

    def screenshot(self, path):
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = self.devtools("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(found["data"]))


def wait(call, passing=(), seconds=30):
    """What a call returns, once that is true; errors of some classes mean that it is not yet."""
    end = time.monotonic() + seconds
    while True:
        try:
            found = call()
            if found:
                return found
        except passing:
            if time.monotonic() > end:
                raise
        if time.monotonic() > end:
            raise TimeoutError(f"nothing after {seconds} seconds")
        time.sleep(0.05)


def _send(address, given=None, method=None):
    data = None if given is None else json.dumps(given).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=120) as answer:
            return json.loads(answer.read())["value"]
    except urllib.error.HTTPError as error:
        raise Refused(json.loads(error.read())["value"]["message"].splitlines()[0]) from error
