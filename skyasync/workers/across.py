"""The trainer's side of weights for engines on other nodes of a Ray cluster, without NCCL.

Invariant: engines are told of memory of their own node, by Ray's name of it, whether or not they could see rank 0's.
On each node with a living engine one receiver holds what rank 0 holds (``skyasync.weight_sync.receiver``), so weights
cross once per node, to all nodes at a time. A receiver that dies has a successor in the same sync; where that dies too,
or cannot start since its node is gone, the engines of that node count as dead, and no others.

An engine that comes late finds the weights with its node's receiver, if that has them; else they cross once more.

| who waits                | for what                            | woken by                                          |
|--------------------------|-------------------------------------|---------------------------------------------------|
| ``publish``              | weights to be on all nodes          | rank 0; a receiver's death or silence; the death  |
|                          |                                     | of the last engine of a node                      |
| ``info`` (each engine)   | its node's weights                  | the same; another engine's ``info`` of the update |
| ``settle``               | the receivers                       | they; ``SETTLE_S``, which ends one                |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyasync.errors import headline
from skyasync.inference.interface import EngineFailedError
from skyasync.weight_sync.carry import Carried
from skyasync.weight_sync.receiver import Receiver
from skyasync.weight_sync.update import WeightSyncError, WeightUpdate

log = logging.getLogger(__name__)

START_S = 60.0  # at least, for a receiver's process to start
LOOK_S = 0.5  # from one look to the next whether that is still wanted
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
        if not others:
            return replace(update, places=places)
        began = time.monotonic()
        await places.carry(others, update.info, self.wanted)
        self._say(others)
        metrics = {"sync/bytes_to_nodes": float(places.bytes), "sync/to_nodes_s": time.monotonic() - began}
        return replace(update, places=places, metrics=update.metrics | metrics)

    async def here(self) -> str:
        """Rank 0's node."""
        if not self._here:
            self._here, _ = await self._policy.call_first("node")
        return self._here

    async def carry(self, nodes: Collection[str], info: dict[str, Any], wanted: Callable[[str], bool]) -> Carried:
        """As ``skyasync.weight_sync.carry``; receivers that do not answer are ended.

        Args:
            wanted: whether there is still an engine on a node: Ray may take long to know that it is gone.
        """
        up = await asyncio.gather(*(self._up(node, wanted) for node in nodes))
        deaths = {node: why for node, why in zip(nodes, up, strict=True) if why}
        receivers = {node: self._receivers[node] for node in nodes if node not in deaths}
        carried = Carried({}, {}, {}, 0)
        if receivers:
            carried = await self._policy.call_first("carry", info, receivers, self._silence_s)
        carried = carried._replace(deaths=deaths | carried.deaths)
        for node in carried.deaths | carried.errors:
            self._end(node)
        return carried

    def wanted(self, node: str) -> bool:
        """Whether an engine lives there."""
        return node in self._nodes()

    async def has(self, node: str) -> bool:
        """Whether its receiver lives."""
        if node in self._receivers and await self._up(node, lambda _: True):
            self._end(node)
        return node in self._receivers

    async def _up(self, node: str, wanted: Callable[[str], bool]) -> str:
        """Have a receiver there that answers; why there is none, empty if there is."""
        clock, limit_s = asyncio.get_running_loop().time, self._silence_s
        if node not in self._receivers:
            self._start(node)
            limit_s = max(limit_s, START_S)
        call, until = asyncio.ensure_future(self._receivers[node].pid.remote()), clock() + limit_s
        try:
            while not call.done() and clock() < until and wanted(node):
                await asyncio.wait({call}, timeout=LOOK_S)
            if call.done():
                call.result()
                return ""
            return f"it gave no answer within {limit_s:g} s" if wanted(node) else "no engine lives there any more"
        except Exception as error:  # its process, or its node
            return headline(error)
        finally:
            call.cancel()

    async def settle(self, update: WeightUpdate, *, kept: bool = False) -> None:
        """The hand-over of an update has ended, on the nodes as on rank 0's; ``kept``: for engines that come late."""
        if isinstance(places := update.places, _Places):
            places.late = kept
            await self.settle_at(places.infos, kept=kept)

    async def settle_at(self, infos: Mapping[str, dict[str, Any]], *, kept: bool) -> None:
        ended = {n: info["path"] for n, info in infos.items() if n in self._receivers and ("kinds" in info or not kept)}
        calls = {node: self._receivers[node].settle.remote(path) for node, path in ended.items()}
        answered = await asyncio.gather(*map(_answered, calls.values()))
        for node in [node for node, answer in zip(calls, answered, strict=True) if not answer]:
            self._end(node)

    def close(self) -> None:
        """End the receivers; what engines have mapped stays theirs."""
        for node in list(self._receivers):
            self._end(node)

    def _start(self, node: str) -> None:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        receiver: Any = ray.remote(Receiver)
        self._receivers[node] = receiver.options(num_cpus=0, max_restarts=0, scheduling_strategy=there).remote(
            computed_on=self._computed_on
        )

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
    bytes: int = 0  # that have crossed
    late: bool = False  # the hand-over to the living engines has ended
    _dead: dict[str, str] = field(default_factory=dict)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def info(self, update: WeightUpdate, node: str) -> dict[str, Any]:
        """What engines of a node are told.

        Raises:
            EngineFailedError: if its receiver, or the node, is no more.
            WeightSyncError: if what has come there is not what was sent.
        """
        if not node or node == await self.across.here():
            return update.info
        async with self._turn:
            if self.late and node in self.infos and not await self.across.has(node):
                del self.infos[node]
            if node not in self.infos and (self.late or node not in self._dead):
                await self.carry([node], update.info, lambda _: True)
                if self.late:  # nobody else will tell this receiver that the hand-over has ended
                    await self.across.settle_at({n: at for n, at in self.infos.items() if n == node}, kept=True)
        if node not in self.infos:
            raise EngineFailedError(f"weights do not reach the engines of node {node[:8]}: {self._dead[node]}")
        return {**self.infos[node], "late": True} if update.info.get("late") else self.infos[node]

    async def carry(self, nodes: Collection[str], info: dict[str, Any], wanted: Callable[[str], bool]) -> None:
        """Raises WeightSyncError if what came is not what was sent."""
        for _ in range(TRIES):
            carried = await self.across.carry(nodes, info, wanted)
            self.infos |= carried.infos
            self.bytes += carried.bytes
            if carried.errors:
                node, why = next(iter(carried.errors.items()))
                raise WeightSyncError(f"weights that were carried to node {node[:8]}: {why}")
            for node, why in carried.deaths.items():
                log.warning("the receiver of weights on node %s is lost: %s", node[:8], why)
            self._dead |= carried.deaths
            nodes = [node for node in carried.deaths if wanted(node)]
            if not nodes:
                return


async def _answered(call: Any) -> bool:  # noqa: ANN401  (Ray's reference)
    try:
        async with asyncio.timeout(SETTLE_S):
            await call
    except Exception:  # dead, or silent
        return False
    return True
