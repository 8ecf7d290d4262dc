"""Runs whose activations are N:M: the schedule, the metrics, resumption, other recipes, mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import config, finished, resumed, rows

from nmrun.errors import ConfigError
from nmrun.lab.config.identity import identity, run_folder
from nmrun.lab.config.schema import Config
from nmrun.lab.train import build, runner
from nmrun.step import activations as mathematics

GPT = (
    *("dataset=stdlib_text", "dataset.context=16", "model=gpt_tiny", "model.width=16"),
    *("model.heads=2", "model.activation=relu2", "optimizer=adamw", "trainer.limit_evaluation=8"),
)


def make(folder: Path, *overrides: str) -> Config:
    """12 steps, evaluated after 3, 6, 9 and 12."""
    return config(folder, *GPT, "recipe=dense", *overrides)


def train(cfg: Config) -> tuple[Path, dict[str, Any]]:
    result = finished(cfg)
    return Path(result["folder"]), result


def test_the_steps_of_a_run(tmp_path):
    """Sparse from step 4 to step 9; what is best is one of the dense end; weights as by hand."""
    cfg = make(
        tmp_path,
        "trainer.activations=1:8",
        "trainer.activations_dense_start=0.25",
        "trainer.activations_dense_end=0.25",
    )
    parts = build.build(cfg)
    assert [parts.activations.sparse_at(step) for step in range(12)] == [
        *[False] * 3,
        *[True] * 6,
        *[False] * 3,
    ]
    folder, result = train(cfg)
    evaluated = [row for row in rows(folder) if "eval/loss" in row]
    assert all(0.2 < row["eval/activation_zeros"] < 0.9 for row in evaluated)
    assert all(0.2 < row["eval/activation_kept"] < 0.95 for row in evaluated)
    assert result["metrics"]["best"]["candidates"] == 2  # after steps 3 and 12
    assert "eval/activation_zeros" in result["metrics"]["final"]


def test_a_dense_start_has_the_bits_of_a_dense_run(tmp_path):
    dense = rows(train(make(tmp_path))[0])
    pruned = rows(
        train(make(tmp_path, "trainer.activations=1:8", "trainer.activations_dense_start=0.5"))[0]
    )
    losses, others = (
        [r["train/loss"] for r in each if "train/loss" in r] for each in (dense, pruned)
    )
    assert losses[:3] == others[:3]
    assert losses[3:] != others[3:]
    (first, *_), (other, *_) = ([r for r in each if "eval/loss" in r] for each in (dense, pruned))
    assert first.items() < other.items()
    assert other.keys() - first.keys() == {"eval/activation_kept"}


@pytest.mark.parametrize("stop", [4, 9])
def test_a_resumed_run_ends_with_the_same_bits(stop, tmp_path):
    options = (
        *("recipe=s_ste", "trainer.activations=2:4", "trainer.activations_dense_end=0.25"),
        *("trainer.mvue=2:4", "trainer.accumulate=2"),
    )
    resumed(tmp_path, *GPT, *options, steps=(stop,))


@pytest.mark.parametrize("recipe", ["step", "t_sr_ste", "bi_mask"])
def test_beside_sparse_weights(recipe, tmp_path, monkeypatch):
    """Every pass prunes its activations, and the weights hold their pattern in the end."""
    seen = []
    threshold = mathematics.hard_threshold

    def watched(x, pattern):
        seen.append(pattern)
        return threshold(x, pattern)

    monkeypatch.setattr(mathematics, "hard_threshold", watched)
    _, result = train(
        make(tmp_path, f"recipe={recipe}", "sparsity='2:4'", "trainer.activations=8:2:8")
    )
    assert len(seen) >= 24
    assert {str(pattern) for pattern in seen} == {"8:2:8"}
    assert all(layer["holds"] for layer in result["sparsity"]["layers"])


def test_a_vision_transformer_and_texts(tmp_path):
    for words in (
        ("dataset=digits", "model=vit_tiny", "model.layers=1", "model.heads=2", "model.width=16"),
        ("dataset=generated_text", "model=text_encoder", "model.width=16"),
    ):
        cfg = config(
            tmp_path, *words, "model.activation=relu2", "trainer.activations=2:4", "recipe=ste"
        )
        _, result = train(cfg)
        assert 0 < result["metrics"]["final"]["eval/activation_kept"] < 1


def test_a_run_without_is_the_run_that_it_was(tmp_path):
    """Keys that change nothing are no part of the id."""
    first = make(tmp_path, "model.activation=gelu")
    assert identity(make(tmp_path, "trainer.activations_dense_end=0.5")) == identity(make(tmp_path))
    some = [
        make(tmp_path, "trainer.activations=2:4", f"trainer.activations_dense_end={x}")
        for x in (0, 0.5)
    ]
    assert len({identity(each) for each in (first, make(tmp_path), *some)}) == 4


def test_a_mistake_that_the_model_shows(tmp_path):
    cfg = make(tmp_path, "trainer.activations=2:6")
    message = "h.0.mlp.activation has 64 features, which 6 does not divide"
    with pytest.raises(ConfigError, match=message):
        runner.run(cfg, run_folder(cfg))
    assert not run_folder(cfg).exists()


def test_the_plan_says_it(tmp_path, capsys):
    cfg = make(
        tmp_path, "trainer.activations=2:4", "trainer.activations_dense_end=0.25", "dry=true"
    )
    runner.run(cfg, run_folder(cfg))
    assert "activations 2:4 of 2 squared ReLUs, steps 1 to 9" in capsys.readouterr().out
