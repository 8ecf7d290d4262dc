"""The training loop: micro-batches, precision, clipping, evaluation, checkpoints, signals.

Recipes do not appear here. They hang on ``optimizer.step`` (see ``nmrun.handle``), so this is the loop anyone would write.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nmrun import checkpoint
from nmrun.console import Console
from nmrun.errors import RunError
from nmrun.handle import Handle
from nmrun.optim import schedule_factor
from nmrun.schema import Config
from nmrun.sparsity.export import baked_state_dict
from nmrun.tasks.base import Task
from nmrun.track import Tracker


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived; a checkpoint of the last complete step is on disk."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Loop:
    """Trains ``model`` from wherever the folder's checkpoint left off to the last step."""

    def __init__(
        self, config: Config, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, handle: Handle, folder: Path
    ) -> None:
        self.config, self.task, self.model, self.optimizer, self.handle, self.folder = config, task, model, optimizer, handle, folder
        trainer, schedule = config.trainer, config.schedule
        self.device = next(model.parameters()).device
        self.steps_per_epoch = steps_per_epoch(config, task)
        self.total_steps = trainer["epochs"] * self.steps_per_epoch
        self.lr_factor = schedule_factor(
            schedule["name"], round(schedule["warmup"] * self.total_steps), self.total_steps, schedule["final"]
        )
        self.base_lrs = [group["lr"] for group in optimizer.param_groups]
        self.dtype = resolve_precision(trainer["precision"], self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.forward = torch.compile(model, fullgraph=True) if trainer["compile"] else model
        self.step = 0
        self.best: dict[str, Any] = {}
        self.events: list[str] = []  # what the recipe had to say
        self.loss_sum = torch.zeros((), device=self.device)  # of the steps since the last line of the log
        self.loss_count = 0
        self._signal: int | None = None

    # --- one optimizer step ---------------------------------------------------------------------------------------------------

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        low = self.dtype != torch.float32
        return torch.autocast(self.device.type, self.dtype) if low else contextlib.nullcontext()

    def train_step(self) -> Tensor:
        """One optimizer step on the next batch; returns its mean loss, on the device."""
        trainer = self.config.trainer
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * self.lr_factor(self.step)
        batch = self.task.batch(self.step // self.steps_per_epoch, self.step % self.steps_per_epoch)
        total = torch.zeros((), device=self.device)
        for part in self.task.split(batch, trainer["accumulate"]):
            with self._autocast():
                loss = self.task.loss(self.forward, part) * (self.task.count(part) / self.task.count(batch))
            if self.device.type == "cpu" and not math.isfinite(loss.item()):
                self._explain_non_finite(part)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        self.scaler.unscale_(self.optimizer)
        if trainer["clip"] is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), trainer["clip"])
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        return total

    def _explain_non_finite(self, batch: Any) -> None:
        """Raise RunError naming the first layer that turned a finite input into a non-finite output."""
        culprit: list[str] = []

        def watch(name: str) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                if isinstance(output, Tensor) and not output.isfinite().all() and not culprit:
                    culprit.append(name)

            return hook

        leaves = [(name, m) for name, m in self.model.named_modules() if name and not any(True for _ in m.children())]
        leaves += [(name, m) for name, m in self.model.named_modules() if name and hasattr(m, "parametrizations")]
        hooks = [module.register_forward_hook(watch(name)) for name, module in leaves]
        with torch.no_grad(), self._autocast():
            self.task.loss(self.model, batch)
        for hook in hooks:
            hook.remove()
        broken = [name for name, p in self.model.named_parameters() if not p.isfinite().all()]
        where = f"first in layer {culprit[0]}" if culprit else "in the loss itself, every layer's output is finite"
        weights = f"; not finite any more: {', '.join(broken[:4])}" if broken else ""
        raise RunError(
            f"the loss is not finite at step {self.step + 1} ({where}{weights}). Try a lower optimizer.lr, trainer.clip=1.0, "
            "schedule.warmup=0.05" + ("" if self.dtype == torch.float32 else " or trainer.precision=fp32")
        )

    # --- the run ----------------------------------------------------------------------------------------------------------------

    def run(self, tracker: Tracker, console: Console) -> dict[str, Any]:
        """Train to the end; returns ``{"final": {...}, "best": {...}}``. Raises Interrupted or RunError."""
        trainer = self.config.trainer
        started, since = time.perf_counter(), self.step
        with self._signals():
            while self.step < self.total_steps:
                self.model.train()
                logs = (self.step + 1) % trainer["log_every"] == 0 or self.step + 1 == self.total_steps
                self.handle.measure_flips = logs
                self.loss_sum += self.train_step()
                self.loss_count += 1
                epoch, epoch_ends = self.step / self.steps_per_epoch, self.step % self.steps_per_epoch == 0
                for event in self.handle.pop_events():
                    self.events.append(event)
                    console.say(event)
                if logs:
                    loss = float(self.loss_sum) / self.loss_count
                    if not math.isfinite(loss):
                        self._explain_non_finite(self.task.batch((self.step - 1) // self.steps_per_epoch, 0))
                    speed = (self.step - since) / (time.perf_counter() - started)
                    lr = self.optimizer.param_groups[0]["lr"]
                    row = {"step": self.step, "epoch": round(epoch, 4), "train/loss": loss, "lr": lr, "steps_per_second": round(speed, 2)}
                    tracker.log({**row, **self.handle.metrics()})
                    phase = "" if not self.handle.sparse else f"  {self.handle.phase}"
                    text = f"epoch {epoch:.1f}/{trainer['epochs']}  loss {loss:.4f}  lr {lr:.2g}{phase}  {speed:.0f} steps/s"
                    console.progress(self.step, self.total_steps, text)
                    self.loss_sum.zero_()
                    self.loss_count = 0
                last = self.step == self.total_steps
                if last or (epoch_ends and round(epoch) % trainer["eval_every"] == 0):
                    self._evaluate(tracker, console, round(epoch, 4))
                if last or self._signal is not None or (epoch_ends and round(epoch) % trainer["checkpoint_every"] == 0):
                    self.save()
                if self._signal is not None and not last:
                    raise Interrupted(self._signal)
        console.stop_progress()
        return self._final_metrics()

    def _evaluate(self, tracker: Tracker, console: Console, epoch: float) -> None:
        values = self.evaluate("eval")
        row: dict[str, Any] = {"step": self.step, "epoch": epoch, **values}
        if self.handle.sparse:
            report = self.handle.report()
            row["sparsity/density"] = report["density"] if self.handle.is_sparse else 1.0
            row["sparsity/holds"] = self.handle.is_sparse and all(layer["holds"] for layer in report["layers"])
        tracker.log(row)
        score = values[f"eval/{self.task.metric}"]
        # while the forward pass is still dense, its score says nothing about the sparse model
        if (self.handle.is_sparse or not self.handle.sparse) and score > self.best.get(f"eval/{self.task.metric}", -math.inf):
            self.best = {"epoch": epoch, **values}
            self.save_model("best.safetensors")
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        console.say(f"epoch {epoch:g}/{self.config.trainer['epochs']}  {shown}" + (f"  {self.handle.phase}" if self.handle.sparse else ""))

    def evaluate(self, split: str) -> dict[str, float]:
        """The task's metrics on a split, as ``eval/accuracy`` and so on."""
        self.model.eval()
        with torch.no_grad(), self._autocast():
            return {f"{split}/{name}": value for name, value in self.task.evaluate(self.forward, split).items()}

    def _final_metrics(self) -> dict[str, Any]:
        from safetensors.torch import load_file

        self.save_model("model.safetensors")
        final = {**self.evaluate("eval"), **self.evaluate("test")}
        best = dict(self.best)
        path = self.folder / "best.safetensors"
        if best and path.exists():  # the test split is looked at once, at the end, for the last and for the best weights
            plain = self.task.model(self.config.model).to(self.device)
            plain.load_state_dict(load_file(path, device=str(self.device)))
            plain.eval()
            with torch.no_grad(), self._autocast():
                best |= {f"test/{name}": value for name, value in self.task.evaluate(plain, "test").items()}
        return {"final": final, "best": best}

    # --- saving and resuming ------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write ``checkpoint.pt``: all that the rest of the run depends on."""
        state = {
            "step": self.step,
            "best": self.best,
            "events": self.events,
            "loss": [float(self.loss_sum), self.loss_count],
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "handle": self.handle.state_dict(),
            "scaler": self.scaler.state_dict(),
            "random": checkpoint.random_state(),
        }
        checkpoint.save(self.folder / "checkpoint.pt", state)

    def resume(self) -> bool:
        """Go back to the checkpoint if there is one. Raises whatever a damaged file makes torch raise."""
        state = checkpoint.load(self.folder / "checkpoint.pt", self.device)
        if state is None:
            return False
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.handle.load_state_dict(state["handle"])
        self.scaler.load_state_dict(state["scaler"])
        checkpoint.restore_random_state(state["random"])
        self.step, self.best, self.events = state["step"], state["best"], state["events"]
        self.handle.pop_events()  # said before the interruption
        self.loss_sum.fill_(state["loss"][0])
        self.loss_count = state["loss"][1]
        return True

    def save_model(self, name: str) -> None:
        """The weights as the forward pass of a finished model uses them: plain keys, exactly N:M."""
        state = {key: tensor.contiguous().cpu() for key, tensor in baked_state_dict(self.model).items()}
        checkpoint.write_atomically(self.folder / name, lambda path: save_file(state, path))

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """A first SIGINT or SIGTERM lets the current step finish and be saved; a second one ends the process at once."""

        def note(number: int, frame: Any) -> None:
            self._signal = number
            for each in (signal.SIGINT, signal.SIGTERM):
                signal.signal(each, signal.SIG_DFL)

        try:
            before = {each: signal.signal(each, note) for each in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: the host program owns the signals
            before = {}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def steps_per_epoch(config: Config, task: Task) -> int:
    """Optimizer steps an epoch: one a batch, at most ``trainer.limit_batches``."""
    limit = config.trainer["limit_batches"]
    return task.batches_per_epoch if limit is None else min(limit, task.batches_per_epoch)


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bf16 on a GPU that has it, else fp32."""
    if name == "auto":
        name = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
