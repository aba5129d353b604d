"""The trainer's side of weights for engines on other nodes of a Ray cluster, without NCCL.

Invariant: engines are told of memory of their own node, by Ray's name of it, whether or not they could see rank 0's.
On each node with a living engine one receiver holds what rank 0 holds (``skyasync.weight_sync.receiver``), so weights
cross once per node, to all nodes at a time. A receiver that dies has a successor in the same sync; where that dies too,
or cannot start since its node is gone, the engines of that node count as dead, and no others.

An engine that comes late finds the weights with its node's receiver, if that has them; else they cross once more.

| who waits                | for what                            | woken by                                          |
|--------------------------|-------------------------------------|---------------------------------------------------|
| ``publish``              | weights to be on all nodes          | rank 0; a receiver's death or silence             |
| ``info`` (each engine)   | its node's weights                  | the same; another engine's ``info`` of the update |
| ``settle``               | the receivers                       | they; ``SETTLE_S``, which ends one                |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyasync.engines.protocol import EngineDiedError
from skyasync.weight_sync.carry import Carried
from skyasync.weight_sync.receiver import Receiver
from skyasync.weight_sync.update import WeightSyncError, WeightUpdate

log = logging.getLogger(__name__)

SETTLE_S = 30.0
TRIES = 2  # of a node in one sync: a receiver may have died, and its node live


class Policy(Protocol):
    """The policy's ranks; see ``RankGroup``."""

    async def call_first(self, method: str, *args: object) -> Any: ...  # noqa: ANN401  (what the method returns)


class Across:
    """Carries from rank 0 to receivers, and ends them.

    Args:
        nodes: of the engines that live, by Ray's names.
        computed_on: engines compute on what is lent.
        silence_s: that a receiver may need for a piece before it counts as dead.
    """

    def __init__(
        self, policy: Policy, nodes: Callable[[], Collection[str]], *, computed_on: bool, silence_s: float
    ) -> None:
        self._policy, self._nodes = policy, nodes
        self._computed_on, self._silence_s = computed_on, silence_s
        self._receivers: dict[str, Any] = {}
        self._here = ""  # rank 0's node
        self._said: set[str] = set()

    async def publish(self, update: WeightUpdate, *, living: bool = True) -> WeightUpdate:
        """The update with the places of other nodes.

        Args:
            living: it is for the living engines, to whose nodes it is carried now; else for one that comes late.
        """
        places = _Places(self)
        others = sorted(set(self._nodes()) - {"", await self.here()}) if living else []
        if others:
            await places.carry(others, update.info)
            self._say(others)
        metrics = {"sync/bytes_to_nodes": float(places.bytes), "sync/to_nodes_s": places.seconds} if others else {}
        return replace(update, places=places, metrics=update.metrics | metrics)

    async def here(self) -> str:
        """Rank 0's node."""
        if not self._here:
            self._here, _ = await self._policy.call_first("node")
        return self._here

    async def carry(self, nodes: Iterable[str], info: dict[str, Any]) -> Carried:
        """As ``skyasync.weight_sync.carry``; receivers that do not answer are ended."""
        receivers = {node: self._receivers.get(node) or self._start(node) for node in nodes}
        carried: Carried = await self._policy.call_first("carry", info, receivers, self._silence_s)
        for node in carried.deaths | carried.errors:
            self._end(node)
        return carried

    async def has(self, node: str) -> bool:
        """Whether its receiver lives."""
        return node in self._receivers and bool(await self._answers([(node, self._receivers[node].pid.remote())]))

    async def settle(self, update: WeightUpdate, *, kept: bool = False) -> None:
        """The hand-over of an update has ended, on the nodes as on rank 0's; ``kept``: for engines that come late."""
        if isinstance(places := update.places, _Places):
            places.late = kept
            await self.settle_at(places.infos, kept=kept)

    async def settle_at(self, infos: Mapping[str, dict[str, Any]], *, kept: bool) -> None:
        ended = {n: info["path"] for n, info in infos.items() if n in self._receivers and ("kinds" in info or not kept)}
        await self._answers([(node, self._receivers[node].settle.remote(path)) for node, path in ended.items()])

    def close(self) -> None:
        """End the receivers; what engines have mapped stays theirs."""
        for node in list(self._receivers):
            self._end(node)

    async def _answers(self, asked: list[tuple[str, Any]]) -> list[str]:
        """The nodes whose receivers answer; the others are ended."""
        found = await asyncio.gather(*(_answered(call) for _, call in asked))
        for (node, _), answered in zip(asked, found, strict=True):
            if not answered:
                self._end(node)
        return [node for (node, _), answered in zip(asked, found, strict=True) if answered]

    def _start(self, node: str) -> Any:  # noqa: ANN401  (Ray's handle)
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        receiver: Any = ray.remote(Receiver)
        self._receivers[node] = receiver.options(num_cpus=0, max_restarts=0, scheduling_strategy=there).remote(
            computed_on=self._computed_on
        )
        return self._receivers[node]

    def _end(self, node: str) -> None:
        if (receiver := self._receivers.pop(node, None)) is not None:
            ray.kill(receiver)

    def _say(self, nodes: Collection[str]) -> None:
        if not self._said.issuperset(nodes):
            self._said.update(nodes)
            many = "s" if len(nodes) > 1 else ""
            print(f"weights go to engines on {len(nodes)} other node{many} through Ray's object store")


@dataclass
class _Places:
    """Of one update: what the engines of each node are told, once it has been carried there."""

    across: Across
    infos: dict[str, dict[str, Any]] = field(default_factory=dict)
    bytes: int = 0
    seconds: float = 0.0
    late: bool = False  # the hand-over to the living engines has ended
    _dead: dict[str, str] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def info(self, update: WeightUpdate, node: str) -> dict[str, Any]:
        """What engines of a node are told.

        Raises:
            EngineDiedError: if its receiver, or the node, is no more.
            WeightSyncError: if what has come there is not what was sent.
        """
        if not node or node == await self.across.here():
            return update.info
        async with self._turn:
            if self.late and node in self.infos and not await self.across.has(node):
                del self.infos[node]
            if node not in self.infos and (self.late or node not in self._dead):
                await self.carry([node], update.info)
                if self.late:  # nobody else will tell this receiver that the hand-over has ended
                    await self.across.settle_at({n: at for n, at in self.infos.items() if n == node}, kept=True)
        if node not in self.infos:
            raise EngineDiedError(f"weights do not reach the engines of node {node[:8]}: {self._dead[node]}")
        return {**self.infos[node], "late": True} if update.info.get("late") else self.infos[node]

    async def carry(self, nodes: Collection[str], info: dict[str, Any]) -> None:
        """Raises WeightSyncError if what came is not what was sent."""
        for _ in range(TRIES):
            carried = await self.across.carry(nodes, info)
            self.infos |= carried.infos
            self.bytes, self.seconds = self.bytes + carried.bytes, self.seconds + carried.seconds
            if carried.errors:
                node, why = next(iter(carried.errors.items()))
                raise WeightSyncError(f"weights that were carried to node {node[:8]}: {why}")
            nodes = list(carried.deaths)
            if not nodes:
                return
            for node, why in carried.deaths.items():
                log.warning("the receiver of weights on node %s is lost: %s", node[:8], why)
            self._dead |= carried.deaths


async def _answered(call: Any) -> bool:  # noqa: ANN401  (Ray's reference)
    try:
        async with asyncio.timeout(SETTLE_S):
            await call
    except Exception:  # dead, or silent
        return False
    return True
