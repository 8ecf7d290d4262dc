"""A small Lightning module and its loaders, for tests in one process and in two."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import nmrun

BATCHES, EPOCHS, ACCUMULATE = 6, 4, 2
STEPS = BATCHES * EPOCHS // ACCUMULATE
OPTIONS: dict[str, dict[str, Any]] = {
    "sr_ste": {"decay": 0.01},
    "s_ste": {},
    "asp": {"prune_at": 0.5},
    "step": {"switch": 0.5},
    # Adam's first steps are all of one size, so the first scores are equal but for rounding, which
    # differs between one process and two: candidates are dropped later
    "lbc": {"t_i": 0.25},
    "maskllm": {"dense": 0.25},
    "sqft": {"rank": 4},
}

DRAWING = ("maskllm", "sqft")  # by torch's generator, which Lightning has used before


def loader(count: int = BATCHES, rank: int | None = None) -> DataLoader[Tensor]:
    """Batches of eight rows, or one of two ranks' half of each."""
    rows = torch.randn(count, 8, 16, generator=torch.Generator().manual_seed(1))
    if rank is not None:
        rows = rows.view(count, 2, 4, 16)[:, rank]
    return DataLoader(list(rows.reshape(-1, 16)), batch_size=rows.shape[1])


class Module(pl.LightningModule):
    def __init__(self, norm: bool = False, lr: float = 0.02, falls: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(16, 8), nn.BatchNorm1d(8) if norm else nn.Identity()]
        self.net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.lr, self.falls = lr, falls

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x[:, :4].square()).square().mean()

    def training_step(self, batch: Tensor) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("epoch", float(self.current_epoch))
        self.log("loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = nmrun.optim.AdamW(self.parameters(), lr=self.lr)
        if not self.falls:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)]


class Manual(Module):
    """Every other batch is a step, by a closure where there is no accumulation."""

    def __init__(self, closure: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.closure = False, closure

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        if self.closure:

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = self.loss(batch)
                self.manual_backward(loss)
                return loss

            optimizer.step(closure=closure)
            return
        self.manual_backward(self.loss(batch) / ACCUMULATE)
        if index % ACCUMULATE == ACCUMULATE - 1:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()


def trainer(folder: Any, callbacks: list[Any], **changes: Any) -> pl.Trainer:
    options = {
        "max_epochs": EPOCHS, "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 0.5,
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
        **changes,
    }  # fmt: skip
    return pl.Trainer(callbacks=callbacks, **options)
