"""Experiments: every file composes at every scale, the published figures have their place, and one
smoke goes from nothing to the table.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from errors import one_line
from pages import markdown_lines
from runs import result_of, write_result
from torch import nn
from verbs import verb

from nmrun.errors import ConfigError
from nmrun.lab.config import (
    command_line,
    experiment,
    identity,
    precheck,
    schema,
)
from nmrun.lab.config.composition import Cache
from nmrun.lab.keys.config import flatten
from nmrun.lab.keys.options import recipe_facts
from nmrun.lab.render import cli as report
from nmrun.lab.render import experiments
from nmrun.lab.runs.run_folder import weights_in
from nmrun.lab.sweeps import jobs
from nmrun.lab.train.build import build
from nmrun.lab.train.optimizers import scheduled
from nmrun.recipes import RECIPES

COMPOSED: Cache = {}  # as the sweeps of one command line share them
NAMES = experiment.names()
EMBEDDED = (
    *("digits", "generated_text", "generated_questions"),
    *("stdlib_text", "stdlib_text_all", "copy_reverse"),
)
EVERY = list(itertools.product(NAMES, experiment.SCALES))
SMOKES_FIRST = [
    pytest.param(name, scale, marks=() if scale == "smoke" else pytest.mark.slow)
    for name, scale in EVERY
]
OWN = """
title: Own
source: nobody
sweep: [recipe=dense seed=0, "recipe=ste,sr_ste sparsity=2:4 seed=0"]
scales: {smoke: trainer.epochs=2 trainer.limit_batches=3}
report: {metric: test/accuracy, baseline: dense, figures: [curves eval/accuracy]}
paper: {source: "page 3 of a book", values: {ste: {"2:4": 77.10}, nowhere: {"2:4": 1, "1:8": 2}}}
"""


@functools.cache
def configs_of(name: str, scale: str) -> list[schema.Config]:
    return precheck.configs(experiment.load(name), scale, cache=COMPOSED)


def label(config: schema.Config, key: str) -> str:
    """A config's value as tables show it."""
    if key == "sparsity":
        return str(config.pattern) if config.pattern else "dense"
    value = {**config.plain, **flatten(config.plain)}.get(key, "-")
    return str(value["name"] if isinstance(value, dict) else value)


# --- the files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "scale"), SMOKES_FIRST)
def test_every_job_is_accepted(name, scale, monkeypatch):
    refusals = schema.refusals  # as on a machine with the data and a GPU
    monkeypatch.setattr(schema, "refusals", lambda plain, here: refusals(plain, False))
    sweeps = command_line.expand([f"experiment={name}", f"scale={scale}"], multirun=True)
    jobs, accepted = 0, {}
    for words in sweeps:
        seeds = [word for word in words if word.startswith("seed=")]
        others = tuple(word for word in words if word not in seeds)
        if others not in accepted:  # one seed is as good as another
            asked = precheck.read([[*others, "seed=0"]], multirun=True, cache=COMPOSED)
            accepted[others] = len(asked.jobs)
        jobs += accepted[others] * (seeds[-1].count(",") + 1 if seeds else 1)
    assert 2 <= jobs <= (30 if scale == "smoke" else 440)
    for words in sweeps if scale == "smoke" else []:
        values = dict(word.split("=", 1) for word in words)
        assert values["dataset"] in EMBEDDED
        assert int(values.get("trainer.epochs", 12)) <= 12


@pytest.mark.parametrize("name", [name for name in NAMES if experiment.load(name).paper])
def test_published_figures_have_their_place_in_the_sweep(name):
    asked = experiment.load(name)
    there = {
        tuple(
            " ".join(label(config, key) for key in keys.split(","))
            for keys in (asked.rows, asked.cols)
        )
        for config in configs_of(name, "paper")
    }
    for row, cells in asked.paper.items():
        for column, printed in cells.items():
            assert (row, column) in there
            assert 0 < float(printed) < 100
    assert asked.paper_source


@pytest.mark.minutes
@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_rows_and_columns_are_keys_of_the_runs(name, scale):
    asked, configs = experiment.load(name), configs_of(name, scale)
    for key in {*asked.rows.split(","), *asked.cols.split(",")} - {"metric", "dataset.task"}:
        assert any(label(config, key) != "-" for config in configs), key
    assert ("metric" in asked.cols.split(",")) or "," not in (asked.metric or "")


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_of_the_table_has_a_seed_once(name):
    asked = experiment.load(name)
    keys = {*asked.rows.split(","), *asked.cols.split(","), "dataset", "dataset.task", "model"}
    cells = [
        (config.seed, *(label(config, key) for key in sorted(keys - {"metric"})))
        for config in configs_of(name, "smoke")
    ]
    assert len(set(cells)) == len(cells)


def test_a_sweep_for_each_scale(tmp_path):
    each = OWN.replace("sweep: [", "sweep: {smoke: recipe=ste seed=0, small: [")
    each = each.replace('2:4 seed=0"]', '2:4 seed=0"]}')
    both = each.replace("scales: {smoke:", "scales: {small: trainer.epochs=3, smoke:")
    (tmp_path / "own.yaml").write_text(both)
    asked = experiment.load(str(tmp_path / "own.yaml"))
    assert command_line.of_experiment(asked, "smoke") == [
        ["recipe=ste", "seed=0", "trainer.epochs=2", "trainer.limit_batches=3"]
    ]
    assert [words[-1] for words in command_line.of_experiment(asked, "small")] == [
        "trainer.epochs=3"
    ] * 2
    (tmp_path / "own.yaml").write_text(each)  # a sweep of a scale that is not there
    with pytest.raises(ConfigError, match="sweep: one for each of smoke, or one for all"):
        experiment.load(str(tmp_path / "own.yaml"))


def test_s_ste_gpt2_is_the_authors_pre_training():
    """thu-ml/2by4-pretrain-acc-examples: config/train_gpt2.py, train.py, README."""
    every = configs_of("s_ste_gpt2", "paper")
    for config in every:
        assert config.trainer.batch_size == 8 * 8 * 8
        assert config.trainer.epochs * config.trainer.limit_batches == 300_000
        assert config.optimizer.decay == "matrices"
        assert config.optimizer.lr * config.schedule.final == pytest.approx(1e-5, rel=1e-3)
        assert config.model.bias is False
        assert config.trainer.evaluate == "both"
    of_masks = [c for c in every if c.recipe.name == "t_sr_ste"]
    assert {(c.model.name, c.recipe.options["decay"]) for c in of_masks} == {
        ("gpt2", 6e-5),
        ("gpt2_medium", 2e-4),
        ("gpt2_large", 6e-5),
    }
    assert {c.recipe.options["dense_end"] for c in of_masks} == {0.0, 0.1667}
    assert {c.trainer.mvue for c in of_masks} == {"2:4"}
    assert len(every) == 3 * (2 + 2 + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["s_ste_glue", "s_ste_squad"])
def test_what_is_fine_tuned_is_what_the_other_experiments_leave(name):
    """The folders that init names, and networks of the same size."""
    for scale, before in (("paper", "s_ste_gpt2"), ("small", "step_gpt2")):
        left = {str(identity.run_folder(c)): c for c in configs_of(before, scale)}
        for config in configs_of(name, scale):
            folder, file = weights_in(config.init)
            of = left[str(folder.path)]
            assert file == "model.safetensors" or of.trainer.evaluate == "both"
            if scale == "paper":
                options, theirs = config.model.mapping(), of.model.mapping()
                same = ("layers", "heads", "width", "bias")
                assert [options[key] for key in same] == [theirs[key] for key in same]
                assert options["embeddings"] == of.dataset.mapping()["vocabulary"]
                assert options["context"] == of.dataset.mapping()["context"]
                soft = config.recipe.name == "s_ste"
                assert (config.trainer.mvue, config.trainer.fp8) == (
                    ("2:4", True) if soft else (None, False)
                )
    pairs = {(left_by(c.init), c.recipe.name) for c in configs_of(name, "paper")}
    of_dense = {("sr_ste dense", "dense"), ("t_sr_ste dense", "dense")}
    table_6 = {("dense", "dense"), ("t_sr_ste", "dense"), ("s_ste", "s_ste"), *of_dense}
    assert pairs == table_6 | {("s_ste", "ste"), ("sr_ste", "s_ste"), ("sr_ste", "ste")}


def left_by(init: str) -> str:
    folder, file = weights_in(init)
    recipe = folder.path.parts[-3]
    return f"{recipe} dense" if file == "dense.safetensors" else recipe


def test_the_ablations_of_s_ste_differ_from_its_runs_in_one_thing():
    """Tables 1 and 2 and figure 4 have S-STE itself among their runs: that of s_ste_wmt."""
    folders = {
        identity.run_folder(c) for c in configs_of("s_ste_wmt", "paper") if c.recipe.name == "s_ste"
    }
    for name in ("s_ste_scale", "s_ste_threshold", "s_ste_flips"):
        every = [c for c in configs_of(name, "paper") if c.recipe.name == "s_ste"]
        assert folders <= {identity.run_folder(c) for c in every}
        for config in every:
            defaults = {"gamma": 0.0, "fit": "mse", "beta": None, "interval": None}
            changed = [
                key for key, value in defaults.items() if config.recipe.options[key] != value
            ]
            assert len(changed) <= 1
    (unscaled,) = [
        c for c in configs_of("s_ste_ablation", "paper") if c.recipe.options.get("beta") is not None
    ]
    assert unscaled.recipe.options["beta"] == 1.0
    assert (unscaled.trainer.mvue, unscaled.trainer.fp8) == (None, False)


def test_s_ste_mvue_is_the_beginning_of_the_pre_training():
    """The table's caption: GPT-2 774M, 4,000 steps."""
    whole = configs_of("s_ste_gpt2", "paper")[0]
    long = scheduled(whole.schedule.mapping(), 1.0, 300_000)
    every = configs_of("s_ste_mvue", "paper")
    for config in every:
        factor = scheduled(config.schedule.mapping(), 1.0, 4000)
        assert config.trainer.epochs * config.trainer.limit_batches == 4000
        assert [factor(s) for s in range(4000)] == pytest.approx(
            [long(s) for s in range(4000)], 1e-4
        )
        assert (config.model.name, config.trainer.batch_size) == ("gpt2_large", 512)
    pairs = {(c.trainer.mvue, c.trainer.input_gradient) for c in every if c.recipe.name == "s_ste"}
    assert pairs == {(a, b) for a in (None, "2:4") for b in ("exact", "mvue")}


def test_activations_begin_with_a_thousand_dense_steps_and_end_with_a_dense_fifth():
    every = configs_of("activations", "paper")
    pruned = [c.trainer for c in every if c.trainer.activations]
    assert {round(t.activations_dense_start * 300_000, -1) for t in pruned} == {990}
    assert {t.activations_dense_end for t in pruned} == {0.0, 0.2}
    assert {(c.recipe.name, c.trainer.activations) for c in every} == {
        (recipe, pattern) for recipe in ("dense", "s_ste") for pattern in (None, "2:4", "64:2:8")
    }


# at paper scale: facebookresearch/deit; zyxxmu/LBC; aojunzz/NM-sparsity; vit_base_training.yaml of progressive_gradient_flow_nm
PUBLISHED_SETTINGS = {
    "s_ste_deit": {
        "trainer.epochs": 300, "trainer.batch_size": 1024, "optimizer.lr": 5e-4 * 1024 / 512, "optimizer.weight_decay": 0.05,
        "schedule.warmup": pytest.approx(5 / 300, rel=0.01), "schedule.final": pytest.approx(1e-5 / 1e-3), "trainer.label_smoothing": 0.1,
        "dataset.mixup": 0.8, "dataset.cutmix": 1.0, "dataset.erasing": 0.25,
    },
    "lbc_resnet": {
        "trainer.epochs": 120, "trainer.batch_size": 256, "optimizer.lr": 0.1, "optimizer.momentum": 0.9, "optimizer.weight_decay": 1e-4,
        "optimizer.decay": "matrices", "trainer.label_smoothing": 0.1, "schedule.warmup": pytest.approx(5 / 120, rel=0.01),
    },
    "sr_ste_resnet": {
        "trainer.epochs": 120, "trainer.batch_size": 256, "optimizer.lr": 0.1, "optimizer.momentum": 0.9, "optimizer.weight_decay": 5e-5,
        "schedule.warmup": pytest.approx(5 / 120, rel=0.01),
    },
    "gradient_flow_vit": {
        "trainer.epochs": 350, "trainer.batch_size": 4096, "optimizer.lr": 1e-3, "optimizer.weight_decay": 0.01, "trainer.clip": 1.0,
        "schedule.warmup": pytest.approx(15 / 350, rel=0.01), "schedule.final": pytest.approx(1e-7 / 1e-3), "dataset.mixup": 0.5,
        "dataset.randaugment_magnitude": 15, "model.dropout": 0.1, "model.stochastic_depth": 0.1,
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), PUBLISHED_SETTINGS.items())
def test_settings_at_paper_scale_are_those_of_the_authors_code(name, settings):
    for config in configs_of(name, "paper"):
        flat = flatten(config.plain)
        assert {key: flat[key] for key in settings} == settings


# inputs-outputs-kernel:N of NM-sparsity/DominoSearch, schemes/resnet50_M16_0.80.txt, in its order
PUBLISHED_RATIOS = """
3-64-7:16 64-64-1:16 64-64-3:4 64-256-1:8 64-256-1:8 256-64-1:8 64-64-3:4 64-256-1:8 256-64-1:8
64-64-3:4 64-256-1:8 256-128-1:8 128-128-3:2 128-512-1:8 256-512-1:4 512-128-1:8 128-128-3:4
128-512-1:8 512-128-1:8 128-128-3:4 128-512-1:8 512-128-1:8 128-128-3:2 128-512-1:8 512-256-1:4
256-256-3:2 256-1024-1:4 512-1024-1:4 1024-256-1:4 256-256-3:2 256-1024-1:4 1024-256-1:4
256-256-3:2 256-1024-1:4 1024-256-1:4 256-256-3:2 256-1024-1:4 1024-256-1:4 256-256-3:2
256-1024-1:4 1024-256-1:4 256-256-3:2 256-1024-1:4 1024-512-1:4 512-512-3:2 512-2048-1:4
1024-2048-1:2 2048-512-1:4 512-512-3:2 512-2048-1:4 2048-512-1:4 512-512-3:2 512-2048-1:4
2048-1000-1:4
"""


def test_each_layer_has_the_ratio_that_dominosearch_publishes():
    config = configs_of("step_dominosearch", "smoke")[1]
    assert config.recipe.name == "sr_ste"
    trainer = {**config.plain["trainer"], "acceleration": "off"}  # no products are timed
    parts = build(replace(config, plain={**config.plain, "trainer": trainer}))
    ratios = {weight.name: weight.pattern for weight in parts.handle.sparse}
    modules = parts.model.named_modules()
    layers = [(name, m) for name, m in modules if isinstance(m, nn.Conv2d | nn.Linear)]
    nonzeros = whole = 0
    for (name, module), published in zip(layers, PUBLISHED_RATIOS.split(), strict=True):
        inputs, outputs, kernel, n = map(int, re.split("[-:]", published))
        shape = tuple(module.weight.shape)
        if name == "conv1":  # the digits are grey
            assert n == 16
        elif name == "fc":  # and of ten classes
            assert (shape[1], n) == (inputs, 4)
        else:
            assert shape == (outputs, inputs, kernel, kernel), name
        pattern = ratios.get(f"{name}.weight")
        assert (pattern.n if pattern else 16) == n, name
        assert pattern is None or pattern.m == 16
        whole += inputs * outputs * kernel**2
        nonzeros += inputs * outputs * kernel**2 * n / 16
    assert 0.19 < nonzeros / whole < 0.2


def test_asp_on_imagenet_trains_twice():
    for config in configs_of("asp_imagenet", "paper"):
        factor = scheduled(config.schedule.mapping(), 1.0, 1000)
        if config.recipe.name == "asp":
            assert config.recipe.options["prune_at"] == 0.5
            assert factor(499) < 1e-4  # the dense training is over
            assert [factor(s) for s in range(500)] == [factor(s) for s in range(500, 1000)]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("compare_")])
def test_comparisons_differ_in_recipe_and_ratio_alone(name):
    """Nothing that is not swept differs between the recipes: what does is for nmrun tune to find."""
    for config in itertools.chain(*(configs_of(name, scale) for scale in experiment.SCALES)):
        declared = recipe_facts(RECIPES[config.recipe.name]).keys
        assert config.recipe.options == {key: field.default for key, field in declared.items()}
    for scale in experiment.SCALES:
        alike: dict[str, set[str]] = {}
        for config in configs_of(name, scale):
            values = {
                key: value
                for key, value in flatten(config.plain).items()
                if not key.startswith(("recipe.", "sparsity.", "seed"))
            }
            alike.setdefault(config.recipe.name, set()).add(json.dumps(values, sort_keys=True))
        # what a recipe has at most: dense has all but ratios, STEP has no SGD
        assert all(settings <= alike["dense"] for settings in alike.values())


def test_what_is_swept_at_paper_scale_is_what_the_papers_compare():
    """step_glue: table 3 of STEP; gradient_flow_vit: vit_base_training.yaml."""

    def swept(name: str, *keys: str) -> set[tuple[object, ...]]:
        return {
            (c.recipe.name, *(c.recipe.options.get(key) for key in keys))
            for c in configs_of(name, "paper")
        }

    assert {("step", "full"), ("step", "partial")} <= swept("step_glue", "window")
    flow = swept("gradient_flow_vit", "tau", "dense")
    assert {("mdgf_exponential", 1e-4, 0.0), ("mdgf_linear", 8e-4, 0.0)} <= flow
    assert {dense for name, _, dense in flow if "gf" in name} == {0.0}
    assert {c.optimizer.decay for c in configs_of("gradient_flow_vit", "paper")} == {"matrices"}


@pytest.mark.parametrize("name", NAMES)
def test_a_larger_scale_replaces_nothing_of_a_sweep_but_its_seeds(name):
    every = experiment.load(name)
    for scale in every.sweeps.keys() - {"smoke"}:
        of_scale = {word.partition("=")[0] for word in shlex.split(every.scales[scale])}
        of_sweeps = {w.partition("=")[0] for line in every.sweeps[scale] for w in shlex.split(line)}
        assert of_scale & of_sweeps <= {"seed", "zip"}


# --- overrides ------------------------------------------------------------------------------------


def test_the_scale_wins_over_the_sweep_and_the_command_line_over_both():
    asked = experiment.load("step_cifar10")
    assert "seed=0,1,2" in command_line.of_experiment(asked, "small")[0]
    assert "seed=0,1" in command_line.of_experiment(asked, "smoke")[0]
    words = command_line.of_experiment(asked, "smoke", ["seed=7", "+recipe=ste", "optimizer.lr=1"])[
        0
    ]
    assert [word for word in words if word.startswith("seed")] == ["seed=7"]
    assert [word for word in words if "recipe" in word] == ["+recipe=ste"]
    assert "optimizer.lr=1" in words


def test_small_is_the_default_and_several_run_one_after_the_other():
    both = command_line.expand(["experiment=step_cifar10,step_glue", "seed=5"], multirun=True)
    assert both == [
        words
        for name in ("step_cifar10", "step_glue")
        for words in command_line.of_experiment(experiment.load(name), "small", ["seed=5"])
    ]
    assert command_line.expand(["recipe=ste"], multirun=False) == [["recipe=ste"]]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("title: Own", "tilte: Own", "tilte: no such key; did you mean title?"),
        ("report: {", "report: {colls: recipe, ", "did you mean cols?"),
        ("{smoke:", "{huge:", "huge: no such scale"),
        ("[curves", "[curve", "did you mean curves?"),
        ("title: Own", "title: [", "not YAML"),
        ("source: nobody", "", "source"),
        (OWN, "", "it takes the keys title, source"),
        ("title: Own", "title: Own\n5: x", "5: no such key"),
        ("sweep: [recipe=dense", "sweep: [3, recipe=dense", "sweep"),
        ("sweep: [recipe=dense", "sweep: [recipe='dense", "it takes a line of overrides"),
        ("{smoke: ", "{smoke: null, small: ", "scales"),
        (OWN, OWN.replace("scales:", "scales: smoke #"), "scales"),
        ("[curves eval/accuracy]", "null", "report.figures"),
        (OWN, OWN.replace("paper: {source:", "paper: {sorce:"), "paper.source"),
        ("{ste: {", "{sr_ste: 77.1, ste: {", "paper.values.sr_ste"),
        ("{ste: {", "{sr_ste 2: {}, ste: {", "paper.values.sr_ste 2: it takes a label"),
        ("report: {", "report: {rows: 'recipe,model', ", "paper.values.ste: it takes a label"),
    ],
)
def test_a_file_that_is_no_experiment(old, new, says, tmp_path):
    (tmp_path / "own.yaml").write_text(OWN.replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(says)):
        experiment.load(str(tmp_path / "own.yaml"))


@pytest.fixture
def own(tmp_path):
    """A folder with experiments as users of Hydra write them."""
    (tmp_path / "experiment").mkdir()
    first = "# @package _global_\ndefaults: [override /recipe: asp, override /optimizer: sgd]\n"
    second = "# @package _global_\ndefaults: [override /hydra/launcher: joblib]\n"
    texts = {
        "one": f"{first}seed: 7\ntrainer: {{epochs: 2}}\noptimizer: {{lr: 0.2}}\n",
        "two": f"{second}hydra: {{sweeper: {{params: {{seed: '4,5'}}}}}}\nrecipe: {{decay: 0.1}}\n",
    }
    for name, text in texts.items():
        (tmp_path / "experiment" / f"{name}.yaml").write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize("word", ["experiment=one", "+experiment=one"])
def test_an_experiment_of_ones_own_is_composed_as_by_hydra(word, own):
    (job,) = jobs.checked([word, "trainer.epochs=3"], False, own).jobs
    config = job.config
    assert (config.recipe.name, config.optimizer.name) == ("asp", "sgd")
    assert (config.seed, config.optimizer.lr, config.trainer.epochs) == (7, 0.2, 3)
    (job,) = jobs.checked([word, "recipe=ste"], False, own).jobs
    assert job.config.recipe.name == "ste"


def test_experiments_of_ones_own_are_swept(own):
    asked = jobs.checked(["experiment=one,two", "seed=0,1"], True, own)
    assert [(job.config.recipe.name, job.config.seed) for job in asked.jobs] == [
        ("asp", 0), ("asp", 1), ("sr_ste", 0), ("sr_ste", 1)
    ]  # fmt: skip
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs joblib's launcher")
    asked = jobs.checked(["experiment=two"], True, own)
    assert asked.launcher == "joblib"
    assert [(job.config.seed, job.config.recipe.options["decay"]) for job in asked.jobs] == [
        (4, 0.1), (5, 0.1)
    ]  # fmt: skip
    (job,) = jobs.checked(["experiment=two"], False, own).jobs  # one run has no launcher
    assert job.config.seed == 0


def test_experiments_of_ones_own_are_told_from_the_papers(own):
    with pytest.raises(ConfigError, match="one of --config-dir, step_cifar10 not"):
        jobs.checked(["experiment=one,step_cifar10"], True, own)
    with pytest.raises(ConfigError, match="no such experiment"):
        jobs.checked(["experiment=one"], True)


def test_an_experiment_of_ones_own_has_hydra_s_line_above_it(own):
    (Path(own) / "experiment" / "three.yaml").write_text("seed: 7\n")
    with one_line(ConfigError, "its file begins with the line # @package _global_"):
        jobs.checked(["experiment=three"], False, own)


def test_an_experiment_of_a_recipe_of_ones_own_has_its_runs(tmp_path):
    file = tmp_path / "own.yaml"
    sweep = "recipe._target_=runs.Mine recipe.strength=1,2 seed=0"
    file.write_text(f"title: a\nsource: b\nsweep: {sweep}\nscales: {{smoke: model=mlp}}\n")
    found = experiment.load(str(file))
    strengths = [run.plain["recipe"]["strength"] for run in precheck.configs(found, "smoke")]
    assert strengths == [1, 2]
    with pytest.raises(ConfigError) as refused:
        experiments.sections([found], "smoke", ['output_dir="a b"'], {})
    command = re.search(r"finished; nmrun (.*) makes them$", str(refused.value))
    _, *words = shlex.split(command[1])  # -m
    (sweep,) = command_line.of_experiment(found, "smoke", ['output_dir="a b"'])
    assert command_line.expand(words, True) == [command_line.own_recipe(sweep)]


# --- from nothing to the table --------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> Path:
    """A folder with an experiment of one's own whose three runs are made: the command line in a
    process of its own, as users do.
    """
    import preloaded

    folder = tmp_path_factory.mktemp("swept")
    (folder / "own.yaml").write_text(OWN)
    line = ("-m", "experiment=own.yaml", "scale=smoke", "track=local", "trainer.threads=1")
    process = preloaded.run(line, folder, 300, dict(os.environ))
    assert process.returncode == 0, process.stderr
    assert [f"[{i}/3]" in process.stdout for i in (1, 2, 3)] == [True] * 3
    assert "sweep of 3: 3 finished" in process.stdout
    return folder


def show(swept: Path, monkeypatch, capsys, *options: str) -> tuple[int, str, str]:
    monkeypatch.chdir(swept)
    words = shlex.split("--experiment own.yaml --scale smoke track=local trainer.threads=1")
    return report.table([*words, *options]), *capsys.readouterr()


def test_our_figures_and_the_papers(swept, monkeypatch, capsys):
    status, out, err = show(swept, monkeypatch, capsys)
    assert (status, err) == (0, "")
    assert "(paper): page 3 of a book" in out
    lines = [
        [cell.strip(" *") for cell in line.strip("|").split("|")]
        for line in out.splitlines()
        if line.startswith("| ")
    ]
    table = lines[: [line[0] for line in lines].index("recipe", 1)]
    results = [result_of(path.parent) for path in (swept / "outputs").rglob("result.json")]
    ours = {
        r["config"]["recipe"]["name"]: f"{100 * r['metrics']['final']['test/accuracy']:.1f}"
        for r in results
    }
    assert table[:4] == [
        ["recipe", "2:4"],
        ["dense", ours["dense"]],
        ["ste", ours["ste"]],
        ["ste (paper)", "77.1"],
    ]
    assert table[4:] == [["sr_ste", ours["sr_ste"]], ["nowhere (paper)", "1"]]
    assert "Difference to dense" in out


@pytest.mark.parametrize("style", ["markdown", "latex"])
def test_published_figures_are_of_the_experiments_own_rows(swept, monkeypatch, capsys, style):
    words = ("--rows", "recipe,seed", "--format", style)
    status, out, _ = show(swept, monkeypatch, capsys, *words)
    assert status == 0
    assert "77.1" not in out
    assert "page 3 of a book" not in out


def test_published_figures_are_of_rows_that_the_runs_have(swept, monkeypatch, capsys):
    text = OWN.replace("report: {", "report: {rows: 'recipe,recipe.switch', ")
    text = re.sub(r"values: .*", 'values: {"step auto": {"2:4": 77.10}}}', text)
    (swept / "switch.yaml").write_text(text)
    monkeypatch.chdir(swept)
    words = "--experiment switch.yaml --scale smoke track=local trainer.threads=1"
    assert report.table(words.split()) == 0
    assert "77.1" not in capsys.readouterr().out


@pytest.mark.parametrize(("option", "key"), [("--rows", "recpie"), ("--cols", "sparsityy")])
def test_a_mistyped_key_of_a_user_is_one_line(swept, monkeypatch, capsys, option, key):
    monkeypatch.chdir(swept)
    words = ("--experiment", "own.yaml", "--scale", "smoke", "trainer.threads=1", option, key)
    assert verb("table", *words) == 2
    assert capsys.readouterr().err.startswith(
        f"nmrun: {key}: no such key in these runs; did you mean"
    )


def test_recipes_for_the_same_seconds_have_their_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for config in configs_of("equal_time", "smoke"):
        folder = identity.run_folder(config)
        folder.mkdir(parents=True)
        result = {
            "status": "finished", "id": identity.identity(config), "config": config.plain, "metric": "accuracy",
            "metrics": {"final": {"test/accuracy": 0.9}, "best": {}}, "flops": {"training_arithmetic": 2e9},
            "seconds": 7.0, "training_seconds": 4.0 + config.seed / 5,
        }  # fmt: skip
        write_result(folder, result)
    sections = experiments.sections([experiment.load("equal_time")], "smoke", [], {})
    head, *rows = markdown_lines(experiments.render(sections, "markdown").split("Difference")[0])
    assert head[1:] == ["test/accuracy in %", "training_seconds", "flops/training_arithmetic"]
    assert [row[0] for row in rows] == ["dense", "asp", "ste", "sr_ste", "step", "s_ste"]
    assert {tuple(cell.strip("*") for cell in row[1:]) for row in rows} == {
        ("90.0 +- 0.0", "4.10 +- 0.14", "2G")
    }


def test_a_run_that_is_not_there_is_seen(swept, monkeypatch, capsys):
    out = show(swept, monkeypatch, capsys, "seed=0,1")[1]
    assert out.count("(1, 1 missing)") == 3


def test_means_of_what_was_logged(swept, monkeypatch, capsys):
    words = "--cols metric --metric mean/train/loss --format csv"
    out = show(swept, monkeypatch, capsys, *words.split())[1]
    (folder,) = (
        path.parent
        for path in (swept / "outputs").rglob("result.json")
        if path.parts[-4] == "sr_ste"
    )
    losses = [
        row["train/loss"]
        for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        if "train/loss" in row
    ]
    cells = {tuple(line.split(",")[2:4]): line.split(",")[5] for line in out.splitlines()}
    assert float(cells["sr_ste", "mean/train/loss"]) == pytest.approx(sum(losses) / len(losses))


def test_tables_and_figures_are_files(swept, monkeypatch, capsys):
    words = ("--out", "tables.md", "--figures", "pictures")
    status, out, _ = show(swept, monkeypatch, capsys, *words)
    page = (swept / "tables.md").read_text()
    assert status == 0
    assert page.count("| recipe") == 2
    (picture,) = (swept / "pictures").iterdir()
    assert picture.name == "own-smoke-1-curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(out.split()) == ["pictures/own-smoke-1-curves.png", "tables.md"]


def test_what_is_unfinished_is_left_out_of_a_page_and_named(swept, monkeypatch, capsys):
    monkeypatch.chdir(swept)
    words = "--experiment own.yaml,step_cifar10 --scale smoke trainer.threads=1"
    assert report.table(words.split()) == 0
    out, err = capsys.readouterr()
    assert out.startswith("# Own (nobody), scale smoke")
    assert err.startswith(
        "nmrun: left out: experiment=step_cifar10 scale=smoke: none of its 16 runs is finished"
    )


def test_make_takes_dashes_for_underscores():
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    words = ["make", "-n", "table-step-cifar10", "SCALE=paper"]
    root = Path(__file__).parents[3]
    out = subprocess.run(words, cwd=root, capture_output=True, text=True).stdout
    assert "nmrun -m experiment=step_cifar10 scale=paper" in out
    assert "nmrun table --experiment step_cifar10 --scale paper" in out


@pytest.mark.minutes
@pytest.mark.parametrize("name", NAMES)
def test_every_smoke(name, nmrun_cli, tmp_path_factory):
    """From nothing to the table and its figures, as make does it; all in one folder, so that shared
    runs are made once.
    """
    if "dataset=copy_reverse" in command_line.of_experiment(experiment.load(name), "smoke")[0]:
        pytest.importorskip("fairseq")
    folder = tmp_path_factory.getbasetemp() / "smokes"
    overrides = ("track=local", f"output_dir={folder}")
    process = nmrun_cli("-m", f"experiment={name}", "scale=smoke", *overrides, timeout=3600)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    options = ("--experiment", name, "--scale", "smoke", "--figures", str(folder / "figures"))
    table = nmrun_cli("table", *options, *overrides)
    assert table.returncode == 0, table.stderr
    assert "missing" not in table.stdout
    assert "no value" not in table.stdout
    drawn = {path.name.split("-")[2] for path in (folder / "figures").glob(f"{name}-*")}
    assert drawn == {str(i + 1) for i in range(len(experiment.load(name).figures))}
