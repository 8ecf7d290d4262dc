"""The command line, looked at before anything begins: each job of a sweep, Hydra's own options,
folders and classes of one's own.
"""

from __future__ import annotations

from itertools import product

import pytest
from hydra import compose
from runs import mistakes

from nmrun.errors import ConfigError
from nmrun.lab.config import command_line, precheck, schema
from nmrun.lab.config.composition import Cache, composing, config_of

COMPOSED: Cache = {}  # as the sweeps of one command line share them


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("recipe=step sparsity=3:16 seed=4", []),
        ("-m recipe=asp,step seed=range(3) sparsity=2:4,dense", []),
        ("-m recipe=glob(*ste)", []),
        ("-m recipe=step,spet seed=0,-1 trainer.epochs=0 foo=1 sparsity=2:4,5:4",
         ["recipe=spet: no such", "seed=-1: it takes", "trainer.epochs=0: it", "foo: no such key", "sparsity=5:4: "]),
    ],
)  # fmt: skip
def test_a_command_line(line, starts):
    multirun, words = line.startswith("-m "), line.removeprefix("-m ").split()
    problems = mistakes(words, multirun, cache=COMPOSED)
    assert len(problems) == len(starts), problems
    assert all(any(problem.startswith(start) for problem in problems) for start in starts), problems
    assert all("\n" not in problem for problem in problems)


@pytest.mark.parametrize(
    "axes",
    [
        {"recipe": ["asp", "dense"], "sparsity": ["2:4", "dense"], "seed": ["0", "3"]},
        {"model": ["mlp", "small_conv"], "model.exclude": ["[a]", "b"], "trainer.epochs": ["3"]},
        {"debug": ["fast"], "track": ["wandb", "local"], "trainer.epochs": ["5", "7"]},
        {"debug": ["fast"], "trainer.log_every": ["2", "3"], "sparsity": ["1:4", "2:4"]},
    ],
)
def test_each_job_of_a_sweep_is_as_hydra_composes_it(axes):
    words = [f"{key}={','.join(values)}" for key, values in axes.items()]
    jobs = [
        [f"{key}={value}" for key, value in zip(axes, job, strict=True)]
        for job in product(*axes.values())
    ]
    asked = precheck.read([words], multirun=True)
    expected: list[schema.Config] = []
    with composing():
        for job in jobs:
            config = schema.check(compose("nmrun", job))
            expected += [config] if config not in expected else []
        alone = [schema.check(compose("nmrun", job.words)) for job in asked.jobs]
    assert [job.config for job in asked.jobs] == expected == alone


def test_a_key_may_refer_to_another_that_is_swept():
    words = ["trainer.epochs=2,3", "trainer.log_every=${trainer.epochs}"]
    jobs = precheck.read([words], multirun=True).jobs
    assert [job.config.trainer.log_every for job in jobs] == [2, 3]


def test_mistakes_of_all_sweeps_are_told_at_once():
    with pytest.raises(ConfigError) as raised:
        precheck.read([["seed=-1"], ["recipe=stpe"], ["seed=-1"]], multirun=True)
    assert [problem.partition(":")[0] for problem in raised.value.problems] == [
        "seed=-1",
        "recipe=stpe",
    ]


def test_keys_of_an_option_that_there_is_not_are_left_alone():
    """Its default stands in, which has other keys; those of all other groups are checked."""
    words = ["optimizer=lion", "optimizer.nesterov=true", "trainer.epochs=-1"]
    option, epochs = mistakes(words)
    assert option.startswith("optimizer=lion: no such optimizer")
    assert epochs.startswith("trainer.epochs=-1")


@pytest.mark.parametrize(
    ("sweeps", "once"),
    [
        (["recipe=dense,ste sparsity=1:4,2:4 seed=0", "recipe=dense seed=0,1"],
         ["recipe=dense seed=0", "recipe=ste sparsity=1:4 seed=0", "recipe=ste sparsity=2:4 seed=0", "recipe=dense seed=1"]),
        (["recipe=sr_ste,step sparsity=dense,2:4"],
         ["sparsity=dense", "recipe=sr_ste sparsity=2:4", "recipe=step sparsity=2:4"]),
        (["recipe=dense,ste sparsity.pad=true,false"],
         ["recipe=dense", "recipe=ste sparsity.pad=True", "recipe=ste sparsity.pad=False"]),
        (["recipe=dense,asp,step sparsity=dense seed=0,1"], ["sparsity=dense seed=0", "sparsity=dense seed=1"]),
        (["recipe=ste,dense track=local,wandb"],
         ["recipe=ste track=local", "recipe=ste track=wandb", "recipe=dense track=local", "recipe=dense track=wandb"]),
    ],
)  # fmt: skip
def test_each_job_is_there_once(sweeps, once):
    """Dense training has no ratio, and sweeps may share runs."""
    asked = precheck.read([sweep.split() for sweep in sweeps], multirun=True)
    assert [" ".join(job.words) for job in asked.jobs] == once


@pytest.mark.parametrize(
    ("words", "count"),
    [
        ("seed=range(0,200) trainer.epochs=range(1,101)", "20,000"),
        ("seed=range(0,1000000000000) recipe=ste,asp", "2,000,000,000,000"),
        ("seed=range(10001,0,-1)", "10,001"),
        ("optimizer.lr=range(0,10000,0.25)", "40,000"),
        ("optimizer.lr=range(0,inf)", "inf"),
    ],
)
def test_a_command_has_so_many_jobs_and_no_more(words, count):
    """Values that are too many are not made to be counted."""
    (problem,) = mistakes(words.split(), multirun=True)
    assert problem == f"a sweep of {count} jobs: one command takes 10,000"


@pytest.mark.parametrize(
    ("words", "many"),
    [
        ("seed=range(0,10000000) trainer.epochs=range(0,10000000) zip=seed,trainer.epochs",
         "seed=range(0,10000000): a sweep of 10,000,000 jobs"),
        ("seed=0,1 optimizer.lr=range(0,inf) zip=seed,optimizer.lr", "optimizer.lr=range(0,inf): a sweep of inf jobs"),
        ("seed=range(0,5000) trainer.epochs=range(0,5000) zip=seed,trainer.epochs "
         "optimizer.lr=range(0,5000) model.dropout=range(0,5000) zip=optimizer.lr,model.dropout",
         "zip=seed,trainer.epochs zip=optimizer.lr,model.dropout: a sweep of 25,000,000 jobs"),
    ],
)  # fmt: skip
def test_rows_that_are_too_many_are_not_made_either(words, many):
    with pytest.raises(ConfigError) as raised:
        command_line.expand(words.split(), multirun=True)
    assert str(raised.value) == f"{many}: one command takes 10,000"


def test_the_rows_of_a_zip_are_jobs_of_one_command(monkeypatch):
    monkeypatch.setattr(command_line, "MOST_JOBS", 5)
    words = ["zip=sparsity,optimizer.lr", "sparsity=2:4,1:4", "optimizer.lr=1e-3,3e-3"]
    few, many = (
        command_line.expand([*words, f"seed={seeds}"], multirun=True) for seeds in ("0,1", "0,1,2")
    )
    assert len(precheck.read(few, multirun=True).jobs) == 4
    with pytest.raises(ConfigError, match="one command takes 5"):
        precheck.read(many, multirun=True)


def test_an_option_may_lie_in_a_folder_of_its_group(tmp_path):
    (tmp_path / "optimizer" / "mine").mkdir(parents=True)
    file = tmp_path / "optimizer" / "mine" / "slow.yaml"
    file.write_text("# @package optimizer\ndefaults: [/optimizer/sgd@_here_]\nlr: 0.125\n")
    words = ["optimizer=mine/slow", "recipe=ste"]
    (job,) = precheck.read([words], config_dir=str(tmp_path)).jobs
    assert job.config.optimizer.lr == 0.125
    for place, option in ((None, "mine/slow"), (str(tmp_path), "mine/slwo")):
        (problem,) = mistakes([f"optimizer={option}"], config_dir=place)
        assert problem.startswith(f"optimizer={option}: no such optimizer")


def test_a_folder_of_configs(tmp_path):
    """A recipe's hyperparameters in a file of one's own, and an overlay that several groups and
    keys of the command line meet.
    """
    nowhere = tmp_path / "nowhere"
    assert mistakes([], config_dir=str(nowhere)) == [f"--config-dir {nowhere}: no such folder"]
    for name, text in {
        "recipe/mine": "name: ste_periodic\ninterval: 3\ngradient: sts\n",
        "debug/slow": "# @package _global_\ndefaults:\n  - override /track: local\ntrainer:\n  epochs: 99\n  eval_every: 9\n",
    }.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / f"{name}.yaml").write_text(text)
    (problem,) = mistakes(["recipe=mine"], config_dir=str(tmp_path))
    assert problem == "recipe.gradient=sts: it takes one of ste, masked; did you mean ste?"
    (tmp_path / "recipe/tagged.yaml").write_text("name: !!python/object/apply:os.abort []\n")
    (problem,) = mistakes(["recipe=tagged"], config_dir=str(tmp_path))
    assert "os.abort" in problem
    assert "tagged.yaml" in problem
    assert "\n" not in problem
    words = ["debug=fast,slow", "track=wandb,local", "trainer.epochs=5,7"]
    configs = [job.config for job in precheck.read([words], True, str(tmp_path)).jobs]
    runs = {
        (c.track.name, c.trainer.epochs, c.trainer.eval_every, c.trainer.limit_batches)
        for c in configs
    }
    assert runs == {
        (track, epochs, *rest)
        for track in ("wandb", "local")
        for epochs in (5, 7)
        for rest in ((1, 3), (9, None))
    }


def test_a_class_of_ones_own_has_keys_of_its_own():
    words = command_line.own_recipe(["recipe._target_=runs.Mine", "recipe.strength=3", "seed=2"])
    assert mistakes(words) == []
    (problem,) = mistakes([*words, "optimizer.strength=3"])
    assert problem.startswith("optimizer.strength: no such key")
    assert command_line.own_recipe(["recipe=ste", "recipe.strength=3"]) == [
        "recipe=ste",
        "recipe.strength=3",
    ]


def test_a_preset_of_a_class_of_ones_own_takes_every_key_of_the_class(tmp_path):
    place, config_dir = tmp_path / "recipe", str(tmp_path)
    place.mkdir()
    (place / "strong.yaml").write_text("name: strong\n_target_: runs.Mine\n")
    (place / "usual.yaml").write_text("defaults: [sr_ste]\n")
    words = {
        name: command_line.own_recipe([f"recipe={name}", "recipe.strength=3"], config_dir)
        for name in ("strong", "usual")
    }
    assert mistakes(words["strong"], config_dir=config_dir) == []
    (problem,) = mistakes(words["usual"], config_dir=config_dir)
    assert problem.startswith("recipe.strength: no such key")


GLOBAL = "# @package _global_\n"
DEFAULTS = GLOBAL + "defaults: [override /hydra/{}]\n"


@pytest.mark.parametrize(("key", "text", "how"), [
    ("verbose", GLOBAL + "hydra: {verbose: true}", "Hydra hears it where"),
    ("job.name", "# @package hydra.job\nname: mine", "Hydra hears it where"),
    ("job_logging", DEFAULTS.format("job_logging: default"), "Hydra hears it where"),
    ("run.dir", GLOBAL + "hydra: {run: {dir: here}}", "runs go to output_dir"),
    ("sweep.dir", GLOBAL + "hydra: {sweep: {dir: here}}", "runs go to output_dir"),
    ("job.chdir", GLOBAL + "hydra: {job: {chdir: true}}", "it takes false; runs go to output_dir"),
    ("mode", GLOBAL + "hydra: {mode: MULTIRUN}", "nmrun -m is what makes a sweep"),
    ("sweeper._target_", DEFAULTS.format("sweeper: basic"), "nmrun -m has a sweeper"),
    ("sweeper._target_", GLOBAL + "hydra: {sweeper: null}", "nmrun -m has a sweeper"),
    ("sweeper.params", GLOBAL + "hydra: {sweeper: {params: 3}}", "it takes values by key"),
])  # fmt: skip
def test_what_a_file_says_to_hydra_is_refused_as_the_same_words_are(key, text, how, tmp_path):
    (tmp_path / "debug").mkdir()
    (tmp_path / "debug" / "mine.yaml").write_text(text)
    for words, multirun in ((["seed=0"], False), (["seed=0,1"], True)):
        assert mistakes(words, multirun, str(tmp_path)) == []
        (line,) = mistakes([*words, "debug=mine"], multirun, str(tmp_path))
        assert line.startswith(f"hydra.{key} in a file of yours: {how}")


def test_a_file_without_settings_for_hydra_is_refused(tmp_path):
    (tmp_path / "debug").mkdir()
    (tmp_path / "debug" / "mine.yaml").write_text(GLOBAL + "hydra: null")
    (line,) = mistakes(["debug=mine"], False, str(tmp_path))
    assert line.startswith("hydra: a file of yours has null there")


def test_what_no_launcher_hears_is_refused_with_one_too(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="needs joblib's launcher")
    (tmp_path / "debug").mkdir()
    text = "hydra: {verbose: true, run: {dir: here}, launcher: {n_jobs: 0}}\n"
    (tmp_path / "debug" / "mine.yaml").write_text(DEFAULTS.format("launcher: joblib") + text)
    lines = mistakes(["debug=mine", "seed=0,1"], True, str(tmp_path))
    assert [line.partition(" ")[0] for line in lines] == ["hydra.run.dir", "hydra.launcher.n_jobs"]


def test_a_sweep_beside_files_for_hydra_tells_a_file_of_defaults_that_are_no_list(tmp_path):
    for folder, text in (
        ("debug", "# @package hydra.job\nname: a\n"),
        ("optimizer", "defaults: 3"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.yaml").write_text(text)
    for words, multirun in ((["seed=0"], False), (["seed=0,1"], True)):
        (line,) = mistakes(["optimizer=mine", *words], multirun, str(tmp_path))
        assert "optimizer/mine" in line


def test_numbers_may_come_from_the_environment(tmp_path, monkeypatch):
    """Read as on the command line; a text stays one where the key takes texts."""
    for key, value in {"SEED": "7", "RATE": "3e-3", "NOTE": "12"}.items():
        monkeypatch.setenv(key, value)
    (tmp_path / "optimizer").mkdir()
    file = "defaults: [adam]\nname: adam\nlr: ${oc.env:RATE}\nweight_decay: ${oc.env:NONE,0.5}\n"
    (tmp_path / "optimizer" / "mine.yaml").write_text(file)
    words = ["seed=${oc.env:SEED}", "optimizer=mine", "track.notes=${oc.env:NOTE}"]
    assert mistakes(words, config_dir=str(tmp_path)) == []
    config = config_of(words, str(tmp_path))
    assert config.plain["seed"] == 7
    assert config.plain["optimizer"]["lr"] == 0.003
    assert config.plain["optimizer"]["weight_decay"] == 0.5
    assert config.plain["track"]["notes"] == "12"
    monkeypatch.setenv("NON_ZEROS", "1")
    sparsity = config_of(["sparsity.n=${oc.env:NON_ZEROS}", "sparsity.m=4"]).plain["sparsity"]
    assert (sparsity["n"], sparsity["m"], sparsity["v"]) == (1, 4, 1)
    monkeypatch.setenv("SEED", "seven")
    (line,) = mistakes(words, config_dir=str(tmp_path))
    assert line.startswith("seed=seven: it takes")


@pytest.mark.parametrize(
    ("key", "cause"), [("timeout_min=abc", "Integer"), ("partitio=low", "LocalQueueConf")]
)
def test_hydra_s_cause_is_told(key, cause):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs submitit")
    words = ["seed=0,1", "hydra/launcher=submitit_local", f"hydra.launcher.{key}"]
    (line,) = mistakes(words, True)
    assert cause in line
