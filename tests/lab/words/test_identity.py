"""Which run it is: all that changes the result changes the id, and nothing else does."""

from __future__ import annotations

import json
import random
import shlex
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from test_schema import EACH, VALUES, changed
from verbs import python

from nmrun.lab.words import schema
from nmrun.lab.words.identity import completed, identity, run_folder

# Where and how a run is done and what it tells of itself. How often it is evaluated does count: it
# decides which epoch is the best.
IRRELEVANT = {
    "output_dir", "resume", "force", "dry", "track.mode", "track.project", "trainer.device", "trainer.threads",
    "trainer.log_every", "trainer.diagnose_every", "trainer.checkpoint_every", "trainer.acceleration",
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
    "options",
    [
        "model=mlp",
        "recipe=ste",
        "sparsity=2:8",
        "sparsity=1:4",
        "optimizer=adamw",
        "schedule=cosine",
    ],
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
    ("one", "other"),
    [
        ({"optimizer.lr": 1}, {"optimizer.lr": 1.0}),
        ({"optimizer.betas": [0, 0.5]}, {"optimizer.betas": [0.0, 0.5]}),
        ({"recipe.decay": 0}, {"recipe.decay": 0.0}),
        ({"trainer.clip": 1}, {"trainer.clip": 1.0}),
        ({"trainer.mvue": "2:4"}, {"trainer.mvue": "2of4"}),
        ({"trainer.budget": "flops:1e9"}, {"trainer.budget": "flops:1000000000"}),
        ({"trainer.budget": "seconds:60"}, {"trainer.budget": "seconds:6e1"}),
        ({"model.exclude": "stem"}, {"model.exclude": ["stem"]}),
        ({"sparsity.overrides": {"inner.1": "1:8"}}, {"sparsity.overrides": {"inner.1": "1of8"}}),
        ({"sparsity.overrides": None}, {"sparsity.overrides": {}}),
    ],
)
def test_two_ways_to_write_the_same(one, other):
    assert same(checked(**one), checked(**other))
    assert run_folder(checked(**one)) == run_folder(checked(**other))


def test_the_dense_run_is_one_run():
    """Whatever the ratio and the recipe's hyperparameters; the same training with a ratio is
    another.
    """
    options = [
        "recipe=dense",
        "recipe=dense,sparsity=1:8",
        "recipe=dense,sparsity=dense",
        "sparsity=dense",
        "recipe=ste,sparsity=dense",
    ]
    ways = [checked(item) for item in options]
    ways += [
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
    assert first.recipe.name == "mine"
    for change in (
        {"recipe._target_": "other.Mine"},
        {"recipe.strength": 2.0},
        {"recipe.more": None},
    ):
        assert not same(first, checked("recipe=custom", **{**keys, **change}))


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
from nmrun.lab.words import identity, schema
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
    assert run_folder(checked("sparsity=dense,recipe=asp")).parts[-4:-1] == (
        "small_conv",
        "dense",
        "dense",
    )
    assert not set(str(run_folder(config))) & set(': \\*?"<>|')
    assert same(
        config, checked("recipe=ste,model=mlp,sparsity=3:16", seed=7, output_dir="elsewhere")
    )


# of commands, as they have been from the first: finished runs are found again. Those of copy_reverse
# are of the second version of its sentences.
IDS = {
    "": "e89f33be18",
    "recipe=dense": "4caabbf75a",
    "recipe=asp sparsity=1:4": "c4eb55c985",
    "recipe=sr_ste recipe.decay=1e-4 sparsity=1:16 optimizer=adamw seed=3": "4f8e7a1c32",
    "recipe=ste optimizer=sgd schedule=cosine trainer.epochs=20": "4a060a0c9c",
    "recipe=t_sr_ste recipe.decay=auto": "24c4876859",
    "recipe=maskllm dataset=copy_reverse model=fairseq_transformer": "7a3efe78c2",
    "recipe=lbc dataset=cifar10 model=resnet18": "d24b16a1e9",
    "recipe=s_ste dataset=imagenet model=vit_small dataset.workers=2": "23ab5074e7",
    "recipe=mdgf_linear trainer.mvue='2:4' trainer.budget=flops:1e12": "c5fc5650f1",
    "recipe=sdgf_geometric sparsity=2:4": "b6388b7195",
    "'sparsity.overrides={inner.1: 1:8, head: dense}'": "e36a7d7b65",
    "recipe=custom ++recipe._target_=a.b.Mine ++recipe.x=1": "4ed35600ca",
    "++dataset._target_=a.b ++dataset.side=3": "4371cd0595",
    "++model._target_=a.b ++model.w=3": "64eff24b4f",
    "schedule=inverse_sqrt track=local debug=fast trainer.acceleration=force": "bc26fdabb9",
    "model=mlp model.hidden=[16,32] dataset=glue": "ce50af0cc7",
    "model=timm dataset=image_folder dataset.path=x model.include=a": "92380e854a",
}


@pytest.mark.parametrize("line", IDS)
def test_the_ids_of_finished_runs_stay(line):
    with initialize_config_module("nmrun.conf", version_base="1.3"):
        assert identity(schema.check(compose("nmrun", shlex.split(line)))) == IDS[line]


def test_what_came_later_changes_no_id_of_before():
    """Where it stands for how it was; what a run's literature asks for otherwise is another run."""
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


def test_a_config_of_before_is_completed():
    before = {"optimizer": {"name": "sgd", "lr": 0.1}, "seed": 3, "recipe": {"name": "ste"}}
    assert completed(before)["optimizer"] == {"name": "sgd", "lr": 0.1, "decay": "all"}
    assert {key: completed(before)[key] for key in ("seed", "recipe")} == {
        key: before[key] for key in ("seed", "recipe")
    }
    assert before["optimizer"] == {"name": "sgd", "lr": 0.1}
