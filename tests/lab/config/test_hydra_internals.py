"""The private parts of Hydra: one module names them, and they are as it takes them to be."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException
from omegaconf import DictConfig, OmegaConf

import nmrun
from nmrun.lab.config import hydra_internals
from nmrun.lab.config.hydra_internals import initialized, product, put

ROOT = Path(nmrun.__file__).parent


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_one_module_imports_them():
    importing = [
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if any(name.startswith("hydra._internal") for name in imported(path))
    ]
    assert importing == ["lab/config/hydra_internals.py"]


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (hydra_internals.ConfigLoaderImpl._apply_overrides_to_config, ["overrides", "cfg"]),
        (hydra_internals.BasicSweeper.split_arguments, ["overrides", "max_batch_size"]),
        (hydra_internals.Hydra.create_main_hydra2, ["task_name", "config_search_path"]),
        (hydra_internals.create_config_search_path, ["search_path_dir"]),
        (hydra_internals.get_args_parser, []),
    ],
)  # fmt: skip
def test_they_take_what_they_took(function: Callable[..., object], names: list[str]):
    assert list(inspect.signature(function).parameters) == names


def test_a_key_is_set_added_and_deleted():
    config = OmegaConf.create({"a": {"b": 1, "c": 2}})
    OmegaConf.set_struct(config, True)
    assert isinstance(config, DictConfig)
    for word in ("a.b=3", "+a.d=[4]", "~a.c", "++a.b=5"):
        put(config, OverridesParser.create().parse_override(word))
    assert config == {"a": {"b": 5, "d": [4]}}
    for word in ("a.e=1", "+a.b=1", "~a.e"):
        with pytest.raises(ConfigCompositionException):
            put(config, OverridesParser.create().parse_override(word))


def test_a_sweep_is_the_product_of_its_values():
    axes = {"a": ["x", "y"], "b.c": ["1", "2", "3"], "d": ["z"]}
    words = [f"{key}={','.join(values)}" for key, values in axes.items()]
    jobs = product(OverridesParser.create().parse_overrides(words))
    assert jobs == [
        [f"{key}={value}" for key, value in zip(axes, job, strict=True)]
        for job in itertools.product(*axes.values())
    ]


def test_a_folder_of_configs_goes_before_the_module(tmp_path):
    for folder in ("trainer", "mine"):
        (tmp_path / folder).mkdir()
        (tmp_path / f"{folder}/default.yaml").write_text("here: 3\n")
    before = GlobalHydra.instance().hydra
    with initialized("nmrun.conf", str(tmp_path)):
        config = compose("nmrun", ["trainer=default", "+mine=default"])
        assert config.mine == {"here": 3}
    assert GlobalHydra.instance().hydra is before
