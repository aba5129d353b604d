"""Weights on their way to other nodes of a Ray cluster, in pieces, through its object store.

Invariant: what is carried is read where it lies; besides that, and besides the memory it goes to, there are never more
than ``AHEAD`` pieces of it, in the object stores. A piece is put there once, and crosses to each node once, however
many engines are on it. A receiver that dies, or is silent for too long, is left out from then on; the others get all.

| who waits   | for what                          | woken by                                      |
|-------------|-----------------------------------|-----------------------------------------------|
| ``carry``   | the oldest piece on its way, to   | the receivers; their death, as Ray sees it;   |
|             | be with all receivers             | ``silence_s``, after which one counts as dead |
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import ray

from skyasync.errors import headline
from skyasync.weight_sync.lent import Bytes
from skyasync.weight_sync.update import WeightSyncError

PIECE = 16 << 20  # bytes
AHEAD = 4  # pieces that are on their way


class Carried(NamedTuple):
    """By node: what its engines are told; why they can be told nothing; and why that is an error, not a death."""

    infos: dict[str, dict[str, Any]]
    deaths: dict[str, str]
    errors: dict[str, str]
    bytes: int  # that have crossed


def carry(info: Mapping[str, Any], receivers: Mapping[str, Any], silence_s: float) -> Carried:
    """Give each receiver what ``info`` tells engines of this node of. Blocks, in a process of that node.

    Args:
        receivers: actors of ``Receiver``, by their nodes.
        silence_s: that a receiver may need for a piece.
    """
    heard, crossed = _Heard(receivers, silence_s), 0
    memory = _mapped(info["path"])
    heard.begin(len(memory), info.get("kinds"))
    on_their_way: deque[dict[str, Any]] = deque()
    for first, piece in _pieces(memory):
        if len(on_their_way) == AHEAD:
            heard.answers(on_their_way.popleft())
        if not heard.there:
            break
        sent = ray.put(piece)
        on_their_way.append({node: each.take.remote(first, sent) for node, each in heard.there.items()})
        crossed += piece.nbytes * len(heard.there)
    for asked in on_their_way:
        heard.answers(asked)
    infos = heard.end(info.get("digests", {}))
    return Carried(infos, heard.deaths, heard.errors, crossed)


class _Heard:
    """What receivers answer, and which of them still do (``there``)."""

    def __init__(self, receivers: Mapping[str, Any], silence_s: float) -> None:
        self.there = dict(receivers)
        self.deaths: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self._silence_s = silence_s

    def begin(self, size: int, kinds: object) -> None:
        self.answers({node: receiver.begin.remote(size, kinds) for node, receiver in self.there.items()})

    def end(self, digests: object) -> dict[str, Any]:
        return self.answers({node: receiver.end.remote(digests) for node, receiver in self.there.items()})

    def answers(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """By node, of those that are there."""
        wanted = {node: answer for node, answer in asked.items() if node in self.there}
        if not wanted:
            return {}
        ready, _ = ray.wait(list(wanted.values()), num_returns=len(wanted), timeout=self._silence_s)
        found = {}
        for node, answer in wanted.items():
            try:
                if answer not in ready:
                    raise TimeoutError(f"it gave no answer within {self._silence_s:g} s")
                found[node] = ray.get(answer)
            except WeightSyncError as error:
                del self.there[node]
                self.errors[node] = headline(error)
            except Exception as error:  # its process, its node, or the memory of either
                del self.there[node]
                self.deaths[node] = headline(error)
        return found


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _pieces(memory: mmap.mmap) -> Iterator[tuple[int, Bytes]]:
    """Views of it, and where they begin."""
    for first in range(0, len(memory), PIECE):
        yield first, np.frombuffer(memory, np.uint8, min(PIECE, len(memory) - first), first)
