"""Which run it is: all that changes the result changes the id, and nothing else does."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from omegaconf import OmegaConf
from test_schema import EACH, VALUES, changed
from verbs import python

from nmrun.lab.config import identity as identity_module
from nmrun.lab.config import schema
from nmrun.lab.config.identity import identity, run_folder

# Where and how a run is done and what it tells of itself. How often it is evaluated does count: it
# decides which epoch is the best.
IRRELEVANT = {
    "output_dir", "resume", "force", "dry", "track.mode", "track.project", "trainer.device", "trainer.threads",
    "trainer.log_every", "trainer.checkpoint_every", "trainer.acceleration",
    "trainer.deterministic",
}  # fmt: skip


def checked(options: str = "", **values: Any) -> schema.Config:
    return schema.check(OmegaConf.create(changed(options, **values)))


def same(*configs: schema.Config) -> bool:
    return len({identity(config) for config in configs}) == 1


@pytest.mark.parametrize(("options", "key"), EACH)
def test_every_key_counts_but_those_that_change_no_result(options, key):
    right = VALUES[options][key][0]
    ids = {identity(checked(options, **{key: value})) for value in right}
    assert len(ids) == (1 if key in IRRELEVANT else len(right))


def test_a_default_that_has_changed_is_told():
    """An id leaves defaults out, so it is the same after a change of one."""
    config = checked(**{"trainer.steps": 50})
    before = json.loads(json.dumps(config.plain))
    assert identity_module.changed(before, config) == []
    before["optimizer"]["lr"], before["trainer"]["clip"] = 0.5, 1.0
    before["trainer"]["epochs"], before["trainer"]["device"] = 99, "cuda"  # change no result here
    del before["schedule"]["cycles"]  # a key that came later
    told = [
        f"optimizer.lr (0.5, now {config.optimizer.lr})",
        "trainer.clip (1.0, now null)",
    ]
    assert identity_module.changed(before, config) == told


def test_what_a_budget_of_seconds_buys_depends_on_the_speed():
    """With it, where and how fast a run computes decides how many steps it has."""
    for key, values in {
        "trainer.acceleration": ("auto", "off"),
        "trainer.distributed": ("ddp", "fsdp"),
        "trainer.device": ("cpu", "cuda"),
        "trainer.threads": (1, 2),
    }.items():
        one, other = ({key: value} for value in values)
        assert same(checked(**one), checked(**other)), key
        budget = {"trainer.budget": "seconds:60"}
        assert not same(checked(**one, **budget), checked(**other, **budget)), key


@pytest.mark.parametrize(
    "options", ["model=mlp", "recipe=ste", "sparsity=2:8", "optimizer=adamw", "schedule=cosine"]
)
def test_every_group_counts(options):
    assert not same(checked(), checked(options))
    assert same(checked(options), checked(f"track=local,{options}"))


def test_all_seeds_and_ratios_are_apart():
    configs = [
        checked(**{"seed": s, "sparsity.n": n, "sparsity.m": m})
        for s in range(9)
        for m in (2, 4, 8, 16)
        for n in (1, m // 2, m)
    ]
    assert len({run_folder(config) for config in configs}) == 9 * (3 * 4 - 1)  # 1:2 is there twice


def test_the_order_of_overrides_counts():
    """The first that matches does."""
    one, other = {"inner.1": "1:8", "inner.*": "2:8"}, {"inner.*": "2:8", "inner.1": "1:8"}
    assert not same(
        checked(**{"sparsity.overrides": one}), checked(**{"sparsity.overrides": other})
    )


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("optimizer.betas", [0, 0.5], [0.0, 0.5]),
        ("optimizer.lr", 1, 1.0),
        ("recipe.decay", 0, 0.0),
        ("trainer.clip", 1, 1.0),
        ("trainer.mvue", "2:4", "2of4"),
        ("trainer.budget", "flops:1e9", "flops:1000000000"),
        ("trainer.budget", "seconds:60", "seconds:6e1"),
        ("model.exclude", "stem", ["stem"]),
        ("sparsity.overrides", {"inner.1": "1:8"}, {"inner.1": "1of8"}),
        ("sparsity.overrides", None, {}),
    ],
)
def test_two_ways_to_write_the_same(key, one, other):
    assert run_folder(checked(**{key: one})) == run_folder(checked(**{key: other}))


def test_the_dense_run_is_one_run():
    """Whatever the ratio and the recipe's hyperparameters; the same training with a ratio is
    another.
    """
    dense = (
        "recipe=dense",
        "recipe=dense,sparsity=1:8",
        "sparsity=dense",
        "recipe=ste,sparsity=dense",
    )
    ways = [
        *map(checked, dense),
        checked("sparsity=dense", **{"recipe.switch": 0.3}),
        checked("recipe=dense", **{"sparsity.overrides": {"inner.1": "1:8"}}),
    ]
    assert same(*ways)
    assert len({run_folder(config) for config in ways}) == 1
    assert not same(ways[0], checked("recipe=dense", seed=1))
    assert not same(ways[0], checked("recipe=ste,sparsity=4:4"))


def test_a_class_of_ones_own_counts_with_its_module_and_hyperparameters():
    keys = {"recipe._target_": "pack.Mine", "recipe.strength": 1.0}
    first = checked("recipe=custom", **keys)
    assert same(first, checked("recipe=custom", **keys))
    assert first.recipe.name == "pack.Mine"
    changes = ({"recipe._target_": "other.Mine"}, {"recipe.strength": 2.0}, {"recipe.more": None})
    for change in changes:
        assert not same(first, checked("recipe=custom", **{**keys, **change}))


@pytest.mark.parametrize(
    "key",
    ["distill_weight", "distill_temperature", "activations_dense_start", "activations_dense_end", "epochs"],
)  # fmt: skip
def test_a_key_of_ones_own_that_the_trainer_has_too_counts(key):
    keys = {"recipe._target_": "pack.Mine", "recipe.steps": 3}
    one, other = (checked("recipe=custom", **keys, **{f"recipe.{key}": n}) for n in (1, 2))
    assert not same(one, other)


def test_workers_of_data_of_ones_own_are_a_key_like_others():
    keys = {"dataset._target_": "pack.build", "dataset.name": "own"}
    one, other = (checked(**keys, **{"dataset.workers": n}) for n in (1, 2))
    assert not same(one, other)
    one, other = (
        checked("dataset=imagenet,model=resnet18", **{"dataset.workers": n}) for n in (1, 2)
    )
    assert same(one, other)


def test_a_number_may_be_the_name_of_ones_own():
    numbered = checked(**{"model._target_": "pack.build", "model.name": 64})
    assert run_folder(numbered).parts[-4] == "64"


def test_ten_digits_that_depend_on_neither_order_nor_process():
    config = checked("recipe=sr_ste", **{"recipe.decay": 0.25})

    def shuffled(value):
        if not isinstance(value, dict):
            return value
        keys = random.Random(1).sample(list(value), len(value))
        return {key: shuffled(value[key]) for key in keys}

    plain = shuffled(config.plain)
    assert list(plain) != list(config.plain)
    assert same(config, schema.Config(plain, config.pattern))
    code = f"""
import json
from nmrun.lab.config import identity, schema
from nmrun.patterns import Pattern
print(identity.identity(schema.Config(json.loads({json.dumps(plain)!r}), Pattern(2, 4))))"""
    for seed in "12":
        assert python("-c", code, PYTHONHASHSEED=seed).stdout.strip() == identity(config)
    assert len(identity(config)) == 10
    assert set(identity(config)) <= set("0123456789abcdef")


def test_the_folder_says_what_it_is_and_goes_on_any_file_system():
    config = checked("recipe=ste,model=mlp,sparsity=3:16", seed=7, output_dir="some/out")
    assert run_folder(config).parts[:-1] == ("some", "out", "digits", "mlp", "ste", "3of16")
    assert run_folder(config).name == f"s7-{identity(config)}"
    dense = run_folder(checked("sparsity=dense,recipe=asp"))
    assert dense.parts[-4:-1] == ("small_conv", "dense", "dense")
    assert not set(str(run_folder(config))) & set(': \\*?"<>|')
    assert same(
        config, checked("recipe=ste,model=mlp,sparsity=3:16", seed=7, output_dir="elsewhere")
    )


def test_an_output_folder_may_be_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = checked(output_dir="~/out")
    assert run_folder(config).is_relative_to(tmp_path / "out")
    assert config.plain["output_dir"] == str(tmp_path / "out")


def test_what_decays_is_what_it_comes_to():
    for line in ("optimizer=adamw", "optimizer=sgd,model=resnet20,recipe=ste"):
        assert same(checked(line), checked(line, **{"optimizer.decay": "all"}))
        assert not same(checked(line), checked(line, **{"optimizer.decay": "matrices"}))
    gpt = "optimizer=adamw,model=gpt_tiny,dataset=shakespeare"
    assert same(checked(gpt), checked(gpt, **{"optimizer.decay": "matrices"}))
    assert not same(checked(gpt), checked(gpt, **{"optimizer.decay": "all"}))
    # nothing decays: one run
    plain = "optimizer=adam,model=gpt_tiny,dataset=shakespeare"
    assert (
        len({identity(checked(plain, **{"optimizer.decay": d})) for d in ("all", "matrices")}) == 1
    )


def test_a_length_in_steps_is_the_whole_length():
    steps = {"trainer.steps": 10}
    assert same(checked(**steps), checked(**steps, **{"trainer.epochs": 3}))
    assert not same(checked(**steps), checked(**{"trainer.steps": 11}))
    assert not same(checked(**steps), checked())


def test_the_last_and_the_best_weights_of_a_run_begin_different_runs(write):
    run = write("dense", "dense", 0, 0.9)
    last, same, best, dense = (
        identity(checked(init=f"{run}{name}"))
        for name in ("", "/model.safetensors", "/best.safetensors", "/dense.safetensors")
    )
    assert last == same
    assert len({last, best, dense}) == 3
