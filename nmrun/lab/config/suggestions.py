"""The line for an unknown word, key or option, with what was probably meant: by meaning first, then
by spelling."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from nmrun.lab.keys import options
from nmrun.lab.keys.models import Model
from nmrun.oneshot import METHODS
from nmrun.ranges import is_path
from nmrun.registry import nearest, no_such

RATIOS = "sparsity.overrides"
# What others call a key, by the last part of it.
ELSEWHERE = {
    "recipe": ("method", "algorithm", "algo", "pruner", "sparsifier"),
    "dataset": ("data", "ds"),
    "model": ("network", "net", "arch", "architecture"),
    "optimizer": ("optim", "opt"),
    "schedule": ("scheduler", "lr_scheduler", "sched"),
    "track": ("logger", "loggers", "logging", "tracking", "log_wandb"),
    "sparsity": ("pattern", "ratio", "nm", "sparse"),
    "sparsity=2:4": ("n", "m", "density", "amount", "prune_ratio"),
    "output_dir": ("outdir", "output", "out", "save_dir", "log_dir"),
    "seed": ("random_seed", "rng"),
    "dry": ("dry_run",),
    "init": ("checkpoint", "ckpt", "weights", "ckpt_path", "checkpoint_path"),
    "optimizer.lr": ("learning_rate", "lrate", "lr0", "base_lr"),
    "optimizer.weight_decay": ("wd", "l2"),
    "optimizer.betas": ("beta1", "beta2"),
    "recipe.decay": ("lambda", "lambda_w", "lam"),
    "schedule.warmup": ("warm_up", "warmup_ratio"),
    "trainer.steps": ("max_steps", "iterations", "iters", "num_steps", "max_iters"),
    "trainer.epochs": ("max_epochs", "num_epochs", "num_train_epochs"),
    "trainer.batch_size": ("bs", "batch", "batchsize", "per_device_train_batch_size"),
    "trainer.device=cuda": ("gpu", "gpus", "cuda", "accelerator", "use_gpu", "n_gpu"),
    "trainer.precision": ("amp", "fp16", "bf16", "half", "mixed_precision", "dtype"),
    "trainer.accumulate": (
        "gradient_accumulation", "gradient_accumulation_steps", "grad_accum", "accumulate_grad_batches",
    ),
    "trainer.clip": ("grad_clip", "clip_grad", "max_grad_norm", "gradient_clip_val"),
    "trainer.patience": ("early_stopping", "early_stop"),
    "trainer.average": ("ema", "model_ema", "swa"),
    "dataset.workers": ("num_workers",),
    "dataset.resolution": ("image_size", "imgsz", "img_size", "input_size"),
}  # fmt: skip
MEANT = {word: key for key, words in ELSEWHERE.items() for word in words}
# What to type instead of the words of other tools: first words and options, keys (with = at their end),
# options of groups.
TABLE = {
    "leave it out: nmrun recipe=sr_ste sparsity=2:4 is a run": "train fit run start launch main finetune train.py",
    "-m makes a sweep, as in nmrun -m recipe=dense,sr_ste seed=0,1,2": "sweep multirun grid agent --sweep",
    "nmrun tune NAME ... searches settings": "hpo search optimize",
    "each run evaluates itself; nmrun table outputs shows it": "eval evaluate test val validate",
    "write nmrun status": "list ls ps runs show history log logs",
    "write nmrun table outputs": "results leaderboard summary",
    "write nmrun report outputs": "ui dashboard",
    "write nmrun plot outputs": "draw visualize",
    "write nmrun --version": "version -V",
    "write nmrun doctor": "info env check system",
    "write nmrun --cfg job": "config cfg --print-config",
    "nmrun prune RUN prunes a trained network": "compress sparsify oneshot",
    "write nmrun export RUN --out DIR": "convert save quantize deploy serve push",
    "the same command goes on with a run that was cut off": "resume continue restart",
    "remove the run's folder; nmrun status lists them": "delete remove clean",
    "track=wandb track.mode=online logs to W&B, after wandb login": "login sync wandb",
    "--config-dir FOLDER adds your configs: FOLDER/model/mine.yaml is model=mine": "init cp new create --config config=",
    "for jobs side by side write -m launcher=joblib launcher.n_jobs=4": "--jobs -j --n-jobs --parallel jobs= n_jobs=",
    "debug=fast is a run of seconds": "debug --debug",
    "force=true makes a finished run anew": "--overwrite -f overwrite=",
    "a run folder is named by its settings; track.project=NAME is W&B's": "--name --project name= exp_name= run_name= experiment_name=",
    "the data set decides on it": "num_classes= n_classes= classes= in_chans= in_channels= vocab_size=",
    "a class by its path is optimizer=custom optimizer.target=torch.optim.NAdam, and schedule=custom likewise": "_target_=",
    "model.pretrained=true for torchvision's and timm's; init=RUN or FILE begins with other weights": "pretrained=",
    "model=hf_encoder model.pretrained=bert-base-uncased, with dataset=glue": "model=bert model=roberta model=distilbert model=deberta",
    "model=hf_causal model.pretrained=NAME, with a data set of running text": "model=llama model=opt model=mistral model=qwen model=phi model=pythia",
    "model=timm model.name_in_timm=NAME has timm's networks": "model=torchvision model=efficientnet model=convnext",
    "texts with labels are dataset=labelled_text, plain ones dataset=text, those of a hub dataset=hub_text": "dataset=csv dataset=json dataset=jsonl",
    "dataset=image_folder dataset.path=FOLDER": "dataset=folder dataset=images",
    "dataset=hub_text dataset.path=NAME": "dataset=huggingface dataset=hf",
    "name them, with commas: -m recipe=dense,asp,sr_ste": "recipe=all",
}  # fmt: skip
INSTEAD = {word: how for how, words in TABLE.items() for word in words.split()}


def no_verb(word: str, following: Sequence[str], verbs: Collection[str]) -> str:
    """The line for a first word that is no verb, override or option."""
    if following and following[0][:1] == "=":
        first = following[0]
        value = following[1] if first == "=" and len(following) > 1 else ""
        return f"{word} {first}: write {word}{first}{value}, without spaces around the ="
    how = f"write {word}={following[0]}" if word in options.GROUPS and following else written(word)
    if how:
        return f"{word}: no such verb; {how}"
    return f"{word}: {no_such('verb', word, verbs, 'nmrun --help')}"


def written(word: str) -> str:
    """How to write a word without =, such as ``write recipe=step`` for ``step``; empty if nothing
    like it is known."""
    if how := INSTEAD.get(word):
        return how
    if ":" in word and word.partition(":")[0] in options.GROUPS:
        return f"write {word.replace(':', '=', 1)}"
    if re.fullmatch(r"\d+:\d+(:\d+)?", word):
        return f"write sparsity={word}; several have commas and no spaces: -m sparsity=2:4,1:8"
    if word.endswith((".yaml", ".yml")):
        return f"{INSTEAD['--config']}; an experiment is -m experiment={word}"
    if (files("nmrun.conf") / "experiment" / f"{word}.yaml").is_file():
        return f"write -m experiment={word}"
    if Path(word).exists():
        return f"nmrun status {word} lists the runs of a folder"
    group, _, name = word.rpartition(".")
    having = [each for each in options.NAMED if name in options.names(each)]
    if group in having or (having and not group):
        places = [group] if group else having
        return f"write {' or '.join(f'{each}={name}' for each in places)}"
    if word in options.GROUPS:
        return f"write {word}=NAME; nmrun help {word} lists them"
    key = as_key(word)
    return f"write {key if '=' in key else f'{key}=VALUE'}" if key else ""


def as_key(word: str) -> str:
    """The key that a word such as ``max-steps=3`` means, ``trainer.steps=3``; empty unless it can
    be only one."""
    leaf, equals, value = word.partition("=")
    leaf, own = leaf.replace("-", "_"), options.keys("")
    meant = MEANT.get(leaf, leaf)
    if "=" in meant:
        return meant
    if meant not in (*options.GROUPS, *own, "debug", "experiment"):
        above, _, leaf = meant.rpartition(".")
        having = [group for group in options.GROUPS if owners(group, leaf) and above in ("", group)]
        if len(having) != 1:
            return ""
        meant = f"{having[0]}.{leaf}"
    if not equals and meant in own and isinstance(own[meant].default, bool):
        equals, value = "=", "true"
    return f"{meant}{equals}{value}"


def line(key: str, keys: Iterable[str]) -> str:
    """The line for an unknown key; ``keys`` are those that exist."""
    keys = set(keys)
    if key.startswith(f"{RATIOS}."):
        layer = key.removeprefix(f"{RATIOS}.")
        return f"{key}: no such key; ratios by layer are one value: '{RATIOS}={{{layer}: 1:8}}'"
    group, _, leaf = key.rpartition(".")
    siblings = {name for name in keys if name.rpartition(".")[0] == group}
    if not siblings:  # there is no such group
        group, siblings = "", {name for name in keys if "." not in name}
    return no_key(key, siblings, _hint(key, group, leaf, keys, siblings))


def _hint(key: str, group: str, leaf: str, keys: set[str], siblings: set[str]) -> str:
    if "model._target_" in keys and key in (f"model.{each}" for each in options.fields(Model)):
        return f"; a network of your own takes it as +{key}="
    if group and (having := owners(group, leaf)):
        return _belongs(leaf, group, having)
    if how := INSTEAD.get(f"{leaf.lower()}="):
        return f"; {how}"
    meant = MEANT.get(leaf.lower(), "")
    if meant.partition("=")[0] in keys:
        return f"; did you mean {meant}?"
    leaf = meant.rpartition(".")[2] or leaf
    same = sorted(name for name in keys if name.rpartition(".")[2] == leaf and "." in name)
    if group and leaf in keys:
        same = [leaf]
    if same:
        return f"; did you mean {' or '.join(same)}?"
    for other in [group] if group else options.NAMED:
        if having := owners(other, leaf):
            return _belongs(f"{other}.{leaf}" if meant else leaf, other, having)
    near = near_key(key, {name for name in siblings if not name.endswith(".name")})
    return near if near or group else near_key(key, keys)


def near_key(key: str, keys: Iterable[str]) -> str:
    """The end of the line for a key beside others: ``; did you mean trainer.epochs?``, by their last
    parts, as what comes before is the same."""
    by_leaf = {name.rpartition(".")[2]: name for name in keys}
    near = nearest(key.rpartition(".")[2], by_leaf)
    return f"; did you mean {by_leaf[near]}?" if near else ""


def _belongs(what: str, group: str, having: list[str]) -> str:
    names = ", ".join(having[:3]) + (", ..." if len(having) > 3 else "")
    return f"; {what} belongs to {group}={names}"


def option(group: str, name: str, names: Collection[str]) -> str:
    """The line for an option that a group does not have."""
    if name.startswith("["):
        listed_values = name.strip("[]").replace("'", "").replace('"', "").replace(" ", "")
        return f"{group}={name}: several are written without brackets: {group}={listed_values}"
    if group == "recipe" and name in METHODS:
        how = f"nmrun prune RUN method={name}"
        return f"recipe={name}: it prunes a trained network, without training: {how}"
    if group in ("dataset", "model", "recipe") and is_path(name):
        alone = f"alone it is recipe._target_={name}; " if group == "recipe" else ""
        return (
            f"{group}={name}: {alone}beside others it has a name, by a file DIR/{group}/NAME.yaml with the lines "
            f"name: NAME and _target_: {name}, and --config-dir DIR"
        )
    instead = INSTEAD.get(f"{group}={name.lower()}")
    if group == "dataset" and "/" in name:
        instead = f"dataset=image_folder dataset.path={name}, or dataset=text dataset.train={name}"
    if instead:
        return f"{group}={name}: no such {group}; {instead}"
    known = options.names(group) if group in options.GROUPS else []
    own = [each for each in names if each not in known]
    listing = no_such(group, name, [*own, *known], f"nmrun help {group}")
    line = f"{group}={name}: {listing}"
    by_path = f"; any other is {group}=custom {group}.target=PATH.OF.CLASS"
    return line + (by_path if group in ("optimizer", "schedule") else "")


def owners(group: str, leaf: str) -> list[str]:
    """The options of a group that have a key."""
    names = options.names(group) if group in options.GROUPS else []
    return [name for name in names if leaf in options.keys(group, name)]


def wrong_keys(
    group: str, keys: Iterable[str], content: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    """The keys that a group lacks or should not have: each problem with its key."""
    names, present = [f"{group}.{key}" for key in keys], [f"{group}.{key}" for key in content]
    if lacks := [name for name in names if name not in present]:
        brings = (
            f"defaults: [{content.get('name', 'default')}] in a file of yours brings what it lacks"
        )
        yield f"{', '.join(lacks)}: missing; a run needs it ({brings})", group
    yield from ((no_key(name, names), name) for name in present if name not in names)


def no_key(key: str, keys: Collection[str], hint: str | None = None) -> str:
    """The line for a key that does not exist; ``keys`` are those beside it."""
    group = key.rpartition(".")[0]
    every = f"nmrun help {group}" if group in options.GROUPS else "nmrun --cfg job"
    hint = near_key(key, keys) if hint is None else hint
    return f"{key}: {no_such('key', key, sorted(keys), every, hint)}"
