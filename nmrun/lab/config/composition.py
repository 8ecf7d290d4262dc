"""Hydra over the classes of keys and the files of ``conf``: its options, and a config of overrides.

The config source ``nm://`` serves every option of every group with the defaults of its class. What
Hydra has in private no other module names; ``tests/lab/config/test_composition.py`` has what is
relied on, for a Hydra that changes it.
"""

from __future__ import annotations

import argparse
import contextlib
import pickle
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose, version
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
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

from nmrun.errors import ConfigError, first_line, raise_all
from nmrun.lab.config import command_line, schema, suggestions
from nmrun.lab.keys import options as groups
from nmrun.lab.keys.config import Config
from nmrun.lab.signals import of_interrupt
from nmrun.patterns import PatternError
from nmrun.registry import did_you_mean, find, no_such

Plugins.instance()  # reloads Hydra's own plugins, so the next lines import the classes in use
from hydra._internal.config_loader_impl import ConfigLoaderImpl  # noqa: E402
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402
from hydra._internal.hydra import Hydra  # noqa: E402
from hydra._internal.utils import create_config_search_path, get_args_parser  # noqa: E402

__all__ = ["BasicSweeper"]

KEYS = "keys"  # the config of the keys that are in no group

# Hydra instantiates only sweepers of the package hydra_plugins; see nmrun.lab.sweeps.jobs
SWEEPER: dict[str, Any] = {
    "_target_": "hydra_plugins.nmrun.NMSweeper",
    "max_batch_size": None,
    "params": None,
}
HYDRAS = ("hydra", "_dummy_empty_config_.yaml")  # in its ConfigStore
Cache = dict[tuple[str, ...], bytes]  # pickled: that is copied four times as fast

# --- its options ------------------------------------------------------------------------------------

MODES = ("run", "multirun", "cfg", "info", "shell_completion")  # of Hydra's options
# of Hydra's own those that a run or a sweep needs
OPTIONS = ("--multirun", "--config-dir", "--cfg", "--help", "--version")


def options(argv: list[str]) -> argparse.Namespace:
    """Hydra's own options by name, and the other arguments as ``overrides``.

    Raises ConfigError for an option that does not exist, or that nmrun has no use for.
    """
    parser = get_args_parser()

    def complain(message: str) -> None:
        glued = re.match(r"argument \S*(-\w): ignored explicit argument '(.*)'", message)
        named = re.match(r"(?:unrecognized arguments|ambiguous option): (\S+)", message)
        if matched := glued or named:
            word = "".join(matched.groups())
            message = f"{word}: {_no_option(word, parser._option_string_actions)}"
        raise ConfigError(message)

    parser.error = complain  # type: ignore[assignment, method-assign]
    parsed = parser.parse_intermixed_args(argv)
    problems = [
        f"--{name.replace('_', '-')}: not for nmrun; --config-dir adds a folder of configs"
        for name in ("config_path", "config_name", "experimental_rerun")
        if getattr(parsed, name) is not None
    ]
    chosen = [f"--{name}".replace("_", "-") for name in MODES if getattr(parsed, name)]
    if len(chosen) > 1:
        problems.append(f"{' and '.join(chosen)}: give one of them; --cfg shows a run")
    raise_all(problems)
    return parsed


def _no_option(word: str, there: Collection[str]) -> str:
    option, letters = word.partition("=")[0], word.lstrip("-")
    if how := suggestions.INSTEAD.get(option):
        return f"no such option; {how}"
    if len(letters.partition("=")[0]) > 1 and (key := suggestions.as_key(letters)):
        return f"no such option; keys are written without dashes: {key}"
    return no_such("option", option, OPTIONS, hint=did_you_mean(option, there))


# --- the source of configs --------------------------------------------------------------------------


class ClassSource(ConfigSource):
    """The config source ``nm://``.

    It answers ``sparsity/2:8`` with ``{n: 2, m: 8, v: 1, ...}`` and ``optimizer/sgd`` with ``{name:
    sgd, lr: 0.05, ...}``. ``recipe/mine`` of another package is ``{name: mine, _target_:
    mypkg.recipes.Mine}``. ``keys`` has the keys that are in no group.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self.nodes: dict[str, dict[str, Any] | None] = {}  # looked up so far

    @staticmethod
    def scheme() -> str:
        return "nm"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", *groups.GROUPS)

    def is_config(self, config_path: str) -> bool:
        path = config_path.removesuffix(".yaml")
        if path not in self.nodes:
            group, _, name = path.rpartition("/")
            if group not in groups.GROUPS and path != KEYS:
                return False
            try:
                self.nodes[path] = groups.node(group, name)
            except PatternError as error:
                raise ConfigCompositionException(str(error)) from None
        return self.nodes[path] is not None

    def load_config(self, config_path: str) -> ConfigResult:
        """Answer a config, as Hydra asks for it: ``sparsity/2:8``, ``recipe/step``, ``model/resnet18``."""
        path = config_path.removesuffix(".yaml")
        group, config = path.rpartition("/")[0], OmegaConf.create(self.nodes[path] or {})
        header: dict[str, str | None] = {"package": group or "_global_"}
        return ConfigResult(self.provider, self.full_path(), config, header)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The options of a group, for Hydra's help and completion."""
        path = config_path.strip("/")
        if path == "":
            return list(groups.GROUPS) if results_filter in (None, ObjectType.GROUP) else []
        served = groups.names(path) if path in groups.GROUPS else []
        return served if results_filter in (None, ObjectType.CONFIG) else []


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


# --- composition ------------------------------------------------------------------------------------


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


@contextlib.contextmanager
def composing(config_dir: str | None = None) -> Iterator[None]:
    """Let ``hydra.compose("nmrun", words)`` compose a config of nmrun and of a folder of more
    configs, while the context is entered. Whoever had initialised Hydra before finds it so again."""
    register()
    search_path = create_config_search_path("pkg://nmrun.conf")
    if config_dir is not None:
        groups.in_folder(config_dir)  # or there is no such folder
        place = f"file://{Path(config_dir).absolute()}"
        search_path.prepend("command-line", place, SearchPathQuery(provider="schema"))
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


def put(config: DictConfig, override: Override) -> None:
    """Set, add or delete a key of a composed config. Raises ConfigCompositionException."""
    ConfigLoaderImpl._apply_overrides_to_config([override], config)


def product(overrides: Sequence[Override]) -> list[list[str]]:
    """The words of each job of a sweep."""
    jobs: list[list[str]] = BasicSweeper.split_arguments(list(overrides), None)[0]
    return jobs


def config_of(
    words: Sequence[str], config_dir: str | None = None, cache: Cache | None = None
) -> Config:
    """The checked config of these overrides; ``cache`` as of :func:`composed`."""
    with plain_errors(), composing(config_dir):
        return schema.check(composed(words, {} if cache is None else cache))


def composed(words: Sequence[str], cache: Cache) -> DictConfig:
    """What ``hydra.compose("nmrun", words)`` composes. It takes a tenth of the time where only
    recipe, ratio and values of keys differ from a config in ``cache``, which is added to.
    """
    config, values = of_groups(words, cache)
    for override in values:
        put(config, override)
    return config


def of_groups(words: Sequence[str], cache: Cache) -> tuple[DictConfig, list[Override]]:
    """The config by the options of groups among the words; and the other overrides, of keys, which
    are to be put in. ``cache`` is as of :func:`composed`."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    values, chosen = list[Override](), list[Override]()
    for override in map(command_line.parse, words):
        key, value = override.key_or_group, override.value()
        of_key = "." in key or isinstance(value, dict) or not any(s.is_group(key) for s in sources)
        plain = not (override.is_sweep_override() or override.is_hydra_override())
        (values if plain and of_key else chosen).append(override)
    every = tuple(override.input_line or "" for override in chosen)
    if every not in cache:
        nodes = _nodes(chosen, sources)
        others = tuple(o.input_line or "" for o in chosen if o.key_or_group not in nodes)
        if others not in cache:
            cache[others] = pickle.dumps(_composed_by_hydra(others))
        with_nodes = pickle.loads(cache[others])
        with_nodes.update(nodes)
        cache[every] = pickle.dumps(with_nodes)
    return pickle.loads(cache[every]), values


def _composed_by_hydra(words: Sequence[str]) -> DictConfig:
    try:
        return compose("nmrun", list(words))
    except (RecursionError, ValueError, AttributeError) as error:
        if isinstance(error, RecursionError):
            line = "defaults: a file of yours names itself there"
        elif isinstance(error, AttributeError) and error.name == "_set_flag":  # Hydra's, of null
            line = "hydra: a file of yours has null there, and it takes settings"
        elif type(error) is ValueError:  # Hydra's, of defaults that are no list
            line = first_line(error)
        else:  # UnicodeDecodeError, ConfigError, a defect of ours
            raise
        raise ConfigError(line) from None


def _nodes(chosen: Sequence[Override], sources: Sequence[ConfigSource]) -> dict[str, Container]:
    """By group, the configs of the options that ``nm://`` serves: they change nothing but their
    group.

    None where a user's own configs are looked through, or beside an overlay such as ``debug``.
    """
    names = [o.key_or_group for o in chosen if not o.key_or_group.startswith("hydra/")]
    if any(s.provider == "command-line" for s in sources) or not {*names} <= {*groups.GROUPS}:
        return {}
    nodes: dict[str, Container] = {}
    for override in chosen:
        group, option = override.key_or_group, override.value()
        once = override.type is OverrideType.CHANGE and names.count(group) == 1
        if once and isinstance(option, str):
            path = f"{group}/{option}"
            source = next((each for each in sources if each.is_config(path)), None)
            if isinstance(source, ClassSource):
                nodes[group] = source.load_config(path).config
    return nodes
