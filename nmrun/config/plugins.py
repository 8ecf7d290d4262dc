"""The launcher and the sweeper of a command line: plug-ins of Hydra, which come with extras."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override

from nmrun.settings import reader

# the extra of nmrun that a plug-in comes with
EXTRAS = {
    "hydra/launcher": {
        **dict.fromkeys(("joblib", "submitit_local", "submitit_slurm"), "launchers"),
        **dict.fromkeys(("ray", "ray_aws"), "ray"),
    },
    "hydra/sweeper": {"optuna": "launchers"},
}
# what begins an override for one of them
WORDS = ("hydra/launcher", "hydra/sweeper", "hydra.launcher", "hydra.sweeper")
HERE = ("basic", "joblib", "submitit_local")  # launchers whose jobs run on this machine


def asked(
    overrides: Sequence[Override], loader: ConfigLoaderImpl
) -> tuple[dict[str, str], list[str]]:
    """Find the launcher and the sweeper that a command line asks for.

    Args:
        overrides: of the command line.
        loader: Hydra's, which knows what is installed.

    Returns:
        The plug-in of ``hydra/launcher`` and ``hydra/sweeper`` where one is asked for; and a line
        for each that is not installed.
    """
    found = {o.key_or_group: str(o.value()) for o in overrides if o.key_or_group in EXTRAS}
    missing = []
    for group, name in found.items():
        installed = loader.get_group_options(group)
        if name in installed:
            continue
        if (extra := EXTRAS[group].get(name)) is None:
            options = sorted({*installed, *EXTRAS[group]})
            missing.append(reader.no_option(group, group, name, options))
        else:
            missing.append(f"{group}={name} is not installed: pip install 'nmrun[{extra}]'")
    return found, missing


def trials(words: Sequence[str]) -> int | None:
    """The number of jobs of a search by Optuna; None where there is none.

    Args:
        words: the overrides for Hydra.
    """
    if "hydra/sweeper=optuna" not in words:
        return None
    key = "hydra.sweeper.n_trials="
    told = [word.removeprefix(key) for word in words if word.startswith(key)]
    return next((int(number) for number in told if number.isdigit()), 20)


def repeatable(words: list[str]) -> list[str]:
    """Let a search by Optuna propose the same again when it is given again: it goes on then where
    it was cut off, since finished runs are not repeated.

    Args:
        words: the overrides.

    Returns:
        The overrides, with a seed for Optuna's sampler unless they have one or name a storage.
    """
    own = ("hydra.sweeper.sampler.seed=", "hydra.sweeper.storage=", "hydra/sweeper/sampler=grid")
    if trials(words) is None or any(word.startswith(own) for word in words):
        return words
    return [*words, "hydra.sweeper.sampler.seed=0"]
