"""The small convolutional net, against its layers one by one."""

import pytest
import torch
from torch.nn.functional import batch_norm, conv2d, linear, max_pool2d

from nmrun.lab.models.images import SmallConvNetwork


@pytest.mark.parametrize("normed", [False, True])
def test_its_output_is_that_of_its_layers(normed):
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
