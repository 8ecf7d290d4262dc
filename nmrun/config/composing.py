"""Hydra over the configs of the package, for as long as something is composed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import compose, version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

HYDRAS = ("hydra", "_dummy_empty_config_.yaml")  # in its ConfigStore
Done = dict[tuple[str, ...], DictConfig]


@contextlib.contextmanager
def composing(config_dir: str | None = None) -> Iterator[None]:
    """Let ``hydra.compose("nmrun", words)`` compose a config of nmrun, while the context is entered.

    Whoever had initialised Hydra before finds it so again.

    Args:
        config_dir: a folder of more configs, which exists.
    """
    search_path = create_config_search_path("pkg://nmrun.conf")
    if config_dir is not None:
        search_path.prepend(
            "command-line",
            f"file://{Path(config_dir).absolute()}",
            SearchPathQuery(provider="schema"),
        )
    before, base = GlobalHydra.instance().hydra, version.getbase()
    GlobalHydra.instance().clear()
    version.setbase("1.3")
    try:
        with without_others_configs():
            Hydra.create_main_hydra2("nmrun", search_path)
            yield
    finally:
        GlobalHydra.instance().hydra = before
        version.VersionBase.instance().version_base = base


@contextlib.contextmanager
def without_others_configs() -> Iterator[None]:
    """Let Hydra's ConfigStore have Hydra's own configs alone, while the context is entered.

    Hydra takes what others store, such as fairseq's ``optimizer/adam``, for schemas of our files of
    the same names. What is stored meanwhile is gone afterwards.
    """
    store = ConfigStore.instance()
    everything = store.repo
    store.repo = {name: node for name, node in everything.items() if name in HYDRAS}
    try:
        yield
    finally:
        store.repo = everything


def composed(words: Sequence[str], done: Done) -> DictConfig:
    """What ``hydra.compose("nmrun", words)`` composes, in a tenth of its time where only values of
    keys differ from a config before.

    Args:
        words: the overrides.
        done: composed configs by their choices of groups, read and added to.
    """
    overrides = OverridesParser.create().parse_overrides(list(words))
    loader = GlobalHydra.instance().config_loader()
    assert isinstance(loader, ConfigLoaderImpl)
    values = [override for override in overrides if _sets_a_value(override, loader)]
    chosen = tuple(o.input_line or "" for o in overrides if o not in values)
    if chosen not in done:
        done[chosen] = compose("nmrun", list(chosen))
    config = copy.deepcopy(done[chosen])
    ConfigLoaderImpl._apply_overrides_to_config(values, config)
    return config


def _sets_a_value(override: Override, loader: ConfigLoaderImpl) -> bool:
    if override.is_sweep_override() or override.is_hydra_override():
        return False
    group = loader.repository.group_exists(override.key_or_group)
    return not group or isinstance(override.value(), dict)
