"""What Hydra has in private, and nmrun needs: no other module names any of it.

``tests/lab/config/test_hydra_internals.py`` has what is relied on, for a Hydra that changes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import version
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

Plugins.instance()  # reloads Hydra's own plugins, so the next lines import the classes in use
from hydra._internal.config_loader_impl import ConfigLoaderImpl  # noqa: E402
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402
from hydra._internal.hydra import Hydra  # noqa: E402
from hydra._internal.utils import create_config_search_path, get_args_parser  # noqa: E402

__all__ = ["BasicSweeper", "get_args_parser", "initialized", "product", "put"]


@contextmanager
def initialized(module: str, config_dir: str | None) -> Iterator[None]:
    """Let ``hydra.compose`` read the configs of a module and of a folder, while entered. Whoever had
    initialised Hydra before finds it so again."""
    search_path = create_config_search_path(f"pkg://{module}")
    if config_dir is not None:
        place = f"file://{Path(config_dir).absolute()}"
        search_path.prepend("command-line", place, SearchPathQuery(provider="schema"))
    before, base = GlobalHydra.instance().hydra, version.getbase()
    GlobalHydra.instance().clear()
    version.setbase("1.3")
    try:
        Hydra.create_main_hydra2("nmrun", search_path)
        yield
    finally:
        GlobalHydra.instance().hydra = before
        version.VersionBase.instance().version_base = base


def put(config: DictConfig, override: Override) -> None:
    """Set, add or delete a key of a composed config. Raises ConfigCompositionException."""
    ConfigLoaderImpl._apply_overrides_to_config([override], config)


def product(overrides: Sequence[Override]) -> list[list[str]]:
    """The words of each job of a sweep."""
    jobs: list[list[str]] = BasicSweeper.split_arguments(list(overrides), None)[0]
    return jobs
