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

from nmrun.integrations.huggingface import NMCallback  # noqa: E402

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    sparse = NMCallback("sr_ste", "2:4", **hf.OPTIONS["sr_ste"])
    trainer = hf.trainer(folder / "two", [sparse], per_device_train_batch_size=2)
    assert trainer.args.world_size == 2
    trainer.train()
    assert sparse.handle is not None
    found = {"step": sparse.handle.recipe.step, "weights": trainer.model.state_dict()}
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
