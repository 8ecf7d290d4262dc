"""Things by their name or dotted path."""

import sys

import pytest

from nmrun import registry
from nmrun.errors import ConfigError

KNOWN = {"join": "os.path.join", "joined": "os.path.nothing"}


def test_a_known_name_and_a_dotted_path(tmp_path, monkeypatch):
    (tmp_path / "mine_alone.py").write_text("thing = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert registry.find("what.name", "join", KNOWN)("a", "b") == "a/b"
    assert str(tmp_path) not in sys.path  # it is looked into for the user's own only
    assert registry.find("what.name", "mine_alone.thing", KNOWN) == 3


def test_mistakes_name_the_key():
    for name, message in (
        ("jion", r"no such what; did you mean join\? \(there are join, joined\)"),
        ("./jion.py", r"no such what \(there are join, joined\)"),
        ("os.nothing", "cannot be imported: module 'os' has no attribute"),
    ):
        with pytest.raises(ConfigError, match=rf"what\.name={name}:? {message}"):
            registry.find("what.name", name, KNOWN)


def test_a_script_that_ends_the_program_is_no_module(tmp_path, monkeypatch):
    (tmp_path / "a_script.py").write_text("import sys\n\nclass Net: ...\n\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(ConfigError, match=r"a_script\.Net cannot be imported"):
        registry.find("model._target_", "a_script.Net", KNOWN)


def test_a_fault_of_our_own_is_no_mistake_of_the_user():
    with pytest.raises(AttributeError):
        registry.find("what.name", "joined", KNOWN)


def test_of_many_options_a_few_are_named_and_the_command_that_lists_all():
    many = [f"option{number}" for number in range(30)]
    near, far = (
        registry.no_such("thing", name, many, "nmrun help thing") for name in ("optoin3", "zzz")
    )
    assert "did you mean option3?" in near
    for line in (near, far):
        assert "nmrun help thing lists all" in line
        assert sum(name in line.replace(",", " ").split() for name in many) <= 8
    assert "there are a, b" in registry.no_such("thing", "zzz", ["a", "b"])
