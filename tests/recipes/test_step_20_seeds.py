"""STEP's trap: a coordinate whose frozen second moment is almost zero blows up the update. It must
not, at any of 20 seeds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from nmrun.lab.train import runner
from nmrun.lab.words import schema, source
from nmrun.lab.words.identity import run_folder

DEFAULT = ("track=local", "trainer.threads=1")
# its first layer has inputs that are always 0
OVER_PIXELS = (
    *DEFAULT,
    "model=mlp",
    "model.exclude=[head]",
    "trainer.epochs=30",
)


@pytest.mark.minutes
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("overrides", [DEFAULT, OVER_PIXELS], ids=["default", "mlp"])
@pytest.mark.parametrize("ratio", ["2:4", "1:16"])
def test_no_seed_diverges(
    ratio: str, overrides: tuple[str, ...], seed: int, tmp_path: Path
) -> None:
    source.register()
    with initialize_config_module("nmrun.conf", version_base="1.3"):
        words = [
            "recipe=step",
            f"sparsity='{ratio}'",
            f"seed={seed}",
            f"output_dir={tmp_path}",
            *overrides,
        ]
        config = schema.check(compose("nmrun", words))
    folder = run_folder(config)
    result = runner.run(config, folder)
    assert result["status"] == "finished"
    assert result["metrics"]["final"]["test/accuracy"] > 0.8
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    sparse = [row["train/loss"] for row in rows if "train/loss" in row][len(rows) // 2 :]
    # a blow-up shows in the loss first, even where training recovers; chance is ln(10)
    assert max(sparse) < 2.5
