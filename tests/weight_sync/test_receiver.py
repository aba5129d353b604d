"""Weights that have come to another node lie there as they lie with the trainer."""

import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from skyasync.weight_sync.receiver import Receiver

from skyasync.weight_sync.delta import ChangedWeights, KeptWeights
from skyasync.weight_sync.tensors import specs_of
from skyasync.weight_sync.transfers.file import write_weights
from skyasync.weight_sync.transfers.shared_memory import BufferReader, BufferWriter
from skyasync.weight_sync.update import WeightSyncError
from skyasync.weight_sync.verify.digests import digests_of


def many(seed):
    draw = torch.Generator().manual_seed(seed)
    return {"l": torch.randn(70, 50, generator=draw), "h": torch.randn(33, generator=draw).bfloat16(),
            "one": torch.tensor(float(seed)), "none": torch.zeros(0, 3)}  # fmt: skip


def lend(lender, weights):
    return lender.write({name: (t.dtype, tuple(t.shape)) for name, t in weights.items()}, weights.items())


def carried(receiver, info, *, piece=1000, damage=lambda data: None, lose=0):
    with open(info["path"], "rb") as file:
        data = np.frombuffer(file.read(), np.uint8).copy()
    damage(data)
    receiver.begin(len(data), info.get("kinds"))
    for first in reversed(range(0, len(data) - lose, piece)):
        receiver.take(first, data[first : first + piece])
    return receiver.end(info.get("digests", {}))


def same(found, weights):
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


def test_what_was_read_there_stays_as_it_is_until_two_more_have_come():
    lender, receiver, borrower, infos = BufferWriter(), Receiver(computed_on=True), BufferReader(), []
    for seed in range(5):
        before = borrower.read(infos[-1]) if infos else {}
        sent = lend(lender, many(seed))
        infos.append(carried(receiver, sent))
        assert not before or same(before, many(seed - 1)), "engines compute on it while the next come"
        assert infos[-1]["path"] != sent["path"] and infos[-1]["digests"] == digests_of(many(seed))
        assert same(borrower.read(infos[-1]), many(seed))
        lender.settle(sent["path"])
        receiver.settle(infos[-1]["path"])
    assert len({info["path"] for info in infos}) == 2
    assert same(BufferReader().read(infos[-1]), many(4)), "one that comes late"


def test_engines_that_only_read_share_one_buffer():
    lender, receiver = BufferWriter(computed_on=False), Receiver(computed_on=False)
    infos = []
    for seed in range(3):
        infos.append(carried(receiver, lend(lender, many(seed))))
        receiver.settle(infos[-1]["path"])
    assert len({info["path"] for info in infos}) == 1 and same(BufferReader().read(infos[-1]), many(2))


def test_a_bit_that_flips_on_the_way_is_named():
    lender, receiver = BufferWriter(), Receiver(computed_on=True)

    def damage(data):
        data[100] ^= 1

    with pytest.raises(WeightSyncError, match=r"shared memory holds other weights than the trainer sent in l$"):
        carried(receiver, lend(lender, many(0)), damage=damage)
    assert same(BufferReader().read(carried(receiver, lend(lender, many(1)))), many(1)), (
        "the next come into the same room"
    )


def test_bytes_that_have_not_come_are_counted():
    sent = lend(lender := BufferWriter(), many(0))
    with pytest.raises(WeightSyncError, match=r"weight sync: \d+ bytes are missing"):
        carried(Receiver(computed_on=True), sent, lose=1000)
    assert lender


def test_a_file_is_there_until_its_hand_over_ends_or_the_next_one_comes():
    receiver = Receiver(computed_on=True)
    files = [write_weights(many(seed)) for seed in range(3)]
    try:
        first, second = (carried(receiver, {"path": file})["path"] for file in files[:2])
        assert first == second or not os.path.exists(first)
        assert same(load_file(second), many(1))
        receiver.settle("of another")
        assert os.path.exists(second)
        receiver.settle(second)
        assert not os.path.exists(second)
        assert same(load_file(carried(receiver, {"path": files[2]})["path"]), many(2))
    finally:
        for file in files:
            os.unlink(file)


def test_files_of_changes_are_put_into_what_was_carried_before():
    changed, kept, receiver, weights = ChangedWeights(), KeptWeights(), Receiver(computed_on=True), many(0)
    for step in range(3):
        weights["l"][0, step] += 1
        sent = changed.publish(specs_of(weights), weights.items())
        try:
            found, digests = kept.read(carried(receiver, {"path": sent.path})["path"])
        finally:
            os.unlink(sent.path)
        assert bool(sent.base) == (step > 0), "the first is of all weights"
        assert same(found, weights) and digests == digests_of(weights)
