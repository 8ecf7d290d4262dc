"""Two processes of the Trainer, for test_huggingface.py."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
os.environ["OMP_NUM_THREADS"] = "1"
import hf  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import nmrun  # noqa: E402
from nmrun.integrations.huggingface import NMTrainerCallback  # noqa: E402


def middle(folder: Path, sharded: bool) -> None:
    """Save a model in the middle of STEP's sparse phase: shards by ``save_pretrained``, a replica
    as it is.
    """
    model = hf.gpt2()
    if sharded:
        for block in model.transformer.h:
            fully_shard(
                block, shard_placement_fn=lambda p: Shard(p.dim() - 1)
            )  # Conv1D: by outputs
        fully_shard(model)
    used = model if sharded else DistributedDataParallel(model)
    optimizer = nmrun.optim.AdamW(model.parameters(), lr=0.01)
    nmrun.sparsify(model, optimizer, "step", "2:4", hf.STEPS, switch=0.25, exclude=None)
    for step in range(hf.STEPS // 2):
        rows = hf.data()[8 * step + 4 * dist.get_rank() :][:4]
        used(**hf.collate(rows)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        if sharded:
            hf.gpt2().save_pretrained(folder / "sharded", state_dict=whole)
        else:
            torch.save(model, folder / "replica.pt")


if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    sparse = NMTrainerCallback("sr_ste", "2:4", **{"exclude": None, **hf.OPTIONS["sr_ste"]})
    trainer = hf.trainer(folder / "two", [sparse], per_device_train_batch_size=2)
    assert trainer.args.world_size == 2
    trainer.train()
    assert sparse.handle is not None
    result = {"step": sparse.handle.recipe.step, "weights": trainer.model.state_dict()}
    torch.save(result, folder / f"{rank}.pt")
    for sharded in (True, False):
        middle(folder, sharded)
    dist.barrier()
    dist.destroy_process_group()
