"""The time of vLLM's own loading of weights, which ``benchmarks.weight_sync`` compares with.

Measured with tensors in its worker's memory (``reload``), and within a weight sync, so that other
load on the machine affects both alike (``watch``).

Needs ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``: these functions run in vLLM's workers.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from safetensors.torch import load_file


def hold(worker: Any, path: str) -> None:
    """Copy a file's weights into the worker's memory."""
    worker.held_weights = [(name, tensor.clone()) for name, tensor in load_file(path).items()]


def reload(worker: Any) -> None:
    """Load the copied weights; nothing is read meanwhile, and nothing verified."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    from skyasync.weight_sync.transfers.vllm_worker import reset_expert_kernels, retie

    engine = worker.weight_transfer_engine
    with set_current_vllm_config(worker.vllm_config):
        reset_expert_kernels(engine.model)
        initialize_layerwise_reload(engine.model)
        engine.model.load_weights(worker.__dict__.pop("held_weights"))
        finalize_layerwise_reload(engine.model, engine.model_config)
        for head, embedding in engine._tied_layers:
            retie(head, embedding)


def watch(worker: Any) -> None:
    """From now on measure updates: vLLM's own functions, digests of bytes, and comparisons of
    layers."""
    from skyasync.weight_sync.transfers import vllm_worker as ours

    engine = worker.weight_transfer_engine
    worker.spent = Counter()
    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload", "retie"):
        setattr(ours, name, counted(worker.spent, "own", getattr(ours, name)))
    ours.digest = counted(worker.spent, "digests", ours.digest)
    engine.model.load_weights = counted(worker.spent, "own", engine.model.load_weights)
    engine.layer_check.check = counted(worker.spent, "asking", engine.layer_check.check)
    engine.receive_weights = counted(worker.spent, "all", engine.receive_weights)


def spent(worker: Any) -> dict[str, float]:
    """CPU milliseconds by kind since the last call. Digests are computed while vLLM's own load
    waits."""
    found = {
        kind: 1000 * worker.spent.pop(kind, 0.0) for kind in ("all", "own", "digests", "asking")
    }
    found["own"] -= found["digests"]
    return found


def counted(into: Counter[str], kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, whose CPU seconds are added up."""

    def counting(*args: object) -> Any:
        used = time.process_time()
        try:
            return call(*args)
        finally:
            into[kind] += time.process_time() - used

    return counting


async def in_workers(
    engines: Sequence[Any], function: Callable[..., Any], *args: object
) -> list[Any]:
    """In the workers of all engines, at the same time; the answers of the first worker of each."""
    answers = await asyncio.gather(
        *(each.llm.collective_rpc(function, args=args) for each in engines)
    )
    return [found[0] for found in answers]
