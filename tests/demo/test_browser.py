"""The HTML page in a real browser, at the width of a desk and of a phone."""

import json
import re
import subprocess

import pytest
from PIL import Image

from gtp_vit import METHODS
from gtp_vit.cli.app import ExitCode, main
from gtp_vit.report.page import Section, picture, table, write_report
from gtp_vit.report.plot import Point, line_plot
from gtp_vit.report.tokens import png
from support.browser import CHROMEDRIVER, CHROMIUM, MISSING, start_chromium

in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install Debian's package chromium")
# What the page looks like to the browser, put where --dump-dom shows it.
PROBE = """<script>addEventListener("load", () => { document.title = JSON.stringify({
  page: document.documentElement.scrollWidth, window: innerWidth,
  loaded: performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !name.startsWith("data:")),
  pictures: [...document.images].map(image => image.naturalWidth),
  plots: document.querySelectorAll("svg circle").length,
  text: document.body.innerText.length }) })</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report with a wide table, a plot and a picture."""
    columns = [f"a long column name {number}" for number in range(14)]
    rows = [["GTP(propagate=(1, 2, 3), alpha=0.3) <b>", *(f"{value:.4f} [0.1, 0.2]" for value in range(13))]] * 4
    lines = {"gtp": [(0.5, 0.2), (0.7, 0.1)], "to<me": [(0.5, 0.1), Point(0.7, 0.05, "KL: 0.05\nsettings: <b>")]}
    few = [["b", "10.5 [9, 11]"], ["a", "not timed"], ["c", "-2"], ["d", "9.75 [9, 11]"]]
    sections = [
        Section("Plot", line_plot(lines, "MACs", "KL", log_y=True)),
        Section("Table", table(columns, rows, best=1)),
        Section("Sorted", table(["name", "speed"], few)),
        Section("Picture", picture(png(Image.new("RGB", (1200, 300), "navy")), "A wide picture.")),
    ]
    path = tmp_path_factory.mktemp("page") / "report.html"
    made = {"command": "gtp-vit compare --output 'a b'", "date": "today", "commit": "c", "torch": "2", "cpu": "a <cpu>"}
    write_report(path, "A <title>", "Made by a test.", sections, made)
    return path


def look(path, width):
    """What the browser finds at this width."""
    probed = path.with_name("probed.html")
    probed.write_text(path.read_text().replace("</body>", f"{PROBE}</body>"))
    return title_of(probed, f"--window-size={width},900")


@pytest.mark.time_limit(10)
@in_a_browser
@pytest.mark.parametrize("width", [1280, 500])  # Chromium makes no window narrower than 500
def test_the_page_fits_and_loads_nothing(page, width):
    found = look(page, width)
    assert found["page"] <= found["window"]
    assert found["loaded"] == []
    assert found["pictures"] == [1200]
    assert found["plots"] == 4
    assert found["text"] > 500


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:DynamicViT's predictors are untrained")
def test_the_demo_compares_every_method_and_its_page_fits_desk_and_phone_and_loads_nothing(tmp_path, capsys):
    """`make demo` on a few images."""
    words = ["compare", "--output", str(tmp_path), "--limit", "24", "--rounds", "3", "--macs", "0.6", "--json"]
    assert main(words) == ExitCode.OK
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["method"] for row in rows} == {"", *METHODS} - {"identity"}
    assert all(row["speedup"] and row["images_per_second"] for row in rows[1:])
    assert (tmp_path / "results.csv").exists()
    page = tmp_path / "report.html"
    assert page.read_text().count("<svg") == 3
    assert re.search(r"<title>method: gtp_plus\n[^<]*KL to unreduced: [^<]*speed-up: [^<]*</title>", page.read_text())
    assert page.read_text().count("<img") == len(METHODS) - 1
    if CHROMIUM is None:
        pytest.skip("the page was not looked at: no Chromium here, install Debian's package chromium")
    found = look(page, 1280)
    assert found["page"] <= found["window"]
    assert found["loaded"] == []
    assert len(found["pictures"]) == len(METHODS) - 1  # of every method but identity
    assert min(found["pictures"]) > 100
    assert found["plots"] >= 2 * len(METHODS)
    assert width_on_a_phone(page) <= 390


@in_a_browser
def test_the_page_fits_a_phone(page):
    assert width_on_a_phone(page) <= 390


def width_on_a_phone(page):
    """In a frame of that width, as Chromium makes no window that narrow."""
    frame = page.with_name("frame.html")
    frame.write_text(
        f'<iframe id="f" style="width:390px;height:800px;border:0" srcdoc="{_quoted(page.read_text())}"></iframe>'
        '<script>addEventListener("load", () => { const d = document.getElementById("f").contentDocument;'
        "document.title = JSON.stringify({page: d.documentElement.scrollWidth}) })</script><title></title></body>"
    )
    return title_of(frame)["page"]


def _quoted(text):
    return text.replace("&", "&amp;").replace('"', "&quot;")


def title_of(path, *more):
    """The title that a probe has written, as JSON."""
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=3000", *more]
    done = subprocess.run([*words, path.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    titles = re.findall(r"<title>(\{.*?\})</title>", done.stdout, re.S)
    return json.loads(titles[-1].replace("&quot;", '"'))


def test_the_page_names_nothing_outside_itself(page):
    text = page.read_text()
    assert not re.findall(r'(?:src|href|url\()\s*=?\s*["\']?(?:https?:)?//', text)
    assert "<script src" not in text
    assert "<link" not in text
    assert "&lt;b&gt;" in re.search(r"<title>KL: 0.05.*?</title>", text, re.S)[0]
    assert "A &lt;title&gt;" in text
    assert "&lt;b&gt;" in text
    assert "gtp-vit compare --output" in text
    for what in ("torch", "cpu", "commit", "date"):
        assert f"<td>{what}</td>" in text


@pytest.fixture
def driver():
    """A browser with a pointer and a keyboard."""
    started = start_chromium(1000, 900)
    yield started
    started.quit()


def column(driver, number):
    """The texts of a column of the last table that sorts."""
    rows = driver.find_elements("css selector", "table.sortable")[-1].find_elements("css selector", "tbody tr")
    return [row.find_elements("tag name", "td")[number].text for row in rows]


@pytest.mark.time_limit(10)
@in_a_browser
@pytest.mark.skipif(CHROMEDRIVER is None, reason=MISSING)
def test_pointer_and_keyboard_show_the_figures_of_a_point_and_sort_tables(page, driver):
    from selenium.webdriver import ActionChains, Keys

    driver.get(page.as_uri())
    tip, points = driver.find_element("id", "tip"), driver.find_elements("css selector", "svg circle")
    assert not tip.is_displayed()
    ActionChains(driver).move_to_element(points[3]).perform()
    assert tip.text == "KL: 0.05\nsettings: <b>"
    ActionChains(driver).move_to_element(driver.find_element("tag name", "h1")).perform()
    assert not tip.is_displayed()
    ActionChains(driver).send_keys(Keys.TAB).perform()  # one stop for the whole plot
    assert tip.text == "gtp: 0.5, 0.2"
    ActionChains(driver).send_keys(Keys.ARROW_LEFT).perform()
    assert tip.text == "KL: 0.05\nsettings: <b>"
    ActionChains(driver).send_keys(Keys.ESCAPE).perform()
    assert not tip.is_displayed()

    name, speed = driver.find_elements("css selector", "table.sortable th button")[-2:]
    assert column(driver, 0) == ["b", "a", "c", "d"]
    speed.click()
    assert column(driver, 1) == ["-2", "9.75 [9, 11]", "10.5 [9, 11]", "not timed"]  # by number, not by text
    speed.send_keys(Keys.ENTER)
    assert column(driver, 1) == ["10.5 [9, 11]", "9.75 [9, 11]", "-2", "not timed"]
    ActionChains(driver).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).send_keys(Keys.SPACE).perform()
    assert column(driver, 0) == ["a", "b", "c", "d"]
    assert name.find_element("xpath", "..").get_attribute("aria-sort") == "ascending"
    assert speed.find_element("xpath", "..").get_attribute("aria-sort") == "none"
    made = driver.find_elements("css selector", "table")[-1]  # how the page was made: nothing to sort
    assert not made.find_elements("tag name", "button")
