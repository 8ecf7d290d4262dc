"""Serves ``sparsity=N:M`` for any ratio, without a file for each: a Hydra config source under ``nm://``.

Files named ``2:8.yaml`` cannot exist on Windows and could only ever cover a finite list.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from nmrun.patterns import Pattern, PatternError

GROUP = "sparsity"
USUAL = ("1:2", "2:4", "4:8", "1:4", "2:8", "1:8", "2:16", "1:16", "1:32")  # what --help and completion offer


class RatioSource(ConfigSource):
    """``sparsity/2:8`` is ``{n: 2, m: 8}``."""

    @staticmethod
    def scheme() -> str:
        return "nm"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path.strip("/") in ("", GROUP)

    def is_config(self, config_path: str) -> bool:
        group, _, ratio = config_path.removesuffix(".yaml").rpartition("/")
        return group == GROUP and ":" in ratio

    def load_config(self, config_path: str) -> ConfigResult:
        try:
            pattern = Pattern.parse(config_path.removesuffix(".yaml").rpartition("/")[2])
        except PatternError as error:
            raise ConfigCompositionException(str(error)) from None
        config = OmegaConf.create({"n": pattern.n, "m": pattern.m})
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header={"package": GROUP})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        path = config_path.strip("/")
        if path == "":
            return [GROUP] if results_filter in (None, ObjectType.GROUP) else []
        return list(USUAL) if path == GROUP and results_filter in (None, ObjectType.CONFIG) else []


class RatioSearchPath(SearchPathPlugin):
    """Puts ``nm://`` on the search path of our own application, and of no other in the process."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if any("nmrun.conf" in (item.path or "") for item in search_path.get_path()):
            search_path.append("nmrun", "nm://")


def register() -> None:
    """Make both known to Hydra; done once, when the command line is imported."""
    plugins = Plugins.instance()
    for plugin in (RatioSource, RatioSearchPath):
        plugins.register(plugin)
