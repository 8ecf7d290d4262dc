"""The weights that a run begins with: the network's own, or those of a finished run (``init=RUN``)."""

from __future__ import annotations

from collections.abc import Collection

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from nmrun.errors import ConfigError, RunError
from nmrun.lab import models
from nmrun.lab.keys.config import Config
from nmrun.lab.runs.run_folder import WEIGHTS, RunFolder, weights_in
from nmrun.lab.tasks.base import Task
from nmrun.recipes.maskllm import masks_file


def network(config: Config, task: Task) -> nn.Module:
    """Build a run's network with the weights that it begins with.

    Raises:
        ConfigError: where it cannot be built, and where ``init`` is no finished run of the same
            network.
    """
    model = models.build(config.model.mapping(), task.inputs)
    # on meta, another process has the values
    if config.init is not None and not any(p.is_meta for p in model.parameters()):
        heads, part = (getattr(model, name, ()) for name in ("heads_of_tasks", "part_of_tasks"))
        load(model, config.init, f"init={config.init}", heads, part)
    return model


def check_masks(place: str) -> None:
    """Look whether the weights that ``recipe.masks`` names are as their run left them.

    Args:
        place: as :func:`nmrun.recipes.maskllm.masks_file` takes it; what is in no run's folder is
            taken as it is.

    Raises:
        ConfigError: where a run's file was changed since.
    """
    path = masks_file(place)
    if path.name in WEIGHTS:
        folder = RunFolder(path.parent)
        try:
            folder.checked(path.name)
        except RunError as error:
            raise ConfigError(f"recipe.masks={place}: {error}") from None
        folder.tell_unverified()


def load(
    model: nn.Module,
    place: str,
    asked: str,
    heads: Collection[str] = (),
    part: Collection[str] = (),
) -> None:
    """Give a network the weights of a finished run.

    Args:
        model: of the same architecture as the run's.
        place: the run's folder, for its last weights, or a file of weights in it.
        asked: the key and value that ask for it, for errors.
        heads: modules that may be another task's: they stay as they are where the run has none of
            the same shape.
        part: the module that may be another task's whole network, if there is one: where the run
            has nothing of that name, the module gets its weights.

    Raises:
        ConfigError: where no finished run is there, another network's, or weights that were
            changed since.
    """
    folder, file = weights_in(place)
    if why := folder.without(file):
        raise ConfigError(f"{asked}: {why}")
    try:
        state = load_file(folder.checked(file))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{asked}: {file} cannot be read ({error})") from None
    except RunError as error:
        raise ConfigError(f"{asked}: {error}") from None
    folder.tell_unverified()
    for name in part:
        if not any(key.startswith(f"{name}.") for key in state):
            model = model.get_submodule(name)
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in state.items()}
    unlike = {*own.items()} ^ {*theirs.items()}
    of_heads = {name for name, _ in unlike if name.partition(".")[0] in heads}
    differing = sorted(item for item in unlike if item[0] not in of_heads)
    if differing:
        name = differing[0][0]
        here, there = (str(shapes.get(name, "missing")) for shapes in (own, theirs))
        raise ConfigError(
            f"{asked} is another network than this run's: {name} is {there} there and {here} here"
        )
    model.load_state_dict(
        {name: tensor for name, tensor in state.items() if name not in of_heads},
        strict=not of_heads,
    )
