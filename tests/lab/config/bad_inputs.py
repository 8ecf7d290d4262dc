"""Mistakes as people type them, and what the answer has to say; run as a program, it answers them
all in one process and prints what happened to each as JSON.

A run that begins after all counts as accepted: none of these may.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

GROUPS = {
    "recipe=stpe": "did you mean step?",
    "recipe=SR-STE": "did you mean sr_ste?",
    "recipe=magnitude": "nmrun prune RUN method=magnitude",
    "recipe=": "recipe=: no such recipe",
    "recipe=null": "no such recipe",
    "recipe=custom": "recipe._target_",
    "recpie=step": "did you mean recipe?",
    "method=step": "did you mean recipe?",
    "dataset=mnist": "did you mean fashion_mnist?",
    "dataset=generated_questions": "has questions on texts: these take gpt_reader",
    "optimizer=adamW": "did you mean adamw?",
    "optimizer=lion": "no such optimizer",
    "trainer=fast": "no such trainer",
    "track=tb": "did you mean tensorboard?",
    "debug=fst": "did you mean fast?",
}

KEYS = {
    "nonsense=1": "no such key",
    "lr=0.1": "did you mean optimizer.lr?",
    "optimizer.learning_rate=0.1": "did you mean optimizer.lr?",
    "optimizer.lrr=1": "did you mean optimizer.lr?",
    "optimizer.momentum=0.9": "momentum belongs to optimizer=sgd",
    "momentum=0.9": "momentum belongs to optimizer=sgd",
    "dataset.batch_size=32": "did you mean trainer.batch_size?",
    "gpu=0": "trainer.device=cuda",
    "trainer.gpu=1": "trainer.device=cuda",
    "workers=4": "workers belongs to dataset=imagenet",
    "model._target_=mine.build": "no such key",
    "seed=1 model._target_": "cannot be read as key=value",
    "recipe=step recipe.switch=abc": "recipe.switch=abc: it takes",
    "recipe.lambda=1e-4": "no such key",
    "recipe=sr_ste recipe.lambda=1e-4": "did you mean recipe.decay?",
    "decay=1e-4": "recipe.decay",
    "n=2": "sparsity=2:4",
    "sparsity.N=2": "did you mean sparsity=2:4?",
    "pattern=2:4": "did you mean sparsity?",
    "'sparsity.overides={inner.1: 1:8}'": "did you mean sparsity.overrides?",
    "sparsity.overrides.inner=1:8": "ratios by layer are one value",
    "seeed=1": "did you mean seed?",
    "+foo=1": "no such key",
    "trainer.epochs.x=1": "(there are dataset, ",
    "recipe@model=ste": "recipe@model=ste: write it without @model",
    "++foo=1": "no such key",
    "+seed=1": "write it without +",
    "--config-dir mine model=named model.exclude=head": "a network of your own takes it as +model.exclude=",
}

# what else a key refuses: test_schema.py
VALUES = {
    **{f"trainer.epochs={value}": "a whole number, 1 or more" for value in ("0", "abc", "null", "1e3", "''")},
    **{f"trainer.{key}={value}": "it takes" for key, value in (
        ("distributed", "dp"), ("average", 0), ("mvue", "dense"), ("device", "cuda:0"),
    )},
    "trainer.device=gpu": "did you mean cuda?",
    "trainer.precision=float16": "did you mean fp16?",
    "trainer.acceleration=cusparsel": "did you mean cusparselt?",
    **{f"optimizer.lr={value}": "a number above 0" for value in ("0", "abc", "nan", "null", "1e-3x")},
    "optimizer.head_lr=0": "it takes",
    "optimizer._target_=torch.optim.NAdam": "optimizer=custom optimizer.target=",
    "optimizer=custom": "the dotted path of a class",
    "schedule=custom schedule.target=nosuch.Falls": "cannot be imported",
    "schedule=multistep schedule.milestones=[0.5,0.2]": "rising fractions",
    "trainer.patience=2 trainer.average=3": "needs to know the last epochs",
    "trainer.patience=2 trainer.evaluate=dense": "no evaluation is the best",
    "optimizer=sgd recipe=ste optimizer.nesterov=true optimizer.momentum=0": "momentum above 0",
    **{f"seed={value}": "seed" for value in ("abc", "99999999999999999999999", "18446744073709551616")},
    "dry=maybe": "true or false",
    "'output_dir=\"a${b\"'": "no viable alternative at input '${b'",
    "+model._target_=math.sin model.name=x '+model.map={1: a, b: c}'": "model.map: it takes numbers, texts",
    "sparsity.pad=on": "true or false",
    "track.also=[neptune]": "a list of tensorboard and mlflow",
    "track.tags=mine": "a list of texts",
    "track.git=yes": "true or false",
    "output_dir=/dev/null": "/dev/null is not a folder",
    "model.exclude=[(]": "cannot be read as key=value",
    "model.exclude=[\\\"(\\\"]": "a regular expression",
    "model=resnet20 model.depth=4 dataset=cifar10": "it takes",
    "recipe=ste_periodic recipe.gradient=sts": "did you mean ste?",
    "recipe._target_=Mine": "package.Class",
    "recipe._target_=nosuch.module.Mine": "cannot be imported",
    "+model._target_=nosuch.build model.name=x": "cannot be imported",
    "+dataset._target_=nosuch.build dataset.name=x": "cannot be imported",
}  # fmt: skip

RATIOS = {
    **{f"sparsity={ratio}": "1 <= N <= M" for ratio in ("5:4", "0:4", "4:0", "0:0")},
    **{f"sparsity={ratio}": "six digits with a colon" for ratio in ("28", "2.8", "2:4:8:2", "2/4", "2-4", "50%", "abc", "2:", ":4", "2:b", "null")},
    "sparsity=64:5:8": "N <= 4 < M",
    "sparsity=2:8 sparsity.v=0": "a whole number, 1 or more",
    "sparsity=2of4": "with a colon",
    "sparsity.n=5": "1 <= N <= M",
    "sparsity.m=abc": "sparsity",
    "sparsity=99999999:99999999999": "two numbers of up to six digits",
    "'sparsity.overrides={inner.1: 1:8, inner.0: 9:8}'": "'inner.0': 9:8 is not an N:M pattern: it takes 1 <= N <= M",
    "'sparsity.overrides={inner.\\(: 1:8}'": "'inner.(' is no regular expression: missing )",
    "'model.exclude=[\"a(\"]'": "'a(' is no regular expression: missing )",
}  # fmt: skip

TOGETHER = {
    "recipe=step optimizer=sgd": "recipe=step freezes Adam's second moment, which sgd has not: use optimizer=adam or adamw",
    "recipe=s_ste sparsity=dense": "recipe=s_ste with sparsity=dense",
    "recipe=step recipe.t_min=0.6": "recipe.t_min=0.6 is above recipe.t_max=0.5",
    "recipe=sr_ste recipe.decay=auto": "recipe.decay=auto: it takes a number at least 0",
    "recipe._target_=nmrun.recipes.ste.STE recipe.name=a/b": "recipe.name=a/b: it names a folder",
    "recipe._target_=nmrun.recipes.ste.STE recipe.name=..": "recipe.name=..: it names a folder",
    "output_dir=file.txt/below": "file.txt is not a folder",
    "dataset=stdlib_text model=gpt_tiny trainer.activations=2:4": "it goes with model.activation=relu2",
    "dataset=stdlib_text model=gpt_tiny model.activation=relu2 trainer.activations=2:4 trainer.activations_dense_start=0.5 "
    "trainer.activations_dense_end=0.5": "less than 1",
    "dataset=generated_text model=resnet18": "model=resnet18 is for images",
    "dataset=generated_text model=text_encoder dataset.tokenizer=true": "it takes a text",
    "init=nowhere.pt": "init=nowhere.pt: there is no such file",
    "trainer.distill=nowhere": "trainer.distill=nowhere: no finished run is there",
    "trainer.distill=start": "begins with random weights",
    "dataset=stdlib_text model=gpt_tiny model.heads=3": "cannot be split into model.heads=3",
    "model=resnet20 model.depth=18": "6n + 2",
    "trainer.accumulate=3": "trainer.batch_size=64 cannot be split into trainer.accumulate=3 equal micro-batches",
    "-m recipe=sr_ste,s_ste sparsity=64:2:8": "recipe=s_ste sparsity=64:2:8: V:N:M masks",
    "trainer.precision=fp16": "fp16",
    "trainer.device=free": "no CUDA device",
    "trainer.threads=100000": "1 to 1024",  # torch would begin them all, and the process dies
    "trainer.average=100": "trainer.epochs=12",
    "dataset=digits model=gpt_tiny": "a language model",
    "dataset=copy_reverse model=mlp": "fairseq_transformer",
    "dataset=image_folder": "dataset.path",
    "dataset=image_folder dataset.path=nowhere": "nowhere",
    "dataset=text dataset.train=nowhere.txt model=gpt_tiny": "nowhere.txt",
    "trainer.acceleration=cusparselt trainer.fp8=true": "trainer.fp8=false",
    "trainer.acceleration=cusparselt sparsity=3:4": "not 3:4",
    "trainer.steps=10 trainer.budget=flops:1e12": "each say how long the run is",
    "trainer.eval_every=10min": "of steps such as 200steps",
    "recipe=mdgf_linear recipe.dense=0.8 recipe.final=0.8": "recipe.dense=0.8 and recipe.final=0.8 are fractions of",
    "dataset=digits dataset.val_fraction=0.5 dataset.test_fraction=0.5": "leave nothing to train with",
}

SWEEPS = {
    "--cfg job -m recipe=step,ste": "--multirun and --cfg: give one of them",
    "recipe=step,ste": "add -m",
    "seed=range(3)": "add -m",
    "experiment=step_aggressive": "add -m",
    "zip=seed,recipe": "add -m",
    "-m recipe=glob(q*)": "matches nothing",
    "-m seed=range(0,0)": "seed=range(0,0): there is no value in it",
    "-m seed=range(0,1,0)": "seed=range(0,1,0): a range takes numbers, and a step other than 0",
    "-m zip=seed,recipe seed=range(0,1,0) recipe=ste,asp": "a range takes numbers, and a step other than 0",
    "-m optimizer.lr=range(nan,1)": "optimizer.lr=range(nan,1): a range takes numbers",
    "-m optimizer.lr=range(-inf,inf,inf)": "a range takes numbers",
    "-m seed=0,0,1": "seed=0,0,1: 0 is there twice",
    "-m model.hidden=[8,8],[8,8] model=mlp": "[8, 8] is there twice",
    "-m recipe=ste,sr_ste recipe.decay=0,1": "no such key with recipe=ste",
    "-m optimizer.lr=interval(1e-4,1e-2)": "nmrun tune --over",
    "-m experiment=nosuch": "PATH.yaml for a table",
    "-m experiment=step_agressive": "did you mean step_aggressive?",
    "-m experiment=step_aggressive scale=tiny": "no such scale",
    "-m experiment=": "no such experiment",
    "-m experiment=nowhere.yaml": "experiment=nowhere.yaml: No such file",
    "-m experiment=step_cifar10 optimizer.lrr=1": "did you mean optimizer.lr?",
    "-m scale=small": "of which experiment",
    "-m zip=seed": "two keys or more",
    "-m zip=seed,optimizer.lr seed=0,1": "no list of values",
    "-m zip=sparsity,sede sparsity=2:4,1:4 seed=0,1": "sede has no list of values here, as in sede=a,b; did you mean",
    "-m zip=recipe,seed recipe=glob(*ste) seed=0,1": "recipe has no list of values here",
    "-m zip=seed,sparsity zip=recipe,seed seed=0,1 sparsity=2:4,1:4 recipe=ste,asp": "seed is zipped twice",
    "-m zip=seed,recipe seed=0,1 recipe=[a,b": "recipe=[a,b: cannot be read as key=value",
    "-m seed=0,1,2 sparsity=2:4,1:4 zip=sparsity,seed": "have as many values each, and have: sparsity 2, seed 3",
    "-m launcher=slrm seed=0,1": "did you mean slurm?",
    "launcher=joblib seed=0": "launchers are for sweeps; add -m",
    "detach=true seed=0": "add -m and launcher=slurm",
    "-m detach=true seed=0,1": "add -m and launcher=slurm",
    "-m hydra/sweeper=optuna hydra.sweeper.n_trials=20 seed=0,1": "nmrun tune",
    "-m hydra.launcher.n_jobz=2 seed=0,1": "hydra.launcher.n_jobz",
    "-m launcher=joblib,basic seed=0,1": "launcher=joblib,basic: no such launcher",
    "-m launcher=joblib hydra.searchpath=[file:///x] seed=0,1": "--config-dir adds a folder of configs",
    "hydra.searchpath=[file:///x] seed=0": "--config-dir adds a folder of configs",
    "-m hydra.nosuch=2 seed=0,1": "hydra.nosuch",
    "-m hydra/launcher=joblib hydra.launcher.n_jobs=0 seed=0,1": "1 or more",
    "-m hydra.job.chdir=true seed=0,1": "output_dir",
    "hydra.mode=MULTIRUN seed=0": "nmrun -m",
    "-m hydra.sweeper.params=3 seed=0,1": "values by key",
    "-m hydra.sweeper.max_batch_size=0 seed=0,1": "1 or more",
    "recipe=step table outputs": "a verb comes first: nmrun table recipe=step outputs",
}

WORDS = {
    "tabel": "did you mean table?",
    "search outputs": "no such verb",
    "--foo": "no such option",
    "--recipe=step": "recipe=step",
    "--lr=1": "keys are written without dashes: optimizer.lr=1",
    "--resume": "keys are written without dashes: resume=true",
    "--verbose": "no such option (there are --multirun, ",
    "-x": "no such option",
    "--multirn seed=1": "did you mean --multirun?",
    "--config-path x": "not for nmrun",
    "--config-dir nowhere": "no such folder",
    "--cfg": "expected one argument",
    "--cfg jobs": "invalid choice",
    **{
        f"-sc {word}": "-sc: it takes install=SHELL or"
        for word in ("", "foo", "install=tcsh", "query=bash")
    },
    "seed": "no such verb",
    "seed=1 seed": "cannot be read as key=value",
    "=1": "cannot be read as key=value",
    "recipe:step seed=1": "recipe=step",
    "seed = 1": "write seed=1, without spaces around the =",
    "optimizer.lr =0.1 seed=1": "write optimizer.lr=0.1, without spaces around the =",
    "trainer.betas=[1": "[1",
    "optimizer.betas=(0.9,0.99)": "optimizer.betas",
    "output_dir=a(b": "quote",
    "output_dir=${nope}": "output_dir: Interpolation key",
    "output_dir=???": "output_dir",
    "~recipe": "recipe: missing; a run needs it",
    "~seed": "seed: missing; a run needs it",
    "~nosuch": "nosuch",
    "~trainer.epochs": "trainer.epochs",
}

VERBS = {
    "table": "outputs: no such folder",
    "table . --foo": "unrecognized arguments: --foo; nmrun table --help",
    "table . recipe=ste": "--filter chooses among runs",
    "table . --runs --baseline dense": "--baseline: it has no meaning with --runs",
    "table --experiment step_cifar10 recipe=stpe": "did you mean step?",
    "report . --out a.pdf": "the suffix must be one of .html, .htm",
    "status . more": "nmrun status --help",
    "status --all=3": "--all",
    "table . --metrics test/accuracy": "unrecognized arguments: --metrics test/accuracy; did you mean --metric?",
    "table . --format word": "invalid choice",
    "table . --format": "expected one argument",
    "table .": "no run below",
    "table file.txt": "file.txt: no such folder of runs",
    "table outputs --experiment step_aggressive": "outputs: cannot be read as key=value",
    "table --experiment step_cifar": "no such experiment; did you mean step_cifar10?",
    "table --experiment step_cifar10 --scale tiny": "scale=tiny: no such scale (there are smoke, small, paper)",
    "table --experiment step_cifar10 --scale smoke": "none of its 16 runs is finished; nmrun -m",
    "table file.txt --out x.foo": "the suffix must be one of .md, .tex, .csv, .json",
    "table file.txt --scale huge": "it has no meaning without --experiment",
    "table file.txt --figures figs": "it has no meaning without --experiment",
    "table nowhere.csv": "nowhere.csv: no such folder of runs, nor a CSV file",
    "plot . --kind pie": "invalid choice",
    "plot . --out x.gif": "--out x.gif: the suffix must be one of .png, .svg, .pdf",
    "status": "nmrun: outputs: no such folder\n",
    "status .": "no runs in it",
    "status file.txt": "file.txt: no such folder",
    "compare file.txt file.txt": "file.txt: no run is in it",
    "export": "required",
    "export . --out x": "finished run",
    "export . --format nosuch --out x": "invalid choice",
    "export .": "--out",
    "export . --out x --precision int8": "--precision int8 is for --format packed alone",
    "bench": "WHAT",
    "bench train --rounds 0": "a whole number, 1 or more",
    "bench train --sparsity 4:2": "1 <= N <= M",
    "bench train --sparsity dense": "dense: it takes N:M with 1 <= N <= M, such as 2:4",
    "bench train --arms stpe": "did you mean step?",
    "bench train trainer.batchsize=32": "did you mean trainer.batch_size?",
    "bench train --out file.txt/x": "file.txt/x: Not a directory",
    "bench train --out new trainer.epochs=0": "trainer.epochs",
    "bench infer --sparsity 4:2": "1 <= N <= M",
    "bench infer --device cuda": "no CUDA device",
    "doctor --nosuch": "unrecognized arguments",
    "prepare --out x": "required: --train, --valid, --test",
    "ratios .": "finished run",
    "ratios . --density 2": "density",
    # an option stands anywhere between the words
    "compare nowhere --all .": "nowhere: there is no such folder",
    "prune nowhere --yes samples=2": "nowhere: no finished run is there",
    "table nowhere --baseline dense .": "nowhere: no such folder",
    "compare . .": "no run",
    "rerun": "required: RUN\n",
    "rerun .": "no run",
}

# What lies in the current folder, and is there afterwards.
FILES = {
    "file.txt": b"",
    "mine/recipe/flow.yaml": b"beta: [1,\ngamma: }",
    "mine/recipe/tabs.yaml": b"beta:\n\t- 1",
    "mine/recipe/twice.yaml": b"beta: 1\nbeta: 2",
    "mine/recipe/bytes.yaml": b"\xff\xfe",
    "mine/recipe/nothing.yaml": b"",
    "mine/recipe/alist.yaml": b"- beta",
    "mine/recipe/unnamed.yaml": b"beta: 1",
    "mine/model/bare.yaml": b"_target_: nosuch.build",
    "mine/model/named.yaml": b"name: own\n_target_: nosuch.build",
    "mine/model/untargeted.yaml": b"name: untargeted\nwidth: 64",
    "mine/optimizer/half.yaml": b"name: sgd\nlr: 0.1\nmomentum: 0\nnesterov: false\ndecay: null",
    "mine/recipe/nowhere.yaml": b"_target_: nosuch.Mine",
    "mine/recipe/other.yaml": b"defaults: [/model: nosuch]\nname: ste",
    "mine/recipe/number.yaml": b"3",
    "mine/recipe/nolist.yaml": b"defaults: 3",
    "mine/recipe/itself.yaml": b"defaults: [itself]\nname: ste",
}
TOLD = {
    "-m": "-m: it takes several values of a key, as in nmrun -m seed=0,1,2",
    "dataset=glue model=hf_encoder model.pretrained=./nope": "nmrun: model.pretrained=./nope: there is no such folder",
    "dataset=glue model=hf_encoder dataset.tokenizer=./nope": "nmrun: dataset.tokenizer=./nope: there is no such folder",
    "tune cmp recipe=ste seed=0,1000": "the seeds 1000 to 1002 are those of tuning",
    "tune recipe=dense seed=0": "the first word is a name",
    "tune try": "required: SWEEP",
    "tune try --trials 0 seed=0": "--trials: 0: it takes a whole number",
    "prune . --out x": "--out",
    "optimizer=lamb": "any other is optimizer=custom optimizer.target=",
    "-m 'recipe=[step,sr_ste]'": "several are written without brackets: recipe=step,sr_ste",
    "=3": "write key=value, without spaces around the =",
    "'recipe = step'": "write key=value, without spaces around the =",
    "model=timm model.name=vit_tinyy": "timm's networks are named by model.name_in_timm",
}
OWN = {
    "--config-dir mine recipe=flow": "flow.yaml, line 2: not YAML",
    "--config-dir mine recipe=tabs": "tabs.yaml, line 2: not YAML",
    "--config-dir mine recipe=twice": "twice.yaml, line 2: not YAML",
    "--config-dir mine recipe=bytes": "--config-dir mine: not a text in UTF-8",
    "--config-dir mine recipe=nothing": "recipe.name: missing",
    "--config-dir mine model=bare": "model.name: missing; write name: NAME beside _target_: nosuch.build in its file",
    "--config-dir mine model=named": "model._target_=nosuch.build cannot be imported",
    "--config-dir mine optimizer=half": "optimizer.head_lr, optimizer.weight_decay: missing; a run needs it (defaults: [sgd]",
    "--config-dir mine recipe=alist": "recipe: missing",
    "--config-dir mine recipe=unnamed": "recipe.name: missing",
    "--config-dir mine recipe=nowhere": "no nosuch.py here and no such package installed; PYTHONPATH=",
    "--config-dir mine recipe=other": "model/nosuch",
    "--config-dir mine recipe=number": "a file in --config-dir mine: Invalid loaded object type",
    "--config-dir mine recipe=nolist": "'recipe/nolist', defaults must be a list",
    "--config-dir mine recipe=itself": "defaults: a file of yours names itself there",
    "help recipe --config-dir mine": "bytes.yaml: not a text in UTF-8",
    "help tabel": "did you mean table?",
    "--config-dir nowhere --help": "--config-dir nowhere: no such folder",
    "--help --config-dir": "expected one argument",
}

# by people who know other tools: W&B, torchtune, lightning-hydra-template, ultralytics, timm
TOOLS = {
    **dict.fromkeys(
        ("train recipe=step", "run", "fit", "finetune model=mlp", "train.py"),
        "leave it out: nmrun recipe=",
    ),
    **dict.fromkeys(("sweep", "agent abc", "--sweep"), "-m makes a sweep"),
    "hpo": "nmrun tune NAME ... searches settings",
    "dataset=data/flowers": "dataset=image_folder dataset.path=data/flowers",
    **dict.fromkeys(
        ("--jobs 4", "-m seed=0,1 -j 4", "-m hydra.launcher.jobs=2 seed=0,1", "-m hydra.launcher.n_jobs=2 seed=0,1", "n_jobs=2"),
        "launcher=joblib launcher.n_jobs=4",
    ),
    **dict.fromkeys(
        ("my.yaml", "--config my.yaml", "--config=my.yaml", "config=my.yaml", "cp recipe.yaml"),
        "--config-dir FOLDER",
    ),
    "resume": "the same command goes on",
    "step": "write recipe=step",
    "recipe.step": "write recipe=step",
    "recipe": "write recipe=NAME",
    "step_cifar10": "write -m experiment=step_cifar10",
    "lr": "write optimizer.lr=VALUE",
    "2:8": "write sparsity=2:8",
    "sparsity=2:4 1:8": "-m sparsity=2:4,1:8",
    "-recipe=step": "without dashes: recipe=step",
    "+recipe=step": "write it without +",
    "seed=0..4": "-m 'seed=range(0,5)'",
    "-m seed=0-4": "-m 'seed=range(0,5)'",
    "seed=[0,1,2]": "-m seed=0,1,2",
    "track=wandb,tensorboard": "track=wandb track.also=[tensorboard]",
    "hydra.run.dir=there": "output_dir",
    "model=bert": "model=hf_encoder model.pretrained=",
    "model=unknown": "nmrun help model lists all",
    "help sweep": "-m makes a sweep",
    "dataset=/my/images": "dataset=image_folder dataset.path=/my/images",
    "dataset.image_size=64": "dataset.resolution belongs to dataset=cifar10, ",
    "table . baseline=dense": "baseline=dense: no such folder of runs",
    "report . --to a.html": "nmrun report --help lists what it takes",
    "--config-dir mine model=untargeted": "_target_",
}  # fmt: skip

EVERY = {
    **GROUPS, **KEYS, **VALUES, **RATIOS, **TOGETHER, **SWEEPS, **WORDS, **VERBS, **OWN, **TOLD, **TOOLS,
}  # fmt: skip


def answer(line: str) -> dict[str, Any]:
    """What the command line does with ``line``, in this process."""
    from nmrun.lab import cli

    for leftover in Path().iterdir():  # what the line before left, which it was told
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    for name, content in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["nmrun", *shlex.split(line)]
    began, before = time.perf_counter(), set(sys.modules)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status: Any = cli.main()
        except SystemExit as stop:
            status = stop.code
        except Exception as error:
            status = f"{type(error).__name__}: {error}"
    heavy = {"torch", "sklearn", "wandb"}
    return {
        "status": status,
        "said": err.getvalue(),
        "printed": out.getvalue(),
        "seconds": time.perf_counter() - began,
        "imported": sorted(heavy & (set(sys.modules) - before)),
        "left": sorted(str(path) for path in Path().rglob("*") if path.is_file()),
    }


def main() -> None:
    from nmrun.lab.config import precheck

    read, composed = precheck.read, {}  # each choice of options is composed once for all lines
    precheck.read = lambda *args, **options: read(*args, **{**options, "cache": composed})

    # whose import would load torch
    runner: Any = ModuleType("nmrun.lab.train.runner")
    runner.run = lambda *_: {"status": "planned", "folder": None}
    sys.modules[runner.__name__] = runner
    os.chdir(tempfile.mkdtemp())  # each line's leftovers are deleted
    print(json.dumps({line: answer(line) for line in EVERY}))


if __name__ == "__main__":
    main()
