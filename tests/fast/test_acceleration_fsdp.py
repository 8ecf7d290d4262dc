"""Sharded weights (FSDP2) train through N:M products: the bits of replicas, packed once a step."""

from __future__ import annotations

from pathlib import Path

import accelerated_ranks
import preloaded
import pytest
import torch

from nmrun.fast.cpu.kernels import products

pytestmark = pytest.mark.skipif(bool(products.KERNELS.obstacle()), reason="no C compiler here")


@pytest.mark.slow
def test_shards_train_the_bits_of_replicas_by_packed_weights(tmp_path: Path) -> None:
    process = preloaded.torchrun(accelerated_ranks.__file__, tmp_path)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    masked, replicated, sharded = (
        torch.load(tmp_path / f"{kind}.pt") for kind in ("masked", "replicated", "sharded")
    )
    assert [path for _, path, _ in sharded["choices"]] == ["packed", "packed"]
    assert [path for _, path, _ in replicated["choices"]] == ["packed", "packed"]
    assert sharded["losses"] == replicated["losses"]
    for name, weight in replicated["weights"].items():
        assert torch.equal(sharded["weights"][name], weight), name
        torch.testing.assert_close(weight, masked["weights"][name], rtol=1e-3, atol=1e-4)
    # two layers, two passes a step
    assert sharded["writes"] == 2 * accelerated_ranks.STEPS
    assert sharded["losses"][-1] != sharded["losses"][0]
