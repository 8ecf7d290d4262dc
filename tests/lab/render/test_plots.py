"""What the pictures show, read back from the axes and compared with the result files."""

from __future__ import annotations

import json
import statistics
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from runs import rewrite
from verbs import verb

from nmrun.lab.compare.runs import collect
from nmrun.lab.compare.tables import build
from nmrun.lab.render import plots, style
from nmrun.lab.render.curves import History
from nmrun.recipes.base import Event

STEPS = (10, 20, 30, 40)


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    pyplot.close("all")


def log(folder: Path, lines: list[dict[str, float]], **other: Any) -> None:
    rows = [{"step": step, "epoch": 1, **line} for step, line in zip(STEPS, lines, strict=True)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewrite(folder, **other)


def spent(folder: Path, flops: float) -> None:
    rewrite(folder, flops={"training_arithmetic": flops})


def drawn(
    kind: str, tmp_path: Path, logged: str = "eval/accuracy", rows: str = "recipe",
    columns: str = "sparsity", layout: style.Layout = plots.PLAIN,
) -> Figure | None:  # fmt: skip
    table = build(collect([tmp_path]), "test/accuracy", rows.split(","), [columns])
    return plots.draw(kind, History(table), logged, layout)


def line(axes: Axes, name: str) -> tuple[list[float], list[float]]:
    (artist,) = [each for each in axes.lines if each.get_label() == name]
    return list(artist.get_xdata()), list(artist.get_ydata())


def test_metric_against_ratio(write, tmp_path):
    values = {
        ("step", "2:4"): [0.98, 0.96],
        ("step", "1:8"): [0.9, 0.8],
        ("ste", "2:4"): [0.95, 0.95],
        ("dense", "dense"): [0.99, 0.97],
    }
    for (recipe, ratio), accuracies in values.items():
        for seed, accuracy in enumerate(accuracies):
            write(recipe, ratio, seed, accuracy)
    write("ste", "1:8", 0, status="failed")
    (axes,) = drawn("ratio", tmp_path).axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2:4\n50 %", "1:8\n12.5 %"]
    containers = {container.get_label(): container for container in axes.containers}
    assert set(containers) == {"STE (1 failed)", "STEP"}
    for name, recipe in (("STE (1 failed)", "ste"), ("STEP", "step")):
        data, _, (bars,) = containers[name]
        cells = [accuracies for (of, _), accuracies in values.items() if of == recipe]
        means = [100 * statistics.mean(cell) for cell in cells]
        assert list(data.get_ydata()) == pytest.approx(means)
        assert [round(x) for x in data.get_xdata()] == list(range(len(cells)))
        lengths = [segment[1, 1] - segment[0, 1] for segment in bars.get_segments()]
        assert lengths == pytest.approx([2 * 100 * statistics.stdev(cell) for cell in cells])
    assert line(axes, "dense")[1] == pytest.approx([98.0, 98.0])


def test_learning_curves_with_step_s_switch(write, tmp_path):
    curves = {0: [0.5, 0.7, 0.8, 0.9], 1: [0.3, 0.7, 0.9, 0.95]}
    for seed, accuracies in curves.items():
        event = Event(21 + seed, "whatever", "switch", {"by": "fixed"}).record
        lines = [{"eval/accuracy": accuracy} for accuracy in accuracies]
        log(write("step", "2:4", seed, accuracies[-1]), lines, events=[event])
        log(write("ste", "1:8", seed, 0.5), [{"eval/accuracy": 0.5}] * 4)
    figure = drawn("curves", tmp_path)
    panels = {axes.get_title(): axes for axes in figure.axes}
    steps, means = line(panels["2:4"], "STEP")
    assert steps == list(STEPS)
    (collection,) = panels["2:4"].collections
    band = collection.get_paths()[0].vertices
    for step, shown, a, b in zip(STEPS, means, *curves.values(), strict=True):
        mean, sd = 50 * (a + b), 100 * statistics.stdev([a, b])
        at = band[band[:, 0] == step, 1]
        assert (at.min(), shown, at.max()) == pytest.approx((mean - sd, mean, mean + sd))
    switches = {
        ratio: [each.get_xdata()[0] for each in axes.lines if each.get_label() == "STEP's switch"]
        for ratio, axes in panels.items()
    }
    assert switches == {"2:4": [21, 22], "1:8": []}
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[-1] == "STEP's switch"
    assert sorted(names[:-1]) == ["STE", "STEP"]  # each once, however many panels
    assert drawn("curves", tmp_path, logged="eval/bleu") is None


def test_curves_are_of_the_seeds_that_their_legend_says(write, tmp_path):
    """A seed that failed by its value is in no curve, as in no mean."""
    for seed in range(3):
        for recipe in ("asp", "ste", "sr_ste"):
            value = 0.3 if (recipe, seed) == ("ste", 0) else 0.95 + seed / 1000
            log(write(recipe, "2:4", seed, value), [{"eval/accuracy": value}] * 4)
    (axes,) = drawn("curves", tmp_path).axes
    assert line(axes, "STE (1 failed)")[1] == pytest.approx([95.15] * 4)
    assert line(axes, "ASP")[1] == pytest.approx([95.1] * 4)


@pytest.mark.parametrize(("factor", "how"), [(2, "linear"), (20, "log")])
def test_metric_against_flops(factor, how, write, tmp_path):
    costs = {"2:4": factor * 2e9, "1:8": 2e9, "1:16": 1.99e9}
    for ratio, flops in costs.items():
        for seed in (0, 1):
            spent(write("ste", ratio, seed, 0.9 + 0.02 * seed), flops)
    (axes,) = drawn("flops", tmp_path).axes
    ((data, _, _),) = axes.containers
    places = data.get_xydata()
    assert places[:, 0].tolist() == list(costs.values())
    assert places[:, 1] == pytest.approx(91.0)
    assert axes.get_xscale() == how
    # two stand on the same spot: their names beside it, over neither each other nor a point
    assert {text.get_text() for text in axes.texts} == {"2:4", "1:8", "1:16"}
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    points = axes.transData.transform(places)
    assert not any(box.contains(*point) for box in boxes for point in points)


def test_names_without_room_are_left_out(write, tmp_path):
    for n in range(1, 9):
        spent(write("ste", f"{n}:16", 0, 0.9), 2e9)
    (axes,) = drawn("flops", tmp_path).axes
    assert len(axes.texts) == 4  # eight points on one spot, which has four sides


def test_rows_that_cost_the_same_stand_side_by_side(write, tmp_path):
    for recipe, flops in {"ste": 1e9, "sr_ste": 1e9, "step": 1.5e9, "dense": 2e9}.items():
        spent(write(recipe, "dense" if recipe == "dense" else "1:8", 0, 0.9), flops)
    (axes,) = drawn("flops", tmp_path).axes
    axes.figure.draw_without_rendering()
    aside = {}  # points of a marker from where its cost is
    for each in axes.containers:
        at = each[0].get_xydata()
        shown, place = (
            how.transform(at)[0, 0] for how in (each[0].get_transform(), axes.transData)
        )
        aside[each.get_label()] = round((shown - place) * 72 / axes.figure.dpi, 6)
    assert aside == {"STE": -3, "SR-STE": 3, "STEP": 0, "dense": 0}
    assert axes.get_xlabel().endswith(", at 1:8")  # one ratio, which no point needs beside it
    assert not axes.texts


def test_the_label_of_narrow_axes_has_lines_and_stays_in_the_picture(write, tmp_path):
    for moment in ("frozen", "live"):
        own = {"recipe__second_moment": moment, "recipe__decay": 2e-4, "recipe__lr_factor": 1.5}
        spent(write("step", "1:8", 0, 0.9, **own), 1e9)
    keys = "recipe,recipe.second_moment,recipe.decay,recipe.lr_factor"
    figure = drawn("flops", tmp_path, rows=keys)
    (axes,) = figure.axes
    figure.draw_without_rendering()
    box = axes.xaxis.label.get_window_extent()
    assert "\n" in axes.get_xlabel()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert box.y0 >= 0


def test_metric_against_a_setting(write, tmp_path):
    """A row without it is a line of its own; the axis is logarithmic where numbers are far apart."""
    values = {0.05: 0.8, 0.5: 0.95, 0.75: 0.9}
    for switch, accuracy in values.items():
        write("step", "1:8", 0, accuracy, recipe__switch=switch)
    for recipe, accuracy in (("ste", 0.7), ("sr_ste", 0.9), ("dense", 0.99)):
        write(recipe, "dense" if recipe == "dense" else "1:8", 0, accuracy)
    (axes,) = drawn("ratio", tmp_path, columns="recipe.switch").axes
    ((data, _, _),) = axes.containers
    assert list(data.get_xdata()) == list(values) == list(axes.get_xticks())
    assert list(data.get_ydata()) == pytest.approx([100 * a for a in values.values()])
    assert [float(text.get_text()) for text in axes.get_xticklabels()] == list(values)
    assert axes.get_xscale() == "log"
    levels = [each for each in axes.lines if str(each.get_label()) in ("STE", "SR-STE")]
    assert [each.get_ydata()[0] for each in levels] == pytest.approx([70.0, 90.0])
    assert len({each.get_color() for each in levels}) == 2
    assert len({each.get_linestyle() for each in levels}) == 2
    assert line(axes, "dense")[1] == pytest.approx([99.0, 99.0])


def drawn_by(tmp_path: Path, *words: str) -> ElementTree.Element:
    """What ``nmrun plot`` writes as SVG."""
    target = tmp_path / "plot.svg"
    assert verb("plot", str(tmp_path / "outputs"), "--out", str(target), *words) == 0
    return ElementTree.parse(target).getroot()


def words_of(picture: ElementTree.Element) -> list[str]:
    return ["".join(each.itertext()) for each in picture.iter("{http://www.w3.org/2000/svg}text")]


def test_a_picture_for_a_paper(write, tmp_path):
    """The words are text; title, width and axis are as asked for."""
    for seed in range(3):
        write("sr_ste", "2:4", seed, 0.95 + 0.001 * seed)
        write("step", "2:4", seed, 0.96)
        write("dense", "dense", seed, 0.97)
    words = words_of(drawn_by(tmp_path))
    title = "small_conv on digits, Adam, learning rate 0.001, 12 epochs; mean and sd"
    assert {title, "SR-STE", "STEP", "dense", "test accuracy (%)"} <= set(words)
    asked = ("--title", r"A <title> & $\bad$", "--width", "3.25")
    picture = drawn_by(tmp_path, *asked, "--ylim", "90,100")
    words = words_of(picture)
    assert {r"A <title> & $\bad$", "STEP", "SR-STE", "90", "100"} <= set(words)
    assert title not in words
    assert picture.get("width") == "234pt"  # 3.25 inches of 72 points
    assert title not in words_of(drawn_by(tmp_path, "--title", ""))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--ylim", "9,a"), "--ylim: invalid limits value: '9,a'"),
        (("--ylim", "9,3"), "ylim=(9.0,3.0): it takes LOW,HIGH"),
        (("--ylim", "0,inf"), "ylim=(0.0,inf): it takes LOW,HIGH"),
        (("--width", "0.1"), "width=0.1: it takes a number at least 1 and at most 40"),
        (("--x", "recipe"), "'step', 'epoch', 'seconds'"),
        (("--cols", "recipe.decy"), "recipe.decy: no such key in these runs"),
        (("--kind", "curves"), "has this metric at two steps or more"),
        (("--kind", "overall"), "name it with --baseline"),
        (("--baseline", "ste"), "--baseline is for --kind overall"),
    ],
)
def test_mistakes_get_one_line(words, message, write, tmp_path, capsys):
    log(write("ste", "2:4", 0, 0.9), [{"train/loss": 2.0}] * 3 + [{"eval/accuracy": 0.8}])
    assert verb("plot", str(tmp_path / "outputs"), *words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("kind", ["ratio", "curves"])
def test_a_narrow_picture_leaves_its_axes_room(kind, write, tmp_path):
    """With a title of three lines, eight entries in the legend and labels of two lines."""
    for recipe in ("asp", "ste", "sr_ste", "step", "s_ste", "lbc", "dense"):
        for ratio in ("2:4", "1:8") if recipe != "dense" else ("dense",):
            log(write(recipe, ratio, 0, 0.9), [{"eval/accuracy": 0.8}] * 4)
    for width in (2.5, 3.25, 5.0):
        layout = style.Layout(title="A title " * 15, width=width)
        figure = drawn(kind, tmp_path, layout=layout)
        figure.draw_without_rendering()
        boxes = [axes.get_window_extent() for axes in figure.axes if axes.axison]
        assert min(box.height for box in boxes) / figure.dpi > 1.6
        assert figure.get_figwidth() == width


def test_runs_without_rows_are_told(write, tmp_path):
    for recipe in ("ste", "sr_ste"):
        log(write(recipe, "2:4", 0, 0.9), [{"eval/accuracy": 0.8}] * 4)
    (write("ste", "2:4", 1, 0.9) / "metrics.jsonl").write_text("")
    (axes,) = drawn("curves", tmp_path).axes
    assert [each.get_label() for each in axes.lines] == ["STE (1 without a log)", "SR-STE"]


def test_each_of_many_recipes_has_a_panel(write, tmp_path):
    names = [f"recipe{i}" for i in range(9)]
    for i, name in enumerate(names):
        rows = [{"eval/accuracy": 0.5 + 0.01 * i}] * 4
        log(write(name, "2:4", 0, 0.8 + 0.01 * i), rows)
        log(write(name, "1:8", 0, 0.7 + 0.01 * i), rows)
    figure = drawn("ratio", tmp_path)
    assert [axes.get_title() for axes in figure.axes] == names
    for i, axes in enumerate(figure.axes):
        (bars,) = [c for c in axes.containers if c.get_label() in names] or [axes.containers[-1]]
        assert list(bars[0].get_ydata()) == pytest.approx([80.0 + i, 70.0 + i])
        assert len(axes.containers) == len(names), "the others in grey"
    curves = drawn("curves", tmp_path)
    assert [axes.get_title() for axes in curves.axes] == names
    assert all(len(axes.lines) == 2 for axes in curves.axes), "a line a ratio"


def test_curves_over_epochs_and_seconds(write, tmp_path):
    """Of anything that was logged, as it is."""
    speeds = [5.0, 10.0, 10.0, 2.0]  # 10 steps each: 2, 1, 1 and 5 seconds
    rates = [0.01, 0.005, 0.001, 0.0005]
    rows = [
        {"epoch": (step + 19) // 20, "sparsity/flip_rate": rate, "steps_per_second": speed}
        for step, rate, speed in zip(STEPS, rates, speeds, strict=True)
    ]
    log(write("ste", "2:4", 0, 0.9), rows)
    for x, expected in (("epoch", [0.5, 1.0, 1.5, 2.0]), ("seconds", [2.0, 3.0, 4.0, 9.0])):
        layout = style.Layout(x=x)
        (axes,) = drawn("curves", tmp_path, "sparsity/flip_rate", layout=layout).axes
        places, shown = line(axes, "STE")
        assert places == pytest.approx(expected)
        assert shown == pytest.approx(rates)
        assert axes.get_xlabel().startswith(x)


@pytest.mark.parametrize("kind", plots.KINDS)
def test_nothing_to_draw(kind, write, tmp_path):
    write("step", "2:4", 0, status="failed")
    assert drawn(kind, tmp_path) is None
    assert pyplot.get_fignums() == []


@pytest.mark.parametrize("suffix", [".svg", ".pdf", ".png"])
def test_a_picture_drawn_later_has_the_same_bytes(suffix, write, tmp_path, monkeypatch):
    write("step", "2:4", 0, 0.9)
    files = []
    for year in ("1000000000", "1500000000"):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", year)
        file = tmp_path / f"plot{suffix}"
        style.save(drawn("ratio", tmp_path), file)
        files.append(file.read_bytes())
    assert files[0] == files[1]


def test_lines_are_told_apart_without_colour(write, tmp_path):
    """In grey: no two of fifteen recipes with the same marker and line, and no line too pale to see
    on white.
    """
    names = [f"recipe{i:02}" for i in range(15)]
    for name in names:
        write(name, "2:4", 0, 0.9)
    table = build(collect([tmp_path]), "test/accuracy", ["recipe"], ["sparsity"])
    looks = [style.look(table, (name,)) for name in names]
    assert len({(look["marker"], look["linestyle"]) for look in looks}) == len(names)
    for look in looks:
        red, green, blue = (int(look["color"][i : i + 2], 16) / 255 for i in (1, 3, 5))
        assert 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.75
