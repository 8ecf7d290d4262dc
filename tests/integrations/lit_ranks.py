"""Two processes of Lightning's DDP, for test_lightning.py."""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
os.environ["OMP_NUM_THREADS"] = "1"
import lit  # noqa: E402
import torch  # noqa: E402

from nmrun.integrations.lightning import NMCallback  # noqa: E402

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_default_dtype(torch.float64)
    for recipe in sorted(lit.OPTIONS.keys() - set(lit.DRAWING)):
        options = lit.OPTIONS[recipe]
        module = lit.Module()
        sparse = NMCallback(recipe, "2:4", **{"exclude": None, **options})
        trainer = lit.trainer(
            folder, [sparse], strategy="ddp", devices=2, use_distributed_sampler=False
        )
        trainer.fit(module, lit.loader(rank=rank))
        assert trainer.world_size == 2
        assert sparse.handle is not None
        assert sparse.handle.recipe.step == trainer.global_step == lit.STEPS
        torch.save(module.state_dict(), folder / f"{recipe}{rank}.pt")
