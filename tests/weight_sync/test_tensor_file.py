"""A safetensors file that is written tensor by tensor."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from skyasync.weight_sync.tensors import digests_of, specs_of
from skyasync.weight_sync.transfers.file import _DTYPE_NAMES, writing

MIXED = {
    "odd": torch.arange(5).bfloat16(),
    "one": torch.tensor(1.5),
    "none": torch.zeros(0, 3),
    "bits": torch.tensor([True, False]),
    "turned": torch.arange(6.0).view(2, 3).T,
    "long": torch.randn(1 << 10, 300),
}


def test_it_holds_what_was_put_in_any_order_with_digests_that_were_known_last(tmp_path):
    with writing(tmp_path / "file", specs_of(MIXED)) as file:
        for name in reversed(MIXED):
            file.put(name, MIXED[name])
    found = load_file(tmp_path / "file")
    assert found.keys() == MIXED.keys()
    assert all(torch.equal(found[n], MIXED[n]) and found[n].dtype == MIXED[n].dtype for n in MIXED)
    with safe_open(tmp_path / "file", framework="pt") as opened:
        assert opened.metadata() == digests_of(MIXED)


@pytest.mark.parametrize("dtype", list(_DTYPE_NAMES))
def test_every_dtype_arrives_as_it_is(tmp_path, dtype):
    sent = torch.arange(4).to(dtype)
    with writing(tmp_path / "file", {"a": (dtype, (4,))}, {}) as file:
        file.put("a", sent)
    assert torch.equal(load_file(tmp_path / "file")["a"].view(torch.uint8), sent.view(torch.uint8))


def test_numbers_are_converted_to_the_dtype_that_was_said(tmp_path):
    sent = torch.randn(700, 400)
    with writing(tmp_path / "file", {"a": (torch.bfloat16, (700, 400))}, {"said": "this"}) as file:
        file.put("a", sent)
    assert torch.equal(load_file(tmp_path / "file")["a"], sent.bfloat16())


def test_what_is_not_as_it_was_said_is_an_error(tmp_path):
    specs = {"a": (torch.float32, (3,))}
    refused = pytest.raises(ValueError, match=r"a has the shape \[2\]; expected \[3\]")
    with refused, writing(tmp_path / "file", specs) as file:
        file.put("a", torch.zeros(2))
    with (
        pytest.raises(ValueError, match=r"tensors are missing: \['a'\]"),
        writing(tmp_path / "file", specs),
    ):
        pass
