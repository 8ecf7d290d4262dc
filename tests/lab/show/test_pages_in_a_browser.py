"""Pages as a browser shows them: none is wider than its window, and all can be read in the dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import browser
import pytest
from verbs import verb


def comparison(write: Any) -> None:
    for seed in range(3):
        for ratio in ("2:4", "1:4", "1:8", "1:16", "1:32", "4:8", "2:8"):
            write("sr_ste", ratio, seed, 0.9 + 0.01 * seed)
            write("step", ratio, seed, 0.91, recipe__switch="auto")
        write("dense", "dense", seed, 0.95)
    write("ste", "2:4", 0, status="failed")


@pytest.mark.parametrize(("width", "scheme"), browser.FRAMES)
def test_a_report(width: int, scheme: str, write: Any, tmp_path: Path) -> None:
    comparison(write)
    target = tmp_path / "report.html"
    assert verb("report", str(tmp_path / "outputs"), "--to", str(target)) == 0
    with browser.opened(width, scheme) as tab:
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(target.as_uri())
        assert browser.overflow(tab) == 0
        assert asked == [target.as_uri()], "nothing else is loaded"
        assert browser.contrast(tab, "p.caption") > 7
        assert browser.contrast(tab, "figure svg text") > 7, "pictures follow the page's colours"
        # words of pictures stay as large as can be read; the picture scrolls by itself
        size = tab.evaluate(
            "document.querySelector('figure svg text').getBoundingClientRect().height"
        )
        assert size >= 8
        before = tab.locator("figure svg").first.bounding_box()
        tab.locator("figure label").first.click()
        after = tab.locator("figure svg").first.bounding_box()
        assert after["width"] > before["width"], "a click enlarges"
        tab.locator("figure label").first.click()
        assert tab.locator("figure svg").first.bounding_box()["width"] == before["width"]
        tab.locator("nav a").last.click()
        assert tab.url.endswith("#made-with")
