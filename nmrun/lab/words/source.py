"""Config nodes without a file: a Hydra config source under ``nm://``.

It serves every option of every group with the defaults of its class: of recipes see
``nmrun.lab.words.recipe_fields``, of all others ``nmrun.lab.keys``. ``sparsity=N:M`` is for any
ratio, and ``keys`` has those that are in no group.
"""

from __future__ import annotations

from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from nmrun import recipes
from nmrun.lab.keys import options
from nmrun.lab.keys.fields import defaults
from nmrun.lab.keys.groups import Run
from nmrun.lab.words import recipe_fields
from nmrun.patterns import Pattern, PatternError
from nmrun.registry import find

GROUP = "sparsity"
KEYS = "keys"  # the config of the keys that are in no group

# Hydra instantiates only sweepers of the package hydra_plugins; see nmrun.lab.words.sweeper
SWEEPER: dict[str, Any] = {
    "_target_": "hydra_plugins.nmrun.NMSweeper",
    "max_batch_size": None,
    "params": None,
}


class ClassSource(ConfigSource):
    """The config source ``nm://``.

    It answers ``sparsity/2:8`` with ``{n: 2, m: 8, v: 1, overrides: null, pad: false}``, ``recipe/sr_ste``
    with ``{name: sr_ste, decay: 2.0e-4}``, ``optimizer/sgd`` with ``{name: sgd, lr: 0.05, ...}``, and
    ``recipe/mine`` of another package with ``{name: mine, _target_: mypkg.recipes.Mine}``.
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
        return (group == GROUP and ":" in name) or name in options.names(group)

    def load_config(self, config_path: str) -> ConfigResult:
        """Answer a config, as Hydra asks for it: ``sparsity/2:8``, ``recipe/step``, ``model/mask_rcnn``."""
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        try:
            content = _node(group, name)
        except PatternError as error:
            raise ConfigCompositionException(str(error)) from None
        header: dict[str, str | None] = {"package": group or "_global_"}
        path, config = self.full_path(), OmegaConf.create(content)
        return ConfigResult(provider=self.provider, path=path, config=config, header=header)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """List the options of a group, for Hydra's help and completion.

        Args:
            config_path: the group.
            results_filter: groups or configs alone; None: both.
        """
        path = config_path.strip("/")
        if path == "":
            return list(options.GROUPS) if results_filter in (None, ObjectType.GROUP) else []
        served = options.names(path) if path in options.GROUPS else []
        return served if results_filter in (None, ObjectType.CONFIG) else []


def _node(group: str, name: str) -> dict[str, Any]:
    if not group:
        return defaults(Run)
    if group in options.UNNAMED:
        ratio = _ratio(name) if group == GROUP and name != "dense" else {}
        return {**defaults(options.kind(group)), **ratio}
    if group != "recipe":
        return {"name": name, **defaults(options.kind(group, name))}
    if name in recipes.installed():
        return {"name": name, "_target_": recipes.installed()[name]}
    return {"name": name} if name == "custom" else recipe_fields.node(name)


def _ratio(name: str) -> dict[str, Any]:
    pattern = Pattern.parse(name)
    return {"n": pattern.n, "m": pattern.m, "v": pattern.v}


class ClassSearchPath(SearchPathPlugin):
    """Adds ``nm://`` to the search path of nmrun, and of no other Hydra application."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if any("nmrun.conf" in (item.path or "") for item in search_path.get_path()):
            search_path.append("nmrun", "nm://")


def register() -> None:
    """Register the source and its search path with Hydra, ``${stdlib_sha256:}``, and the sweeper.

    ``nmrun.lab.train.jobs`` calls it once, when it is imported.
    """
    ConfigStore.instance().store("nmrun", SWEEPER, "hydra/sweeper", provider="nmrun")
    OmegaConf.register_new_resolver("stdlib_sha256", _digest, replace=True)
    plugins = Plugins.instance()
    for plugin in (ClassSource, ClassSearchPath):
        plugins.register(plugin)


def _digest() -> str:
    """Compute the hash of ``stdlib_text``, which only configs with that data set contain."""
    return str(find("dataset.sha256", "nmrun.lab.tasks.text.stdlib.digest", {})())
