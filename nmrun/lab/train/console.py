"""What a run prints: its plan, its progress, and the lines in ``run.log``. A terminal has a live
display."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from nmrun import ranges
from nmrun.errors import folded, tell
from nmrun.lab import output
from nmrun.lab.keys.config import Config
from nmrun.lab.tasks.base import evaluating
from nmrun.lab.train.build import Parts
from nmrun.lab.train.steps import TrainingSteps
from nmrun.sparsity.weight import SparseWeight

REFRESH = 0.1  # seconds between two drawings of the display


class Bar(NamedTuple):
    """What is done of ``total``, with words to its left, to its right and below it."""

    left: str
    done: int
    total: int
    right: str
    below: str = ""


class Console:
    """Lines for the reader. ``brief`` keeps details off the screen (in a sweep); ``run.log`` has
    them always.

    ``log`` is opened at the first line, so a run that is refused leaves no file. Colours are for
    terminals, unless NO_COLOR is set.
    """

    def __init__(self, log: Path | None, brief: bool = False) -> None:
        self.log, self.brief = log, brief
        self._live: Any = None
        self._bar: Bar | None = None
        self._draw_time = 0.0
        self.on_terminal = output.is_terminal(sys.stdout)

    def say(self, text: str, error: bool = False, style: str = "") -> None:
        """Show a line on the screen, on a terminal in a ``style`` such as ``bold green``, and log
        it."""
        self.clear()
        stream = sys.stderr if error else sys.stdout
        try:
            if style and self.on_terminal:
                rich = _rich(error)
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

    def progress(self, now: Callable[[], Bar]) -> None:
        """Draw the progress of the training on a terminal, at most every ``REFRESH`` seconds."""
        if self._due():
            self._bar = now()
            self._draw(self._bar)

    @contextlib.contextmanager
    def evaluation(self, what: str) -> Iterator[None]:
        """While entered, draw the progress of an evaluation under the name ``what``."""

        def tell(batch: int, total: int) -> None:
            if self._bar is not None and self._due():
                self._draw(self._bar, Bar(what, batch, total, f"{batch}/{total}"))

        before = evaluating.set(tell)
        try:
            yield
        finally:
            evaluating.reset(before)

    def _due(self) -> bool:
        return self.on_terminal and time.monotonic() - self._draw_time >= REFRESH

    def _draw(self, *bars: Bar) -> None:
        self._draw_time = time.monotonic()
        if self._live is None:
            self._live = _live_display()
            self._live.start()
        self._live.update(_display(bars), refresh=True)

    def clear(self) -> None:
        """Take the display away; the next :meth:`progress` brings it back."""
        if self._live is not None:
            self._live.stop()
            self._live, self._draw_time = None, 0.0


def _rich(error: bool = False) -> Any:
    """Rich's console, which prints lines as they are, without highlighting or markup."""
    from rich.console import Console

    return Console(stderr=error, highlight=False, markup=False, emoji=False)


def _live_display() -> Any:
    """A display that is redrawn in place, and removed when it stops."""
    from rich.live import Live

    redirect = sys.stderr.isatty()
    return Live(console=_rich(), auto_refresh=False, transient=True, redirect_stderr=redirect)


def _display(bars: Sequence[Bar]) -> Any:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Column, Table
    from rich.text import Text

    lines = Table.grid("", Column(ratio=1), "", padding=(0, 1), expand=True)
    for bar in bars:
        progress = ProgressBar(max(bar.total, 1), bar.done)
        lines.add_row(Text(bar.left, "bold cyan"), progress, bar.right)
    return Group(lines, *(Text(bar.below) for bar in bars if bar.below))


class RunProgress:
    """The progress of a run as it is shown. ``row`` has the last value of everything that was
    logged."""

    def __init__(self, steps: TrainingSteps) -> None:
        self.steps, self.parts = steps, steps.parts
        self.row: dict[str, float] = {}
        self._began, self._begun = time.perf_counter(), steps.step

    def begin(self) -> None:
        self._began, self._begun = time.perf_counter(), self.steps.step

    def bar(self) -> Bar:
        steps, elapsed = self.steps, time.perf_counter() - self._began
        completed, total = steps.step - self._begun, self.parts.total_steps
        right = f"{steps.step}/{total}  {timedelta(seconds=round(elapsed))}"
        if completed:
            left = round(elapsed / completed * (total - steps.step))
            right += f" < {timedelta(seconds=left)}"
        below = "  ".join(facts(self.row, self.parts.task.metric))
        words = f"epoch {self._epoch()}  {self._phase()}".rstrip()
        return Bar(words, steps.step, total, right, below)

    def epoch(self, best: bool = False) -> str:
        """The line of an evaluation."""
        row = self.row
        keys = ("train/loss", f"eval/{self.parts.task.metric}", "steps_per_second")
        cells = [f"epoch {self._epoch()}"]
        if ranges.steps(self.steps.trainer.eval_every):  # several lines of one epoch
            total = str(self.parts.total_steps)
            cells.append(f"step {self.steps.step:{len(total)}}/{total}")
        if self.parts.handle.sparse:
            cells.append(f"{self._phase():6}")
        cells += facts({key: row[key] for key in keys if key in row}, self.parts.task.metric)
        if best:
            cells.append("best")
        return "  ".join(cells)

    def _epoch(self) -> str:
        batches = self.parts.task.batches_per_epoch
        epochs = -(-self.parts.total_steps // batches)
        return f"{max(-(-self.steps.step // batches), 1):{len(str(epochs))}}/{epochs}"

    def _phase(self) -> str:
        return self.parts.handle.phase if self.parts.handle.sparse else ""


def facts(row: Mapping[str, float], metric: str) -> list[str]:
    """The figures of a row of ``metrics.jsonl``, as far as it has them, in words."""
    columns = [
        ("train/loss", lambda value: f"train loss {value:.4f}"),
        (f"eval/{metric}", lambda value: f"val {metric} {value:.4f}"),
        ("eval/loss", lambda value: f"val loss {value:.4f}"),
        ("lr", lambda value: f"lr {value:.2e}"),
        ("steps_per_second", lambda value: f"{value:.{0 if value >= 10 else 2}f} steps/s"),
        ("items_per_second", lambda value: f"{_short(value)} items/s"),
    ]
    said = {key: words(row[key]) for key, words in columns if row.get(key) is not None}
    return [*said.values()]


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
    nonzeros = total - sum(
        weight.dense.numel() * (1 - weight.pattern.density) for weight in handle.sparse
    )
    cost = parts.cost
    if handle.sparse or activations.pattern is not None:
        lines.append(f"  density {nonzeros / total:.1%} of {total:,} parameters")
        item_flops = (cost.forward, cost.forward_sparse, cost.forward_hardware)
        for what, flops in (("an inference", item_flops), ("the training", planned_flops(parts))):
            dense, arithmetic, hardware = map(_short, flops)
            lines.append(
                f"  FLOPs of {what}: {dense} dense, {arithmetic} sparse, {hardware} on 2:4 tensor cores"
            )
    else:
        lines.append(f"  {total:,} parameters")
        inference, whole = _short(cost.forward), _short(planned_flops(parts)[0])
        lines.append(f"  FLOPs of an inference: {inference}; of the training: {whole}")
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
