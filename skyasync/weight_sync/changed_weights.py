"""Weights of which only what has changed is sent, since the weights that went before.

Invariant: a file of changes names, by their content, the weights that they are changes of, and carries the digests of
all tensors as they are to be, changed or not. So whoever holds other weights can refuse it before touching anything,
and whoever has taken it proves as much as after a whole file. Both ends keep a copy of what was sent last:

    trainer: kept copy ── compare ──▶ changes, digests ──▶ file ──▶ put into what the engine holds ──▶ its digests

The trainer compares tensor after tensor. Where the changes take more than half the bytes of the whole, the whole is
sent: beside the kept copy there is never more than half of another, and one whole tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import safe_open
from torch import Tensor

from skyasync.weight_sync.delta import Changes, changes, put
from skyasync.weight_sync.digests import digest, digests_of
from skyasync.weight_sync.kinds import Kinds, kinds_of
from skyasync.weight_sync.shared_memory import ABOUT, read_digests, read_weights, write_weights
from skyasync.weight_sync.update import WeightMismatchError

MOST = 0.5  # of the bytes of all weights: changes that take more are not worth comparing


class Published(NamedTuple):
    """A file: its path, the content of the weights, that of what it is changes of ("" of the whole), metrics."""

    path: str
    content: str
    base: str
    metrics: dict[str, float]


class About(NamedTuple):
    """What a file says of itself.

    Args:
        keep: its weights must be kept: changes of them may follow.
        adapter: it holds adapters alone; see ``adapter_file``.
    """

    base: str = ""
    keep: bool = False
    adapter: dict[str, Any] | None = None


def content_of(digests: Mapping[str, str]) -> str:
    """A mark of weights as a whole, from the digests of their tensors."""
    return xxhash.xxh3_64_hexdigest(json.dumps(sorted(digests.items())).encode())


def read_about(path: str) -> About:
    with safe_open(path, framework="pt") as file:
        return About(**json.loads((file.metadata() or {}).get(ABOUT, "{}")))


class ChangedWeights:
    """The trainer's end."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._fallbacks = 0

    def publish(self, kinds: Kinds, weights: Iterable[tuple[str, Tensor]], folder: str = "") -> Published:
        """Write what has changed since the last time, or all of it; keeps a copy.

        Args:
            kinds: of all of them, as they are sent.
            weights: whole, one after the other; each may change afterwards.
        """
        if kinds != kinds_of(self._kept):
            self._kept = {}
            for name, tensor in weights:
                self._kept[name] = tensor.to("cpu", kinds[name][0], copy=True).contiguous()
            self._digests = digests_of(self._kept)
            return self.whole(folder, {"sync/share_changed": 1.0})
        base, most = content_of(self._digests), MOST * _bytes(self._kept)
        found: dict[str, Tensor] = {}
        changed = size = 0
        for name, tensor in weights:
            sent, count = changes(self._kept[name], tensor.to("cpu", kinds[name][0]).contiguous())
            if sent is None:
                continue
            changed, size = changed + count, size + sent.nbytes
            self._digests[name] = digest(self._kept[name])
            if size > most:
                found.clear()  # all will be sent, of which there is a copy
            else:
                found |= {f"{part}:{name}": value for part, value in sent._asdict().items()}
        metrics = {"sync/share_changed": changed / max(sum(prod(shape) for _, shape in kinds.values()), 1)}
        if size > most:
            self._fallbacks += 1
            return self.whole(folder, metrics)
        path = write_weights(found, folder, self._digests | {ABOUT: json.dumps({"base": base})})
        metrics |= {"sync/bytes": float(size), "sync/fallbacks": float(self._fallbacks)}
        return Published(path, content_of(self._digests), base, metrics)

    def whole(self, folder: str = "", metrics: Mapping[str, float] | None = None) -> Published:
        """Write all of what was published last, for an engine that holds something else."""
        path = write_weights(self._kept, folder, self._digests | {ABOUT: json.dumps({"keep": True})})
        found = {"sync/bytes": float(_bytes(self._kept)), "sync/fallbacks": float(self._fallbacks)}
        return Published(path, content_of(self._digests), "", {**(metrics or {}), **found})

    def fall_back(self, folder: str = "") -> Published:
        """As ``whole``, after changes that somebody could not take."""
        self._fallbacks += 1
        return self.whole(folder)


class KeptWeights:
    """An engine's end, where the weights are in another layout or dtype than they come in: a copy of what was sent."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._content = ""

    def read(self, path: str) -> tuple[Mapping[str, Tensor], dict[str, str]]:
        """All weights by a file, of the whole or of changes, and the digests by which the caller is to prove them.

        Raises:
            WeightMismatchError: for changes of other weights than are kept; nothing has been done then.
        """
        about, digests = read_about(path), read_digests(path)
        if not about.base:
            weights = read_weights(path)
            if not about.keep:
                self._kept, self._content = {}, ""
                return weights, digests
            self._keep(weights)
        else:
            if about.base != self._content:
                raise WeightMismatchError(f"changes of other weights ({about.base}) than are kept ({self._content})")
            self._content = ""
            put_changes(path, self._kept)
        self._content = content_of(digests)
        return self._kept, digests

    def _keep(self, weights: Mapping[str, Tensor]) -> None:
        if kinds_of(weights) == kinds_of(self._kept):
            for name, tensor in weights.items():
                self._kept[name].copy_(tensor)
        else:
            self._kept = {name: tensor.clone() for name, tensor in weights.items()}


@torch.no_grad()
def put_changes(path: str, into: Mapping[str, Tensor]) -> None:
    """Write a file's changes over the tensors of the same names."""
    sent = read_weights(path)
    for name in (key.removeprefix("counts:") for key in sent if key.startswith("counts:")):
        put(into[name], Changes(*(sent[f"{part}:{name}"] for part in Changes._fields)))


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
