"""What the run itself would refuse after seconds, with torch and the data loaded, told before: as
far as a config, the names of files and this machine show it.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nmrun.lab.keys import options
from nmrun.lab.keys.datasets import RUNNING_TEXT
from nmrun.lab.runs.run_folder import RunFolder, weights_in
from nmrun.patterns import Pattern

# The package and the extra of nmrun that a logger needs.
LOGGERS = {"tensorboard": "tensorboard", "mlflow": "mlflow"}
DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/nvmap")  # CUDA, WSL, ROCm, Jetson


def problems(plain: dict[str, Any], here: bool = True) -> Iterator[str]:
    """Yield what is wrong, a line each.

    Args:
        plain: a resolved config in which nothing else is wrong.
        here: whether the run is for this machine, not for one that a launcher finds.
    """
    own = {group for group in ("dataset", "model") if "_target_" in plain[group]}
    for group in ("dataset", "model", "recipe"):
        yield from _unknown_package(group, plain[group].get("_target_"))
    yield from _no_logger(plain["track"])
    yield from _no_teacher(plain, here)
    if here and plain["init"] is not None and (why := _no_weights(plain["init"])):
        yield f"init={plain['init']}: {why}"
    yield from _no_masks(plain["recipe"], here)
    if not own:
        yield from _other_data(plain["dataset"]["name"], plain["model"]["name"])
    yield from _not_pruned(plain["model"], plain["trainer"])
    if "dataset" not in own:
        yield from _too_few(plain["dataset"], plain["trainer"])
        if here:
            yield from _no_files(plain["dataset"])
    if here:
        yield from _no_pretrained(plain["dataset"], plain["model"])
    if "model" not in own:
        layers = options.kind("model", plain["model"]["name"]).layer_inputs(plain["model"])
        yield from _no_layer(plain["model"], plain["sparsity"], layers) if layers else ()
    if here and no_gpu():
        yield from _needs_gpu(plain["trainer"])


def _unknown_package(group: str, target: Any) -> Iterator[str]:
    package = str(target).partition(".")[0]
    if target is None or (Path.cwd() / f"{package}.py").exists() or Path(package).is_dir():
        return
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        yield (
            f"{group}._target_={target} cannot be imported: there is no {package}.py here and no "
            f"such package installed; PYTHONPATH=FOLDER lets nmrun look in another folder"
        )


def _no_logger(track: dict[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([track["name"], *track["also"]]):
        if name in LOGGERS and importlib.util.find_spec(LOGGERS[name]) is None:
            yield f"track={name} is not installed: pip install 'nmrun[{name}]'"


def _no_weights(place: str) -> str:
    folder, name = weights_in(place)
    return folder.without(name)


def _no_teacher(plain: dict[str, Any], here: bool) -> Iterator[str]:
    teacher, model = plain["trainer"]["distill"], plain["model"]
    if teacher is None:
        return
    if teacher == "start":
        trained = "_target_" in model or options.kind("model", model["name"]).trained
        if plain["init"] is None and not trained:
            yield (
                f"trainer.distill=start: model={model['name']} begins with random weights in its "
                "head or everywhere, which teach nothing; take the folder of a finished run"
            )
    elif here and (why := RunFolder(teacher).unfinished()):
        yield f"trainer.distill={teacher}: {why}"


def _no_masks(recipe: dict[str, Any], here: bool) -> Iterator[str]:
    place = recipe.get("masks") if recipe.get("name") == "maskllm" else None
    if not here or place is None or Path(place).expanduser().is_file():
        return
    if why := RunFolder(Path(place).expanduser()).unfinished():
        yield f"recipe.masks={place}: {why}"


def _not_pruned(model: dict[str, Any], trainer: dict[str, Any]) -> Iterator[str]:
    start, end = trainer["activations_dense_start"], trainer["activations_dense_end"]
    if trainer["activations"] is not None and model.get("activation") == "gelu":
        yield (
            f"trainer.activations={trainer['activations']} prunes the outputs of squared ReLUs: it "
            "goes with model.activation=relu2"
        )
    if start + end >= 1:
        yield (
            f"trainer.activations_dense_start={start} and trainer.activations_dense_end={end} are "
            "shares of one run: less than 1 together"
        )


def _other_data(dataset: str, model: str) -> Iterator[str]:
    has, takes = options.kind("dataset", dataset).data, options.kind("model", model).data
    if has != takes:
        names = options.names("model")
        fitting = ", ".join(name for name in names if options.kind("model", name).data == has)
        what = "a language model" if takes == RUNNING_TEXT else f"for {takes}"
        yield (f"model={model} is {what}, and dataset={dataset} has {has}: these take {fitting}")


def _too_few(dataset: dict[str, Any], trainer: dict[str, Any]) -> Iterator[str]:
    most = dataset.get("train_size") or options.kind("dataset", dataset["name"]).train_images
    if most is not None and trainer["batch_size"] > most:
        yield (
            f"trainer.batch_size={trainer['batch_size']}: dataset={dataset['name']} has "
            f"{'' if dataset.get('train_size') else 'at most '}{most} training images"
        )


def _no_pretrained(dataset: dict[str, Any], model: dict[str, Any]) -> Iterator[str]:
    named = {"model.pretrained": model.get("pretrained")}
    if dataset.get("tokenizer") != model.get("pretrained"):  # the model's own by default
        named["dataset.tokenizer"] = dataset.get("tokenizer")
    for key, place in named.items():
        folder = str(place).startswith(("/", "./", "../", "~"))
        if folder and not Path(str(place)).expanduser().is_dir():
            yield f"{key}={place}: there is no such folder"


def _no_files(dataset: dict[str, Any]) -> Iterator[str]:
    kind = options.kind("dataset", dataset["name"])
    for key in kind.places:
        if dataset[key] is not None and not Path(dataset[key]).expanduser().exists():
            yield f"dataset.{key}={dataset[key]}: there is no such file or folder"
    if kind.within:
        from nmrun.lab.tasks import storage

        if not any(place.exists() for place in storage.places(dataset["path"])):
            yield (
                f"dataset.path={dataset['path']}: there is no such folder, neither in "
                f"{storage.data_folder()} (NMRUN_DATA) nor here; it has {kind.within}"
            )


def _no_layer(
    model: dict[str, Any], sparsity: dict[str, Any], layers: dict[str, int]
) -> Iterator[str]:
    given = {
        "model.include": model["include"],
        "model.exclude": model["exclude"],
        "sparsity.overrides": sparsity["overrides"],
    }
    for key, texts in given.items():
        for text in [texts] if isinstance(texts, str) else texts or ():
            found = [layer for layer in layers if text == "auto" or re.fullmatch(text, layer)]
            if not found:
                yield (
                    f"{key}: {text!r} is the whole name of no layer of model={model['name']}; "
                    f"there are {', '.join(layers)}"
                )
            elif key == "sparsity.overrides" and not sparsity["pad"]:
                yield from _unfit(text, str(texts[text]), [layers[layer] for layer in found])


def _unfit(text: str, ratio: str, inputs: list[int]) -> Iterator[str]:
    m = 1 if ratio == "dense" else Pattern.parse(ratio).m
    if all(width and width % m for width in inputs):
        widths = ", ".join(map(str, dict.fromkeys(inputs)))
        yield (
            f"sparsity.overrides: {text!r} with {ratio} fits no layer: {widths} inputs are not a "
            f"multiple of {m} (sparsity.pad=true allows that)"
        )


def _needs_gpu(trainer: dict[str, Any]) -> Iterator[str]:
    if trainer["device"] in ("cuda", "free"):
        yield (
            f"trainer.device={trainer['device']}: there is no CUDA device here; "
            "auto takes what there is"
        )
    elif trainer["precision"] == "fp16":
        yield "trainer.precision=fp16 is for GPUs, and a CPU is many times slower by it; take fp32"


def no_gpu() -> bool:
    """Whether this machine has surely no GPU for torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return True
    return sys.platform.startswith("linux") and not any(map(glob.glob, DEVICES))
