"""A run whose controller injects faults by order: it drops messages, delays them, finds the disk full, or flips a bit.

Invariant: without an order, every part works as usual. Only the classes of the parts are changed, in the controller's
process, so that parts which are created later (a replacement engine) get the faults too.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from skyasync.run.experiment import BasePPOExp
from tests.chaos.channel import USED, VARIABLE, Order, Orders

if TYPE_CHECKING:
    from skyasync.trainer import RayPPOTrainer

Method = Callable[..., Any]
WRITING = (
    "transfer_weights",
    "write",
)  # a call of the ranks; engines read the weights of rank 0 after it


class FaultyExperiment(BasePPOExp):
    """The usual experiment, with a controller that takes orders."""

    def build(self) -> RayPPOTrainer:
        if folder := os.environ.get(VARIABLE):
            take_orders(Orders(Path(folder)))
        return super().build()


def take_orders(orders: Orders) -> None:
    """Change the classes of this process's parts so that they take orders."""
    from skyasync.inference.ray_engine import RayEngine
    from skyasync.utils.rpc import RayTransport
    from skyasync.weight_sync.sync import WeightSync
    from skyasync.workers.dispatch import RayWorkerDispatch
    from skyasync.workers.ranks import RankGroup

    _change(RayEngine, "progress", lambda own: _lossy(own, orders, "a heartbeat of an engine"))
    _change(RayEngine, "generate", lambda own: _late(own, orders, "answers of an engine"))
    _change(
        RayTransport,
        "exchange",
        lambda own: _lossy(own, orders, "a message of an environment process"),
    )
    _change(RayWorkerDispatch, "save", lambda own: _full(own, orders))
    _change(RayWorkerDispatch, "begin_save", lambda own: _full(own, orders))
    flips = _Flips(orders)
    _change(WeightSync, "sync", flips.in_sync)
    _change(RankGroup, "call", flips.after_writing)


def _change(owner: type, name: str, made: Callable[[Method], Method]) -> None:
    setattr(owner, name, made(getattr(owner, name)))


def _lossy(own: Method, orders: Orders, what: str) -> Method:
    @wraps(own)
    async def call(self: object, *args: object) -> Any:
        if orders.now("drop-messages", what, once=True):
            await asyncio.Event().wait()  # never returns: the message is lost
        if late := orders.now("delay-messages", what):
            await asyncio.sleep(late.lasts)
        return await own(self, *args)

    return call


def _late(own: Method, orders: Orders, what: str) -> Method:
    @wraps(own)
    async def stream(self: object, requests: Sequence[object]) -> AsyncIterator[Any]:
        async for outputs in own(self, requests):
            if late := orders.now("delay-messages", what):
                await asyncio.sleep(late.lasts)
            yield outputs

    return stream


def _full(own: Method, orders: Orders) -> Method:
    @wraps(own)
    async def save(self: object, folder: Path) -> Any:
        if orders.now("fill-disk", f"the checkpoint {folder.name}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        return await own(self, folder)

    return save


class _Flips:
    """Flips a bit after weights are written and before they are first read; reports whether engines took them."""

    def __init__(self, orders: Orders) -> None:
        self._orders, self._order, self._of = orders, cast(Order | None, None), "weights"

    def in_sync(self, own: Method) -> Method:
        @wraps(own)
        async def sync(weights: object, version: int, *args: object, **options: object) -> None:
            self._order, self._of = None, f"the weights of version {version}"
            await own(weights, version, *args, **options)
            if self._order is not None:
                self._orders.tell(self._order, self._of + USED)

        return sync

    def after_writing(self, own: Method) -> Method:
        @wraps(own)
        async def call(group: object, method: str, *args: object) -> list[Any]:
            ranks: list[Any] = await own(group, method, *args)
            if (method, *args[1:2]) == WRITING and (
                order := self._orders.now("flip-bit", self._of, once=True)
            ):
                self._order, said = order, ranks[0]
                bare = isinstance(said, dict)
                flip_bit(Path(said["path"] if bare else said[0]), order.pick, bare=bare)
            return ranks

        return call


def flip_bit(file: Path, pick: float, *, bare: bool = False) -> None:
    """Flip one bit of the tensors in a safetensors file; ``pick``, from 0 to 1, selects it.

    Args:
        bare: the file has tensors without a header (``weight_sync.transfers.shared_memory``).
    """
    with file.open("r+b") as weights:
        begin = 0 if bare else 8 + int.from_bytes(weights.read(8), "little")
        size = weights.seek(0, os.SEEK_END) - begin
        bit = int(pick * size * 8)
        weights.seek(begin + bit // 8)
        byte = weights.read(1)[0]
        weights.seek(begin + bit // 8)
        weights.write(bytes([byte ^ 1 << bit % 8]))
