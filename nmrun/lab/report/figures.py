"""The pictures that the options of ``nmrun plot`` ask for, and what they are to look like."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from nmrun.errors import ConfigError
from nmrun.lab.report import chosen

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from nmrun.lab.report.style import Layout


def labels(given: str | None) -> dict[str, str]:
    """The user's names for labels.

    Args:
        given: ``NAME=TEXT`` with commas between, such as ``step=Ours,dense=Dense``.

    Raises:
        ConfigError: for a part that is not ``NAME=TEXT``.
    """
    pairs = [part.partition("=") for part in (given or "").split(",") if part]
    for name, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"--labels {name}: write NAME=TEXT, such as sr_ste=SR-STE")
    return {name: text for name, _, text in pairs}


def figures(options: argparse.Namespace) -> list[Figure]:
    """Draw the pictures that the options of ``nmrun plot`` ask for.

    Args:
        options: the parsed command line: ``paths``, ``rows``, ``cols``, ``metric``, ``filter``,
            ``kind``, and ``title``, ``width``, ``height``, ``labels``, ``ylim`` and ``x`` of the layout.

    Returns:
        One picture for each data set and model that has something of this kind.

    Raises:
        ConfigError: where the runs have nothing of this kind.
    """
    wanted, options.metric = (
        (options.metric, None) if options.kind == "curves" else (None, options.metric)
    )
    own, layout = layout_of(options)
    if options.kind == "overall":
        return [_overall(own, layout)]
    if options.baseline:
        raise ConfigError("--baseline is for --kind overall")
    found = chosen.parts(own, several=False)
    from nmrun.lab.report import plots
    from nmrun.lab.report.history import History

    if wanted:  # what is logged while training goes on, which the results need not have
        chosen.known(
            wanted,
            sorted({key for runs, each in found for key in History(each, runs).logged()}),
            "metric",
        )
    every = [
        plots.draw(options.kind, each, runs, wanted or chosen.logged(runs, each), layout)
        for runs, each in found
    ]
    drawn = [figure for figure in every if figure is not None]
    if not drawn:
        raise ConfigError(f"--kind {options.kind}: {plots.KINDS[options.kind].nothing}")
    return drawn


def _overall(options: argparse.Namespace, layout: Layout) -> Figure:
    """All data sets in one picture."""
    from nmrun.lab.report import overall_picture, overall_table

    options.show, options.test, options.verify, options.digits = "mean", "t", False, None
    return overall_picture.draw(*overall_table.compared(options), layout)


def layout_of(options: argparse.Namespace) -> tuple[argparse.Namespace, Layout]:
    """The options with the columns that ``--x`` asks for, and the layout.

    Raises:
        ConfigError: for an ``--x`` that this kind of picture has not, and for numbers that are
            none.
    """
    from nmrun.lab.report.curves import OVER
    from nmrun.lab.report.style import Layout

    own = argparse.Namespace(**vars(options))
    over = options.kind in ("curves", "flips", "autoswitch")
    if over and options.x not in (None, *OVER):
        raise ConfigError(f"--x {options.x}: {options.kind} are over {', '.join(OVER)}")
    if options.x and not over:
        if options.kind != "ratio" or options.cols:
            raise ConfigError("--x KEY is for --kind ratio without --cols")
        own.cols = options.x
    ylim = _numbers("--ylim", options.ylim, "LOW,HIGH") if options.ylim else ()
    if len(ylim) not in (0, 2) or (ylim and not ylim[0] < ylim[1]):
        raise ConfigError(f"--ylim {options.ylim}: write LOW,HIGH, such as 90,100")
    for side in ("width", "height"):
        inches = getattr(options, side)
        if inches is not None and not 1 <= inches <= 40:
            raise ConfigError(f"--{side} {inches:g}: inches, from 1 to 40")
    layout = Layout(
        title=options.title,
        width=options.width,
        height=options.height,
        labels=labels(options.labels),
        ylim=(ylim[0], ylim[1]) if ylim else None,
        x=(options.x or "step") if over else "step",
    )
    return own, layout


def _numbers(option: str, text: str, form: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"{option} {text}: write {form}") from None
