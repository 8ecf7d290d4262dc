"""A loop in plain torch, with accumulation, clipping and a checkpoint: three lines make it sparse.

python -m examples.plain_loop [FILE.pt]
"""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn

import nmrun

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = torch.arange(0, 1400), torch.arange(1400, len(labels))

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
model.append(nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
epochs, batch, accumulate = 20, 50, 2
steps = epochs * len(train) // (batch * accumulate)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
handle = nmrun.sparsify(model, optimizer, "sr_ste", "2:4", steps)

for _ in range(epochs):
    for number, rows in enumerate(train[torch.randperm(len(train))].split(batch)):
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        (loss / accumulate).backward()
        if number % accumulate == accumulate - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

handle.finalize()
accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
print(f"accuracy {accuracy:.3f}")
if len(sys.argv) > 1:
    torch.save(model.state_dict(), sys.argv[1])
