"""Weights by broadcast over TCP, as GPUs get them by NCCL: two real trainer ranks, real engines, real gloo groups."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.cuda._utils import _get_device_index

from skyasync.config.schema import Config
from skyasync.inference.backends.transformers.engine import TransformersEngine
from skyasync.inference.interface import EngineConfig
from skyasync.weight_sync.tensors import (
    TensorSpecs,
    bytes_of,
    chunks_of,
    pack,
    specs_of,
    to_message,
    unpack,
)
from skyasync.weight_sync.transfers import broadcast
from skyasync.weight_sync.transfers.broadcast import (
    BroadcastReader,
    BroadcastSender,
    BroadcastTransfer,
)
from skyasync.weight_sync.transfers.groups import interrupt, meet
from skyasync.weight_sync.update import (
    TransferInterruptedError,
    WeightsMovedError,
    WeightSyncError,
    WeightUpdate,
)
from skyasync.workers.policy import PolicyWorker
from tests.workers.conftest import make_model
from tests.workers.processes import Rank, Ranks

CPU = torch.device("cpu")
PROBES = [[5, 6, 7, 8, 9, 10, 11], list(range(2, 90))]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3)),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 200),
)
def test_what_is_packed_into_chunks_is_unpacked_as_it_was(shapes: list[Any], most: int) -> None:
    tensors = {
        str(i): torch.randint(0, 100, shape).to(dtype) for i, (dtype, shape) in enumerate(shapes)
    }
    specs, found = specs_of(tensors), dict[str, torch.Tensor]()
    for names in chunks_of(specs, most):
        size = sum(bytes_of(specs[name]) for name in names)
        assert size <= most or len([name for name in names if bytes_of(specs[name])]) <= 1
        buffer, end = torch.empty(size, dtype=torch.uint8), 0
        for name in names:
            pack(tensors[name], specs[name], buffer[end:])
            end += bytes_of(specs[name])
        found |= unpack(buffer, names, specs)
    assert list(found) == list(tensors) and all(
        torch.equal(found[name], tensors[name]) for name in tensors
    )


class Tensors:
    """In place of ``FullTensors``."""

    def __init__(self, tensors: dict[str, torch.Tensor], specs: TensorSpecs) -> None:
        self.specs, self._tensors = specs, tensors

    def __iter__(self) -> Any:
        return iter(self._tensors.items())


def sending(
    tensors: dict[str, torch.Tensor], members: int, **other: Any
) -> tuple[BroadcastSender, dict[str, Any]]:
    specs = {**specs_of(tensors), **other}
    sender = BroadcastSender(lambda: Tensors(tensors, specs), 0, CPU)  # type: ignore[arg-type,return-value]
    info = {"rendezvous": sender.open("127.0.0.1", members, 20.0), "specs": to_message(specs)}
    return sender, info


def alongside(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def test_members_get_all_in_the_dtypes_that_were_announced_and_again_in_the_same_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast, "PART_BYTES", 64)
    tensors = {
        "a": torch.randn(9, 5),
        "none": torch.zeros(0, 2),
        "n": torch.arange(7),
        "b": torch.randn(3),
    }
    sender, info = sending(tensors, 2, b=(torch.bfloat16, (3,)))
    readers = [BroadcastReader(CPU) for _ in range(2)]
    for _ in range(2):
        threads = [alongside(lambda reader=reader: reader.read(info)) for reader in readers]
        assert sender.send(info["rendezvous"]) == ""
        for thread, found in threads:
            thread.join()
            expected = {**tensors, "b": tensors["b"].bfloat16()}
            assert list(found[0]) == list(expected)
            assert all(torch.equal(found[0][name], expected[name]) for name in expected)


def test_an_engine_on_a_gpu_receives_from_a_cpu_in_host_memory() -> None:
    tensors = {"a": torch.randn(9, 5), "n": torch.arange(7)}
    sender, info = sending(tensors, 1)
    thread, found = alongside(lambda: BroadcastReader(torch.device("cuda", 0)).read(info))
    assert sender.send(info["rendezvous"]) == ""
    thread.join()
    assert found[0].keys() == tensors.keys()
    assert all(
        found[0][name].device == CPU and torch.equal(found[0][name], tensors[name])
        for name in tensors
    )


def test_other_bytes_than_were_sent_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, info = sending({"a": torch.ones(4), "b": torch.ones(4)}, 1)

    def damaged(
        buffer: torch.Tensor, names: list[str], specs: TensorSpecs
    ) -> dict[str, torch.Tensor]:
        found = unpack(buffer, names, specs)
        if threading.current_thread() is thread:
            found["b"][2] += 1
        return found

    monkeypatch.setattr(broadcast, "unpack", damaged)
    thread, found = alongside(lambda: time.sleep(0.2) or BroadcastReader(CPU).read(info))
    assert sender.send(info["rendezvous"]) == ""
    thread.join()
    assert isinstance(found[0], WeightSyncError) and str(found[0]).endswith(
        "other weights than the trainer sent in b"
    )


@pytest.mark.parametrize("moment", ["before it joins", "between two chunks"])
def test_a_member_that_ends_ends_the_others_wait(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broadcast, "PART_BYTES", 4 << 20)
    sender, info = sending({str(i): torch.ones(1 << 20) for i in range(8)}, 3)

    def closes() -> None:
        if moment == "before it joins":
            interrupt(info["rendezvous"])
            return
        reader = BroadcastReader(CPU)
        next(reader.chunks(info))
        reader.close()

    dying, others = (
        alongside(closes),
        [alongside(lambda: BroadcastReader(CPU).read(info)) for _ in range(2)],
    )
    began = time.monotonic()
    assert "was interrupted" in sender.send(info["rendezvous"])
    sender.close()
    for thread, found in (dying, *others):
        thread.join()
        assert found[0] is None or isinstance(found[0], TransferInterruptedError), found
    assert time.monotonic() - began < 10


def test_a_member_that_comes_after_its_group_has_ended_does_not_wait() -> None:
    sender, info = sending({"a": torch.ones(1)}, 2)
    former = info["rendezvous"]
    info["rendezvous"] = sender.open("127.0.0.1", 1, 20.0)
    began = time.monotonic()
    with pytest.raises(TransferInterruptedError):
        BroadcastReader(CPU).read({**info, "rendezvous": former})
    assert time.monotonic() - began < 15
    thread, found = alongside(lambda: BroadcastReader(CPU).read(info))
    assert sender.send(info["rendezvous"]) == ""
    thread.join()
    assert found[0].keys() == {"a"}


def test_ranks_that_meet_by_loopback_are_reached_at_their_nodes_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    addresses: list[dict[str, str]] = []
    create_device = torch.distributed.ProcessGroupGloo.create_device

    def created(**address: str) -> Any:
        addresses.append(address)
        return create_device(hostname="127.0.0.1")

    monkeypatch.setattr(torch.distributed.ProcessGroupGloo, "create_device", created)
    for interface, address in [("lo", {"hostname": "127.0.0.2"}), ("eth7", {"interface": "eth7"})]:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
        sender = BroadcastSender(lambda: Tensors({}, {}), 0, CPU)  # type: ignore[arg-type,return-value]
        meet(None, sender.open("127.0.0.2", 0, 20.0), CPU, 0).join()
        assert addresses.pop() == address, interface


class NCCL:
    """In place of ``ProcessGroupNCCL``, which needs a GPU."""

    class Options:
        pass

    def __init__(self, *place: Any) -> None:
        _, self.rank, self.size, _ = place

    def abort(self) -> None: ...


def test_a_rank_that_sees_one_gpu_meets_a_worker_that_sees_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", NCCL, raising=False)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: chosen.append(_get_device_index(device))
    )
    sender = BroadcastSender(lambda: Tensors({}, {}), 0, torch.device("cuda"))  # type: ignore[arg-type,return-value]
    rendezvous = sender.open("127.0.0.1", 1, 20.0)
    worker = meet(None, rendezvous, torch.device("cuda", 3))
    thread, found = alongside(worker.join)
    rank = meet(sender._group, rendezvous, torch.device("cuda"), 0)
    rank.join()
    thread.join()
    assert found == [None]
    assert [(group._groups[0].rank, group._groups[0].size) for group in (rank, worker)] == [
        (0, 2),
        (1, 2),
    ]
    assert chosen == [3], "torch cannot choose a GPU without a number"


class Policy:
    """Two ranks of a real policy, without Ray."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    async def call(self, method: str, *args: object) -> list[Any]:
        if method == "node":
            return [("here", "127.0.0.1")] * self._ranks.count
        return await asyncio.to_thread(self._ranks.call, ask, method, args)

    async def call_first(self, method: str, *args: object) -> Any:
        return (await asyncio.to_thread(self._ranks.call, ask_first, method, args))[0]

    def give_up(self, reason: str, cause: BaseException | None = None) -> None:
        raise AssertionError(reason)


def ask(rank: Rank, method: str, args: tuple[Any, ...]) -> Any:
    return getattr(rank.worker, method)(*args)


def ask_first(rank: Rank, method: str, args: tuple[Any, ...]) -> Any:
    return None if rank.rank else ask(rank, method, args)


def step(rank: Rank, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in rank.worker.backend.model.parameters():
            local = getattr(parameter, "_local_tensor", parameter)
            local += 0.02 * torch.randn(local.shape)


def small_chunks(rank: Rank) -> None:
    broadcast.PART_BYTES = 30_000


def fails_after_a_chunk(engine: Rank, info: dict[str, Any]) -> None:
    next(BroadcastReader(CPU).chunks(info))
    os._exit(0)


@asynccontextmanager
async def running(
    ranks: Ranks, path: str, engine: Callable[[], Any], senders: int
) -> AsyncIterator[tuple[Any, Any, list[Any]]]:
    cfg, running = Config(), [0, 1]
    cfg.trainer.policy.model.path = path
    engines = [engine(), engine()]
    try:
        ranks.set_up(PolicyWorker, cfg)
        ranks.call(small_chunks)
        for each in engines:
            await each.start()
        policy = Policy(ranks)
        transfer = BroadcastTransfer(
            policy, 1, lambda: running, senders=senders, timeout_s=30.0, recovers=True
        )
        yield policy, transfer, engines
    finally:
        for each in engines:
            await each.shutdown()


async def scores_differ(policy: Policy, engine: Any) -> float:
    found, expected = await engine.score(PROBES), (await policy.call("score", PROBES))[0]
    return max(
        abs(a - b) for e, f in zip(expected, found, strict=True) for a, b in zip(e, f, strict=True)
    )


async def loaded(
    transfer: BroadcastTransfer, update: WeightUpdate, engines: list[Any]
) -> list[Any]:
    calls = [transfer.send(update), *(each.update_weights(update) for each in engines)]
    return (await asyncio.gather(*calls, return_exceptions=True))[1:]


async def check_two_ranks_and_two_engines(
    policy: Policy, transfer: BroadcastTransfer, engines: list[Any], other: Ranks
) -> None:
    ranks = policy._ranks
    other.call(small_chunks)  # its process is there
    for version in (1, 2):
        ranks.call(step, version)
        update = await transfer.publish(version)
        assert not any(
            isinstance(each, Exception) for each in await loaded(transfer, update, engines)
        )
        await transfer.release(update)
        assert max([await scores_differ(policy, each) for each in engines]) < 1e-4

    # An engine's process ends in the middle: the others have their old weights, and get the update again.
    ranks.call(step, 3)
    transfer._members = None  # the second engine has a new process
    update = await transfer.publish(3)
    dying = asyncio.create_task(asyncio.to_thread(other.call, fails_after_a_chunk, update.info))
    found, before = await loaded(transfer, update, engines[:1]), await engines[0].score(PROBES)
    with pytest.raises(AssertionError, match="its process ended with 0"):
        await dying
    assert isinstance(found[0], TransferInterruptedError), found
    again = await transfer.publish_whole(update)
    assert again.info["rendezvous"] != update.info["rendezvous"]
    assert not any(isinstance(each, Exception) for each in await loaded(transfer, again, engines))
    assert await engines[0].score(PROBES) != before
    assert max([await scores_differ(policy, each) for each in engines]) < 1e-4

    late = await transfer.for_late_engine(3)
    await engines[1].update_weights(late)
    await transfer.release(late)
    async with transfer.changing():
        pass
    with pytest.raises(WeightsMovedError):
        await transfer.for_late_engine(3)


@pytest.fixture
def ranks(fork_socket: Path) -> Iterator[Ranks]:
    two = Ranks(2, fork_socket)
    yield two
    two.close()


@pytest.fixture
def other(fork_socket: Path) -> Iterator[Ranks]:
    """A process for a third engine."""
    one = Ranks(1, fork_socket)
    yield one
    one.close()


@pytest.mark.slow
@pytest.mark.parametrize("senders", [1, 2])
async def test_two_ranks_send_to_two_embedded_engines(
    senders: int, ranks: Ranks, other: Ranks, tmp_path: Path
) -> None:
    path = make_model(tmp_path, tied=True)
    config = EngineConfig(
        path, threads=1, max_model_len=128, kv_cache_gb=0.1, weight_sync_backend="nccl"
    )
    async with running(ranks, path, lambda: TransformersEngine(config), senders) as (
        policy,
        transfer,
        engines,
    ):
        await check_two_ranks_and_two_engines(policy, transfer, engines, other)


@pytest.mark.matrix
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("senders", [1, 2])
async def test_two_ranks_send_to_workers_of_two_vllm_engines(
    senders: int, engines_session: None, ranks: Ranks, other: Ranks, tmp_path: Path
) -> None:
    from skyasync.inference.backends.vllm.engine import VLLMEngine
    from tests.inference.backends.vllm.models import save_model

    save_model(tmp_path, tied=True)
    config = EngineConfig(
        str(tmp_path),
        max_model_len=256,
        max_num_seqs=64,
        threads=1,
        kv_cache_gb=0.25,
        weight_sync_backend="nccl",
    )
    async with running(ranks, str(tmp_path), lambda: VLLMEngine(config), senders) as (
        policy,
        transfer,
        engines,
    ):
        await check_two_ranks_and_two_engines(policy, transfer, engines, other)
