"""Rules for keys that depend on each other; and what the run itself would refuse, reported before
it begins."""

from __future__ import annotations

import glob
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from nmrun.errors import extra
from nmrun.lab.config import sources
from nmrun.lab.keys import options
from nmrun.lab.keys.datasets import RUNNING_TEXT
from nmrun.lab.keys.ranges import AS_DENSE, START
from nmrun.lab.keys.recipe_facts import recipe_facts
from nmrun.lab.runs.run_folder import OWN, WEIGHTS, own_weights, weights_in
from nmrun.patterns import Pattern, PatternError, written
from nmrun.ranges import TEXT
from nmrun.recipes import RECIPES

# the package that an option needs, and the extra of nmrun that it comes with
PACKAGES = {
    "track=tensorboard": ("tensorboard", "tensorboard"),
    "track=mlflow": ("mlflow", "mlflow"),
    "model=timm": ("timm", "timm"),
    **dict.fromkeys(("dataset=hub_text", "dataset=labelled_text"), ("datasets", "texts")),
    **dict.fromkeys(
        ("model=hf_encoder", "model=hf_gpt2", "model=hf_causal"), ("transformers", "transformers")
    ),
}
DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd", "/dev/nvmap")  # CUDA, WSL, ROCm, Jetson


class Facts:
    """A resolved config for the rules: plain data, since parts of it may be wrong: the keys and
    groups that are ``bad``. Rules use no values of these.

    Attributes:
        own_rules: whether the recipe is built-in and not the dense one.
        pattern: the ratio of a sparse run that has a valid one.
        no_pattern: what is wrong with a ratio whose numbers are valid.
    """

    def __init__(self, plain: dict[str, Any], bad: Collection[str]) -> None:
        self.bad = bad
        groups = ("recipe", "optimizer", "model", "dataset", "trainer", "sparsity")
        self.recipe, self.optimizer, self.model, self.dataset, self.trainer, self.sparsity = (
            content if isinstance(content := plain.get(group), dict) else {} for group in groups
        )
        builtin = self.valid("recipe") and "_target_" not in self.recipe
        known = self.valid("sparsity.n", "sparsity.m", "sparsity.v")
        no_ratio = known and self.sparsity["n"] is None and self.sparsity["m"] is None
        dense = no_ratio or (builtin and self.recipe["name"] == "dense")
        self.own_rules = builtin and not dense
        self.pattern: Pattern | None = None
        self.no_pattern = ""
        if known and not dense:
            text = written(self.sparsity)
            try:
                self.pattern = Pattern.parse(text)
            except PatternError as error:
                self.no_pattern = f"sparsity={text}: {error}"

    def valid(self, *keys: str) -> bool:
        """Whether a rule may use these keys; ``recipe.*`` is a built-in recipe and all its keys."""
        if keys == ("recipe.*",):
            every = (f"recipe.{name}" for name in self.recipe)
            return self.own_rules and self.valid("recipe", *every)
        return not any(key in self.bad or key.partition(".")[0] in self.bad for key in keys)


def broken(plain: dict[str, Any], bad: Collection[str]) -> Iterator[str]:
    """One line for each rule that a resolved config breaks; nothing is concluded from ``bad`` keys."""
    facts = Facts(plain, bad)
    if facts.no_pattern:
        yield facts.no_pattern
    yield from _wrong_recipe(facts)
    yield from _wrong_training(facts)
    yield from _wrong_acceleration(facts)
    if facts.valid("output_dir"):
        yield from _unwritable(Path(plain["output_dir"]))


def _unwritable(folder: Path) -> Iterator[str]:
    parents = [folder, *folder.absolute().parents]
    # os.path says no to a name that is too long for the file system
    existing = next((path for path in parents if os.path.exists(path)), Path("/"))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        yield f"output_dir={folder}: {existing} is not a folder that can be written to"


def _wrong_recipe(facts: Facts) -> Iterator[str]:
    recipe, name, pattern = facts.recipe, facts.recipe.get("name"), facts.pattern
    if facts.valid("optimizer.name") and facts.own_rules and name == "step":
        optimizer = facts.optimizer["name"]
        if optimizer not in ("adam", "adamw"):
            yield (
                f"recipe=step freezes Adam's second moment, which {optimizer} has not: "
                "use optimizer=adam or adamw"
            )
    if facts.valid("recipe.*"):
        for low, high in (("t_min", "t_max"), ("t_i", "t_f")):
            if low in recipe and high in recipe and recipe[low] > recipe[high]:
                yield f"recipe.{low}={recipe[low]} is above recipe.{high}={recipe[high]}"
        if recipe.get("dense", 0) + recipe.get("final", 0) > 1:
            yield (
                f"recipe.dense={recipe['dense']} and recipe.final={recipe['final']} are "
                "fractions of one run: at most 1 together"
            )
    if facts.own_rules and pattern is not None and pattern.v > 1:
        taking = [each for each, path in RECIPES.items() if recipe_facts(path).takes_blocks]
        if name not in taking:
            yield (
                f"recipe={name} sparsity={pattern}: V:N:M masks are for recipes that keep the "
                f"largest weights ({', '.join(taking)})"
            )


def _wrong_training(facts: Facts) -> Iterator[str]:
    optimizer, trainer, dataset = facts.optimizer, facts.trainer, facts.dataset
    model, sized = facts.model, facts.valid("model.width", "model.heads")
    if sized and "_target_" not in model and model.get("width", 0) % model.get("heads", 1):
        yield (
            f"model.width={model['width']} cannot be split into model.heads={model['heads']} heads "
            "of the same size"
        )
    nesterov = facts.valid("optimizer.nesterov", "optimizer.momentum") and optimizer.get("nesterov")
    if nesterov and not optimizer.get("momentum"):
        yield "optimizer.nesterov=true needs optimizer.momentum above 0"
    sizes = facts.valid("trainer.batch_size", "trainer.accumulate")
    if sizes and trainer["batch_size"] % trainer["accumulate"]:
        yield (
            f"trainer.batch_size={trainer['batch_size']} cannot be split into "
            f"trainer.accumulate={trainer['accumulate']} equal micro-batches"
        )
    if facts.valid("trainer.steps", "trainer.budget"):
        steps, budget = trainer["steps"], trainer["budget"]
        if steps is not None and budget not in (None, *AS_DENSE):
            yield (
                f"trainer.steps={steps} and trainer.budget={budget} each say how long the run is: "
                "give one of them"
            )
    if facts.valid("trainer.average", "trainer.epochs", "trainer.steps", "trainer.budget"):
        by_epochs = trainer["steps"] is None and trainer["budget"] is None
        if by_epochs and trainer["average"] > trainer["epochs"]:
            yield (
                f"trainer.average={trainer['average']}: there are "
                f"trainer.epochs={trainer['epochs']} to average over"
            )
    if facts.valid("trainer.patience") and trainer["patience"] is not None:
        patience = f"trainer.patience={trainer['patience']}"
        if facts.valid("trainer.average") and trainer["average"] > 1:
            yield f"{patience}: trainer.average={trainer['average']} needs to know the last epochs"
        if facts.valid("trainer.evaluate") and trainer["evaluate"] == "dense":
            yield f"{patience}: with trainer.evaluate=dense no evaluation is the best"
    if facts.valid("dataset.val_fraction", "dataset.test_fraction") and "_target_" not in dataset:
        val, test = dataset.get("val_fraction", 0), dataset.get("test_fraction", 0)
        if val + test >= 1:
            yield (
                f"dataset.val_fraction={val} and dataset.test_fraction={test} leave nothing to "
                "train with"
            )


def _wrong_acceleration(facts: Facts) -> Iterator[str]:
    if not facts.valid("trainer.acceleration", "trainer.fp8"):
        return
    way, fp8, pattern = facts.trainer["acceleration"], facts.trainer["fp8"], facts.pattern
    products = f"trainer.acceleration={way}: 2:4 products"
    one_way = way not in ("auto", "off", "force")
    if one_way and fp8:
        yield f"{products} by it go with trainer.fp8=false"
        return
    unfit = pattern is not None and not pattern.fits_2_4 and not facts.sparsity.get("overrides")
    if unfit and way not in ("auto", "off"):
        yield (
            f"{products} take 2:4 weights and sparser ones whose groups fit in "
            f"(1:M, 2:M with M a multiple of 4), not {pattern}"
        )


def refusals(plain: dict[str, Any], on_this_machine: bool = True) -> Iterator[str]:
    """What the run itself would refuse after seconds, as far as a config, the names of files and
    this machine show it. A line each.

    Nothing else is wrong in ``plain``. ``on_this_machine``: whether the run is for it, not for one
    that a launcher finds.
    """
    custom = {group for group in ("dataset", "model") if "_target_" in plain[group]}
    for group, key in sources.OWN.items():
        yield from _unknown_package(f"{group}.{key}", plain[group].get(key))
    yield from _not_installed(plain)
    yield from _no_teacher(plain)
    if on_this_machine:
        yield from _no_weights(plain)
    if not custom:
        yield from _other_data(plain["dataset"]["name"], plain["model"]["name"])
    yield from _not_pruned(plain["model"], plain["trainer"])
    if on_this_machine and "dataset" not in custom:
        yield from _no_files(plain["dataset"])
    if on_this_machine:
        yield from _no_pretrained(plain["dataset"], plain["model"])
    if on_this_machine and no_gpu():
        yield from _needs_gpu(plain["trainer"])


def _unknown_package(key: str, target: Any) -> Iterator[str]:
    package = str(target).partition(".")[0]
    if target is None or (Path.cwd() / f"{package}.py").exists() or Path(package).is_dir():
        return
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        yield (
            f"{key}={target} cannot be imported: there is no {package}.py here and no "
            f"such package installed; PYTHONPATH=FOLDER lets nmrun look in another folder"
        )


def _not_installed(plain: dict[str, Any]) -> Iterator[str]:
    chosen = [f"track={name}" for name in (plain["track"]["name"], *plain["track"]["also"])]
    own = (group for group in ("dataset", "model") if "_target_" not in plain[group])
    chosen += [f"{group}={plain[group]['name']}" for group in own]
    for option in dict.fromkeys(chosen):
        package, its_extra = PACKAGES.get(option, ("", ""))
        if package and importlib.util.find_spec(package) is None:
            yield f"{option} needs {package}, which is not installed: {extra(its_extra)}"


def _no_weights(plain: dict[str, Any]) -> Iterator[str]:
    for key, place in options.weights_named(plain).items():
        folder, name = weights_in(place)
        # a recipe takes any file, of a run or not
        taken = key.startswith("recipe.") and Path(place).expanduser().is_file()
        if not (taken or own_weights(place)) and (why := folder.without(name)):
            path = Path(place).expanduser()
            if key == "init" and path.is_file():
                why = f"a file of weights is {', '.join(OWN)}"
            elif path.suffix in OWN and path.name not in WEIGHTS and not path.exists():
                why = "there is no such file"
            yield f"{key}={place}: {why}"


def _no_teacher(plain: dict[str, Any]) -> Iterator[str]:
    model = plain["model"]
    trained = "_target_" in model or options.kind("model", model["name"]).trained
    if plain["trainer"]["distill"] == START and plain["init"] is None and not trained:
        yield (
            f"trainer.distill=start: model={model['name']} begins with random weights in its "
            "head or everywhere, which teach nothing; take the folder of a finished run"
        )


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


def _no_pretrained(dataset: dict[str, Any], model: dict[str, Any]) -> Iterator[str]:
    named = {"model.pretrained": model.get("pretrained")}
    if dataset.get("tokenizer") != model.get("pretrained"):  # the model's own by default
        named["dataset.tokenizer"] = dataset.get("tokenizer")
        if isinstance(dataset.get("tokenizer"), bool):
            yield f"dataset.tokenizer={str(dataset['tokenizer']).lower()}: it takes {TEXT.allowed}"
    for key, place in named.items():
        folder = str(place).startswith(("/", "./", "../", "~"))
        if folder and not Path(str(place)).expanduser().is_dir():
            yield f"{key}={place}: there is no such folder"


def _no_files(dataset: dict[str, Any]) -> Iterator[str]:
    kind = options.kind("dataset", dataset["name"])
    if not kind.places and not kind.within:
        return
    from nmrun.lab.tasks import storage  # numpy

    here = f"neither in {storage.data_folder()} (NMRUN_DATA) nor here"
    for key in kind.places:
        if dataset[key] is not None and not storage.path_of(dataset[key]).exists():
            yield f"dataset.{key}={dataset[key]}: there is no such file or folder, {here}"
    if kind.within and not storage.path_of(path := dataset["path"]).exists():
        yield f"dataset.path={path}: there is no such folder, {here}; it has {kind.within}"


def _needs_gpu(trainer: dict[str, Any]) -> Iterator[str]:
    if trainer["device"] in ("cuda", "free"):
        yield (
            f"trainer.device={trainer['device']}: there is no CUDA device here; "
            "auto takes what there is"
        )
    elif trainer["precision"] == "fp16":
        yield "trainer.precision=fp16 is for GPUs, and a CPU is many times slower by it; take fp32"


def no_gpu() -> bool:
    """Whether this machine certainly has no GPU for torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return True
    return sys.platform.startswith("linux") and not any(map(glob.glob, DEVICES))
