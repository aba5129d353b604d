"""A real policy and a real engine with one model, small steps of the policy, and faults in the transfer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from skyasync.config.schema import Config
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import ENGINES, EngineConfig
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.transfers import shared_memory
from skyasync.weight_sync.verify.log_probabilities import BFLOAT16, FLOAT32, gap
from skyasync.workers.dispatch import LocalDispatch

STEP = 5e-6  # the change of every weight by one optimizer step with SmolLM2's learning rate
LAYER = ".layers.1."
SWAPPED = ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.weight")


class Pair:
    """Policy, engine, and the sync between them. ``step`` changes the policy by a small optimizer step."""

    def __init__(
        self,
        backend: str,
        path: str,
        dtype: str,
        probe: list[list[int]],
        config_kwargs: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        head_dtype: str = "model",
        **engine: Any,
    ) -> None:
        cfg = Config()
        cfg.trainer.policy.model.config_kwargs = config_kwargs or {}
        vars(cfg.trainer.policy.lora).update(lora or {})
        (
            cfg.trainer.policy.model.path,
            cfg.trainer.policy.model.dtype,
            cfg.trainer.policy.threads,
        ) = path, dtype, 1
        cfg.generator.backend = backend
        cfg.trainer.policy.head_dtype = head_dtype
        self.dispatch = LocalDispatch(cfg)
        settings = {
            "threads": 1,
            "max_model_len": 256,
            "max_num_seqs": 64,
            "kv_cache_gb": 0.25,
            **engine,
        }
        settings["extra"] = {"float32_head": head_dtype == "float32", **settings.get("extra", {})}
        self.engine: Any = ENGINES[backend](EngineConfig(path, dtype=dtype, **settings))
        self.client = InferenceClient([self.engine])
        rounding = FLOAT32 if dtype == "float32" else BFLOAT16
        self.sync = WeightSync(self.dispatch, self.client, probe, rounding=rounding)
        self._random, self.version = torch.Generator().manual_seed(0), 0

    @torch.no_grad()
    def step(self, size: float = STEP) -> None:
        for parameter in self.dispatch._policy.backend.model.parameters():
            if not parameter.requires_grad:
                continue
            local = getattr(parameter, "_local_tensor", parameter)
            local += size * torch.randn(local.shape, generator=self._random).sign()

    async def hand_over(self) -> None:
        self.version += 1
        await self.sync.sync(self.version)

    async def verify(self) -> dict[str, float]:
        return await self.sync.verify(self.version)


@asynccontextmanager
async def running(
    backend: str, path: str, dtype: str, probe: list[list[int]], **engine: Any
) -> AsyncIterator[Pair]:
    pair = Pair(backend, path, dtype, probe, **engine)
    await pair.client.start()
    try:
        await pair.sync.measure_floor()
        yield pair
    finally:
        await pair.client.shutdown()
        await pair.dispatch.shutdown()


async def never_fails(pair: Pair, syncs: int) -> list[float]:
    """Run ``syncs`` small steps with a verified sync each; returns the mean differences, as shares of the limit."""
    found = []
    for _ in range(syncs):
        pair.step()
        await pair.hand_over()
        metrics = await pair.verify()
        found.append(metrics["sync/logprob_gap_mean"] / metrics["sync/logprob_gap_limit"])
    return found


async def moved_by_writing_over(pair: Pair) -> tuple[float, float]:
    """How far an engine's log-probabilities move when its file is overwritten, and when it is notified of that."""
    pair.sync.expects_late_engines = True
    for _ in range(3):
        pair.step()
        await pair.hand_over()
    (before,) = await pair.client.score(pair.sync.probe)
    pair.step(1e-2)
    update = await pair.dispatch.transfer.publish(0)
    (untold,) = await pair.client.score(pair.sync.probe)
    await pair.client.update_weights(update)
    (told,) = await pair.client.score(pair.sync.probe)
    await pair.hand_over()
    await pair.verify()
    return gap(before, untold).largest, gap(before, told).largest


# Faults in received weights, as functions of the weights that were sent and those that the model had before.


def stale_layer(sent: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: before[name] if LAYER in name else tensor for name, tensor in sent.items()}


def swapped_pair(sent: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
    first, second = SWAPPED
    return sent | {first: sent[second], second: sent[first]}


def flipped_bit(sent: dict[str, Tensor], before: dict[str, Tensor]) -> dict[str, Tensor]:
    """Flip the lowest bit of one element."""
    tensor = sent[SWAPPED[0]].clone()
    tensor.view(-1).view(torch.int16)[0] ^= 1
    return sent | {SWAPPED[0]: tensor}


@contextmanager
def arriving(model: Any, fault: Callable[..., dict[str, Tensor]]) -> Iterator[None]:
    """Inside, an embedded model loads ``fault`` of the sent weights."""
    load = model.load_weights

    def faulty(weights: dict[str, Tensor], **how: bool) -> None:
        before = {name: tensor.clone() for name, tensor in model._model.state_dict().items()}
        load(fault(dict(weights), before), **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "load_weights", faulty)
        yield


@contextmanager
def losing_a_bit() -> Iterator[None]:
    """Inside, one bit of a tensor flips while the trainer writes it into shared memory."""
    copy = shared_memory._copy

    def loses_a_bit(into: Tensor, sent: Tensor) -> str:
        digest = copy(into, sent)
        into.view(-1)[:1].view(torch.int16)[:1] ^= 1
        return digest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_copy", loses_a_bit)
        yield
