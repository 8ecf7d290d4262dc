"""Networks for images: the parameters of the papers, the layers that are sparse, and the sizes of
images they take.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from errors import one_line
from runs import config
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, linear, max_pool2d

from nmrun.errors import ConfigError
from nmrun.lab import models
from nmrun.lab.keys.options import CLASSES, defaults, find_builder, keys
from nmrun.lab.models.images import ImageAttention, PaddedShortcut, SmallConvNetwork
from nmrun.lab.train import build
from nmrun.patterns import Pattern
from nmrun.sparsity.select import candidates, select

# parameters with 1,000 classes, as published by torchvision and timm, and sparse layers of all that
# are eligible at 2:4
IMAGENET = {
    "resnet18": (11_689_512, 19),
    "resnet50": (25_557_032, 52),
    "densenet121": (7_978_856, 119),
    "vgg16_bn": (138_365_992, 14),
    "mobilenet_v2": (3_504_872, 34),
    "vit_tiny": (5_717_416, 24),
    "vit_small": (22_050_664, 24),
    "deit_tiny": (5_717_416, 24),
    "swin_v2_t": (28_351_570, 24),
}


def options(name: str, **changed: Any) -> dict[str, Any]:
    return {"name": name, **defaults(keys("model", name)), **changed}


def built(name: str, side: int, classes: int, channels: int = 3, **changed: Any) -> nn.Module:
    with torch.device("meta"):
        return models.build(
            options(name, **changed), {"shape": (channels, side, side), "classes": classes}
        )


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def chosen(model: nn.Module, settings: dict[str, Any], pattern: str = "2:4") -> tuple[Any, Any]:
    """The weights that are sparse by default, and those that are not."""
    return select(model, Pattern.parse(pattern), settings["include"], settings["exclude"])


def sparse_layers(model: nn.Module, name: str) -> int:
    """How many there are by default; the first layer and the last one are none."""
    sparse, dense = chosen(model, options(name))
    first, *_, last = [candidate.name for candidate in candidates(model)]
    assert {first, last} <= {left.name for left in dense}
    return len(sparse)


@pytest.mark.slow
@pytest.mark.parametrize("name", IMAGENET)
def test_for_imagenet(name):
    model = built(name, 224, 1000)
    assert (parameters(model), sparse_layers(model, name)) == IMAGENET[name]
    assert model(torch.zeros(2, 3, 224, 224, device="meta")).shape == (2, 1000)


FAMILIES = "resnet20 resnet18 densenet121 vgg16_bn mobilenet_v2 vit_tiny swin_v2_t".split()  # noqa: SIM905


@pytest.mark.parametrize("side", [28, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FAMILIES)
def test_for_small_images(name, side):
    channels = 1 if side == 28 else 3
    if name == "vgg16_bn" and side == 28:
        with one_line(ConfigError, "five poolings leave nothing of 28 pixels"):
            built(name, side, 10, channels)
        return
    model = built(name, side, 10, channels)
    assert model(torch.zeros(2, channels, side, side, device="meta")).shape == (2, 10)
    assert sparse_layers(model, name) >= 12


@pytest.mark.parametrize("normed", [False, True])
def test_the_output_of_a_small_conv_is_that_of_its_layers(normed):
    model = SmallConvNetwork((3, 8, 8), 5, [4, 6, 8], batch_norm=normed)
    plain = SmallConvNetwork((3, 8, 8), 5, [4, 6, 8])
    if not normed:
        assert list(model.state_dict()) == list(plain.state_dict())
    x = torch.randn(7, 3, 8, 8)
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    y = x
    for number, name in enumerate(("stem", "inner.0", "inner.1")):
        y = conv2d(y, values[f"{name}.weight"], values[f"{name}.bias"], padding=1)
        if normed:
            y = batch_norm(y, None, None, training=True)  # scale 1 and shift 0 at first
        y = y.relu() if number == 0 else max_pool2d(y.relu(), 2)
    expected = linear(y.flatten(1), values["head.weight"], values["head.bias"])
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(("name", "million"), [("resnet20", 0.27), ("resnet32", 0.46)])
def test_resnets_of_cifar_by_the_table_of_the_paper(name, million):
    blocks = {"resnet20": 3, "resnet32": 5}[name]
    convolutions = [(3, 16)]
    for before, width in ((16, 16), (16, 32), (32, 64)):
        convolutions += [(before, width), (width, width)] + [(width, width)] * (2 * blocks - 2)
    by_hand = sum(9 * a * b + 2 * b for a, b in convolutions) + 64 * 10 + 10
    assert round(by_hand / 1e6, 2) == million
    model = built(name, 32, 10)
    assert parameters(model) == by_hand
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in model.modules()) == int(name[6:])


def test_the_shortcut_without_parameters_takes_every_second_pixel():
    x = torch.randn(2, 4, 6, 6)
    out = PaddedShortcut()(x)
    assert out.shape == (2, 8, 3, 3)
    assert torch.equal(out[:, 2:6], x[:, :, ::2, ::2])
    assert not out[:, :2].any()
    assert not out[:, 6:].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module", "small", "large"),
    [
        ("resnet18", "layer4", (4, 4), (1, 1)),
        ("swin_v2_t", "features.0", (16, 16), (8, 8)),  # (B, H, W, C)
    ],
)
def test_forms_differ_in_the_resolution_of_the_maps(name, module, small, large):
    for form, expected in (("auto", small), ("cifar", small), ("imagenet", large)):
        model, seen = built(name, 32, 10, form=form), list[torch.Size]()
        hook = lambda m, i, out, seen=seen: seen.append(out.shape)  # noqa: E731
        model.get_submodule(module).register_forward_hook(hook)
        model(torch.zeros(2, 3, 32, 32, device="meta"))
        assert seen[0][1:3] == expected if name == "swin_v2_t" else seen[0][2:] == expected
    assert parameters(built(name, 128, 10)) == parameters(built(name, 128, 10, form="imagenet"))


def test_depthwise_convolutions_cannot_be_sparse():
    model, settings = built("mobilenet_v2", 32, 10), options("mobilenet_v2")
    modules = dict(model.named_modules())
    depthwise = {
        f"{name}.weight" for name, m in modules.items() if isinstance(m, nn.Conv2d) and m.groups > 1
    }
    for pattern in ("2:4", "1:4", "1:16"):
        assert depthwise <= {left.name for left in chosen(model, settings, pattern)[1]}
    assert len(depthwise) == 17


def test_separate_projections_attend_as_the_fused_ones():
    torch.manual_seed(0)
    fused = nn.MultiheadAttention(24, 3, batch_first=True)
    nn.init.normal_(fused.in_proj_bias)
    x = torch.randn(2, 5, 24)
    expected, _ = fused(x, x, x, need_weights=False)
    out, nothing = ImageAttention(fused)(x, x, x, need_weights=False)
    assert torch.allclose(out, expected, atol=1e-6)
    assert nothing is None


def test_queries_and_keys_can_be_chosen(tmp_path):
    tiny = ("model=vit_tiny", "model.layers=2", "model.width=24", "recipe=sr_ste")
    for words, names in (
        ((r"model.include=['.*\.(query|key)']",), ["self_attention.query", "self_attention.key"]),
        ((), ["mlp.0", "mlp.3"]),
    ):
        sparse = build.build(config(tmp_path, *tiny, *words)).handle.sparse
        assert [weight.module_name.split(".", 3)[3] for weight in sparse] == names * 2


def test_stochastic_depth_leaves_out_whole_branches_and_more_of_later_layers():
    sizes = {"layers": 3, "heads": 1, "width": 8, "patch": 4}
    model = models.build(
        options("deit_tiny", **sizes, stochastic_depth=0.9), {"shape": (3, 8, 8), "classes": 2}
    )
    blocks: Any = model.encoder.layers
    x, unchanged = torch.randn(400, 5, 8), []
    model.train()
    for block in blocks:
        same: Tensor = (block(x) == x).flatten(1).all(1)  # both branches were left out
        unchanged.append(int(same.sum()))
    assert unchanged[0] == 0
    assert abs(unchanged[1] - 400 * 0.45**2) < 4 * 8.1
    assert abs(unchanged[2] - 400 * 0.9**2) < 4 * 7.9
    model.eval()
    assert not any((block(x) == x).flatten(1).all(1).any() for block in blocks)


def test_patches_that_do_not_divide():
    with pytest.raises(ConfigError, match=r"model\.patch=5: images of 32x32"):
        built("vit_tiny", 32, 10, patch=5)


@pytest.mark.parametrize("name", ["small_conv", "resnet18", "resnet20", "vit_tiny"])
def test_networks_for_images_take_no_features(name):
    with pytest.raises(ConfigError, match=r"has 30 features an item: model=mlp takes these"):
        models.build(options(name), {"shape": (30,), "classes": 2})
    models.build(options("mlp"), {"shape": (30,), "classes": 2})


@pytest.mark.parametrize(
    ("name", "first", "head"),
    [
        ("resnet10t", "conv1.0", "fc"),
        ("resnet50d", "conv1.0", "fc"),
        ("densenet121", "features.conv0", "classifier"),
        ("vgg11_bn", "features.0", "head.fc"),
        ("inception_v3", "Conv2d_1a_3x3.conv", "fc"),
    ],
)
def test_of_any_network_of_timm_the_first_layer_and_the_head_stay_dense(name, first, head):
    pytest.importorskip("timm")
    model = built("timm", 224, 10, name_in_timm=name)
    _, dense = chosen(model, options("timm"))
    excluded = {each.name for each in dense if "exclude" in each.reason}
    assert excluded == {f"{first}.weight", f"{head}.weight"}


def test_timm_networks():
    pytest.importorskip("timm")
    model = built("timm", 224, 1000, name_in_timm="vit_tiny_patch16_224")
    sparse, dense = chosen(model, options("timm"))
    left = "cls_token pos_embed patch_embed.proj.weight head.weight"
    assert [each.name for each in dense] == left.split()
    assert len(sparse) == 12 * 4
    small = built("timm", 32, 10, 1, name_in_timm="vit_tiny_patch16_224", options={"patch_size": 4})
    assert small(torch.zeros(2, 1, 32, 32, device="meta")).shape == (2, 10)
    convolutional = built("timm", 32, 10, name_in_timm="resnet18")
    assert parameters(convolutional) == 11_689_512 - 513 * 990
    with pytest.raises(ConfigError, match=r"model.name_in_timm=resnet1 .*Unknown model"):
        built("timm", 32, 10, name_in_timm="resnet1")
    with pytest.raises(ConfigError, match=r"with model.options=.*nonsense"):
        built("timm", 32, 10, name_in_timm="resnet18", options={"nonsense": 1})


def test_without_timm_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[timm\]'"):
        built("timm", 32, 10)


@pytest.mark.parametrize("group", ["model", "dataset"])
def test_every_model_and_data_set_has_its_builder(group):
    assert all(callable(find_builder(group, name)) for name in CLASSES[group])
    with pytest.raises(ConfigError, match=rf"{group}.name=none_such: no such {group}"):
        find_builder(group, "none_such")


@pytest.mark.parametrize("takes", ["shape, classes, width=8", "shape, classes, *, width=8, **more"])
def test_a_builder_of_one_s_own_may_have_defaults(takes, tmp_path, monkeypatch):
    (tmp_path / f"own_{len(takes)}.py").write_text(
        f"from torch import nn\n\n\ndef build({takes}):\n    return nn.Linear(shape[0], width)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    named = {"name": "own", "_target_": f"own_{len(takes)}.build"}
    inputs = {"shape": (3,), "classes": 2}
    assert models.build(named, inputs).out_features == 8
    assert models.build({**named, "width": 5}, inputs).out_features == 5
    with pytest.raises(ConfigError, match=r"made from shape, classes, .* data set has vocabulary"):
        models.build(named, {"vocabulary": 9})


@pytest.mark.slow
def test_pretrained_networks_keep_all_but_the_head(tmp_path, monkeypatch):
    """The weights lie where both libraries look first, and nothing is downloaded."""
    import torchvision

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    place = tmp_path / "hub" / "checkpoints"
    place.mkdir(parents=True)
    state = torchvision.models.resnet18().state_dict()
    torch.save(state, place / "resnet18-f37072fd.pth")
    inputs = {"shape": (3, 96, 96), "classes": 10}
    model = models.build(options("resnet18", pretrained=True), inputs)
    for name, tensor in model.state_dict().items():
        if name.startswith("fc."):
            assert tensor.shape[0] == 10
        else:
            assert torch.equal(tensor, state[name]), name
    refused = [({"form": "cifar"}, 3, 96), ({}, 1, 96), ({}, 3, 32)]
    for changed, channels, side in refused:
        with one_line(ConfigError, "are for coloured images and model.form=imagenet"):
            settings = options("resnet18", pretrained=True, **changed)
            models.build(settings, {"shape": (channels, side, side), "classes": 10})

    def no_network(*_: object, **__: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torch.hub.download_url_to_file", no_network)
    with one_line(
        ConfigError, r"mobilenet_v2 are not in .*, and their download failed: no network"
    ):
        models.build(options("mobilenet_v2", pretrained=True), inputs)


@pytest.mark.slow
def test_pretrained_networks_of_timm(tmp_path):
    timm = pytest.importorskip("timm")
    state = timm.create_model("resnet10t").state_dict()
    torch.save(state, tmp_path / "w.pth")
    overlay = {"pretrained_cfg_overlay": {"file": str(tmp_path / "w.pth")}}
    settings = options("timm", name_in_timm="resnet10t", options=overlay, pretrained=True)
    model = models.build(settings, {"shape": (3, 64, 64), "classes": 10})
    for name, tensor in model.state_dict().items():
        if not name.startswith("fc."):
            assert torch.equal(tensor, state[name]), name
