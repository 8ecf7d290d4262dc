"""What each of two processes does in test_shard_memory.py: train a perceptron of 210 MB in shards,
and tell how much memory it has had."""

from __future__ import annotations

import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import shards

from nmrun import ranks
from nmrun.lab.train import build

LAYERS, WIDTH = 50, 1024
MODEL = LAYERS * WIDTH * WIDTH * 4  # bytes
OVERRIDES = (
    "recipe=sr_ste",
    "model=mlp",
    f"model.hidden={[WIDTH] * (LAYERS + 1)}",
    "trainer.distributed=fsdp",
    "trainer.limit_batches=1",
    "trainer.epochs=2",
)


def anonymous() -> int:
    """Bytes of this process's memory that are no file's, as the system counts them."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


class Peak(threading.Thread):
    """How much more memory there was at most than at the beginning."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = anonymous()
        self.over = threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.005):
            self.most = max(self.most, anonymous())

    def end(self) -> float:
        """The difference, in models."""
        self.over.set()
        self.join()
        self.most = max(self.most, anonymous())
        return (self.most - self.before) / MODEL


def main(folder: Path) -> None:
    """Build, train a step, save, stop; go on, train a step, write the weights."""
    original, found = build._sharded, {}

    def watched(*args: Any) -> Any:
        peak = Peak()
        parts = original(*args)
        found["build"] = peak.end()
        return parts

    build._sharded = watched
    shards.CASES["big"] = OVERRIDES
    for name, stop in (("begin", 1), ("go on", None)):
        peak = Peak()
        result = shards.run(folder, "big", stop=stop)
        assert result["status"] == ("interrupted" if stop else "finished"), result
        found[name] = peak.end()
        gc.collect()
    (folder / f"rank{ranks.rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
