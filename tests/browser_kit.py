"""Pages in a real browser, for the tests of reports."""

import base64
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync")  # fmt: skip

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium found: run tests/install_chromium.sh")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield browser
        browser.close()


@dataclass
class Opened:
    """Open page, with its errors and its network requests."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def chart(self, key: str, axis: str = "time") -> Locator:
        return self.page.locator(f".view.{axis} figure[data-key={key}]")

    def hover(self, key: str, fraction: float, axis: str = "time") -> str:
        """Return the tooltip with the pointer at a fraction of a chart's width."""
        plot = self.chart(key, axis).locator(".plot")
        plot.scroll_into_view_if_needed()
        self.page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        box = plot.bounding_box()
        assert box
        self.page.mouse.move(box["x"] + fraction * box["width"], box["y"] + box["height"] / 2)
        return self.page.locator("#tip").inner_text()

    def assert_fits_and_is_quiet(self) -> None:
        """Check that the page logs nothing, requests nothing but itself, and is no wider than its window."""
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith("data:")] == [self.page.url]
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@contextmanager
def opened_in(browser: Browser, file: str | Path, width: int, scheme: str = "light") -> Iterator[Opened]:
    """Open a file in a window of `width` pixels."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)  # type: ignore[arg-type]
    opened = Opened(page)
    page.on("console", lambda message: opened.complaints.append(message.text))
    page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    page.on("request", lambda request: opened.requests.append(request.url))
    page.goto(Path(file).as_uri())
    yield opened
    page.close()


def assert_policy_allows_only(html: str, *tags: str) -> None:
    """Check that a page allows only its own elements of these names, such as `style`, and names no address."""
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy
    assert policy[1].startswith("default-src 'none'")
    assert policy[1].count("sha256-") == len(tags)
    for tag in tags:
        own = html.split(f"<{tag}>")[1].split(f"</{tag}>")[0]
        assert f"{tag}-src 'sha256-{base64.b64encode(sha256(own.encode()).digest()).decode()}'" in policy[1]
    assert " style=" not in html
    assert html.count("<style") == 1
    assert "://" not in re.sub(r"http://www\.w3\.org/\S+", "", html)
