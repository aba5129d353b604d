"""Calls of a policy worker, with the invariants that hold between any two of them; every rank runs them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from skyasync.models.backend import VALUE_HEAD, SaveResult
from skyasync.utils import manifest
from skyasync.weight_sync.delta import DeltaDecoder
from skyasync.weight_sync.transfers.broadcast import BroadcastReader
from skyasync.weight_sync.transfers.file import read_file, read_weights
from skyasync.weight_sync.transfers.shared_memory import BufferReader
from skyasync.workers.model_worker import ModelWorker
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.ranks import split_for_ranks
from tests.workers.conftest import make_batch
from tests.workers.processes import Rank

CALLS = (
    "score",
    "logprobs",
    "update",
    "publish",
    "broadcast",
    "save",
    "save_asynchronously",
    "load",
    "export",
)
SEQUENCES = [[5, 6, 7, 8], [9, 1], [1, 2, 3]]


def play(rank: Rank, calls: list[str], folder: str) -> list[str]:
    """Make the calls, checking the worker after each; returns a digest of the state after each."""
    player = _Player(rank, Path(folder))
    return [player.play(call) for call in calls]


class _Player:
    def __init__(self, rank: Rank, folder: Path) -> None:
        self.rank, self.folder = rank, folder
        self.worker: PolicyWorker = rank.worker
        self.names = {id(p): name for name, p in self.worker.backend.model.named_parameters()}
        self.answers: dict[tuple[str, str], Any] = {}  # a call in a state has one answer
        self.saved: list[tuple[str, str]] = []  # folder, digest of the state in it
        self.reader, self.decoder = BufferReader(), DeltaDecoder()  # an engine's
        self.digest = digest(self.worker)

    def play(self, call: str) -> str:
        before = self.digest
        answer = getattr(self, call)()
        check_between_calls(self.worker, self.names)
        self.digest = digest(self.worker)
        if call not in ("update", "save_asynchronously", "load"):
            assert self.digest == before, f"{call} has changed the state"
        assert self.answers.setdefault((before, call), answer) == answer, (
            f"{call} has two answers in one state"
        )
        return self.digest

    def score(self) -> list[list[float]]:
        return self.worker.score(SEQUENCES)

    def logprobs(self) -> list[list[float]]:
        return self.worker.logprobs(self._shard(3)).tolist()

    def update(self) -> tuple[dict[str, float], str]:
        metrics = self.worker.update_policy(self._shard(self.worker.backend.step))
        return metrics, digest(self.worker)

    def publish(self) -> None:
        send = self.worker.transfer_weights
        written, expected = send("file", "write"), whole_weights(self.worker)
        assert (written is None) == (self.rank.rank > 0)
        if written is not None:
            equal(read_weights(written[0]), expected)
            send("file", "remove", written[0])
        info, delta = send("shared_memory", "write"), send("file", "write", "delta")
        assert (info is None) == (delta is None) == (self.rank.rank > 0)
        if info is not None and delta is not None:
            equal(self.reader.read(info), expected)
            send("shared_memory", "release", info["path"])
            equal(dict(self.decoder.decode(*read_file(delta[0]))), expected)
            send("file", "remove", delta[0])

    def broadcast(self) -> None:
        """Broadcast to one engine, which is a thread of rank 0."""
        send, received, rendezvous = (
            self.worker.transfer_weights,
            dict[str, Tensor](),
            {"senders": [0]},
        )
        if self.rank.rank == 0:
            rendezvous, specs = (
                send("broadcast", "open", "127.0.0.1", 1, 30.0),
                send("broadcast", "specs"),
            )
            info = {"rendezvous": rendezvous, "specs": specs}
            reader = BroadcastReader(torch.device("cpu"))
            engine = Thread(target=lambda: received.update(reader.read(info)))
            engine.start()
        assert send("broadcast", "send", rendezvous) == ""
        expected = whole_weights(self.worker)
        if self.rank.rank == 0:
            engine.join()
            equal(received, expected)
            assert set(received) == {
                n for n, _ in self.worker.backend.model.model.named_parameters()
            }
            assert list(specs) == list(received)

    def save(self) -> None:
        folder = self.folder / str(len(self.saved))
        check_files(self.worker, folder, self.worker.save(str(folder)))
        self.saved.append((str(folder), digest(self.worker)))

    def save_asynchronously(self) -> None:
        """The save has the state at its beginning, although training continues during it."""
        folder, state = self.folder / str(len(self.saved)), digest(self.worker)
        self.worker.begin_save(str(folder))
        self.update()
        while (found := self.worker.saved()) is None:
            time.sleep(0.01)
        check_files(self.worker, folder, found)
        self.saved.append((str(folder), state))

    def load(self) -> None:
        """The oldest save, so that a later update must be undone."""
        if not self.saved:
            with pytest.raises(FileNotFoundError):
                self.worker.load(str(self.folder / "nothing"))
            return
        folder, state = self.saved[0]
        self.worker.load(folder)
        assert digest(self.worker) == state, "the loaded state differs from the saved one"

    def export(self) -> None:
        folder = self.folder / "export"
        self.worker.export(str(folder))
        expected = whole_weights(self.worker)
        if self.rank.rank == 0:
            equal(load_file(folder / "model.safetensors"), expected)

    def _shard(self, seed: int) -> Any:
        batch = make_batch(seed=seed)
        return batch.select(split_for_ranks(batch, self.rank.count)[self.rank.rank]).trim()


def check_files(worker: PolicyWorker, folder: Path, found: SaveResult) -> None:
    """A rank has written files, and they contain what the manifest says."""
    assert not found.problem
    assert found.files and list(manifest.damage(folder, found.files)) == []
    assert worker.verify(str(folder), found.files) == []


def check_between_calls(worker: ModelWorker, names: dict[int, str]) -> None:
    """Parameters are the original objects, sharded if the worker is; the optimizer has exactly these.

    Args:
        names: of the parameters, by their identity.
    """
    sharded = worker.backend.is_sharded()
    parameters = dict(worker.backend.model.named_parameters())
    for name, parameter in parameters.items():
        assert isinstance(parameter, DTensor) == sharded, f"{name} is a {type(parameter).__name__}"
        assert names.get(id(parameter)) == name, f"{name} is another tensor than before"
        assert parameter.dtype == worker.backend.master_dtype()
        assert not sharded or parameter.placements == (Shard(0),)
    if isinstance(worker, PolicyWorker):
        known = [id(p) for group in worker.backend.optimizer.param_groups for p in group["params"]]
        assert sorted(known) == sorted(map(id, parameters.values()))
        assert {id(p) for p in worker.backend.optimizer.state} <= set(known)


def remember_parameters(rank: Rank) -> None:
    rank.notes["names"] = {id(p): name for name, p in rank.worker.backend.model.named_parameters()}


def logprobs(rank: Rank, seed: int) -> list[list[float]]:
    """Log-probabilities of all rows on every rank, checked."""
    answer: list[list[float]] = rank.worker.logprobs(make_batch(seed=seed)).tolist()
    check_between_calls(rank.worker, rank.notes["names"])
    return answer


def step_and_save(rank: Rank, folder: str) -> str:
    """An optimizer step, its checkpoint, and a digest of the whole state, which is independent of the ranks."""
    batch = make_batch(seed=rank.worker.backend.step)
    rank.worker.update_policy(batch.select(split_for_ranks(batch, rank.count)[rank.rank]).trim())
    rank.worker.save(folder)
    return digest_of_whole(rank.worker)


def load_whole(rank: Rank, folder: str) -> str:
    rank.worker.load(folder)
    return digest_of_whole(rank.worker)


def digest_of_whole(worker: PolicyWorker) -> str:
    return _hashed(
        worker, lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    )


def whole_weights(worker: PolicyWorker) -> dict[str, Tensor]:
    """Published weights, gathered by hand: parameters once each, in the engines' dtype."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().to(worker.backend.dtype)
        for name, p in worker.backend.model.model.named_parameters()
    }


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def digest(worker: PolicyWorker) -> str:
    """A digest of the state that determines the worker's next calls, over all ranks."""
    own = _hashed(
        worker, lambda tensor: tensor.to_local() if isinstance(tensor, DTensor) else tensor
    )
    if not dist.is_initialized():
        return own
    everybody: list[Any] = [None] * worker.world_size
    dist.all_gather_object(everybody, own)
    return "-".join(everybody)


def _hashed(worker: PolicyWorker, view: Callable[[Tensor], Tensor]) -> str:
    hashed = hashlib.blake2b(str(worker.backend.step).encode())
    for name, tensor in _state(worker):
        hashed.update(name.encode() + view(tensor).reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def _state(worker: PolicyWorker) -> Iterator[tuple[str, Tensor]]:
    yield "random", torch.get_rng_state()
    kept = dict(worker.backend.optimizer.state)
    if head := worker.backend.trained.get(VALUE_HEAD):
        kept |= head.optimizer.state
    for name, parameter in worker.backend.model.named_parameters():
        yield name, parameter.detach()
        for kind, value in sorted(kept.get(parameter, {}).items()):
            yield f"{name} {kind}", value
