"""A network, an optimizer, a schedule and a scaler of timm: three lines make it sparse.

pip install '.[timm]'
python -m examples.timm_train [FILE.pt]
"""

import sys

import timm
import torch
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import NativeScaler
from torch import nn

import nmrun

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
train, test = torch.arange(0, 1400), torch.arange(1400, len(labels))

model = timm.create_model(
    "vit_tiny_patch16_224",
    img_size=8,
    patch_size=4,
    in_chans=1,
    num_classes=10,
    embed_dim=64,
    depth=2,
    num_heads=2,
)
optimizer = create_optimizer_v2(model, "adamw", lr=3e-3, weight_decay=0.05, layer_decay=0.95)
scaler = NativeScaler("cpu")
epochs, batch = 12, 50
steps = epochs * len(train) // batch
schedule = CosineLRScheduler(optimizer, t_initial=epochs, warmup_t=1, warmup_lr_init=1e-4)
handle = nmrun.sparsify(model, optimizer, "sr_ste", "2:4", steps)

for epoch in range(epochs):
    for rows in train[torch.randperm(len(train))].split(batch):
        loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        optimizer.zero_grad()
    schedule.step(epoch + 1)

handle.finalize()
accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
print(f"accuracy {accuracy:.3f}")
if len(sys.argv) > 1:
    torch.save(model.state_dict(), sys.argv[1])
