"""The built site in a browser, as wide as on a desktop and on a phone; ``make test-site`` builds it first."""

import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.site.browser import Browser, find_chromium

SITE = Path(__file__).parents[2] / "site"
DESKTOP, PHONE = 1400, 390
SEARCHED = {
    "GPU": {"guides/distributed.html", "results/gpu.html"},
    "several processes": {"guides/distributed.html"},
    "learning rate": {"layers/index.html"},
    "batch size": {"callbacks/growing_batch_size.html"},
    "GrowingBatchSize": {"callbacks/growing_batch_size.html"},
    "PINN": {"guides/differential_equations.html"},
    "inverse problem": {"guides/differential_equations.html"},
    "LoRA": {"layers/adapters.html"},
    "CUDA": {"guides/distributed.html"},
}
MEASURE = """(() => {
    const shown = selector => [...document.querySelectorAll(`.md-content ${selector}`)].filter(e => e.offsetParent);
    return {
        overflow: document.scrollingElement.scrollWidth - document.documentElement.clientWidth,
        cut: shown('pre > code').filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 60)),
        broken: shown('td code:not(:has(wbr))').filter(e => e.getClientRects().length > 1).map(e => e.innerText),
        foreign: performance.getEntriesByType('resource').map(e => e.name).filter(e => !e.startsWith('file:')),
        untypeset: shown('.arithmatex, merror').map(e => e.innerText),
    };
})()"""
WRAPPED = """(() => {
    const blocks = [...document.querySelectorAll('.language-python pre > code')].filter(e => e.offsetParent);
    blocks.forEach(e => { e.style.whiteSpace = 'pre'; });
    return blocks.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 60));
})()"""
FOUND = """[...document.querySelectorAll('.md-search-result__item > a')].map(e => new URL(e.href).pathname.slice(1))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_chromium()
    if path is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    assert (SITE / "index.html").exists(), "the site is not built: make docs"
    browser = Browser(path)
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def measured(browser: Browser) -> dict[int, dict[str, dict[str, Any]]]:
    """What each page has at each width."""
    found: dict[int, dict[str, dict[str, Any]]] = {DESKTOP: {}, PHONE: {}}
    for page in sorted(SITE.rglob("*.html")):
        browser.resize(PHONE)
        browser.open(page.as_uri())
        name = page.relative_to(SITE).as_posix()
        found[PHONE][name] = browser.evaluate(MEASURE)
        browser.resize(DESKTOP)
        found[DESKTOP][name] = browser.evaluate(MEASURE) | {"wrapped": browser.evaluate(WRAPPED)}
    assert len(found[PHONE]) > 60
    return found


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_no_page_is_wider_than_its_window(measured: dict[int, dict[str, dict[str, Any]]], width: int) -> None:
    assert {name: page["overflow"] for name, page in measured[width].items() if page["overflow"] > 0} == {}


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
@pytest.mark.parametrize("fault", ["cut", "broken", "foreign", "untypeset"])
def test_no_page_has(fault: str, measured: dict[int, dict[str, dict[str, Any]]], width: int) -> None:
    """Code that is cut, names in tables that break, files of other hosts, or equations that are not typeset."""
    assert {name: page[fault] for name, page in measured[width].items() if page[fault]} == {}


def test_python_fits_its_column_on_a_desktop(measured: dict[int, dict[str, dict[str, Any]]]) -> None:
    assert {name: page["wrapped"] for name, page in measured[DESKTOP].items() if page["wrapped"]} == {}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The site over HTTP: from the disk a browser does not search."""

    class Silent(SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize(("words", "pages"), SEARCHED.items(), ids=SEARCHED)
def test_the_search_finds_first(browser: Browser, address: str, words: str, pages: set[str]) -> None:
    browser.resize(DESKTOP)
    browser.open(f"{address}/index.html?q={words.replace(' ', '%20')}")
    end = time.monotonic() + 20
    while not (found := browser.evaluate(FOUND)) and time.monotonic() < end:
        time.sleep(0.1)
    assert set(list(dict.fromkeys(found))[: len(pages)]) == pages
