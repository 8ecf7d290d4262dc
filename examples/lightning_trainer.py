"""A Lightning module on the digits of scikit-learn: a callback makes it sparse.

pip install '.[lightning]'
python -m examples.lightning_trainer [FILE.ckpt]
"""

import sys

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nmrun.integrations.lightning import NMCallback


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[Tensor]) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


pl.seed_everything(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
data = TensorDataset(images, torch.tensor(digits.target))
train, test = torch.utils.data.random_split(data, [1400, len(data) - 1400])

sparse = NMCallback("sr_ste", "2:4")
trainer = pl.Trainer(
    max_epochs=20,
    accelerator="cpu",
    callbacks=[sparse],
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
module = Digits()
trainer.fit(module, DataLoader(train, 50, shuffle=True))
trainer.validate(module, DataLoader(test, 397))
if len(sys.argv) > 1:
    trainer.save_checkpoint(sys.argv[1])
