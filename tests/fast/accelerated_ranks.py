"""Two processes train through N:M products, replicated and sharded; for test_acceleration_fsdp.py.

``torchrun accelerated_ranks.py FOLDER`` leaves in ``FOLDER/<kind>.pt`` what came out of ``masked``,
``replicated`` and ``sharded``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import nmrun
from nmrun.fast import measurement
from nmrun.fast.cpu import convolution, linear, probe

STEPS = 5


def net() -> nn.Sequential:
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 48), nn.ReLU()
    )
    return nn.Sequential(body, nn.Linear(48, 6))


def batch(number: int) -> Tensor:
    seed = 10 * number + dist.get_rank()
    return torch.randn(6, 8, 4, 4, generator=torch.Generator().manual_seed(seed))


def train(kind: str) -> dict[str, Any]:
    model: Any = net()
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (model[0], model):
            fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    handle = nmrun.sparsify(model, optimizer, "sr_ste", "1:4", exclude=["1"], total_steps=STEPS)
    mode = "off" if kind == "masked" else "packed"
    choices = nmrun.accelerate(handle, lambda: model(batch(0)), mode)
    if kind != "sharded":
        model = nn.parallel.DistributedDataParallel(model)
    writes = [0]
    for packed in (linear.LinearProducts, convolution.ConvolutionProducts):
        packed.write = counted(packed.write, writes)  # type: ignore[method-assign]
    losses = []
    for step in range(STEPS):
        x = batch(step)
        with torch.no_grad():
            model(x)  # a second pass reads the same packed weights
        loss = nn.functional.cross_entropy(model(x), x.mean((2, 3)).argmax(1) % 6)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    handle.finalize()
    weights = {
        name.removeprefix("module."): getattr(p, "full_tensor", lambda p=p: p)().detach().clone()
        for name, p in model.named_parameters()
    }
    return {"choices": [(c.name, c.path, c.reason) for c in choices if c.is_sparse], "losses": losses,
            "weights": weights, "writes": writes[0]}  # fmt: skip


def counted(write: Any, writes: list[int]) -> Any:
    def run(*args: Any, **kwargs: Any) -> None:
        writes[0] += 1
        write(*args, **kwargs)

    return run


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    probe.SMALLEST, probe.ROUNDS = 1, 2
    measurement.cache_folder = lambda: folder
    for kind in ("masked", "replicated", "sharded"):
        result = train(kind)
        if dist.get_rank() == 0:
            torch.save(result, folder / f"{kind}.pt")
    dist.destroy_process_group()
