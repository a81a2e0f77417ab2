"""The documentation as a site: it builds strictly, names nothing outside itself, and is searched without a server."""

import importlib.util
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from support.browser import CHROMEDRIVER, CHROMIUM, MISSING, addresses_asked_for, start_chromium

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs needs Python 3.11 here")


@pytest.fixture(scope="module")
def site(once):
    """build/site, as make docs builds it."""

    def make(folder):
        words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder / "site")]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return once("site", make) / "site"


class Addresses(HTMLParser):
    """What a page loads, where it leads, and what can be led to."""

    def __init__(self, path):
        super().__init__()
        self.loads, self.links, self.anchors = [], [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag in ("script", "img", "iframe", "source") and "src" in found:
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loads.append(found["href"])
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        self.anchors |= {found[key] for key in ("id", "name") if key in found}


@pytest.mark.slow
def test_every_page_is_there_and_every_link_leads_somewhere(site):
    pages = {path: Addresses(path) for path in site.rglob("*.html") if path.name != "404.html"}  # for servers only
    wanted = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    wanted |= {Path("changelog.html"), Path("contributing.html"), Path("files/examples/serve.py")}
    assert not [str(path) for path in wanted if not (site / path).is_file()]
    for path, page in pages.items():
        for target in [*page.loads, *page.links]:
            if target.startswith("data:") or (target in page.links and target.startswith(("http:", "https:"))):
                continue
            name, _, anchor = target.partition("#")
            assert not re.match(r"\w+:|//|/", name), f"{path.name} asks for {target}"
            to = (path.parent / name.split("?")[0]).resolve() if name else path
            assert to.exists(), f"{path.relative_to(site)}: {target}"
            if anchor and to in pages and anchor != "__skip":
                assert anchor in pages[to].anchors, f"{path.relative_to(site)}: {target}"


@pytest.mark.slow
def test_the_reference_has_every_public_name(site):
    import gtp_vit

    text = (site / "reference/api.html").read_text()
    found = {name.rsplit(".", 1)[-1] for name in re.findall(r'id="(gtp_vit\.[\w.]+)"', text)}
    public = {name for name in gtp_vit.__all__ if callable(getattr(gtp_vit, name))}
    assert public <= found
    assert "of a supported ViT" in text or "a supported ViT" in text  # what a docstring says of an argument
    assert "&gt;&gt;&gt;" in text  # examples


@pytest.mark.slow
@pytest.mark.skipif(not (CHROMIUM and CHROMEDRIVER), reason=MISSING)
def test_it_reads_and_searches_from_a_disk_and_asks_nothing_of_the_network(site):
    from selenium.webdriver import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    driver = start_chromium(1200, 900)
    try:
        for name in ("explanation/how-it-works.html", "reference/api.html", "index.html"):
            driver.get((site / name).as_uri())
        box = driver.find_element("css selector", ".md-search__input")
        box.click()
        box.send_keys("restored features", Keys.END)
        WebDriverWait(driver, 30).until(lambda d: d.find_elements("css selector", ".md-search-result__link"))
        found = [each.get_attribute("href") for each in driver.find_elements("css selector", ".md-search-result__link")]
        assert any("dense.html" in each or "features.html" in each for each in found)
        names = addresses_asked_for(driver)
        assert any(name.endswith("one-layer.png") for name in names)
        assert not [name for name in names if not name.startswith(("file:", "data:", "blob:", "about:"))]
        assert driver.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    finally:
        driver.quit()
