"""What vLLM itself takes to load weights that its worker has in memory: ``benchmarks.weight_sync`` compares with it.

Wants ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``: these functions run in vLLM's workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from safetensors.torch import load_file


def hold(worker: Any, path: str) -> None:
    """Copy a file's weights into the worker's memory."""
    worker.held_weights = [(name, tensor.clone()) for name, tensor in load_file(path).items()]


def reload(worker: Any) -> None:
    """Load what is held; nothing is read meanwhile, and nothing proven."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from skyasync.weight_sync.vllm_shared_memory import have_experts_packed, retie

    engine = worker.weight_transfer_engine
    with set_current_vllm_config(worker.vllm_config):
        have_experts_packed(engine.model)
        initialize_layerwise_reload(engine.model)
        engine.model.load_weights(worker.__dict__.pop("held_weights"))
        finalize_layerwise_reload(engine.model, engine.model_config)
        for head, embedding in engine._tied:
            retie(head, embedding)


async def in_workers(engines: Sequence[Any], function: Callable[..., None], *args: object) -> None:
    """In those of all engines, at the same time."""
    await asyncio.gather(*(each._core.llm.collective_rpc(function, args=args) for each in engines))
