"""Several senders and node trees: eight real processes over gloo, two ranks of a policy and six workers of engines.

Engines 0 and 1 are on one node, engine 2 on another, by the names that their processes take for their hosts'.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from skyasync.config.schema import Config
from skyasync.weight_sync.tensors import bytes_of, digests_of, from_message, specs_of, to_message
from skyasync.weight_sync.transfers import broadcast, groups
from skyasync.weight_sync.transfers.broadcast import (
    BroadcastReader,
    BroadcastSender,
    BroadcastTransfer,
    spread,
)
from skyasync.weight_sync.transfers.groups import TensorGroup
from skyasync.weight_sync.update import TransferInterruptedError, WeightUpdate
from skyasync.workers.policy import PolicyWorker
from tests.weight_sync.test_broadcast import CPU, Policy, Tensors, alongside, step
from tests.workers.conftest import make_model
from tests.workers.processes import Rank, Ranks

SENDERS, WORKERS, NODES = 2, 2, ("a", "a", "b")
LIMIT_S = 30.0


class Counted:
    """A process group that counts the bytes that its member sends or receives."""

    def __init__(self, group: Any, name: str, count: Counter[str]) -> None:
        self._group, self._name, self._count = group, name, count

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self._count[self._name] += sum(tensor.nbytes for tensor in tensors)
        return self._group.broadcast(tensors, options)


def prepare(rank: Rank, node: str) -> None:
    connect = TensorGroup._connect

    def counted(group: TensorGroup, name: str, *place: int) -> Counted:
        return Counted(connect(group, name, *place), name, rank.notes["count"])

    groups.gethostname = lambda: node
    TensorGroup._connect = counted  # type: ignore[method-assign]
    broadcast.PART_BYTES = 40_000
    rank.notes |= {"count": Counter(), "reader": BroadcastReader(CPU)}


def counts(rank: Rank) -> Counter[str]:
    count = rank.notes["count"]
    rank.notes["count"] = Counter()
    return count


def receive(rank: Rank, info: dict[str, Any], ends: str, token: str) -> tuple[dict[str, str], str]:
    """Digests of the weights, or why they did not arrive.

    Args:
        ends: the first leader of a node, or another member of one, that has a chunk ends its process.
        token: a file that the first one makes.
    """
    reader: BroadcastReader = rank.notes["reader"]
    weights: dict[str, torch.Tensor] = {}
    try:
        for chunk in reader.chunks(info):
            weights |= chunk
            assert reader._group is not None
            if ends == ("leader" if reader._group._groups else "not a leader"):
                try:
                    Path(token).open("x").close()
                except FileExistsError:
                    continue
                os._exit(0)
    except TransferInterruptedError as error:
        return {}, str(error)
    return digests_of(weights), ""


def full_weights(rank: Rank) -> dict[str, str]:
    return digests_of(dict(rank.worker._engine_weights()))


class Cluster:
    def __init__(self, ranks: Ranks, engines: list[Ranks], token: Path) -> None:
        self.ranks, self.engines, self.token = ranks, engines, str(token)
        self.running = [0, 1, 2]
        self.transfer = BroadcastTransfer(
            Policy(ranks),
            WORKERS,
            lambda: self.running,
            senders=SENDERS,
            timeout_s=LIMIT_S,
            recovers=True,
        )

    async def load(self, update: WeightUpdate, ends: str = "") -> list[Any]:
        """What the running engines' workers have received; None for an engine of which a worker's process ended."""
        calls = [
            asyncio.to_thread(self.engines[index].call, receive, update.info, ends, self.token)
            for index in self.running
        ]
        _, *found = await asyncio.gather(self.transfer.send(update), *calls, return_exceptions=True)
        return [
            None if isinstance(each, AssertionError) and "process ended" in str(each) else each
            for each in found
        ]

    async def check(self, update: WeightUpdate) -> None:
        expected = self.ranks.call(full_weights)[0]
        assert await self.load(update) == [[(expected, "")] * WORKERS] * len(self.running)
        await self.transfer.release(update)


@asynccontextmanager
async def cluster(ranks: Ranks, engines: list[Ranks], folder: Path) -> AsyncIterator[Cluster]:
    cfg = Config()
    cfg.trainer.policy.model.path = make_model(folder, tied=True)
    ranks.set_up(PolicyWorker, cfg)
    ranks.call(prepare, "policy")
    for node, engine in zip(NODES, engines, strict=True):
        engine.call(prepare, node)
    yield Cluster(ranks, engines, folder / "token")


@pytest.fixture
def ranks(fork_socket: Path) -> Iterator[Ranks]:
    two = Ranks(SENDERS, fork_socket)
    yield two
    two.close()


@pytest.fixture
def engines(fork_socket: Path) -> Iterator[list[Ranks]]:
    three = [Ranks(WORKERS, fork_socket) for _ in NODES]
    yield three
    for engine in three:
        engine.close()


@pytest.mark.slow
async def test_senders_share_the_bytes_and_each_node_receives_each_byte_once(
    ranks: Ranks, engines: list[Ranks], tmp_path: Path
) -> None:
    async with cluster(ranks, engines, tmp_path) as run:
        for version in (1, 2):
            ranks.call(step, version)
            update = await run.transfer.publish(version)
            await run.check(update)
        specs = from_message(update.info["specs"])
        total = 2 * sum(
            bytes_of(spec) + 8 for spec in specs.values()
        )  # twice, and a sum of each tensor

        sent = [count[f"sender {rank}"] for rank, count in enumerate(ranks.call(counts))]
        assert sum(sent) == total and min(sent) > total / 4
        received = [engine.call(counts) for engine in engines]
        for node in ("a", "b"):
            workers = [
                count
                for at, each in zip(NODES, received, strict=True)
                if at == node
                for count in each
            ]
            from_senders = Counter[str]()
            for count in workers:
                from_senders.update(
                    {name: size for name, size in count.items() if name.startswith("sender")}
                )
            assert [from_senders[f"sender {rank}"] for rank in range(SENDERS)] == sent
            leaders = [
                count for count in workers if any(name.startswith("sender") for name in count)
            ]
            assert len(leaders) == SENDERS, "each sender has a leader of its own"


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["leader", pytest.param("not a leader", marks=pytest.mark.matrix)])
async def test_a_worker_that_ends_in_the_middle_interrupts_all_others_and_those_left_get_the_weights(
    ends: str, ranks: Ranks, engines: list[Ranks], tmp_path: Path
) -> None:
    async with cluster(ranks, engines, tmp_path) as run:
        ranks.call(step, 1)
        update, began = await run.transfer.publish(1), time.monotonic()
        found = await run.load(update, ends)
        assert time.monotonic() - began < LIMIT_S / 2, "no wait has lasted until its limit"
        failed = found.index(None)
        assert found.count(None) == 1
        for engine in (each for each in found if each is not None):
            assert all(not weights and "was interrupted" in reason for weights, reason in engine), (
                engine
            )

        run.running.remove(failed)
        await run.check(await run.transfer.publish_whole(update))
        engines[failed].call(prepare, NODES[failed])  # in new processes
        run.running = [0, 1, 2]
        ranks.call(step, 2)
        await run.check(await run.transfer.publish(2))


def ends_at_its_second_chunk(rank: Rank) -> None:
    start, calls = TensorGroup.start, Counter[int]()

    def ends(group: TensorGroup, sender: int, tensor: torch.Tensor) -> None:
        calls[sender] += 1
        if calls[1] == 2:
            os._exit(0)
        start(group, sender, tensor)

    TensorGroup.start = ends  # type: ignore[method-assign]


@pytest.mark.slow
async def test_a_sender_that_ends_in_the_middle_interrupts_all_receivers(
    ranks: Ranks, engines: list[Ranks], tmp_path: Path
) -> None:
    async with cluster(ranks, engines, tmp_path) as run:
        ranks.call(ends_at_its_second_chunk)
        update, began = await run.transfer.publish(1), time.monotonic()
        found = await run.load(update)
        assert time.monotonic() - began < LIMIT_S / 2, "no wait has lasted until its limit"
        for engine in found:
            assert all(not weights and "was interrupted" in reason for weights, reason in engine), (
                engine
            )


@pytest.mark.slow
async def test_a_late_engine_receives_all_weights_from_rank_0(
    ranks: Ranks, engines: list[Ranks], tmp_path: Path
) -> None:
    async with cluster(ranks, engines, tmp_path) as run:
        await run.check(await run.transfer.publish(1))
        ranks.call(counts)
        late = await run.transfer.for_late_engine(1)
        found = await asyncio.to_thread(engines[1].call, receive, late.info, "", "")
        await run.transfer.release(late)
        assert [set(count) for count in ranks.call(counts)] == [{"sender 0"}, set()]
        assert [weights for weights, _ in found] == ranks.call(full_weights)


def members(
    senders: int, hosts: list[str], monkeypatch: pytest.MonkeyPatch
) -> list[tuple[set[int], int]]:
    """Of receivers on these hosts: the senders whose groups they are in, and the size of their node's group."""
    tensors = {"a": torch.ones(3)}
    every: list[Any] = [
        BroadcastSender(lambda: Tensors(tensors, specs_of(tensors)), n, CPU) for n in range(senders)
    ]  # type: ignore[arg-type,return-value]
    rendezvous = every[0].open("127.0.0.1", len(hosts), 20.0, list(range(senders)))
    info = {"rendezvous": rendezvous, "specs": to_message(specs_of(tensors))}
    names = dict[int, str]()
    monkeypatch.setattr(groups, "gethostname", lambda: names[threading.get_ident()])
    readers = [BroadcastReader(CPU) for _ in hosts]

    def read(reader: BroadcastReader, host: str) -> Callable[[], Any]:
        def call() -> dict[str, torch.Tensor]:
            names[threading.get_ident()] = host
            return reader.read(info)

        return call

    def send(sender: BroadcastSender) -> Callable[[], str]:
        def call() -> str:
            names[threading.get_ident()] = "policy"
            return sender.send(rendezvous)

        return call

    calls = [alongside(send(each)) for each in every]
    calls += [alongside(read(*each)) for each in zip(readers, hosts, strict=True)]
    for thread, _ in calls:
        thread.join()
    assert [found for _, found in calls[:senders]] == [[""]] * senders
    assert all(torch.equal(found[0]["a"], tensors["a"]) for _, found in calls[senders:])
    in_groups = [reader._group for reader in readers]
    found = [(set(group._groups), group._node_size) for group in in_groups if group is not None]
    for each in (*every, *readers):
        each.close()
    return sorted(found, key=str)


def test_on_one_node_and_with_one_receiver_per_node_all_receive_from_all_senders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert members(2, ["a", "a", "a"], monkeypatch) == [({0, 1}, 1)] * 3
    assert members(2, ["a", "b", "c"], monkeypatch) == [({0, 1}, 1)] * 3


@pytest.mark.matrix
def test_the_receivers_of_a_node_take_turns_as_leaders(monkeypatch: pytest.MonkeyPatch) -> None:
    assert members(3, ["a", "a", "b"], monkeypatch) == [({0, 1, 2}, 1), ({0, 2}, 2), ({1}, 2)]
    assert members(1, ["a", "a", "b", "b"], monkeypatch) == [
        (set(), 2),
        (set(), 2),
        ({0}, 2),
        ({0}, 2),
    ]


def test_senders_are_on_as_many_nodes_as_possible() -> None:
    nodes = ["a", "a", "a", "b", "b", "b"]
    assert spread(nodes, 1) == [0]
    assert spread(nodes, 2) == [0, 3]
    assert spread(nodes, 3) == [0, 3, 1]
