"""A loop of Hugging Face's accelerate: three lines make it sparse, before or after ``prepare``.

pip install '.[huggingface]'
accelerate launch examples/accelerate_loop.py [FILE.pt]
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nmrun

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
model.append(nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), 50, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
epochs = 20
steps = epochs * len(loader) // 2
handle = nmrun.sparsify(model, optimizer, "sr_ste", "2:4", steps)

for _ in range(epochs):
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

handle.finalize()
accuracy = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
accelerator.print(f"accuracy {accuracy:.3f}")
if len(sys.argv) > 1:
    accelerator.save(accelerator.unwrap_model(model).state_dict(), sys.argv[1])
