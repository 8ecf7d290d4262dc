"""``nmrun report``: what stands on the page, against the result files."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import browser
import pytest
from pages import Page
from runs import rewrite
from verbs import verb

from nmrun.lab.runs import documents


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., Page]:
    """Writes the report, and reads it."""

    def call(*arguments: str) -> Page:
        target = tmp_path / "report.html"
        assert verb("report", str(tmp_path / "outputs"), "--out", str(target), *arguments) == 0
        return Page(target.read_text())

    return call


def curve(folder: Path, *accuracies: float) -> None:
    lines = [
        {"step": 10 * (i + 1), "epoch": i + 1, "eval/accuracy": value}
        for i, value in enumerate(accuracies)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rewrite(folder)


def test_the_page_has_all_of_it_and_needs_nothing_else(write, report, tmp_path, capsys):
    values = {
        ("step", "2:4"): [0.98, 0.97],
        ("step", "1:8"): [0.95, 0.93],
        ("ste", "2:4"): [0.9, 0.92],
        ("dense", "dense"): [0.99, 0.98],
    }
    for (recipe, ratio), accuracies in values.items():
        for seed, accuracy in enumerate(accuracies):
            curve(write(recipe, ratio, seed, accuracy), 0.5, accuracy)
    document = report()
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert "Runs: 8 finished." in document.text
    means = {
        place: f"{100 * statistics.mean(each):.1f} ± {100 * statistics.stdev(each):.1f}"
        for place, each in values.items()
    }
    dense = means["dense", "dense"]
    assert document.tables[0] == [
        ["recipe", "2:4", "1:8"],
        ["dense", dense, dense],
        ["ste", means["ste", "2:4"], "-"],
        ["step", means["step", "2:4"], means["step", "1:8"]],
    ]
    # against the ratio, and over steps: nothing else was logged
    assert document.tags.count("svg") == 2
    inside = {address[1:] for address in document.addresses if address.startswith("#")}
    assert inside == {"part-1", "runs", "settings", "made-with"} <= set(document.ids)
    links = [address for address in document.addresses if not address.startswith("#")]
    assert len(links) == 8
    assert all((tmp_path / link / "result.json").is_file() for link in links)
    assert not {"script", "link", "iframe", "img"} & set(document.tags)
    assert not re.search(r"url\((?!#)", (tmp_path / "report.html").read_text())
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".report")] == []


def test_a_single_run_has_no_picture_of_a_dot(write, report):
    folder = write("step", "2:4", 0, 0.98)
    curve(folder, 0.9)
    assert "svg" not in report().tags
    curve(folder, 0.5, 0.9)  # two points are a curve
    assert report().tags.count("svg") == 1


def test_a_value_that_is_not_finite_is_none(write, report):
    """As a hand or another program writes it; nmrun writes null."""
    for seed, value in enumerate([0.5, math.inf]):
        write("ste", "2:4", seed, value)
    cells = [cell for rows in report().tables for row in rows for cell in row]
    assert "-" in cells
    assert "inf" not in " ".join(cells)


def test_what_did_not_finish_with_its_error_and_command(write, report, tmp_path):
    write("step", "2:4", 0, 0.98)
    failed = write("step", "2:4", 1, status="failed")
    command = {"command": "nmrun recipe=step seed=1 'model.exclude=[a,b]'"}
    rewrite(failed, error="step 7: the loss is nan", environment=command)
    curve(failed, 0.1)
    killed = tmp_path / "outputs/digits/small_conv/ste/2of4/s0-0123456789"
    killed.mkdir(parents=True)
    (killed / "config.yaml").write_text("# nmrun recipe=ste seed=0\nseed: 0\n")
    document = report()
    assert "Runs: 1 finished, 1 failed, 1 killed." in document.text
    assert "Not finished: 2" in document.text
    assert f"failed: {failed}" in document.text
    assert "step 7: the loss is nan" in document.text
    assert "nmrun recipe=step seed=1 'model.exclude=[a,b]'" in document.text
    assert re.search(rf"killed: {killed} .*nmrun recipe=ste seed=0", document.text)
    assert document.tables[0][1] == ["step", "98.0 (1, 1 failed)"]


def test_a_filter_chooses_among_the_runs_that_did_not_finish_too(write, report):
    """By their configs, where there is no result yet; one without a config may be any."""
    for recipe in ("step", "ste"):
        write(recipe, "2:4", 0, 0.98)
        write(recipe, "2:4", 1, status="failed")
        killed = write(recipe, "2:4", 2, 0.9)
        result = killed / "result.json"
        (killed / "config.yaml").write_text(json.dumps(json.loads(result.read_text())["config"]))
        result.unlink()
    text = report("--filter", "recipe=ste").text
    assert "Runs: 1 finished, 1 failed, 1 killed." in text
    assert "Not finished: 2" in text
    assert "/step/" not in text
    (killed / "config.yaml").write_text("seed: 2")
    assert "1 finished, 1 failed, 1 killed." in report("--filter", "recipe=ste").text
    assert "Runs: 2 finished, 2 failed, 2 killed." in report().text


def test_runs_settings_and_environments(write, report):
    folders = []
    for seed in (0, 1):
        folders.append(write("step", "2:4", seed, 0.98))
        folders.append(other := write("step", "2:4", seed, 0.97, optimizer__lr=0.01))
    rewrite(other, environment={"commit": "fff", "torch": "9.9"})
    reads: Counter[Path] = Counter()
    read = documents.read

    def counted(path: Path) -> bytes:
        reads[Path(path)] += 1
        return read(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "read", counted)
        document = report("--rows", "recipe,optimizer.lr")
    assert [reads[folder / "result.json"] for folder in folders] == [1] * 4
    runs, same, made_with = document.tables[1:]
    shown = [dict(zip(runs[0], line, strict=True)) for line in runs[1:]]
    keys = ("optimizer.lr", "seed", "status", "test/accuracy in %")
    assert [[line[key] for key in keys] for line in shown] == [
        *(["0.001", "0", "finished", "98.0"], ["0.01", "0", "finished", "97.0"]),
        *(["0.001", "1", "finished", "98.0"], ["0.01", "1", "finished", "97.0"]),
    ]
    assert dict(same[1:])["trainer.epochs"] == "12"
    assert not {"seed", "optimizer.lr", "status", "folder"} & set(dict(same[1:]))
    assert sorted(made_with[1:]) == [["commit", "abc, fff"], ["torch", "9.9"]]
    assert "made by 2 versions of the code" in document.text


def test_what_users_wrote_is_text(write, report):
    note = "<script>alert(1)</script>"
    write("step", "2:4", 0, 0.98, model__note=note)
    folder = write("step", "2:4", 1, status="failed", model__note=note)
    rewrite(folder, error="<img src=http://x/y>", environment={"command": 'nmrun "<b>"'})
    document = report()
    assert "script" not in document.tags
    assert not [address for address in document.addresses if ":" in address]
    assert "<script>alert(1)</script>" in document.text
    assert "<img src=http://x/y>" in document.text


def test_it_divides_what_cannot_be_averaged(write, report):
    """Each setting has rows of its own, compared with the dense row of its learning rate."""
    for seed in (0, 1):
        for rate in (0.001, 0.01):
            write("dense", "dense", seed, 0.95, optimizer__lr=rate)
            for decay in (1e-4, 1e-3):
                own = {"recipe__decay": decay, "optimizer__lr": rate}
                write("sr_ste", "2:4", seed, 0.9 + rate + decay, **own)
    document = report()
    assert "part-2" not in document.ids
    values, differences = document.tables[:2]
    assert values[0] == ["recipe", "optimizer.lr", "recipe.decay", "2:4"]
    assert [line[3] for line in values[1:]] == [
        f"{mean} ± 0.0" for mean in (95.0, 95.0, 90.1, 90.2, 91.0, 91.1)
    ]
    assert [line[:3] for line in differences[1:]] == [line[:3] for line in values[3:]]
    assert "Difference to dense" in document.text
    other = report("--baseline", "sr_ste 0.01 0.001")
    assert "Difference to sr_ste lr=0.01 decay=0.001" in other.text


@pytest.mark.parametrize(
    ("out", "words", "message"),
    [
        ("report.html", ("--metric", "test/acuracy"), "test/acuracy: no such metric"),
        ("report.html", ("--baseline", "stepp"), "--baseline stepp: no such row"),
        ("no/report.html", (), "No such file or directory"),
        ("outputs", (), "Is a directory"),
    ],
)
def test_one_line_for_a_mistake_and_no_half_a_page(out, words, message, write, tmp_path, capsys):
    write("step", "2:4", 0, 0.98)
    before = sorted(tmp_path.rglob("*"))
    assert verb("report", str(tmp_path / "outputs"), "--out", str(tmp_path / out), *words) == 2
    printed, err = capsys.readouterr()
    assert (printed, err.count("\n")) == ("", 1)
    assert message in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), browser.FRAMES)
def test_a_report(width, scheme, write, report, tmp_path):
    for seed in range(3):
        for ratio in ("2:4", "1:4", "1:8", "1:16", "1:32", "4:8", "2:8"):
            write("sr_ste", ratio, seed, 0.9 + 0.01 * seed)
            write("step", ratio, seed, 0.91, recipe__switch="auto")
        write("dense", "dense", seed, 0.95)
    write("ste", "2:4", 0, status="failed")
    report()
    target = tmp_path / "report.html"
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


def test_a_run_below_two_of_the_paths_is_one(write, report, tmp_path):
    write("step", "2:4", 0, 0.98)
    write("step", "2:4", 1, status="failed")
    document = report(str(tmp_path / "outputs/digits"))
    assert "Runs: 1 finished, 1 failed." in document.text
