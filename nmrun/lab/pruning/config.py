"""The config of ``nmrun prune``: that of a finished run, or a composed one, with a one-shot method
in the place of the recipe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from nmrun import oneshot
from nmrun.errors import ConfigError, raise_all
from nmrun.lab import consent
from nmrun.lab.config import command_line, composition, precheck, schema, suggestions
from nmrun.lab.keys import options
from nmrun.lab.keys.config import Config, flatten
from nmrun.lab.keys.groups import Run
from nmrun.lab.keys.models import OwnModel, Timm
from nmrun.lab.runs.run_folder import RunFolder
from nmrun.patterns import Pattern, PatternError
from nmrun.ranges import check_values, whole

SAMPLES = 128  # as in the papers
DEFAULT = "sparsegpt"

composition.register()


def read_config(
    words: Sequence[str], config_dir: str | None = None, trusted: bool = False
) -> Config:
    """The config of the command: its recipe is the method, with its hyperparameters and
    ``samples``.

    ``words`` are at most one run folder; ``method=NAME``, ``method.KEY=VALUE`` and ``samples=N``;
    and overrides. ``trusted``: whether the code that a run names may be imported.
    """
    folders = [word for word in words if "=" not in word]
    overrides, problems = command_line.parsed([word for word in words if "=" in word])
    problems += [f"{word}: one run folder; all else is key=value" for word in folders[1:]]
    settings, rest = dict[str, Any](), list[Override]()
    for override in overrides:
        key, line = override.key_or_group, override.input_line
        group = key.partition(".")[0]
        if override.is_sweep_override():
            problems.append(f"{line}: several values make a sweep, and this is one run")
        elif key == "samples" or group == "method":
            settings[key] = override.value()
        elif line == "track=local":
            continue  # as it is anyway
        elif group in ("recipe", "track", "dry"):
            problems.append(
                f"{line}: nmrun prune has method= in the place of a recipe, tracks nothing, and has no plan"
            )
        else:
            rest.append(override)
    raise_all(problems)
    samples, method = settings.pop("samples", SAMPLES), str(settings.pop("method", DEFAULT))
    check_values({"samples": whole(1)}, {"samples": samples})
    config = _of_run(Path(folders[0]), rest, trusted) if folders else _compose(rest, config_dir)
    if config.is_dense:
        raise ConfigError("sparsity=dense: nothing would be pruned")
    hyperparameters = {key.partition(".")[2]: value for key, value in settings.items()}
    pruner = oneshot.build(method, hyperparameters)
    recipe = {"name": pruner.name, "samples": samples, **dataclasses.asdict(pruner)}
    plain = {**config.plain, "recipe": recipe, "track": {"name": "local", "tags": [], "also": []}}
    return Config(plain, config.pattern)


def _compose(overrides: list[Override], config_dir: str | None) -> Config:
    words = [*(str(override.input_line) for override in overrides), f"recipe={schema.STAND_IN}"]
    config = precheck.read([words], config_dir=config_dir).jobs[0].config
    model = config.model
    loads = isinstance(model, OwnModel) or model.trained
    if isinstance(model, Timm):
        loads = bool((model.options or {}).get("pretrained"))
    if config.init is None and not loads:
        raise ConfigError(
            f"model={model.name} comes untrained: name a finished run, or a pretrained model "
            "(model=hf_causal model.pretrained=FOLDER)"
        )
    return config


def _of_run(folder: Path, overrides: list[Override], trusted: bool) -> Config:
    """The config of a finished run, with changes, which begins with the run's weights."""
    run = RunFolder(folder)
    run.demand(folder)
    result = run.result
    consent.demand_consent(folder, result["config"], trusted)
    # the folder may have been copied, so its output_dir need not exist here
    here = {"init": str(folder), "output_dir": Run.output_dir}
    plain: dict[str, Any] = {**result["config"], **here}
    plain["recipe"] = {"name": schema.STAND_IN}
    if plain["sparsity"]["n"] is None:
        plain["sparsity"] = {**plain["sparsity"], "n": 2, "m": 4}
    composed = OmegaConf.create(plain)
    keys = {*plain, *flatten(plain)}
    raise_all(filter(None, (_put(composed, override, keys) for override in overrides)))
    config = schema.check(composed)
    raise_all(schema.refusals({**config.plain, "recipe": plain["recipe"]}))
    return config


def _put(composed: DictConfig, override: Override, keys: set[str]) -> str:
    """Change one key. Returns what is wrong with it; empty if nothing is."""
    key, value = override.key_or_group, override.value()
    if key == "sparsity":
        try:
            node = options.node(key, "dense") if value == "dense" else {}
            ratio = node or options.ratio(Pattern.parse(str(value)))
        except PatternError as error:
            return f"sparsity={value}: {error}"
        OmegaConf.update(composed, key, ratio, merge=True)
        return ""
    if key in options.CLASSES:
        return f"{override.input_line}: the run has its own {key}; its keys ({key}.…) can change"
    if key not in keys:
        return suggestions.line(key, keys)
    OmegaConf.update(composed, key, value, merge=False)
    return ""
