"""Different tensors have different digests, wherever the difference is."""

import pytest
import torch

from skyasync.weight_sync.tensors import digest, holds, refuse
from skyasync.weight_sync.update import WeightSyncError

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5, 7)])
def test_equal_tensors_have_equal_digests_whatever_their_strides(dtype, shape):
    tensor = torch.randn(shape).to(dtype)
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor.T.contiguous().T if tensor.dim() == 2 else tensor) == digest(tensor)


@pytest.mark.parametrize("bit", [0, 7, 31])
@pytest.mark.parametrize("element", [0, 500, 999])
def test_one_flipped_bit_shows_wherever_it_is(element, bit):
    tensor = torch.randn(1000)
    flipped = tensor.clone()
    flipped.view(torch.int32)[element] ^= 1 << bit if bit < 31 else -(1 << 31)
    assert digest(flipped) != digest(tensor)


def test_two_elements_or_rows_in_each_others_place_show():
    tensor = torch.randn(4, 6)
    assert digest(tensor[[1, 0, 2, 3]]) != digest(tensor)
    assert digest(tensor[:, [1, 0, 2, 3, 4, 5]]) != digest(tensor)


def test_a_holder_of_another_dtype_holds_what_was_sent_rounded():
    sent = torch.randn(10)
    assert holds(sent.clone(), sent, digest(sent))
    assert holds(sent.bfloat16(), sent, digest(sent))
    assert not holds(sent.bfloat16(), sent + 1, digest(sent))
    assert not holds((sent + 1).bfloat16(), sent, digest(sent))
    assert not holds(sent[:5], sent, digest(sent))


def test_an_error_names_a_few_tensors_and_counts_the_rest():
    refuse([], "the engine holds")
    with pytest.raises(
        WeightSyncError,
        match=r"the engine holds other weights than the trainer sent in a, b, c and 1 more",
    ):
        refuse(["a", "b", "c", "d"], "the engine holds")
