"""Linear layers with oneDNN: equal results up to rounding, for the current weights."""

import pytest
import torch
from torch import nn

from skyasync.inference.backends.transformers.model import multiply_by_onednn

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch has been built without oneDNN"
)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(3,), (2, 1), (4, 7)])
def test_a_layer_computes_what_it_did(rows: tuple[int, ...], bias: bool) -> None:
    layer, states = nn.Linear(24, 10, bias=bias).requires_grad_(False), torch.randn(*rows, 24)
    expected = layer(states)
    multiply_by_onednn(layer)
    assert torch.allclose(layer(states), expected, atol=1e-6)
    layer.weight.data = torch.zeros(10, 24)
    assert torch.equal(
        layer(states), layer.bias.expand(*rows, 10) if bias else torch.zeros(*rows, 10)
    )


def test_what_is_no_float32_layer_is_left_as_it_is() -> None:
    layers = nn.ModuleList(
        [nn.Linear(2, 2, dtype=torch.bfloat16), nn.Embedding(2, 2), nn.Bilinear(2, 2, 2)]
    )
    multiply_by_onednn(layers)
    assert not any("forward" in vars(layer) for layer in layers)


def test_a_row_does_not_depend_on_how_many_others_there_are() -> None:
    layer, states = nn.Linear(576, 192, bias=False).requires_grad_(False), torch.randn(64, 576)
    multiply_by_onednn(layer)
    whole = layer(states)
    assert all(torch.equal(layer(states[:n].contiguous()), whole[:n]) for n in range(4, 64))
