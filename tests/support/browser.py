"""A real browser for tests: Chromium, driven by selenium."""

import base64
import json
import re
import shutil
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
MISSING = "no Chromium with chromedriver here: install Debian's packages chromium and chromium-driver"
KEYS = {"right": "\ue014", "left": "\ue012", "up": "\ue013", "down": "\ue015", "tab": "\ue004", "enter": "\ue007"}


def start_chromium(width=1280, height=1400, *words):
    """A driver of selenium, of a browser with a profile of its own. No name but this machine's leads anywhere in it."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in (
        *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server"),
        *(f"--window-size={width},{height}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
        *("--use-fake-device-for-media-stream", "--disable-background-networking", "--disable-component-update"),
        *words,
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(CHROMEDRIVER))


def addresses_asked_for(driver):
    """Addresses that the browser has asked for since it was asked last."""
    events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    found = [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]
    return [each for each in found if not re.match("(data|blob|about|chrome):", each)]


class Browser:
    """What a person does in one browser."""

    def __init__(self, width=1280, height=1400, dark=False):
        self.driver = start_chromium(width, height, *(["--force-dark-mode"] if dark else []))
        self.open, self.run, self.devtools = self.driver.get, self.driver.execute_script, self.driver.execute_cdp_cmd
        if dark:
            media = [{"name": "prefers-color-scheme", "value": "dark"}]
            self.devtools("Emulation.setEmulatedMedia", {"features": media})
        if width < 500:  # Chromium makes no window that narrow
            sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
            self.devtools("Emulation.setDeviceMetricsOverride", sizes)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.driver.quit()

    def find(self, css, seconds=30):
        """The first element, once it is there."""
        return wait(lambda: next(iter(self.driver.find_elements("css selector", css)), None), seconds)

    def click(self, css):
        self.find(css).click()

    def type(self, css, text):
        """Type into an element; of a file input, choose the file of this path."""
        self.find(css).send_keys(text)

    def text(self, css):
        """Text of the first element; '' if there is none."""
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", css)

    def until(self, script, seconds=30):
        """What a script returns, once that is true."""
        return wait(lambda: self.run(script), seconds)

    def press(self, key):
        """A key, for whatever has the focus."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(KEYS.get(key, key)).perform()

    def point(self, css, x, y, click=False):
        """Move the mouse to a place in an element, in shares of its size, and perhaps click."""
        from selenium.webdriver import ActionChains

        element = self.find(css)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        width, height = element.size["width"], element.size["height"]
        # An offset is from the middle of the element.
        actions = ActionChains(self.driver, duration=0)
        actions.move_to_element_with_offset(element, round((x - 0.5) * width), round((y - 0.5) * height))
        (actions.click() if click else actions).perform()

    def requests(self):
        return addresses_asked_for(self.driver)

    def complaints(self):
        """What the browser's console has to say: errors only."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]

    def screenshot(self, path):
        height, width = self.run("return document.documentElement.scrollHeight"), self.run("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        found = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
        path.write_bytes(base64.b64decode(found["data"]))


def wait(call, seconds=30):
    """What a call returns, once that is true."""
    end = time.monotonic() + seconds
    while True:
        found = call()
        if found:
            return found
        if time.monotonic() > end:
            raise TimeoutError(f"nothing after {seconds} seconds")
        time.sleep(0.05)
