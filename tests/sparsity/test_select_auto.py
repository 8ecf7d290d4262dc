"""``exclude="auto"``: the first layer and the heads, in the conventions of several libraries."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from torch import nn

from nmrun import Pattern
from nmrun.sparsity.select import select

FIRST, HEAD = "first layer (exclude=auto)", "head (exclude=auto)"


def auto(model: nn.Module, exclude: Any = "auto", **options: Any) -> dict[str, str]:
    return {d.name: d.reason for d in select(model, Pattern(2, 4), exclude=exclude, **options)[1]}


def chain(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def test_not_by_default():
    assert auto(chain(stem=nn.Linear(8, 8), body=body(), fc=nn.Linear(8, 8)), exclude=()) == {}


@pytest.mark.parametrize(
    "head",
    ["fc", "head", "heads", "classifier", "lm_head", "score", "qa_outputs", "cls", "head_dist"],
)
def test_a_head_is_known_by_its_name_among_the_children(head):
    model = nn.ModuleDict({"stem": nn.Conv2d(8, 8, 3), head: nn.Linear(8, 8), "body": body()})
    assert auto(model) == {"stem.weight": FIRST, f"{head}.weight": HEAD}


def test_a_unet_writes_by_its_last_convolution():
    sizes = {"conv_in": 4, "middle": 16, "conv_out": 16}
    model = chain(**{name: nn.Conv2d(inputs, 16, 3) for name, inputs in sizes.items()})
    assert auto(model) == {"conv_in.weight": FIRST, "conv_out.weight": HEAD}


def test_the_last_layer_of_a_head_counts():
    model = chain(stem=nn.Linear(8, 8), classifier=body())
    assert auto(model) == {"stem.weight": FIRST, "classifier.2.weight": HEAD}
    heads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    several = nn.ModuleDict({"stem": nn.Linear(8, 8), "lm_heads": heads})
    both = dict.fromkeys(("lm_heads.0.weight", "lm_heads.1.weight"), HEAD)
    assert auto(several) == {"stem.weight": FIRST, **both}


def test_both_projections_of_a_pair_of_towers():
    towers = {"text_model": body(), "vision_model": body()}
    ends = {f"{kind}_projection": nn.Linear(8, 8) for kind in ("visual", "text")}
    dense = dict.fromkeys(("visual_projection.weight", "text_projection.weight"), HEAD)
    assert auto(nn.ModuleDict({**towers, **ends})) == {"text_model.0.weight": FIRST, **dense}


def test_the_heads_of_a_detector():
    predictor = nn.ModuleDict({"cls_score": nn.Linear(8, 4), "bbox_pred": nn.Linear(8, 16)})
    regions = nn.ModuleDict({"box": nn.Linear(8, 8), "predictor": predictor})
    model = nn.ModuleDict({"backbone": body(), "roi": regions})
    heads = ["roi.predictor.cls_score.weight", "roi.predictor.bbox_pred.weight"]
    assert auto(model) == {"backbone.0.weight": FIRST, **dict.fromkeys(heads, HEAD)}


def test_without_a_name_the_last_layer_is_the_head_if_it_is_linear():
    assert auto(body()) == {"0.weight": FIRST, "2.weight": HEAD}
    assert auto(nn.Sequential(nn.Linear(8, 8), nn.Conv2d(8, 8, 1))) == {"0.weight": FIRST}
    # a name inside a block says nothing
    inner = nn.ModuleDict({"fc": nn.Linear(8, 8), "out": nn.Linear(8, 8)})
    model = chain(stem=nn.Linear(8, 8), block=inner)
    assert auto(model) == {"stem.weight": FIRST, "block.out.weight": HEAD}
    assert auto(nn.Linear(8, 8)) == {"weight": FIRST}


def test_after_an_embedding_nothing_more_reads_the_input():
    model = chain(tokens=nn.Embedding(8, 8), body=body(), head=nn.Linear(8, 8))
    assert auto(model) == {"tokens.weight": "an embedding", "head.weight": HEAD}
    model.head.weight = model.tokens.weight
    assert auto(model) == {"tokens.weight": "an embedding", "head.weight": "tied to tokens.weight"}


def test_of_a_recurrent_layer_only_what_reads_the_input():
    model = chain(lstm=nn.LSTM(8, 8, bidirectional=True), fc=nn.Linear(16, 8))
    first = dict.fromkeys(("lstm.weight_ih_l0", "lstm.weight_ih_l0_reverse"), FIRST)
    assert auto(model) == {**first, "fc.weight": HEAD}


def test_a_first_layer_that_is_computed_is_still_the_first():
    stem = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    by_name = auto(chain(stem=stem, body=body(), fc=nn.Linear(8, 8)))
    assert {name for name, reason in by_name.items() if "auto" in reason} == {"fc.weight"}


def test_the_model_may_say_it_itself():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.out, self.body = nn.Linear(8, 8), nn.Linear(8, 8), body()

    class Timm(Named):
        def get_classifier(self):
            return self.out

    class Distilled(Named):
        def get_classifier(self):
            return self.out, self.body

    class Headless(Named):
        def get_classifier(self):
            return nn.Identity()

    class HuggingFace(Named):
        def get_output_embeddings(self):
            return self.out

    class Base(Named):
        @property
        def base_model(self):
            return self

    both = {"stem.weight": FIRST, "out.weight": HEAD}
    assert auto(Timm()) == auto(HuggingFace()) == both
    assert auto(Distilled()) == {**both, "body.2.weight": HEAD}
    assert auto(Headless()) == auto(Base()) == {"stem.weight": FIRST}
    wrapped = nn.Module()
    wrapped.module = HuggingFace()
    assert auto(wrapped) == {f"module.{name}": reason for name, reason in both.items()}


def test_wrapped_models_have_the_same_ends():
    model = nn.ModuleDict({"stem": nn.Linear(8, 8), "fc": nn.Linear(8, 8), "body": body()})
    wrapped = chain(module=chain(_orig_mod=model))
    ends = {"stem": FIRST, "fc": HEAD}
    assert auto(wrapped) == {f"module._orig_mod.{name}.weight": ends[name] for name in ends}


def test_together_with_expressions_and_overrides():
    model = chain(stem=nn.Linear(8, 8), body=body(), fc=nn.Linear(8, 8))
    both = {"stem.weight": FIRST, "fc.weight": HEAD}
    assert auto(model, ["auto", r"body\.0"]) == {**both, "body.0.weight": "excluded"}
    assert auto(model, ["fc", "auto"]) == {"stem.weight": FIRST, "fc.weight": "excluded"}
    assert auto(model, overrides={"fc": "1:4"}) == {"stem.weight": FIRST}
    assert auto(model, include="stem|fc")["body.0.weight"] == "not in include"
    named = chain(auto=nn.Linear(8, 8), out=nn.Linear(8, 8))
    assert auto(named, "(auto)") == {"auto.weight": "excluded"}
