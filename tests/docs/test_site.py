"""The documentation site: built strictly, and looked at in a real browser where there is one."""

from __future__ import annotations

import functools
import http.server
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("mkdocstrings", reason="the site is built by mkdocs: pip install '.[docs]'")

PHONE, DESK = (390, 844), (1400, 900)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run `make docs` itself: with other options, such as --quiet, mkdocs may report less."""
    folder = Path(tmp_path_factory.mktemp("site"))
    lines = (ROOT / "Makefile").read_text().split("\ndocs:")[1].splitlines()
    recipe = itertools.takewhile(lambda line: line.startswith("\t"), lines[1:])
    (words,) = (shlex.split(line) for line in recipe)
    variable, python, *arguments = words
    assert python == "$(BIN)/python"
    command = [sys.executable, *arguments, "--site-dir", str(folder)]
    environment = {**os.environ, **dict([variable.split("=")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_upstream_name_is_here(site: Path) -> None:
    page = (site / "names.html").read_text()
    assert page.count("<td>yes</td>") == len(json.loads((ROOT / "docs_site" / "names.json").read_text()))
    assert "<td>no</td>" not in page


def test_reference_has_signatures_and_docstrings(site: Path) -> None:
    for package, name in (
        ("apex.amp", "initialize"),
        ("apex.optimizers", "FusedAdam"),
        ("apex.graphs", "capture"),
        ("apex.parallel", "DistributedDataParallel"),
        ("apex.transformer.tensor_parallel", "ColumnParallelLinear"),
    ):
        page = (site / "reference" / f"{package}.html").read_text()
        headings = re.findall(r'<h3 id="[\w.]*\.(\w+)"', page)
        assert headings[0] == name, f"{package} starts with {headings[:3]}"
        assert f"reference/{package}.html" in (site / "reference.html").read_text()
    assert "Make the linear layers of" in (site / "reference" / "apex.fp8.html").read_text()


def test_all_pages_are_in_the_navigation(site: Path) -> None:
    pages = {path.with_suffix(".html").name for path in (ROOT / "docs").glob("*.md")}
    links = (site / "index.html").read_text()
    assert not {page for page in pages if f'href="{page}"' not in links}


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    pytest.importorskip("selenium", reason="a browser is driven by selenium: pip install '.[docs]'")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver, Debian's packages chromium and chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=Service(driver))
    yield found
    found.quit()


def visit(browser: Any, url: str, size: tuple[int, int]) -> None:
    # The width of a page: a window of a desktop cannot be as narrow as a phone.
    numbers = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", numbers)
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(url)


def requested_hosts(browser: Any) -> set[str]:
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [message for message in messages if message["method"] == "Network.requestWillBeSent"]
    urls = [message["params"]["request"]["url"] for message in sent]
    return {urlsplit(url).hostname for url in urls if url.startswith("http")}  # type: ignore[misc]


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize(
    "page", ["index", "amp", "performance", "reference", "reference/apex.amp", "names", "benchmarks"]
)
def test_pages_fit_and_ask_nobody_else(page: str, size: tuple[int, int], address: str, browser: Any) -> None:
    visit(browser, f"{address}/{page}.html", size)
    width = browser.execute_script("return document.documentElement.scrollWidth")
    assert width <= size[0], f"{page} is {width} wide"
    assert browser.find_element("tag name", "h1").text
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert requested_hosts(browser) == {"127.0.0.1"}


def test_names_stay_whole_on_a_phone(address: str, browser: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    visit(browser, f"{address}/reference/apex.transformer.tensor_parallel.html", PHONE)
    WebDriverWait(browser, 20).until(lambda here: here.find_elements("css selector", "h3 .doc-object-name"))
    lines = browser.execute_script(
        "return [...document.querySelectorAll('h3 .doc-object-name')].map(name => name.getClientRects().length)"
    )
    assert len(lines) > 20
    assert set(lines) == {1}


@pytest.mark.parametrize("page", ["performance", "status"])
def test_tables_fit_on_a_desk(page: str, address: str, browser: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    visit(browser, f"{address}/{page}.html", DESK)
    # The theme's script takes tables out of the page for a moment, to wrap them.
    WebDriverWait(browser, 20).until(lambda here: here.find_elements("css selector", ".md-typeset table"))
    hidden = browser.execute_script(
        "return [...document.querySelectorAll('.md-typeset table')].map("
        "table => table.getBoundingClientRect().right - table.closest('.md-content').getBoundingClientRect().right)"
    )
    assert hidden
    assert max(hidden) <= 0


def bars(browser: Any) -> list[str]:
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 20).until(lambda here: here.find_elements("css selector", "#benchmark-results figure .bar"))
    return [caption.text for caption in browser.find_elements("css selector", "#benchmark-results figcaption")]


def test_benchmarks_are_chosen_by_device_family_and_dtype(address: str, browser: Any) -> None:
    from selenium.webdriver.support.ui import Select, WebDriverWait

    visit(browser, f"{address}/benchmarks.html", PHONE)
    before = bars(browser)

    def menu(name: str) -> Any:
        return Select(browser.find_element("name", name))

    assert [option.text for option in menu("device").options]
    menu("family").select_by_visible_text("norm")
    WebDriverWait(browser, 20).until(lambda here: bars(here) != before)
    menu("dtype").select_by_visible_text("float32")
    WebDriverWait(browser, 20).until(lambda here: all("float32" in text for text in bars(here)))
    shown = bars(browser)
    assert shown
    assert all("norm float32" in text for text in shown)
    names = {row.text.splitlines()[0] for row in browser.find_elements("css selector", "#benchmark-results .row")}
    assert {"apex (this)", "torch"} <= names
    assert browser.find_elements("css selector", "#benchmark-results .floor")
    assert browser.execute_script("return document.documentElement.scrollWidth") <= PHONE[0]
    assert "family=norm" in browser.current_url  # a link to what is shown
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
