"""What a config may hold: every value, key and combination that is refused, with what is allowed,
and all at once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hydra import compose
from omegaconf import OmegaConf

import nmrun
from nmrun.errors import ConfigError
from nmrun.lab.config import schema
from nmrun.lab.config.composition import composing
from nmrun.lab.keys import options
from nmrun.lab.keys.datasets import Context, Digits, OwnDataset
from nmrun.lab.keys.groups import AdamKeys, Trainer
from nmrun.lab.keys.models import OwnModel
from nmrun.patterns import written
from nmrun.ranges import number, whole

NO_NUMBER, NO_SHARE = (
    [-1, "one", None, True, float("nan"), float("inf"), [1]],
    [-0.1, 1.0, 2, "half", None, False, float("nan")],
)
NO_COUNT, NO_FLAG = [0, -1, 1.0, 1.5, "one", None, True, [1]], ["yes", 0, 1, None]
# which options a key is of: values that are right, and wrong ones
VALUES: dict[str, dict[str, tuple[list[Any], list[Any]]]] = {
    "": {
        "seed": ([0, 7, 10**9], [-1, 1.5, "one", None, True]),
        "init": ([None, "out/a", "out/b"], ["", 3, True, "\udce4"]),  # \xe4, a byte of Latin-1
        "output_dir": (["out", "a/b"], ["", 3, None, "/a/\udce4"]),
        "resume": ([True, False], NO_FLAG),
        "force": ([True, False], NO_FLAG),
        "dry": ([True, False], NO_FLAG),
        "sparsity.overrides": (
            [None, {"inner.1": "1:8"}, {"inner.*": "dense"}],
            ["1:8", ["1:8"], {"inner.1": "8:1"}, {"inner.1": 68}, {"(": "1:8"}],
        ),
        "dataset.split_seed": ([0, 2**63 - 1], [-1, 2**63, 0.5, None]),
        "dataset.val_fraction": ([0.1, 0.5], [0, 0.51, "0.1", None]),
        "dataset.test_fraction": ([0.1, 0.5], [0.0, 1, True]),
        "model.channels": ([[8, 8], [8, 16, 8]], [[8], [], 8, [8, 0], [8, 8.0], [8, True], None]),
        "model.include": ([None, "inner.*", ["inner.0"]], ["(", ["a", "["], 5, [5], {"inner.0": 1}]),
        "model.exclude": (["stem", [], ["stem", "head"]], ["*", [None], 1.0]),
        "trainer.epochs": ([1, 30], NO_COUNT),
        "trainer.budget": (
            [None, "flops:dense", "flops:1e9", "flops:2e9", "hardware_flops:dense",
             "hardware_flops:1e9", "seconds:60", "seconds:30"],
            ["1e9", "dense", "flops:", "flops:0", "flops:-1", "flops:inf", "flops:nan", "flops:many",
             "seconds:", "seconds:0", "seconds:-1", "seconds:nan", "seconds:dense", "minutes:3", "hardware_flops:0", 5],
        ),
        "trainer.batch_size": ([1, 100], NO_COUNT),
        "trainer.accumulate": ([1, 2], NO_COUNT),
        "trainer.clip": ([None, 0.5, 2.0], [0, -1, "off", True, float("inf")]),
        "trainer.precision": (["auto", "fp32", "bf16", "fp16"], ["fp8", None, 32]),
        "trainer.device": (["auto", "cpu", "cuda"], ["gpu", 0]),
        "trainer.compile": ([True, False], NO_FLAG),
        "trainer.acceleration": (["auto", "off", "force", "cusparselt"], ["fast", "cutlass", True, None]),
        "trainer.input_gradient": (["exact", "transposable", "double_prune", "mvue"], ["dense", True, None]),
        "trainer.label_smoothing": ([0.0, 0.1], NO_SHARE),
        "trainer.mvue": ([None, "2:4", "1:4"], ["4:2", 124, "two", True]),
        "trainer.fp8": ([True, False], NO_FLAG),
        "trainer.evaluate": (["sparse", "dense", "both"], ["mask", None, True]),
        "trainer.test": ([True, False], NO_FLAG),
        "trainer.eval_every": ([1, 5, "1steps", "200steps"], [*NO_COUNT, "0steps", "2.5steps", "steps", "200", "2epochs"]),
        "trainer.patience": ([None, 1, 20], [0, 1.5, True, "all"]),
        "trainer.steps": ([None, 1, 500], [0, 1.5, "all"]),
        "trainer.log_every": ([1, 5], NO_COUNT),
        "trainer.checkpoint_every": (
            ["10min", "30s", "2h", "0.5h", 1, 5],
            [*NO_COUNT, "0s", "10", "10m", "-1s", "1e3s", "min"],
        ),
        "trainer.limit_batches": ([None, 1, 5], [0, 1.5, "all"]),
        "trainer.limit_evaluation": ([None, 1, 500], [0, 1.5, "all"]),
        "trainer.threads": ([None, 1, 5], [0, 1.5, "all"]),
        "track.mode": (["online", "offline"], ["auto", "of", None]),
        "track.project": (["nmrun", "mine", None], ["", 1]),
        "optimizer.lr": ([1e-3, 1], [0, *NO_NUMBER]),
        "optimizer.weight_decay": ([0.0, 0.1, 1], NO_NUMBER),
        "optimizer.betas": ([[0.9, 0.999], [0, 0.5]], [[0.9], [0.9, 1.0], [0.9, -0.1], 0.9, [0.9, "b"], [0.9, 0.9, 0.9]]),
        "optimizer.eps": ([1e-8, 1e-6], [0, *NO_NUMBER]),
        "schedule.warmup": ([0.0, 0.1], NO_SHARE),
        "schedule.cycles": ([1, 2], NO_COUNT),
        "schedule.final": ([0.0, 0.1, 1], [-0.1, 1.1, None]),
        "recipe.window": (["full", "partial"], ["half", None, 10]),
        "recipe.threshold": ([None, 2e-3, 1], [0, -1, "eps", True]),
        "recipe.switch": (["auto", "auto_geometric", "variance_ratio", "gradient_norm", 0.25], [0, 1, 1.0, 0.0, "atuo", None, True]),
        "recipe.t_min": ([0.0, 0.2, 0.5], [-0.1, 1.1, None]),
        "recipe.t_max": ([0.5, 0.9, 1], [-0.1, 1.1, "auto"]),
        "recipe.eps_mode": (["inside", "outside", "floor"], ["in", True, None]),
        "recipe.bias_correction": ([True, False], NO_FLAG),
        "recipe.second_moment": (["frozen", "live"], ["dead", True, None]),
        "recipe.lr_factor": ([0.5, 4], [0, -1, None]),
        "recipe.decay": ([0.0, 0.1, 2], ["none", -1, None, True, [0.1]]),
    },
    "dataset=cifar10": {
        "dataset.train_size": ([None, 1, 50], [0, -1, "x"]), "dataset.val_size": ([None, 1, 50], [0, -1, "x"]),
        "dataset.test_size": ([None, 1, 50], [0, -1, "x"]), "dataset.crop_padding": ([0, 4], [-1, None]),
        "dataset.flip": ([True, False], [2, *NO_FLAG]), "dataset.randaugment": ([0, 2], [-1, None]),
        "dataset.randaugment_magnitude": ([0, 30], [31, -1]), "dataset.erasing": ([0.0, 0.5], [1.5, "no"]),
        "dataset.mixup": ([0.0, 0.8], [-1, "no"]), "dataset.cutmix": ([0.0, 0.8], [-1, "no"]),
    },
    "optimizer=adamw": {"optimizer.decay": (["all", "matrices"], ["norms", True, 0.1])},
    "model=gpt_tiny,dataset=shakespeare": {"model.bias": ([True, False], NO_FLAG)},
    "model=mlp": {"model.hidden": ([[8, 8], [64, 16, 8]], [[8], [8, "8"], 8, None])},
    "optimizer=sgd,recipe=asp": {
        "optimizer.momentum": ([0.0, 0.9], NO_SHARE), "optimizer.nesterov": ([True, False], NO_FLAG), "recipe.prune_at": ([0, 0.5], NO_SHARE),
        "recipe.permute": ([True, False], [*NO_FLAG, "perhaps"]),
    },
    "recipe=ste_periodic": {"recipe.interval": ([1, 5], NO_COUNT), "recipe.gradient": (["ste", "masked"], ["mask", None])},
    "recipe=bi_mask": {"recipe.candidates": ([1, 5], NO_COUNT)},
    "recipe=t_sr_ste": {"recipe.dense_end": ([0.0, 0.2], NO_SHARE), "recipe.decay": ([0.0, 0.1], ["auto", -1])},
    "recipe=mdgf_linear": {
        "recipe.tau": ([None, 0.1, 2], [0, -1, "auto", float("nan")]), "recipe.dense": ([0.0, 0.3], NO_SHARE),
        "recipe.final": ([0.1, 0.3], [0, 1.1, None]), "recipe.grad_mode": (["scaled", "ste"], ["scale", None]),
    },
    "recipe=sdgf_geometric": {"recipe.frames": ([1, 2, 4], NO_COUNT), "recipe.densify": ([True, False], NO_FLAG)},
    "recipe=s_ste": {
        "recipe.gamma": ([0.0, 0.5], NO_SHARE), "recipe.fit": (["mse", "l1"], ["l2", None]),
        "recipe.beta": ([None, 1, 2.5], [0, -1, "fit"]), "recipe.interval": ([None, 1, 100], [0, 1.5, "auto"]),
    },
    "recipe=lbc": {"recipe.t_i": ([0.0, 0.2], NO_SHARE), "recipe.t_f": ([0.4, 0.9], [0.0, 1.0, None])},
    "recipe=maskllm": {
        "recipe.kappa": ([[1, 2], [2, 1.0]], [[0, 1], [1], 1, [1, "b"]]), "recipe.temperature": ([[1, 2], [2, 1]], [[1, -1], "hot"]),
        "recipe.prior": ([0, 3.5], NO_NUMBER), "recipe.reg": ([0.0, 1], NO_NUMBER), "recipe.lr_mult": ([0.5, 3], [0, *NO_NUMBER]),
        "recipe.masks": ([None, "some/run"], [3, ""]),
    },
}  # fmt: skip
EACH = [(options, key) for options, keys in VALUES.items() for key in keys]


@functools.cache
def composed(*options: str) -> dict[str, Any]:
    with composing():
        return schema.resolve(compose("nmrun", ["recipe=step", *options]))


def changed(options: str, **values: Any) -> dict[str, Any]:
    """The config with these options of groups (joined by commas), then these values, set whatever
    the config is.
    """
    plain = copy.deepcopy(composed(*options.split(",") if options else ()))
    for key, value in values.items():
        group, _, leaf = key.rpartition(".")
        (plain[group] if group else plain)[leaf] = value
    return plain


def test_the_command_and_the_library_have_the_same_defaults():
    """Recipe, pattern, and the layers that stay dense."""
    with composing():
        plain = schema.check(compose("nmrun", ["+model._target_=mine.build"])).plain
    default = {name: p.default for name, p in inspect.signature(nmrun.sparsify).parameters.items()}
    assert plain["recipe"]["name"] == default["recipe"]
    assert written(plain["sparsity"]) == default["pattern"]
    assert plain["model"]["exclude"] == [default["exclude"]]


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "key"), EACH)
def test_values(options, key):
    """A right one is no problem; a wrong one is one problem that names it, with what is allowed,
    and nothing follows from it.
    """
    right, wrong = VALUES[options][key]
    for value in right:
        assert schema.problems(changed(options, **{key: value})) == []
    for value in wrong:
        (problem,) = schema.problems(changed(options, **{key: value}))
        shown = str(value).replace(" ", "")
        shown = {"None": "null", "True": "true", "False": "false"}.get(shown, shown)
        assert problem.startswith(f"{key}={shown}: it takes ")
        assert "\n" not in problem


KINDS = [
    (group, name) for group in options.GROUPS if group != "recipe" for name in options.names(group)
]
NEEDED = {  # what only the user knows
    "dataset=image_folder": {"path"}, "dataset=text": {"train"}, "dataset=hub_text": {"path"},
    "dataset=labelled_text": {"train"},
    "dataset=token_bin": {"folder"}, "dataset=fairseq": {"path"},
    "optimizer=custom": {"target"}, "schedule=custom": {"target"},
}  # fmt: skip


@pytest.mark.parametrize(("group", "name"), KINDS)
def test_every_default_is_in_its_range(group, name):
    """As far as it is a value: an interpolation is resolved later."""
    keys = options.fields(options.kind(group, name))
    wrong = {
        key
        for key, field in keys.items()
        if field.check and "${" not in str(field.default) and not field.check.holds(field.default)
    }
    assert wrong == NEEDED.get(f"{group}={name}", set())


def test_every_key_has_a_range_and_a_meaning():
    """But for the ratio, which is checked as a pattern, and two labels."""
    keys = {
        f"{group}.{key}": field
        for group, name in KINDS
        for key, field in options.fields(options.kind(group, name)).items()
    }
    free = {key for key, field in keys.items() if field.check is None}
    assert free == {"sparsity.n", "sparsity.m", "track.entity", "track.group"}
    assert all(field.meaning for field in keys.values())


def test_what_a_class_leaves_out_is_as_above_it():
    @dataclass(frozen=True)
    class Above:
        rate: Annotated[float, number(0, 1), "how much"] = 0.5
        size: Annotated[int, whole(1), "how many"] = 3

    @dataclass(frozen=True)
    class Below(Above):
        names: Annotated[tuple[str, ...], "which"] = ("a", "b")
        rate: float = 0.25
        size: Annotated[int, "how many of them"] = 4

    keys = options.fields(Below)
    assert list(keys) == ["names", "rate", "size"]  # its own come first
    assert {key: field.default for key, field in keys.items()} == {
        "names": ["a", "b"], "rate": 0.25, "size": 4,
    }  # fmt: skip
    assert keys["rate"].check.allowed == "a number at least 0 and at most 1"
    assert keys["size"].check.allowed == "a whole number, 1 or more"
    assert [field.meaning for field in keys.values()] == ["which", "how much", "how many of them"]
    assert options.fields(Above)["rate"].default == 0.5


@pytest.mark.parametrize(
    ("n", "m"), [(5, 4), (0, 4), (-1, 4), (None, 4), (2, None), ("two", 4), (2.0, 4), (True, 4)]
)
def test_a_ratio_given_as_numbers(n, m):
    (problem,) = schema.problems(changed("", **{"sparsity.n": n, "sparsity.m": m}))
    assert problem.startswith(f"sparsity={n}:{m}: ")
    assert "is not an N:M pattern" in problem


def test_all_problems_at_once():
    wrong = {"optimizer.lr": "abc", "optimizer.lrr": 1, "model.name": "smal_conv", "sparsity.m": 1}
    plain = changed("", seed=-1, sede=1, **wrong)
    del plain["trainer"]["epochs"], plain["schedule"], plain["dry"]
    expected = [
        "sede: no such key; did you mean seed?",
        "dry: missing",
        "model.name=smal_conv: no such model; did you mean small_conv?",
        "optimizer.lrr: no such key; did you mean optimizer.lr?",
        "schedule: missing",
        "trainer.epochs: missing",
        "seed=-1: it takes a whole number, 0 or more",
        "optimizer.lr=abc: it takes a number above 0",
        "sparsity=2:1: ",
    ]
    with pytest.raises(ConfigError) as raised:
        schema.check(OmegaConf.create(plain))
    problems = raised.value.problems
    assert len(problems) == len(expected)
    assert all(any(each.startswith(start) for each in problems) for start in expected)
    assert str(raised.value).splitlines() == problems


# --- combinations ---------------------------------------------------------------------------------


OWN = {"recipe._target_": "a.B", "recipe.decay": "what it likes", "recipe.t_min": "none"}


@pytest.mark.parametrize(
    ("options", "values"),
    [
        # the dense run: what the recipe says does not matter
        ("sparsity=dense,optimizer=sgd", {"recipe.t_min": 0.9}),
        ("recipe=dense,sparsity=1:128,optimizer=sgd", {}),
        ("recipe=custom", OWN),
        ("trainer=default", {"trainer.accumulate": 4}),
    ],
)
def test_what_does(options, values):
    assert schema.problems(changed(options, **values)) == []


@pytest.mark.parametrize("unsure", ["recipe", "optimizer"])
def test_nothing_is_concluded_from_what_stands_in(unsure):
    assert schema.problems(changed("optimizer=sgd"), unsure=[unsure]) == []


def test_groups_are_typed():
    config = schema.check(OmegaConf.create(changed("recipe=sr_ste")))
    assert isinstance(config.trainer, Trainer)
    assert isinstance(config.optimizer, AdamKeys)
    assert (config.trainer.epochs, config.optimizer.betas, config.seed) == (12, [0.9, 0.999], 0)
    assert (str(config.pattern), config.is_dense) == ("2:4", False)
    recipe = config.recipe
    assert (recipe.name, recipe.target, recipe.options) == ("sr_ste", None, {"decay": 2e-4})
    assert config.dataset.as_kind(Digits).val_fraction == 0.15
    assert config.model.mapping() == config.plain["model"]
    with pytest.raises(ConfigError, match=r"dataset\.context: missing"):
        config.dataset.as_kind(Context)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.trainer.epochs = 3


def test_what_is_the_user_s_own_stays_a_mapping():
    groups = {
        "dataset": {"name": "mine", "_target_": "a.b", "context": 7, "extra": [1]},
        "model": {"name": "net", "_target_": "c.d", "include": None, "exclude": [], "wide": True},
    }
    config = schema.check(OmegaConf.create({**changed(""), **groups}))
    assert isinstance(config.dataset, OwnDataset)
    assert (config.dataset.target, config.dataset.options) == ("a.b", {"context": 7, "extra": [1]})
    assert config.dataset.as_kind(Context).context == 7
    assert isinstance(config.model, OwnModel)
    assert config.model.options == {"wide": True}
    assert config.model.mapping() == groups["model"]
