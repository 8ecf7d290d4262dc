"""What a run prints: its plan, its progress, and the lines in ``run.log``. A terminal has a live
display."""

from __future__ import annotations

import contextlib
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nmrun import ranges
from nmrun.errors import folded, tell
from nmrun.lab import output
from nmrun.lab.keys.config import Config
from nmrun.lab.tasks.base import evaluating
from nmrun.lab.train.build import Parts
from nmrun.lab.train.steps import TrainingSteps
from nmrun.sparsity.weight import SparseWeight

REFRESH = 0.1  # seconds between two drawings of the display


class Console:
    """Lines for the reader. ``brief`` keeps details off the screen (in a sweep); ``run.log`` has
    them always.

    ``log`` is opened at the first line, so a run that is refused leaves no file. Colours are for
    terminals, unless NO_COLOR is set.
    """

    def __init__(self, log: Path | None, brief: bool = False) -> None:
        self.log, self.brief = log, brief
        self.has_traceback = False
        self._live: Any = None
        self._draw_time = 0.0
        self.on_terminal = output.is_terminal(sys.stdout)

    def say(self, text: str, error: bool = False, style: str = "") -> None:
        """Show a line on the screen, on a terminal above the display and in a ``style`` such as
        ``bold green``, and log it."""
        stream = sys.stderr if error else sys.stdout
        try:
            if self.on_terminal:
                rich = self._live.console if self._live and not error else _rich(error)
                rich.print(folded(text, stream), style=style, soft_wrap=True)
            else:
                print(folded(text, stream), file=stream, flush=True)
        except OSError:  # a full disk behind ``nmrun ... > file``; the log has the line
            output.discard(stream)
        self.note(text)

    def detail(self, text: str, style: str = "") -> None:
        """A line for the log, and for the screen unless brief."""
        self.note(text) if self.brief else self.say(text, style=style)

    def note(self, text: str) -> None:
        if self.log is None:
            return
        try:
            with self.log.open("a", encoding="utf-8") as file:
                file.write(text.rstrip("\n") + "\n")
        except OSError as error:  # a full disk must not keep a run from ending in order
            tell([f"{self.log} cannot be written: {error.strerror}"])
            self.log = None

    def note_traceback(self) -> None:
        """Log the traceback of the error that is being handled."""
        self.note(traceback.format_exc())
        self.has_traceback = self.log is not None

    def due(self) -> bool:
        """Whether to draw: on a terminal, at most every ``REFRESH`` seconds."""
        now = time.monotonic()
        if not self.on_terminal or now - self._draw_time < REFRESH:
            return False
        self._draw_time = now
        return True

    def draw(self, words: str, done: int, total: int, figures: str) -> None:
        """Draw the training's progress, below what is said."""
        if self._live is None:
            self._live = _display()
            self._live.add_task("", total=total, completed=done)
            self._live.start()
        self._live.figures = figures
        training = self._live.task_ids[0]
        self._live.update(training, completed=done, description=words, refresh=True)

    @contextlib.contextmanager
    def evaluation(self, what: str) -> Iterator[None]:
        """While entered, draw the progress of an evaluation under the name ``what``."""
        task = self._live.add_task(what, total=None) if self._live else None

        def tell(batch: int, total: int) -> None:
            if task is not None and self.due():
                self._live.update(task, completed=batch, total=total, refresh=True)

        before = evaluating.set(tell)
        try:
            yield
        finally:
            evaluating.reset(before)
            if task is not None:
                self._live.remove_task(task)

    def clear(self) -> None:
        """Take the display away."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _rich(error: bool = False) -> Any:
    """Rich's console, which prints lines as they are, without highlighting or markup."""
    from rich.console import Console

    return Console(stderr=error, highlight=False, markup=False, emoji=False)


def _display() -> Any:
    """Bars that are redrawn in place, with ``figures`` below them; removed when it stops."""
    from rich import progress
    from rich.text import Text

    class Display(progress.Progress):
        figures = ""

        def get_renderables(self) -> Iterator[Any]:
            yield self.make_tasks_table(self.tasks)
            yield Text(self.figures)

    return Display(
        progress.TextColumn("{task.description}", style="bold cyan", markup=False),
        progress.BarColumn(None),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        console=_rich(),
        auto_refresh=False,
        transient=True,
        redirect_stderr=sys.stderr.isatty(),
        expand=True,
    )


def where(steps: TrainingSteps) -> str:
    """Where a run is: ``epoch  3/12  dense``, with the step where evaluations are within epochs."""
    parts, total = steps.parts, steps.parts.total_steps
    epochs = str(-(-total // parts.task.batches_per_epoch))
    cells = [f"epoch {steps.epoch:{len(epochs)}}/{epochs}"]
    if ranges.steps(steps.trainer.eval_every):
        cells.append(f"step {steps.step:{len(str(total))}}/{total}")
    if parts.handle.sparse:
        cells.append(f"{parts.handle.phase:6}")
    return "  ".join(cells)


def facts(row: Mapping[str, float], metric: str, brief: bool = False) -> list[str]:
    """The figures of a row of ``metrics.jsonl``, as far as it has them, in words; ``brief``: those of
    an epoch's line."""
    columns = {
        "train/loss": lambda value: f"train loss {value:.4f}",
        f"eval/{metric}": lambda value: f"val {metric} {value:.4f}",
        "eval/loss": lambda value: f"val loss {value:.4f}",
        "lr": lambda value: f"lr {value:.2e}",
        "steps_per_second": lambda value: f"{value:.{0 if value >= 10 else 2}f} steps/s",
        "items_per_second": lambda value: f"{_short(value)} items/s",
    }
    keys = ("train/loss", f"eval/{metric}", "steps_per_second") if brief else columns
    return [columns[key](row[key]) for key in keys if row.get(key) is not None]


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}P"


# --- the plan -------------------------------------------------------------------------------------


def plan_lines(config: Config, parts: Parts) -> list[str]:
    """The plan of a run: length, device, which weights are sparse, which are dense and why, density
    and FLOPs."""
    trainer, handle = config.trainer, parts.handle
    epochs = parts.total_steps / parts.task.batches_per_epoch
    duration = "1 epoch" if epochs == 1 else f"{epochs:.4g} epochs"
    budget = "" if trainer.budget is None else f" (trainer.budget={trainer.budget})"
    precision = parts.precision
    if trainer.precision == "auto" and precision != "fp32":
        precision += f": this {'processor' if parts.device.type == 'cpu' else 'GPU'} has it"
    lines = [
        f"  {duration} of {parts.task.batches_per_epoch} batches of {parts.task.batches_of or trainer.batch_size}, "
        f"{parts.total_steps} steps{budget}, {parts.device.type} {precision}"
    ]
    lines += [f"  {line}" for line in (parts.task.about, parts.task.left_out) if line]
    if trainer.distill is not None:
        lines.append(
            f"  taught by {trainer.distill}: {trainer.distill_weight:g} of the loss, "
            f"temperature {trainer.distill_temperature:g}"
        )
    rows = [
        ("sparse", weight.name, tuple(weight.shape), _pattern_text(weight))
        for weight in handle.sparse
    ]
    if not config.is_dense:
        rows += [("dense", layer.name, layer.shape, layer.reason) for layer in handle.left_dense]
    lines += [f"  {line}" for line in layer_lines(rows)]

    if (activations := parts.activations).pattern is not None:
        sparse_steps = activations.sparse_steps
        sparse_steps = range(parts.total_steps) if sparse_steps is None else sparse_steps
        lines.append(
            f"  activations {activations.pattern} of {len(activations.modules)} squared ReLUs, "
            f"steps {sparse_steps.start + 1} to {sparse_steps.stop}"
        )
    total = sum(parameter.numel() for parameter in parts.model.parameters())
    cost, ends_dense = parts.cost, handle.recipe.planned_dense_end
    zeros = sum(weight.dense.numel() * (1 - weight.pattern.density) for weight in handle.sparse)
    nonzeros = total if ends_dense else total - zeros
    inference = (cost.forward, *(cost.inference(on, ends_dense) for on in (False, True)))
    costs = [("an inference", inference), ("the training", planned_flops(parts))]
    if handle.sparse or activations.pattern is not None:
        lines.append(f"  density {nonzeros / total:.1%} of {total:,} parameters")
        for what, flops in costs:
            dense, arithmetic, hardware = map(_short, flops)
            lines.append(
                f"  FLOPs of {what}: {dense} dense, {arithmetic} sparse, {hardware} on 2:4 tensor cores"
            )
    else:
        lines.append(f"  {total:,} parameters")
        dense_costs = "; of ".join(f"{what}: {_short(flops[0])}" for what, flops in costs)
        lines.append(f"  FLOPs of {dense_costs}")
    return lines


def planned_flops(parts: Parts) -> tuple[float, float, float]:
    """FLOPs of a whole training as planned: of a dense one, without the zeros, and on 2:4 tensor
    cores."""
    cost, recipe, steps = parts.cost, parts.handle.recipe, parts.total_steps
    items = steps * parts.task.mean_size()
    without, hardware = (items * cost.planned(recipe, steps, on) for on in (False, True))
    return items * cost.dense, without, hardware


def plan_line(parts: Parts) -> str:
    """What a run is going to do, in a line of a list of runs."""
    dense, without, _ = map(_short, planned_flops(parts))
    line = f"  {parts.total_steps} steps, FLOPs of the training: {dense} dense"
    return f"{line}, {without} sparse" if parts.handle.sparse else line


Row = tuple[str, str, tuple[int, ...], str]  # sparse or dense, name, shape, pattern or reason


def layer_lines(rows: Sequence[Row]) -> list[str]:
    """The weights, a line for all whose names differ only in a number: ``sparse 6 x
    blocks.*.attn.qkv.weight 1536x512 2:4``."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for kind, name, shape, note in rows:
        alike = (kind, re.sub(r"\d+", "*", name), "x".join(map(str, shape)), note)
        groups.setdefault(alike, []).append(name)
    lines = [
        (kind, f"{len(names)} x {stars}" if len(names) > 1 else names[0], size, note)
        for (kind, stars, size, note), names in groups.items()
    ]
    return output.aligned(lines)


def _pattern_text(weight: SparseWeight) -> str:
    pattern, rest = weight.pattern, weight.shape[weight.dim] % weight.pattern.m
    text = str(pattern)
    if pattern.v > 1:
        text += f": {pattern.n}:{pattern.m}, the columns shared by {pattern.v} rows"
    if pattern.n == pattern.m:
        text += ", which prunes nothing"
    return text + (f", the last group of {rest}" if rest else "")
