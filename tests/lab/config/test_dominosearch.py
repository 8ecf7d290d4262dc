"""The experiment with DominoSearch's ratios has, layer by layer, those that its authors publish."""

from __future__ import annotations

import re
from dataclasses import replace

from torch import nn

from nmrun.lab.config import experiment, precheck
from nmrun.lab.train.build import build

# inputs-outputs-kernel:N of NM-sparsity/DominoSearch, schemes/resnet50_M16_0.80.txt, in its order
PUBLISHED = """
3-64-7:16 64-64-1:16 64-64-3:4 64-256-1:8 64-256-1:8 256-64-1:8 64-64-3:4 64-256-1:8 256-64-1:8
64-64-3:4 64-256-1:8 256-128-1:8 128-128-3:2 128-512-1:8 256-512-1:4 512-128-1:8 128-128-3:4
128-512-1:8 512-128-1:8 128-128-3:4 128-512-1:8 512-128-1:8 128-128-3:2 128-512-1:8 512-256-1:4
256-256-3:2 256-1024-1:4 512-1024-1:4 1024-256-1:4 256-256-3:2 256-1024-1:4 1024-256-1:4
256-256-3:2 256-1024-1:4 1024-256-1:4 256-256-3:2 256-1024-1:4 1024-256-1:4 256-256-3:2
256-1024-1:4 1024-256-1:4 256-256-3:2 256-1024-1:4 1024-512-1:4 512-512-3:2 512-2048-1:4
1024-2048-1:2 2048-512-1:4 512-512-3:2 512-2048-1:4 2048-512-1:4 512-512-3:2 512-2048-1:4
2048-1000-1:4
"""


def test_each_layer_has_its_published_ratio():
    config = precheck.configs(experiment.load("step_dominosearch"), "smoke")[1]
    assert config.recipe.name == "sr_ste"
    trainer = {**config.plain["trainer"], "acceleration": "off"}  # no products are timed
    parts = build(replace(config, plain={**config.plain, "trainer": trainer}))
    ratios = {weight.name: weight.pattern for weight in parts.handle.sparse}
    layers = [(name, m) for name, m in parts.model.named_modules() if _is_layer(m)]
    published_ratios = PUBLISHED.split()
    assert len(layers) == len(published_ratios)
    nonzeros = whole = 0
    for (name, module), published in zip(layers, published_ratios, strict=True):
        inputs, outputs, kernel, n = map(int, re.split("[-:]", published))
        shape = tuple(module.weight.shape)
        if name == "conv1":  # the digits are grey
            assert n == 16
        elif name == "fc":  # and of ten classes
            assert (shape[1], n) == (inputs, 4)
        else:
            assert shape == (outputs, inputs, kernel, kernel), name
        pattern = ratios.get(f"{name}.weight")
        assert (pattern.n if pattern else 16) == n, name
        assert pattern is None or pattern.m == 16
        nonzeros, whole = (
            nonzeros + inputs * outputs * kernel**2 * n / 16,
            whole + inputs * outputs * kernel**2,
        )
    assert 0.19 < nonzeros / whole < 0.2


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv2d, nn.Linear))
