"""The picture of a benchmark: panels side by side, a line an arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nmrun.lab.bench.timing import Row


def draw(
    out: Path,
    rows: Sequence[Row],
    panel: str,
    line: str,
    across: str,
    value: str,
    labels: tuple[str, str],
    level: float | None,
) -> None:
    """Draw panels of lines, with quartiles as bars.

    Args:
        out: the file.
        rows: what was measured; those without the value are left out.
        panel: the key that has a panel for each of its values.
        line: the key that has a line for each of its values.
        across, value: the keys of both axes.
        labels: of both axes.
        level: drawn as a grey line for reference; None: none.
    """
    from matplotlib import pyplot  # a second that a benchmark without a picture need not wait for

    from nmrun.lab.show import style

    panels = list(dict.fromkeys(row[panel] for row in rows))
    lines, places = (
        list(dict.fromkeys(row[line] for row in rows)),
        list(dict.fromkeys(row[across] for row in rows)),
    )
    wide = min(style.ACROSS, len(panels))
    deep = -(-len(panels) // wide)
    figure, grid = pyplot.subplots(
        deep,
        wide,
        figsize=(1.9 + 3.3 * wide, 0.6 + 2.7 * deep),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for i, axes in enumerate(grid.flat):
        if i >= len(panels):
            axes.set_axis_off()
            continue
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(str(panels[i]), fontsize=10)
        if level is not None:
            axes.axhline(level, color="#555555", linestyle="--", linewidth=0.9)
        for number, name in enumerate(lines):
            known = [
                row
                for row in rows
                if row[panel] == panels[i] and row[line] == name and value in row
            ]
            xs, ys, bars = (
                zip(*(_point(row, places.index(row[across]), value) for row in known), strict=True)
                if known
                else ((),) * 3
            )
            axes.errorbar(
                xs, ys, list(zip(*bars, strict=True)) or None, label=str(name), color=style.COLOURS[number % len(style.COLOURS)],
                marker=style.MARKERS[number % len(style.MARKERS)], markersize=4, linewidth=1.2, elinewidth=0.9, capsize=2,
            )  # fmt: skip
        axes.set_xticks(
            range(len(places)),
            [str(place) for place in places],
            rotation=45 if len(places) > 5 else 0,
            fontsize=8,
        )
        axes.tick_params(labelbottom=i + wide >= len(panels))
    values = [row[value] for row in rows if value in row]
    if values and max(values) > 20 * min(values):
        figure.axes[0].set_yscale("log")  # the other panels share it
    figure.supxlabel(labels[0], fontsize=10)
    figure.supylabel(labels[1], fontsize=10)
    style.legend(figure)
    style.save(figure, out)


def _point(row: Mapping[str, float], x: int, value: str) -> tuple[int, float, tuple[float, float]]:
    return x, row[value], (row[value] - row[f"{value}_q1"], row[f"{value}_q3"] - row[value])
