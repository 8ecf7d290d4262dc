"""Configs that are composed with less work, and without what others store in Hydra; and Hydra's
private parts: one module names them, and they are as it takes them to be.
"""

from __future__ import annotations

import importlib.util
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra import compose
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from runs import TINY
from verbs import python

import nmrun
from nmrun.lab.config import composition
from nmrun.lab.config.composition import Cache, composed, composing

LINES = (
    "",
    "seed=3 output_dir=some/where",
    "recipe=step recipe.switch=0.5 optimizer=sgd optimizer.lr=1",
    "sparsity=3:16 '+sparsity.overrides={inner.1: 1\\:8}' ~track.also",
    "'sparsity={n: 1, m: 4}'",  # values for a group that has options
    "recipe=custom ++recipe._target_=a.b.Mine ++recipe.x=1 debug=fast trainer.epochs=7",
)


@pytest.fixture
def compositions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What Hydra composes for nmrun."""
    calls: list[Any] = []
    monkeypatch.setattr(
        composition, "compose", lambda *words: calls.append(words) or compose(*words)
    )
    return calls


@pytest.mark.parametrize("line", LINES)
def test_values_on_a_config_of_before_are_what_hydra_composes(line, compositions):
    cache: Cache = {}
    words = shlex.split(line)
    with composing():
        for more in ([], ["trainer.epochs=99", "+note=mine"], []):
            assert composed([*words, *more], cache) == compose("nmrun", [*words, *more])
    assert len(compositions) == 1


def test_all_recipes_and_ratios_are_composed_once(compositions):
    cache: Cache = {}
    with composing():
        for recipe in ("ste", "s_ste", "sr_ste recipe.decay=0.5", "dense"):
            for ratio in ("1:8", "64:2:8"):
                words = ["model=mlp", f"sparsity={ratio}", *f"recipe={recipe}".split()]
                assert composed(words, cache) == compose("nmrun", words)
    assert len(compositions) == 1


def test_an_overlay_of_ones_own_wins_over_the_recipe(tmp_path):
    (tmp_path / "debug").mkdir()
    (tmp_path / "debug" / "mine.yaml").write_text("# @package _global_\nrecipe: {decay: 0.5}\n")
    words, cache = ["recipe=sr_ste", "debug=mine"], Cache()
    with composing(str(tmp_path)):
        assert composed(words, cache) == composed(words, cache) == compose("nmrun", words)
        assert composed(words, cache).recipe.decay == 0.5


def test_what_hydra_refuses_is_refused_as_ever():
    with composing():
        for word in (
            *("nonsense=1", "recipe=nonsense", "+recipe=ste", "recipe=ste,asp"),
            *("+seed=1", "seed=1,2", "seed=[1"),
        ):
            for composer in (lambda words: composed(words, {}), partial(compose, "nmrun")):
                with pytest.raises(HydraException):
                    composer([word])


# --- what others store ----------------------------------------------------------------------------

# a schema of optimizer/adam, as fairseq stores one: without the keys of nmrun's
STORES = """
from dataclasses import dataclass
from hydra.core.config_store import ConfigStore

@dataclass
class Adam:
    use_old_adam: bool = False

ConfigStore.instance().store("adam", Adam, "optimizer")
"""


def test_a_schema_of_somebody_elses(monkeypatch):
    store = ConfigStore.instance()
    monkeypatch.setattr(store, "repo", dict(store.repo))
    exec(compile(STORES, "stores", "exec", dont_inherit=True), {"__name__": __name__})
    stored = store.repo
    assert "optimizer" in stored
    with composing():
        assert compose("nmrun", ["optimizer=adam"]).optimizer.eps == 1e-8
    assert store.repo is stored


@pytest.mark.slow
def test_a_job_of_a_sweep_that_imports_such_a_schema(tmp_path, nmrun_cli):
    """The second job is composed after the first has imported it."""
    recipe = "from nmrun.recipes.ste import STE\n\n\nclass Mine(STE):\n    pass\n"
    (tmp_path / "mine.py").write_text(STORES + recipe)
    words = [word for word in TINY if not word.startswith(("trainer.epochs", "recipe="))]
    process = nmrun_cli("-m", "recipe._target_=mine.Mine", *words, "trainer.epochs=1", "seed=0,1")
    assert process.returncode == 0, process.stderr
    assert "sweep of 2: 2 finished" in process.stdout


@pytest.mark.minutes
@pytest.mark.skipif(
    importlib.util.find_spec("fairseq") is None,
    reason="needs fairseq: pip install '.[translation]'",
)
def test_a_run_in_a_process_that_has_imported_fairseq(tmp_path):
    words = [*TINY, "trainer.epochs=1", "recipe=ste"]
    lines = f"import fairseq\nimport nmrun\nprint(nmrun.run({words!r}).metrics['test/accuracy'])"
    process = python("-W", "ignore", "-c", lines, cwd=tmp_path, timeout=300)
    assert process.returncode == 0, process.stderr
    assert 0 < float(process.stdout.splitlines()[-1]) < 1


# --- Hydra's private parts -------------------------------------------------------------------------

ROOT = Path(nmrun.__file__).parent


def test_one_module_imports_them():
    importing = [
        path.name for path in ROOT.rglob("*.py") if "from hydra._internal" in path.read_text()
    ]
    assert importing == ["composition.py"]


def test_a_folder_of_configs_goes_before_the_module(tmp_path):
    for folder in ("trainer", "mine"):
        (tmp_path / folder).mkdir()
        (tmp_path / f"{folder}/default.yaml").write_text("here: 3\n")
    before = GlobalHydra.instance().hydra
    with composing(str(tmp_path)):
        config = compose("nmrun", ["trainer=default", "+mine=default"])
        assert config.mine == {"here": 3}
    assert GlobalHydra.instance().hydra is before
