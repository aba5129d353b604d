"""Weights in shared memory that other processes compute on."""

import faulthandler
import os
import signal

import pytest
import torch

from skyasync.weight_sync.tensors import digests_of
from skyasync.weight_sync.transfers.shared_memory import BufferReader, BufferWriter
from skyasync.weight_sync.update import WeightSyncError


def many(seed):
    draw = torch.Generator().manual_seed(seed)
    large = torch.randn(700, 500, generator=draw)  # of several chunks, the last one incomplete
    return {"l": large, "h": torch.randn(33, generator=draw).bfloat16(), "one": torch.tensor(float(seed)),
            "n": torch.arange(seed, seed + 5), "none": torch.zeros(0, 3)}  # fmt: skip


def specs(weights, **other):
    return {
        name: (other.get(name, tensor.dtype), tuple(tensor.shape))
        for name, tensor in weights.items()
    }


def published(writer, weights, **other):
    info = writer.write(specs(weights, **other), weights.items())
    writer.prove()
    writer.release(info["path"])
    return info


def same(found, weights):
    return found.keys() == weights.keys() and all(
        torch.equal(found[name], weights[name]) for name in weights
    )


def test_what_was_read_stays_as_it_is_until_two_more_have_been_written():
    writer, reader, infos = BufferWriter(), BufferReader(), []
    for seed in range(6):
        before = reader.read(infos[-1]) if infos else {}
        infos.append(published(writer, many(seed)))
        assert not before or same(before, many(seed - 1))
        found = reader.read(infos[-1])
        assert same(found, many(seed)) and infos[-1]["digests"] == digests_of(many(seed))
        assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values())
    assert len({info["path"] for info in infos}) == 2
    assert same(BufferReader().read(infos[-1]), many(5)), "a late-joining engine"


def test_a_buffer_without_readers_is_overwritten():
    writer = BufferWriter()
    published(writer, many(0))
    lost, sent = (writer.write(specs(many(seed)), many(seed).items()) for seed in (1, 2))
    assert lost["path"] == sent["path"]
    assert same(BufferReader().read(sent), many(2))


def test_dtypes_are_converted_on_the_way():
    weights, writer = many(3), BufferWriter()
    found = BufferReader().read(published(writer, weights, l=torch.bfloat16))
    assert same(found, {**weights, "l": weights["l"].bfloat16()})


def test_other_shapes_get_other_memory_and_what_was_read_stays():
    writer, reader = BufferWriter(), BufferReader()
    first = reader.read(published(writer, many(0)))
    for seed in range(3):
        other = {"x": torch.full((2, 3), float(seed))}
        assert same(reader.read(published(writer, other)), other)
        assert same(first, many(0))


def test_it_outlives_its_writer_and_is_gone_for_others():
    writer, reader = BufferWriter(), BufferReader()
    info = published(writer, many(0))
    found = reader.read(info)
    del writer
    assert same(found, many(0))
    with pytest.raises(FileNotFoundError, match=r"generator\.weight_sync_backend=nccl"):
        BufferReader().read(info)


def test_a_path_that_leads_to_something_else_by_now_is_refused(tmp_path):
    info = published(writer := BufferWriter(), many(0))
    assert writer
    (tmp_path / "other").touch()
    with pytest.raises(FileNotFoundError):
        BufferReader().read({**info, "path": str(tmp_path / "other")})


def test_another_process_finds_it_and_cannot_write_to_it():
    writer = BufferWriter()
    info = published(writer, {"a": torch.ones(4)})
    if (child := os.fork()) == 0:
        faulthandler.disable()
        found = BufferReader().read(info)["a"]
        if found.tolist() == [1.0] * 4:
            found[0] = 0.0
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV, (
        "a stray write must not reach the other engines"
    )
    assert same(BufferReader().read(info), {"a": torch.ones(4)})


@pytest.mark.parametrize("fault", ["bit", "swap", "old"])
def test_what_does_not_lie_there_as_it_was_sent_is_named(fault):
    writer = BufferWriter()
    for seed in range(3):
        info = writer.write(specs(many(seed)), many(seed).items())
        tensors = writer._back.tensors
        if seed == 2:
            match fault:
                case "bit":
                    tensors["l"].view(torch.int32)[699, 499] ^= 1
                case "swap":
                    tensors["l"][[0, 1]] = tensors["l"][[1, 0]]
                case "old":
                    tensors["l"].copy_(many(0)["l"])
            with pytest.raises(
                WeightSyncError,
                match=r"shared memory holds other weights than the trainer sent in l$",
            ):
                writer.prove()
        writer.release(info["path"])
