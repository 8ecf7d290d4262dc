"""Hydra over the classes of keys and the files of ``conf``.

The config source ``nm://`` serves every option of every group with the defaults of its class.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nmrun import recipes
from nmrun.errors import ConfigError, first_line
from nmrun.lab.config import command_line, hydra_internals, launchers, schema
from nmrun.lab.config.launchers import Launcher
from nmrun.lab.keys import options
from nmrun.lab.keys.config import Config
from nmrun.lab.keys.fields import defaults
from nmrun.lab.keys.groups import ratio
from nmrun.lab.signals import of_interrupt
from nmrun.patterns import Pattern, PatternError
from nmrun.registry import find

RATIO = "sparsity"
KEYS = "keys"  # the config of the keys that are in no group

# Hydra instantiates only sweepers of the package hydra_plugins; see nmrun.lab.sweeps.jobs
SWEEPER: dict[str, Any] = {
    "_target_": "hydra_plugins.nmrun.NMSweeper",
    "max_batch_size": None,
    "params": None,
}


class ClassSource(ConfigSource):
    """The config source ``nm://``.

    It answers ``sparsity/2:8`` with ``{n: 2, m: 8, v: 1, ...}`` and ``optimizer/sgd`` with ``{name:
    sgd, lr: 0.05, ...}``. ``recipe/mine`` of another package is ``{name: mine, _target_:
    mypkg.recipes.Mine}``. ``keys`` has the keys that are in no group.
    """

    @staticmethod
    def scheme() -> str:
        return "nm"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", *options.GROUPS)

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        if group not in options.GROUPS:
            return config_path.removesuffix(".yaml") == KEYS
        return (group == RATIO and ":" in name) or name in options.names(group)

    def load_config(self, config_path: str) -> ConfigResult:
        """Answer a config, as Hydra asks for it: ``sparsity/2:8``, ``recipe/step``, ``model/resnet18``."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        try:
            content = _node(group, name)
        except PatternError as error:
            raise ConfigCompositionException(str(error)) from None
        header: dict[str, str | None] = {"package": group or "_global_"}
        path, config = self.full_path(), OmegaConf.create(content)
        return ConfigResult(provider=self.provider, path=path, config=config, header=header)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The options of a group, for Hydra's help and completion."""
        path = config_path.strip("/")
        if path == "":
            return list(options.GROUPS) if results_filter in (None, ObjectType.GROUP) else []
        served = options.names(path) if path in options.GROUPS else []
        return served if results_filter in (None, ObjectType.CONFIG) else []


def _node(group: str, name: str) -> dict[str, Any]:
    values = defaults(options.keys(group, name))
    if group == RATIO and name != "dense":
        return values | ratio(Pattern.parse(name))
    if not group or group in options.UNNAMED:
        return values
    target = recipes.installed().get(name) if group == "recipe" else None
    return {"name": name, **values, **({"_target_": target} if target else {})}


class ClassSearchPath(SearchPathPlugin):
    """Adds ``nm://`` to the search path of nmrun, and of no other Hydra application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if any("nmrun.conf" in (item.path or "") for item in search_path.get_path()):
            search_path.append("nmrun", "nm://")


def register() -> None:
    """Register the source and its search path with Hydra, ``${stdlib_sha256:...}``, and the sweeper."""
    ConfigStore.instance().store("nmrun", SWEEPER, "hydra/sweeper", provider="nmrun")
    OmegaConf.register_new_resolver("stdlib_sha256", _digest, replace=True)
    plugins = Plugins.instance()
    for plugin in (ClassSource, ClassSearchPath):
        plugins.register(plugin)


def _digest(dataset: str) -> str:
    return str(find("dataset.sha256", "nmrun.lab.tasks.text.files.stdlib_digest", {})(dataset))


@contextlib.contextmanager
def plain_errors() -> Iterator[None]:
    """Turn errors of Hydra and OmegaConf into ConfigErrors of one line, while entered."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        if of_interrupt(error):
            raise KeyboardInterrupt from None
        line, cause = first_line(error), error.__cause__
        if cause is not None and first_line(cause) not in line:
            line = f"{line.rstrip('.')}: {first_line(cause)}"
        raise ConfigError(line) from None


HYDRAS = ("hydra", "_dummy_empty_config_.yaml")  # in its ConfigStore
Cache = dict[tuple[str, ...], bytes]  # pickled: that is copied four times as fast


@contextlib.contextmanager
def composing(config_dir: str | None = None) -> Iterator[None]:
    """Let ``hydra.compose("nmrun", words)`` compose a config of nmrun, while the context is
    entered."""
    register()
    with without_others_configs(), hydra_internals.initialized("nmrun.conf", config_dir):
        yield


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


def composed(words: Sequence[str], cache: Cache) -> DictConfig:
    """What ``hydra.compose("nmrun", words)`` composes. It takes a tenth of the time where only
    recipe, ratio and values of keys differ from a config in ``cache``, which is added to.
    """
    config, values = of_groups(words, cache)
    for override in values:
        hydra_internals.put(config, override)
    return config


def of_groups(words: Sequence[str], cache: Cache) -> tuple[DictConfig, list[Override]]:
    """The config by the options of groups among the words; and the other overrides, of keys, which
    are to be put in. ``cache`` is as of :func:`composed`."""
    overrides = [command_line.parse(word) for word in words]
    loader = GlobalHydra.instance().config_loader()
    values = [override for override in overrides if _sets_a_value(override, loader)]
    groups = [override for override in overrides if override not in values]
    every = tuple(override.input_line or "" for override in groups)
    if every not in cache:
        nodes = _nodes(groups, loader)
        choices = tuple(o.input_line or "" for o in groups if o.key_or_group not in nodes)
        if choices not in cache:
            cache[choices] = pickle.dumps(_composed_by_hydra(choices))
        with_nodes = pickle.loads(cache[choices])
        with_nodes.update(nodes)
        cache[every] = pickle.dumps(with_nodes)
    return pickle.loads(cache[every]), values


def _composed_by_hydra(words: Sequence[str]) -> DictConfig:
    try:
        return compose("nmrun", list(words))
    except RecursionError:
        raise ConfigError("defaults: a file of yours names itself there") from None
    except ValueError as error:
        if type(error) is not ValueError:  # UnicodeDecodeError, ConfigError
            raise
        raise ConfigError(first_line(error)) from None  # Hydra's, of defaults that are no list


class Sweep(NamedTuple):
    """What Hydra's settings say of a sweep: its launcher, and what that is; and the overrides of
    ``hydra.sweeper.params``."""

    launcher: str
    known: Launcher
    params: list[Override]


def sweep(overrides: Sequence[Override]) -> Sweep | None:
    """The settings of a sweep with these overrides. None where they cannot be composed, which the
    jobs then tell."""
    fixed = [o.input_line or "" for o in overrides if not o.is_sweep_override()]
    try:
        settings = compose("nmrun", fixed, return_hydra_config=True).hydra
        params = settings.sweeper.params or {}
        swept = [command_line.parse(f"{key}={values}") for key, values in params.items()]
    except (HydraException, OmegaConfBaseException):
        return None
    name = str(settings.runtime.choices["hydra/launcher"])
    return Sweep(name, launchers.of(settings.launcher._target_), swept)


def config_of(
    words: Sequence[str], config_dir: str | None = None, cache: Cache | None = None
) -> Config:
    """The checked config of these overrides; ``cache`` as of :func:`composed`."""
    with plain_errors(), composing(config_dir):
        return schema.check(composed(words, {} if cache is None else cache))


def _nodes(groups: Sequence[Override], loader: ConfigLoader) -> dict[str, Container]:
    """By group, the configs of the options that ``nm://`` serves: they change nothing but their
    group.

    None where a user's own configs are looked through, or beside an overlay such as ``debug``.
    """
    names = [override.key_or_group for override in groups]
    others = any(source.provider == "command-line" for source in loader.get_sources())
    overlays = {name for name in names if not name.startswith("hydra/")} - {*options.GROUPS}
    if others or overlays:
        return {}
    nodes: dict[str, Container] = {}
    for override in groups:
        group, option = override.key_or_group, override.value()
        plain = override.type is OverrideType.CHANGE and isinstance(option, str)
        if plain and group in options.GROUPS and names.count(group) == 1:
            path = f"{group}/{option}"
            source = next((each for each in loader.get_sources() if each.is_config(path)), None)
            if isinstance(source, ClassSource):
                nodes[group] = source.load_config(path).config
    return nodes


def _sets_a_value(override: Override, loader: ConfigLoader) -> bool:
    if override.is_sweep_override() or override.is_hydra_override():
        return False
    key = override.key_or_group
    group = "." not in key and any(source.is_group(key) for source in loader.get_sources())
    return not group or isinstance(override.value(), dict)
