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
import time
from pathlib import Path
from typing import Any

GROUPS = {
    "recipe=stpe": "did you mean step?",
    "recipe=STEP": "did you mean step?",
    "recipe=sr-ste": "did you mean sr_ste?",
    "recipe=SR-STE": "did you mean sr_ste?",
    "recipe=srste": "did you mean sr_ste?",
    "recipe=magnitude": "no such recipe",
    "recipe=": "recipe=: no such recipe",
    "recipe=null": "no such recipe",
    "recipe=custom": "recipe._target_",
    "recpie=step": "did you mean recipe?",
    "method=step": "did you mean recipe?",
    "sparsifier=step": "no such key",
    "dataset=mnist": "did you mean fashion_mnist?",
    "dataset=cifar": "did you mean cifar10?",
    "dataset=CIFAR10": "did you mean cifar10?",
    "dataset=cifar-10": "did you mean cifar10?",
    "dataset=digit": "did you mean digits?",
    "dataset=wikitext": "did you mean wikitext2?",
    "dataset=imagenet1k": "did you mean imagenet?",
    "dataset=nothing": "no such dataset",
    "data=digits": "did you mean dataset?",
    "model=resnet": "did you mean resnet",
    "model=ResNet18": "did you mean resnet18?",
    "model=resnet-18": "did you mean resnet18?",
    "model=gpt": "did you mean gpt2?",
    "model=vit": "did you mean vit_",
    "model=mpl": "did you mean mlp?",
    "model=unet": "no such model",
    "network=mlp": "did you mean model?",
    "arch=resnet18": "did you mean model?",
    "optimizer=adamW": "did you mean adamw?",
    "optimizer=adan": "did you mean adam?",
    "optimizer=lion": "no such optimizer",
    "optimizer=rmsprop": "no such optimizer",
    "optim=sgd": "did you mean optimizer?",
    "schedule=cosin": "did you mean cosine?",
    "schedule=step": "no such schedule",
    "scheduler=cosine": "did you mean schedule?",
    "trainer=fast": "no such trainer",
    "track=wanbd": "did you mean wandb?",
    "track=wandbb": "did you mean wandb?",
    "track=tensorbord": "did you mean tensorboard?",
    "track=tb": "did you mean tensorboard?",
    "track=neptune": "no such track",
    "tracker=local": "did you mean track?",
    "logger=wandb": "did you mean track?",
    "debug=fst": "did you mean fast?",
    "debug=true": "no such debug",
}

KEYS = {
    "nonsense=1": "no such key",
    "lr=0.1": "did you mean optimizer.lr?",
    "learning_rate=0.1": "did you mean optimizer.lr?",
    "optimizer.learning_rate=0.1": "did you mean optimizer.lr?",
    "optimizer.lrr=1": "did you mean optimizer.lr?",
    "weight_decay=0.1": "did you mean optimizer.weight_decay?",
    "wd=0.1": "did you mean optimizer.weight_decay?",
    "optimizer.wd=0.1": "did you mean optimizer.weight_decay?",
    "optimizer.momentum=0.9": "momentum belongs to optimizer=sgd",
    "optimizer.nesterov=true": "nesterov belongs to optimizer=sgd",
    "momentum=0.9": "momentum belongs to optimizer=sgd",
    "optimizer=sgd recipe=ste optimizer.betas=[0.9,0.95]": "betas belongs to optimizer=adam",
    "optimizer.beta1=0.9": "did you mean optimizer.betas?",
    "epochs=3": "did you mean trainer.epochs?",
    "trainer.epoch=3": "did you mean trainer.epochs?",
    "trainer.max_epochs=3": "did you mean trainer.epochs?",
    "steps=100": "trainer.epochs",
    "trainer.max_steps=100": "trainer.epochs",
    "batch_size=32": "did you mean trainer.batch_size?",
    "bs=32": "did you mean trainer.batch_size?",
    "trainer.bs=32": "did you mean trainer.batch_size?",
    "dataset.batch_size=32": "did you mean trainer.batch_size?",
    "gpu=0": "trainer.device=cuda",
    "gpus=1": "trainer.device=cuda",
    "cuda=true": "trainer.device=cuda",
    "device=cuda": "did you mean trainer.device?",
    "trainer.gpu=1": "trainer.device=cuda",
    "amp=true": "trainer.precision",
    "trainer.amp=true": "trainer.precision",
    "fp16=true": "trainer.precision",
    "bf16=true": "trainer.precision",
    "precision=bf16": "did you mean trainer.precision?",
    "num_workers=4": "dataset.workers",
    "workers=4": "workers belongs to dataset=imagenet",
    "dropout=0.1": "dropout belongs to model=",
    "model.dropout=0.1": "dropout belongs to model=",
    "model.depth=20": "depth belongs to model=resnet20",
    "model.hidden=[8,8]": "hidden belongs to model=mlp",
    "model=mlp model.channels=[8,8]": "channels belongs to model=small_conv",
    "model.layers=2": "layers belongs to model=",
    "model.chanels=[8,8]": "did you mean model.channels?",
    "model._target_=mine.build": "no such key",
    "seed=1 model._target_": "cannot be read as key=value",
    "recipe.switch=abc": "recipe.switch=abc: it takes",
    "recipe=sr_ste recipe.switch=0.5": "switch belongs to recipe=step",
    "recipe=ste recipe.decay=1e-4": "decay belongs to recipe=",
    "recipe=dense recipe.decay=1e-4": "decay belongs to recipe=",
    "recipe.lambda=1e-4": "no such key",
    "recipe=sr_ste recipe.lambda=1e-4": "did you mean recipe.decay?",
    "recipe=sr_ste recipe.lambda_w=1e-4": "did you mean recipe.decay?",
    "recipe=sr_ste recipe.dcay=1e-4": "did you mean recipe.decay?",
    "recipe.frames=3": "frames belongs to recipe=sdgf_geometric",
    "decay=1e-4": "recipe.decay",
    "switch=0.5": "did you mean recipe.switch?",
    "n=2": "sparsity=2:4",
    "m=4": "sparsity=2:4",
    "sparsity.N=2": "did you mean sparsity=2:4?",
    "pattern=2:4": "did you mean sparsity?",
    "ratio=2:4": "did you mean sparsity?",
    "density=0.5": "sparsity=2:4",
    "nm=2:4": "did you mean sparsity?",
    "'sparsity.overides={inner.1: 1:8}'": "did you mean sparsity.overrides?",
    "sparsity.overrides.inner=1:8": "ratios by layer are one value",
    "schedule.warm_up=0.1": "did you mean schedule.warmup?",
    "warmup=0.1": "did you mean schedule.warmup?",
    "schedule.warmup_steps=100": "warmup_steps belongs to schedule=inverse_sqrt",
    "schedule=inverse_sqrt schedule.final=0.1": "final belongs to schedule=",
    "track.project=mine track=local": "project belongs to track=wandb",
    "project=mine": "track.project",
    "outdir=x": "did you mean output_dir?",
    "output=x": "did you mean output_dir?",
    "seeed=1": "did you mean seed?",
    "random_seed=1": "did you mean seed?",
    "exclude=[head]": "did you mean model.exclude?",
    "+foo=1": "no such key",
    "+foo.bar=1": "no such key",
    "++foo=1": "no such key",
    "+seed=1": "write it without +",
    "dataset.trainsize=10": "no such key",
    "dataset.train_size=10": "train_size belongs to dataset=",
    "trainer.gradient_accumulation=2": "did you mean trainer.accumulate?",
    "trainer.grad_clip=1": "did you mean trainer.clip?",
    "trainer.clip_grad=1": "did you mean trainer.clip?",
}

VALUES = {
    **{f"trainer.epochs={value}": "a whole number, 1 or more" for value in ("0", "-1", "1.5", "abc", "null", "true", "[1]", "1e3", "''")},
    **{f"trainer.batch_size={value}": "a whole number, 1 or more" for value in ("0", "-8", "3.5", "auto", "null")},
    **{f"trainer.{key}={value}": "it takes" for key, value in (
        ("accumulate", 0), ("accumulate", "two"), ("clip", -1), ("clip", 0), ("clip", "yes"), ("compile", "fast"),
        ("label_smoothing", 1.5), ("label_smoothing", -0.1), ("on_oom", "retry"), ("distributed", "dp"),
        ("evaluate", "all"), ("eval_every", 0), ("log_every", 0), ("checkpoint_every", -1), ("average", 0),
        ("limit_batches", 0), ("threads", 0), ("threads", "all"), ("fp8", "e4m3"), ("mvue", "dense"),
        ("input_gradient", "sparse"), ("diagnose_every", 0), ("budget", 600), ("budget", "hours:2"),
        ("budget", "flops:-1"), ("budget", "seconds:0"), ("budget", "seconds:abc"),
    )},
    "trainer.device=gpu": "did you mean cuda?",
    "trainer.device=cuda:0": "it takes",
    "trainer.device=mps": "one of auto, cpu, cuda, free",
    "trainer.device=CUDA": "did you mean cuda?",
    "trainer.precision=float16": "did you mean fp16?",
    "trainer.precision=bfloat16": "did you mean bf16?",
    "trainer.precision=16": "it takes",
    "trainer.precision=half": "did you mean fp16?",
    "trainer.precision=mixed": "it takes",
    "trainer.acceleration=sparse": "it takes",
    "trainer.acceleration=cusparsel": "did you mean cusparselt?",
    **{f"optimizer.lr={value}": "a number above 0" for value in ("0", "-1", "abc", "nan", "inf", "null", "1e-3x", "true")},
    **{f"optimizer.{key}={value}": "it takes" for key, value in (
        ("weight_decay", -1), ("eps", 0), ("betas", 0.9), ("betas", "[0.9]"), ("betas", "[0.9,1.0]"),
        ("betas", "[0.9,0.99,0.999]"), ("betas", "[a,b]"), ("head_lr", 0), ("decay", "none"),
    )},
    "optimizer=sgd recipe=ste optimizer.momentum=1.5": "it takes",
    "optimizer=sgd recipe=ste optimizer.nesterov=maybe": "true or false",
    "optimizer=sgd recipe=ste optimizer.nesterov=true optimizer.momentum=0": "momentum above 0",
    **{f"schedule.{key}={value}": "it takes" for key, value in (("warmup", 1), ("warmup", -0.1), ("final", 2), ("cycles", 0))},
    **{f"seed={value}": "seed" for value in ("-1", "abc", "1.5", "null", "99999999999999999999999", "18446744073709551616")},
    **{f"seeds={value}": "null or a list of different whole numbers" for value in ("[]", "[1,1]", "[-1]", "3", "[a]", "[99999999999999999999999]")},
    **{f"{key}={value}": "true or false" for key, value in (("force", "yes"), ("resume", 1), ("dry", "maybe"), ("sparsity.pad", "on"))},
    "track.also=[neptune]": "a list of tensorboard and mlflow",
    "track.also=tensorboard": "a list of tensorboard and mlflow",
    "track.tags=mine": "a list of texts",
    "track.git=yes": "true or false",
    "trainer.limit_evaluation=0": "a whole number, 1 or more",
    "output_dir=null": "it takes a text",
    "output_dir=''": "it takes a text",
    "output_dir=/proc/nothing": "/proc/nothing",
    "output_dir=/dev/null": "/dev/null is not a folder",
    "model.channels=8": "at least two whole numbers",
    "model.channels=[8]": "at least two whole numbers",
    "model.channels=[0,8]": "at least two whole numbers",
    "model=mlp model.hidden=[64,a]": "at least two whole numbers",
    "model.exclude=[(]": "cannot be read as key=value",
    "model.exclude=[\\\"(\\\"]": "a regular expression",
    "model=resnet18 model.form=small": "it takes",
    "model=resnet20 model.depth=4 dataset=cifar10": "it takes",
    "recipe.switch=1.5": "it takes",
    "recipe.switch=0": "it takes",
    "recipe=sr_ste recipe.decay=-1": "it takes",
    "recipe=sr_ste recipe.decay=none": "it takes",
    "recipe=ste_periodic recipe.gradient=sts": "did you mean ste?",
    "recipe=sdgf_geometric recipe.frames=0": "it takes",
    "recipe._target_=Mine": "package.Class",
    "recipe._target_=nosuch.module.Mine": "cannot be imported",
    "+model._target_=nosuch.build model.name=x": "cannot be imported",
    "+dataset._target_=nosuch.build dataset.name=x": "cannot be imported",
    "dataset.val_fraction=0.9": "it takes",
    "dataset.split_seed=-1": "it takes",
    "dataset=glue dataset.task=cola2": "did you mean cola?",
    "dataset=cifar10 dataset.train_size=0": "it takes",
}  # fmt: skip

RATIOS = {
    **{f"sparsity={ratio}": "1 <= N <= M" for ratio in ("5:4", "0:4", "4:0", "0:0")},
    **{f"sparsity={ratio}": "two numbers with a colon" for ratio in ("28", "2.8", "2:4:8", "2/4", "2-4", "50%", "abc", "2:", ":4", "2:b", "null")},
    "sparsity=2of4": "with a colon",
    "sparsity=dnse": "or dense",
    "sparsity=1:128": "no layer whose inputs are a multiple of 128",
    "sparsity=3:5": "no layer whose inputs are a multiple of 5",
    "sparsity.n=5": "1 <= N <= M",
    "sparsity.n=null": "sparsity",
    "sparsity.m=abc": "sparsity",
    "sparsity.overrides=2:4": "regular expressions with a ratio",
    "sparsity.overrides={inner.1}": "write it as",
    "'sparsity.overrides={inner.1: 5:4}'": "regular expressions with a ratio",
    "'sparsity.overrides={nosuch: 1:8}'": "nosuch",
    "'sparsity.overrides={inner.1: 3:7}'": "inner.1",
    "model=mlp model.hidden=[64,64,64] 'sparsity.overrides={hidden.1: 3:7}'": "hidden.1",
    "'sparsity.overrides={\"inner.1\": 1:8}'": "write it as",
    "model.exclude=[nosuch]": "nosuch",
    "model.include=[nosuch]": "nosuch",
    "model=mlp model.exclude=[nosuch]": "nosuch",
}  # fmt: skip

TOGETHER = {
    "recipe=step optimizer=sgd": "optimizer=adam or adamw",
    "recipe=s_ste sparsity=dense": "recipe=s_ste with sparsity=dense",
    "recipe=sr_ste sparsity=dense": "recipe=dense",
    "recipe.t_min=0.6": "recipe.t_min=0.6 is above recipe.t_max=0.5",
    "trainer.batch_size=10 trainer.accumulate=3": "equal micro-batches",
    "trainer.batch_size=1000000": "training images",
    "trainer.batch_size=5000": "training images",
    "trainer.precision=fp16 trainer.device=cpu": "fp16",
    "trainer.precision=fp16": "fp16",
    "trainer.device=cuda": "no CUDA device",
    "trainer.device=free": "no CUDA device",
    "trainer.average=100": "trainer.epochs=12",
    "dataset=digits model=gpt_tiny": "a language model",
    "dataset=cifar10 model=gpt_tiny": "a language model",
    "dataset=stdlib_text model=resnet18": "images",
    "dataset=stdlib_text": "images",
    "dataset=copy_reverse model=mlp": "fairseq_transformer",
    "dataset=generated_text model=gpt2": "text_encoder",
    "dataset=digits model=fairseq_transformer": "is for pairs of sentences",
    "dataset=digits model=text_encoder": "texts",
    "dataset=image_folder": "dataset.path",
    "dataset=image_folder dataset.path=nowhere": "nowhere",
    "dataset=text dataset.train=nowhere.txt model=gpt_tiny": "nowhere.txt",
    "trainer.acceleration=cusparselt trainer.fp8=true": "trainer.fp8=false",
    "trainer.acceleration=cusparselt sparsity=3:4": "not 3:4",
    "recipe=t_sr_ste recipe.decay=auto trainer.budget=flops:1e12": "on top of trainer.budget",
    "recipe=mdgf_linear recipe.dense=0.8 recipe.final=0.8": "at most 1 together",
    "dataset=digits dataset.val_fraction=0.5 dataset.test_fraction=0.5": "leave nothing to train with",
    "resume=true force=true dry=true seeds=[0,1,2,-3]": "seeds",
}

SWEEPS = {
    "recipe=step,ste": "add -m",
    "seed=0,1": "add -m",
    "seed=range(3)": "add -m",
    "experiment=step_aggressive": "add -m",
    "zip=seed,recipe": "add -m",
    "-m recipe=step,spet": "did you mean step?",
    "-m recipe=glob(q*)": "matches nothing",
    "-m recipe=ste,sr_ste recipe.decay=0,1": "no such key with recipe=ste",
    "-m optimizer.lr=interval(1e-4,1e-2)": "needs a sweeper",
    "-m sparsity=2:4,4:2": "1 <= N <= M",
    "-m seed=0,1 optimizer.lr=1e-3,abc": "a number above 0",
    "-m experiment=nosuch": "no such experiment",
    "-m experiment=step_agressive": "did you mean step_aggressive?",
    "-m experiment=step_aggressive scale=tiny": "no such scale",
    "-m experiment=": "no such experiment",
    "-m scale=small": "of which experiment",
    "-m zip=seed": "two keys or more",
    "-m zip=seed,optimizer.lr seed=0,1": "no list of values",
    "-m seed=0,1,2 optimizer.lr=1e-3,1e-4 zip=seed,optimizer.lr": "as many values each",
    "-m hydra/launcher=jobblib seed=0,1": "did you mean joblib?",
    "-m hydra/launcher=slurm seed=0,1": "submitit_slurm",
    "-m hydra/sweeper=optna seed=0,1": "did you mean optuna?",
    "-m hydra/sweeper=nosuch seed=0,1": "no such hydra/sweeper",
    "-m hydra/sweeper=ax seed=0,1": "no such hydra/sweeper",
    "-m hydra.launcher.n_jobz=2 seed=0,1": "hydra.launcher.n_jobz",
    "-m hydra.nosuch=2 seed=0,1": "hydra.nosuch",
    "-m recipe": "cannot be read as key=value",
}

WORDS = {
    "tabel": "did you mean table?",
    "train": "no such verb",
    "train recipe=step": "no such verb",
    "run recipe=step": "no such verb",
    "sweep recipe=step": "no such verb",
    "evaluate outputs": "no such verb",
    "ls": "no such verb",
    "list": "no such verb",
    "step": "no such verb",
    "search outputs": "no such verb",
    "--foo": "no such option",
    "--recipe=step": "recipe=step",
    "--recipe step": "no such option",
    "--epochs 3": "no such option",
    "-x": "no such option",
    "--multirn seed=1": "did you mean --multirun?",
    "--config-path x": "not for nmrun",
    "--config-name=x": "not for nmrun",
    "--config-dir nowhere": "no such folder",
    "--cfg": "expected one argument",
    "--cfg jobs": "invalid choice",
    "-v": "no such option",
    "--help tabel": "did you mean table?",
    "--help foo": "no such verb",
    "seed": "no such verb",
    "seed=1 seed": "cannot be read as key=value",
    "=1": "cannot be read as key=value",
    "recipe:step seed=1": "recipe=step",
    "seed=1 recipe:step": "cannot be read as key=value",
    "seed = 1": "no such verb",
    "trainer.betas=[1": "[1",
    "optimizer.betas=(0.9,0.99)": "optimizer.betas",
    "output_dir=a(b": "quote",
    "output_dir=${nope}": "nope",
    "output_dir=???": "output_dir",
    "~recipe": "recipe",
    "~model": "model",
    "~nosuch": "nosuch",
    "~trainer.epochs": "trainer.epochs",
}

VERBS = {
    "table": "required: PATH",
    "table nowhere": "no such folder",
    "table . --foo": "unrecognized arguments",
    "table . --format word": "invalid choice",
    "table . --format": "expected one argument",
    "table .": "no run below",
    "table file.txt": "file.txt",
    "table outputs --experiment step_aggressive": "outputs",
    "plot": "required: PATH",
    "plot nowhere": "no such folder",
    "plot . --kind pie": "invalid choice",
    "plot . --out x.gif": "suffix",
    "report nowhere": "no such folder",
    "report .": "no run below",
    "status nowhere": "no such folder",
    "status .": "no runs in it",
    "status file.txt": "file.txt",
    "status --foo": "unrecognized arguments",
    "export": "required",
    "export nowhere --to x": "nowhere",
    "export . --to x": "finished run",
    "export . --format nosuch --to x": "invalid choice",
    "export .": "--to",
    "bench nosuch": "it takes one of",
    "doctor --nosuch": "unrecognized arguments",
    "prepare": "required",
    "prepare nosuch --to x": "invalid choice",
    "prepare parallel --to x": "missing",
    "ratios": "required: run",
    "ratios nowhere": "nowhere",
    "ratios .": "finished run",
    "ratios . --density 2": "density",
    "ratios . --cost money": "invalid choice",
    "compare": "required",
    "compare nowhere .": "nowhere",
    "compare . .": "no run",
    "rm": "which runs",
    "rm . --filter nonsense": "KEY=VALUE",
    "rm nowhere --failed": "no such folder",
    "rm . --failed --filter": "expected at least one argument",
    "rerun": "required",
    "rerun nowhere": "nowhere",
    "rerun .": "no run",
}

EVERY = {
    **GROUPS, **KEYS, **VALUES, **RATIOS, **TOGETHER, **SWEEPS, **WORDS, **VERBS,
}  # fmt: skip


def answer(line: str) -> dict[str, Any]:
    """What the command line does with ``line``, in this process."""
    from nmrun import cli

    for made in Path().iterdir():  # what the line before left, which it was told
        shutil.rmtree(made) if made.is_dir() else made.unlink()
    Path("file.txt").touch()
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
        "left": sorted(os.listdir()),
    }


def main() -> None:
    from nmrun.config import precheck
    from nmrun.train import jobs

    look, composed = precheck.look, {}  # each choice of options is composed once for all lines
    precheck.look = lambda words, multirun, place, _: look(words, multirun, place, composed)

    class Accepts:
        @staticmethod
        def run(*_: Any) -> dict[str, Any]:
            return {"status": "planned", "folder": None}

    jobs._runner = lambda: Accepts  # type: ignore[assignment]
    print(json.dumps({line: answer(line) for line in EVERY}))


if __name__ == "__main__":
    main()
