"""Deltas of weights are applied bitwise exactly, rejected if they do not fit, and sent only if smaller."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.weight_sync.delta import PIECE, Changes, DeltaDecoder, DeltaEncoder, changes, put
from skyasync.weight_sync.tensors import digest, specs_of
from skyasync.weight_sync.transfers.file import (
    read_file,
    read_metadata,
    read_weights,
    remove_weights,
    write_encoded,
)
from skyasync.weight_sync.update import (
    CurrentContent,
    WeightMismatchError,
    WeightSyncError,
    WeightUpdate,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.bool]
SHARES = [0.0, 0.001, 0.06, 0.07, 0.5, 0.95, 1.0]
SIZES = [0, 1, 7, PIECE - 1, PIECE, PIECE + 9, 3 * PIECE + 5]


def flipped(tensor, share, seed):
    """The tensor with flipped lowest bits in a share of its elements, in runs of different density."""
    generator = torch.Generator().manual_seed(seed)
    new = tensor.clone()
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    chosen = torch.rand(new.numel(), generator=generator) < share
    flat = new.view(-1).view(width)
    flat[chosen] ^= 1
    return new, int(chosen.sum())


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from(SIZES),
    st.sampled_from(SHARES),
    st.integers(0, 99),
)
def test_what_changed_is_put_back_bit_for_bit(dtype, size, share, seed):
    old = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    new, count = flipped(old, share, seed)
    copy, kept = old.clone(), old.clone()
    sent, changed = changes(kept, new)
    assert changed == count and digest(kept) == digest(new)
    if sent is None:
        assert digest(old) == digest(new)
    else:
        put(copy, sent)
        assert digest(copy) == digest(new)
        assert sent.values.nbytes + sent.where.nbytes <= new.nbytes


def test_nans_and_signs_of_zeros_are_elements_like_others():
    old, new = (
        torch.tensor([0.0, float("nan"), 1.0, -0.0]),
        torch.tensor([-0.0, float("nan"), 1.0, 0.0]),
    )
    sent, changed = changes(old.clone(), new)
    put(old, sent)
    assert changed == 2 and digest(old) == digest(new)


def test_few_changes_take_four_bytes_each_and_many_an_eighth_of_a_byte_more():
    old = torch.zeros(4 * PIECE, dtype=torch.bfloat16)
    for share in (0.01, 0.2):
        new, count = flipped(old, share, 0)
        sent, _ = changes(old.clone(), new)
        assert sum(part.nbytes for part in sent) == pytest.approx(
            16 + 2 * count + min(2 * count, old.numel() / 8), rel=0.01
        )


@pytest.mark.parametrize("spoil", ["counts", "where", "values"])
def test_changes_that_are_cut_short_are_refused(spoil):
    old = torch.zeros(2 * PIECE)
    sent, _ = changes(old.clone(), flipped(old, 0.01, 0)[0])
    with pytest.raises(WeightSyncError, match="cut short"):
        put(old, Changes(**(sent._asdict() | {spoil: getattr(sent, spoil)[:-1]})))


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": torch.randn(300, 400, generator=generator).bfloat16(),
        "b": torch.randn(7, generator=generator),
        "never": torch.arange(5),
    }


def publish(sender, weights, folder):
    return written(sender.encode(specs_of(weights), weights.items()), folder)


def written(encoded, folder):
    """A delta as engines get it, as a file, and its description."""
    return write_encoded(encoded, str(folder)), encoded


def read(engine, path):
    found, digests, about = read_file(path)
    return engine.decode(found, digests, about), digests


def step(weights, share, seed=1):
    return {n: flipped(t, share, seed)[0] if n != "never" else t for n, t in weights.items()}


def test_both_ends_hold_the_same_after_every_step(weights, tmp_path):
    sender, engine = DeltaEncoder(), DeltaDecoder()
    seen = []
    for seed, share in enumerate([0, 0.01, 0.0, 0.2, 0.9, 0.01]):
        weights = step(weights, share, seed)
        path, sent = publish(sender, weights, tmp_path)
        found, digests = read(engine, path)
        remove_weights(path)
        assert digests == {name: digest(tensor) for name, tensor in weights.items()}
        assert {name: digest(tensor) for name, tensor in found.items()} == digests
        seen.append((bool(sent.header.base), sent.metrics["sync/fallbacks"]))
        if sent.header.base:
            assert sent.metrics["sync/share_changed"] == pytest.approx(share, abs=0.01)
    assert seen == [(False, 0), (True, 0), (True, 0), (True, 0), (False, 1), (True, 1)]


def test_an_engine_that_holds_something_else_refuses_changes_and_takes_the_whole(weights, tmp_path):
    sender, engine, late = DeltaEncoder(), DeltaDecoder(), DeltaDecoder()
    read(engine, publish(sender, weights, tmp_path)[0])
    delta, changed = publish(sender, step(weights, 0.01), tmp_path)
    with pytest.raises(WeightMismatchError):
        read(late, delta)
    path, whole = written(sender.whole(fell_back=True), tmp_path)
    assert read(late, path)[1] == read(engine, delta)[1]
    assert whole.content == changed.content and whole.metrics["sync/fallbacks"] == 1


def test_a_file_says_what_it_is_of_and_its_digests_are_of_the_weights(weights, tmp_path):
    sender = DeltaEncoder()
    (whole_path, whole), (delta, changed) = (
        publish(sender, each, tmp_path) for each in (weights, step(weights, 0.01))
    )
    assert read_metadata(whole_path)[1].keep and not read_metadata(whole_path)[1].base
    assert read_metadata(delta)[1].base == whole.content == changed.header.base
    assert read_metadata(delta)[0].keys() == weights.keys() == read_weights(whole_path).keys()


def test_an_engine_knows_what_it_holds_only_after_an_update():
    held, whole = CurrentContent(), WeightUpdate(1, "shared_memory", {}, content="x")
    changed = WeightUpdate(2, "shared_memory", {}, content="y", base="x")
    with pytest.raises(WeightMismatchError, match="received none"):
        held.begin(changed)
    held.begin(whole)
    held.complete(whole)
    held.begin(changed)
    with pytest.raises(WeightMismatchError):
        held.begin(changed)
