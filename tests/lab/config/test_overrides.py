"""Ratios by layer: every way to write them on the command line and in a file, and the line for what
cannot be read.
"""

from __future__ import annotations

import shlex

import pytest
import torch
from runs import mistakes, result_of
from safetensors.torch import load_file

from nmrun.lab.config import precheck, schema
from nmrun.lab.config.composition import Cache, composed, composing

COMPOSED: Cache = {}  # as the sweeps of one command line share them

ACCEPTED = {  # a line as it stands in a shell, and what is meant
    "'sparsity.overrides={inner.1: 1:8}'": {"inner.1": "1:8"},
    "'sparsity.overrides={inner.1: 2:8, head: dense}'": {"inner.1": "2:8", "head": "dense"},
    "'sparsity.overrides={inner.*: \"1:8\"}'": {"inner.*": "1:8"},
    "\"sparsity.overrides={layer3.*: '1:8'}\"": {"layer3.*": "1:8"},
    r"'sparsity.overrides={layer\[34\].*: 1:8}'": {"layer[34].*": "1:8"},
    r"'sparsity.overrides={layer\(3|4\).\{1\,9\}: 1:8}'": {"layer(3|4).{1,9}": "1:8"},
    "'sparsity.overrides={0: 1:8}'": {"0": "1:8"},
    "+sparsity.overrides.head=1:8": {"head": "1:8"},
    "sparsity.overrides=null": None,
    "'sparsity.overrides={}'": None,
}
PLEA = "all of it in quotes"
REFUSED = {  # what Hydra cannot read, or can be read and means nothing
    '\'sparsity.overrides={"layer3.*": "1:8"}\'': PLEA,
    'sparsity.overrides={"layer3.*": "1:8"}': PLEA,  # the shell takes the quotes and cuts it
    "'sparsity.overrides={layer[34].*: 1:8}'": PLEA,
    "'sparsity.overrides={layer3.*: 1:8'": PLEA,
    "'sparsity.overrides={layer3=1:8}'": PLEA,
    "'sparsity.overrides={[a: 1:8, b: 9.8, c: 2:8}'": PLEA,
    "'sparsity.overrides=\"{inner.1: 1:8}\"'": "as in 'sparsity.overrides={inner.1: 1:8, head: dense}'",
    "sparsity.overrides=inner.1:1:8": "as in 'sparsity.overrides={inner.1: 1:8, head: dense}'",
    "+sparsity.overrides.inner.1=1:8": "as in 'sparsity.overrides={inner.1: 1:8, head: dense}'",
    "sparsity.overrides.inner.1=1:8": "'sparsity.overrides={inner.1: 1:8}'",
    "'+sparsity.overrides={inner.1: 1:8}'": "write it without +",
}


def checked(*words: str) -> schema.Config:
    assert mistakes(list(words), cache=COMPOSED) == []
    with composing():
        return schema.check(composed(words, COMPOSED))


@pytest.mark.parametrize("line", ACCEPTED)
def test_what_is_accepted_means_what_it_says(line):
    assert checked(*shlex.split(line)).sparsity.overrides == ACCEPTED[line]


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_read_gets_the_rule(line):
    (problem,) = mistakes(shlex.split(line), cache=COMPOSED)
    assert REFUSED[line] in problem
    assert "\n" not in problem


def test_the_rest_of_the_line_is_read_all_the_same():
    for ratios in ('{"layer3.*": "1:8"}', "{layer3.*: 1:8"):
        problems = mistakes(shlex.split(f"sparsity.overrides={ratios} recipe=stpe seed=-1"))
        assert [line.partition("=")[0] for line in sorted(problems)] == [
            "recipe",
            "seed",
            "sparsity.overrides",
        ]


def test_a_sweep_over_ratios_by_layer():
    words = ["sparsity.overrides={inner.0: 1:8},{inner.1: 1:8},null"]
    configs = [job.config for job in precheck.read([words], multirun=True).jobs]
    expected = [{"inner.0": "1:8"}, {"inner.1": "1:8"}, None]
    assert [config.sparsity.overrides for config in configs] == expected


@pytest.mark.slow
def test_a_file_can_say_them_and_the_weights_follow(nmrun_cli, tmp_path):
    """The first expression that fits counts, and more than model.exclude; a ratio in a file needs
    quotes.
    """
    (tmp_path / "mine" / "debug").mkdir(parents=True)
    file = tmp_path / "mine" / "debug" / "mixed.yaml"
    text = 'sparsity:\n  overrides: {{"inner\\\\.1": {}, "inner.*": "2:8", head: "1:4"}}\n'
    begin = "# @package _global_\ntrainer: {epochs: 1, limit_batches: 2}\n"
    file.write_text(begin + text.format("1:8"))  # YAML reads 1:8 as 68
    line = "--config-dir mine debug=mixed recipe=ste sparsity=4:8 track=local output_dir=out"
    words = line.split()
    refused = nmrun_cli(*words)
    assert refused.returncode == 2
    assert "'sparsity.overrides={inner.1: 1:8, head: dense}'" in refused.stderr

    file.write_text(begin + text.format('"1:8"'))
    process = nmrun_cli(*words)
    assert process.returncode == 0, process.stderr
    (folder,) = [path.parent for path in tmp_path.rglob("result.json")]
    layers = result_of(folder)["sparsity"]["layers"]
    assert {layer["name"]: layer["pattern"] for layer in layers} == {
        "inner.0.weight": "2:8", "inner.1.weight": "1:8", "head.weight": "1:4"
    }  # fmt: skip
    weights = load_file(folder / "model.safetensors")
    for name, n, m in (("inner.0.weight", 2, 8), ("inner.1.weight", 1, 8), ("head.weight", 1, 4)):
        along_inputs = weights[name].movedim(1, -1).reshape(-1, m)
        assert torch.equal((along_inputs != 0).sum(1), torch.full((len(along_inputs),), n))
    assert torch.all(weights["stem.weight"] != 0)
