"""A real browser for tests of pages: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FRAMES = [(1280, "dark"), (400, "light")]


@contextlib.contextmanager
def opened(width: int, scheme: str) -> Iterator[Any]:
    """A tab of a window so wide, in ``light`` or ``dark``; skips the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            size = {"width": width, "height": 900}
            yield browser.new_page(viewport=size, color_scheme=scheme)
        finally:
            browser.close()


def overflow(tab: Any) -> int:
    """By how many pixels the page is wider than its window."""
    return int(
        tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    )


def contrast(tab: Any, selector: str) -> float:
    """Of the text of an element with the page behind it, as WCAG has it: 1 to 21."""
    return float(
        tab.evaluate(
            """selector => {
                const light = css => {
                    const c = document.createElement('canvas').getContext('2d');
                    c.fillStyle = css; c.fillRect(0, 0, 1, 1);
                    const [r, g, b] = [...c.getImageData(0, 0, 1, 1).data].slice(0, 3).map(v => {
                        v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
                    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
                const style = getComputedStyle(document.querySelector(selector));
                const own = light(selector.includes('svg') ? style.fill : style.color);
                const probe = document.createElement('div');
                probe.style.color = 'Canvas'; document.body.append(probe);
                const back = light(getComputedStyle(probe).color);
                probe.remove();
                return (Math.max(own, back) + 0.05) / (Math.min(own, back) + 0.05); }""",
            selector,
        )
    )
