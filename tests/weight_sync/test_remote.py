"""Engines on other nodes than rank 0: their messages, their weights, and their failures; without a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from skyasync.config.schema import Config
from skyasync.weight_sync.delta import DeltaDecoder, ReceivedWeights
from skyasync.weight_sync.tensors import digests_of, specs_of
from skyasync.weight_sync.transfers.base import WeightTransfer
from skyasync.weight_sync.transfers.endpoints import WeightReader, WeightSender
from skyasync.weight_sync.transfers.file import FileTransfer
from skyasync.weight_sync.transfers.remote import RemoteEngines
from skyasync.weight_sync.transfers.shared_memory import SharedMemoryTransfer
from skyasync.weight_sync.update import TransferInterruptedError, WeightUpdate
from skyasync.workers.dispatch import memory_transfer

CPU = torch.device("cpu")
HOME, THERE = "node 0", "node 1"

Weights = dict[str, torch.Tensor]


def many(seed: int) -> Weights:
    draw = torch.Generator().manual_seed(seed)
    return {
        "large": torch.randn(70, 50, generator=draw),
        "small": torch.randn(33, generator=draw).bfloat16(),
    }


class Pass:
    """In place of ``FullTensors``."""

    def __init__(self, weights: Weights) -> None:
        self.specs, self._weights = specs_of(weights), weights

    def __iter__(self) -> Any:
        return iter(self._weights.items())


class Rank0:
    """The only rank of a policy, in a thread of its own as in an actor."""

    def __init__(self) -> None:
        self.weights = many(0)
        no_adapter: Any = None
        passes: Any = lambda: Pass(self.weights)  # noqa: E731
        self.sender = WeightSender(passes, no_adapter, 0, CPU, two_buffers=True)
        self._thread = ThreadPoolExecutor(1)

    async def call(self, method: str, *args: Any) -> list[Any]:
        return [await self.call_first(method, *args)]

    async def call_first(self, method: str, *args: Any) -> Any:
        if method == "node":
            return HOME, "127.0.0.1"
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, self.sender.call, *args
        )


class Engine:
    def __init__(self, node: str) -> None:
        self.node, self.told = node, dict[str, Any]()
        self.reader, self.decoder = WeightReader(CPU), DeltaDecoder()
        self.fails = False

    async def load(self, update: WeightUpdate) -> Weights:
        async with update.on(self.node) as own:
            self.told = own.info
            if self.fails:
                raise ConnectionError("its process is gone")
            received = await asyncio.to_thread(self.reader.read, own.info)
            return self.decoded(received)

    def decoded(self, received: ReceivedWeights) -> Weights:
        found = dict(self.decoder.decode(received.weights, received.digests, received.header))
        assert digests_of(found) == received.digests, "digests that an engine verifies"
        return found


def test_every_worker_of_an_engine_with_pipeline_stages_joins_the_group() -> None:
    cfg = Config()
    cfg.generator.backend, cfg.generator.inference_engine_tensor_parallel_size = "vllm", 2
    cfg.generator.engine_kwargs = {"pipeline_parallel_size": 3}

    async def members() -> int:
        rank_0, engines = Rank0(), {1: THERE}
        opened: list[int] = []
        rank_0.sender.remote.open = lambda host, workers, timeout_s: opened.append(workers) or {}  # type: ignore
        transfer = memory_transfer(cfg, {"policy": rank_0}, lambda: engines)  # type: ignore[dict-item]
        await transfer._remote.open(1)  # type: ignore[attr-defined]
        return opened[0]

    assert asyncio.run(members()) == 6


def has_file(update: WeightUpdate) -> bool:
    return Path(update.info["path"]).exists()


class Cluster:
    def __init__(self, made: str, nodes: list[str]) -> None:
        self.rank_0, self.engines = Rank0(), [Engine(node) for node in nodes]
        self.running = list(range(len(nodes)))
        remote = RemoteEngines(
            self.rank_0, lambda: {i: nodes[i] for i in self.running}, timeout_s=20.0
        )
        self.transfer: WeightTransfer = SharedMemoryTransfer(
            self.rank_0, computed_on=True, remote=remote
        )
        if made != "shared memory":
            self.transfer = FileTransfer(self.rank_0, made, remote)
        self.transfer.expects_late_engines = True

    async def load(self, update: WeightUpdate) -> list[Any]:
        """Load into all engines; the rest is as in a weight sync."""
        loads = [self.engines[place].load(update) for place in self.running]
        return (await asyncio.gather(self.transfer.send(update), *loads, return_exceptions=True))[
            1:
        ]

    async def fails_in(self, update: WeightUpdate, place: int) -> None:
        """An engine fails while all load the update."""
        self.engines[place].fails = True
        assert any(isinstance(each, TransferInterruptedError) for each in await self.load(update))
        self.running.remove(place)

    def right(self, found: Weights) -> bool:
        return all(torch.equal(found[name], tensor) for name, tensor in self.rank_0.weights.items())


@pytest.fixture(params=["shared memory", "full", "delta"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    yield Cluster(request.param, [HOME, THERE, THERE])


async def test_engines_of_rank_0s_node_read_its_memory_and_the_others_get_a_broadcast(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in range(4):
        cluster.rank_0.weights["large"][0, version] += 1
        update = await cluster.transfer.publish(version)
        assert all(map(cluster.right, await cluster.load(update)))
        assert ["rendezvous" in engine.told for engine in cluster.engines] == [False, True, True]
        assert update.metrics["sync/bytes_to_nodes"] > 0 and update.metrics["sync/to_nodes_s"] > 0
        await cluster.transfer.release(update)
    groups = {engine.told["rendezvous"]["name"] for engine in cluster.engines[1:]}
    assert len(groups) == 1, "one group for all syncs"
    assert capsys.readouterr().out.count("weights go to engines on 1 other node by broadcast") == 1


@pytest.mark.parametrize("node", [pytest.param(HOME, marks=pytest.mark.matrix), THERE])
async def test_a_late_engine_gets_what_the_others_have_wherever_it_is(
    cluster: Cluster, node: str
) -> None:
    update = await cluster.transfer.publish(1)
    await cluster.load(update)
    await cluster.transfer.release(update)
    late, sent = (
        Engine(node),
        {name: tensor.clone() for name, tensor in cluster.rank_0.weights.items()},
    )
    cluster.rank_0.weights["large"] += 1  # an optimizer step
    update = await cluster.transfer.for_late_engine(1)
    found = await late.load(update)
    assert digests_of(found) == digests_of(sent) and ("rendezvous" in late.told) == (node == THERE)
    await cluster.transfer.release(update)
    update = await cluster.transfer.publish(2)
    assert all(map(cluster.right, await cluster.load(update))), (
        "the other engines have their group again"
    )
    await cluster.transfer.release(update)


async def test_no_one_waits_for_a_failed_engine_and_the_others_get_all_weights_again(
    cluster: Cluster,
) -> None:
    cluster.engines[1].fails = True
    update = await cluster.transfer.publish(1)
    home, failed, other = await cluster.load(update)
    assert cluster.right(home) and isinstance(failed, ConnectionError)
    assert isinstance(other, TransferInterruptedError), other
    cluster.running.remove(1)
    whole = await cluster.transfer.publish_whole(update)
    assert all(map(cluster.right, await cluster.load(whole)))
    for each in (whole, update):
        await cluster.transfer.release(each)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("made", ["shared memory", "full", "delta"])
async def test_the_others_get_all_weights_also_if_engines_fail_one_after_the_other(
    made: str, late: bool
) -> None:
    cluster = Cluster(made, [HOME, THERE, THERE, THERE])
    cluster.transfer.expects_late_engines = late
    update = await cluster.transfer.publish(1)
    await cluster.fails_in(update, 1)
    whole = await cluster.transfer.publish_whole(update)
    await cluster.fails_in(whole, 2)
    await cluster.transfer.release(whole)
    whole = await cluster.transfer.publish_whole(update)
    assert all(map(cluster.right, await cluster.load(whole)))
    for each in (whole, update):
        await cluster.transfer.release(each)
    assert made == "shared memory" or not has_file(update)
    if late:
        update = await cluster.transfer.for_late_engine(1)
        assert cluster.right(await Engine(THERE).load(update))
        await cluster.transfer.release(update)


@pytest.mark.matrix
async def test_other_bytes_than_rank_0_proved_are_found_by_the_digests(cluster: Cluster) -> None:
    update = await cluster.transfer.publish(1)
    engine = cluster.engines[1]
    decoded = engine.decoded

    def damaged(received: ReceivedWeights) -> Weights:
        first = next(iter(received.weights.values()))
        first.view(-1).view(torch.uint8)[0] ^= 1
        return decoded(received)

    engine.decoded = damaged  # type: ignore[method-assign]
    home, found, other = await cluster.load(update)
    assert cluster.right(home) and cluster.right(other) and isinstance(found, AssertionError)
    await cluster.transfer.release(update)
