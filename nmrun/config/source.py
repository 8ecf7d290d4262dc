"""Serves ``sparsity=N:M`` for any ratio, without a file for each, and the recipes of other installed packages: a Hydra config
source under ``nm://``.

Files named ``2:8.yaml`` cannot exist on Windows and could only ever cover a finite list.
"""

from __future__ import annotations

from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from nmrun.data import stdlib_text
from nmrun.patterns import Pattern, PatternError
from nmrun.recipes import installed

GROUP = "sparsity"
USUAL = ("1:2", "2:4", "4:8", "1:4", "2:8", "1:8", "2:16", "1:16", "1:32")  # what --help and completion offer


class RatioSource(ConfigSource):
    """``sparsity/2:8`` is ``{n: 2, m: 8, overrides: null, pad: false}``; ``recipe/mine`` is ``{name: mine, _target_: mypkg.recipes.Mine}``."""

    @staticmethod
    def scheme() -> str:
        return "nm"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", GROUP, "recipe")

    def is_config(self, config_path: str) -> bool:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        return (group == GROUP and ":" in name) or (group == "recipe" and name in installed())

    def load_config(self, config_path: str) -> ConfigResult:
        group, _, name = config_path.removesuffix(".yaml").rpartition("/")
        try:
            if group == "recipe":
                content: dict[str, Any] = {"name": name, "_target_": installed()[name]}
            else:
                pattern = Pattern.parse(name)
                content = {"n": pattern.n, "m": pattern.m, "overrides": None, "pad": False}
        except PatternError as error:
            raise ConfigCompositionException(str(error)) from None
        header: dict[str, str | None] = {"package": group}
        return ConfigResult(provider=self.provider, path=self.full_path(), config=OmegaConf.create(content), header=header)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        path = config_path.strip("/")
        if path == "":
            return [GROUP, "recipe"] if results_filter in (None, ObjectType.GROUP) else []
        served = {GROUP: list(USUAL), "recipe": list(installed())}.get(path, [])
        return served if results_filter in (None, ObjectType.CONFIG) else []


class RatioSearchPath(SearchPathPlugin):
    """Puts ``nm://`` on the search path of our own application, and of no other in the process."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if any("nmrun.conf" in (item.path or "") for item in search_path.get_path()):
            search_path.append("nmrun", "nm://")


def register() -> None:
    """Make both known to Hydra, and ``${stdlib_sha256:}`` to configs; done once, when the command line is imported."""
    OmegaConf.register_new_resolver("stdlib_sha256", stdlib_text.digest, replace=True)
    plugins = Plugins.instance()
    for plugin in (RatioSource, RatioSearchPath):
        plugins.register(plugin)
