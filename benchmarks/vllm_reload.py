"""What vLLM itself takes to load weights that its worker has in memory: ``benchmarks.weight_sync`` compares with it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from safetensors.torch import load_file


def reload(worker: Any, path: str) -> tuple[float, float]:
    """Milliseconds, and the processor's; nothing is read meanwhile, and nothing proven."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    from skyasync.weight_sync.vllm_shared_memory import have_experts_packed, retie

    engine = worker.weight_transfer_engine
    weights = [(name, tensor.clone()) for name, tensor in load_file(path).items()]
    with set_current_vllm_config(worker.vllm_config):
        start, used = time.perf_counter(), time.process_time()
        have_experts_packed(engine.model)
        initialize_layerwise_reload(engine.model)
        engine.model.load_weights(weights)
        finalize_layerwise_reload(engine.model, engine.model_config)
        for head, embedding in engine._tied:
            retie(head, embedding)
        return 1000 * (time.perf_counter() - start), 1000 * (time.process_time() - used)


async def reloads(engines: Sequence[Any], path: str) -> tuple[float, float]:
    """The slowest of all engines, which load at the same time, and the processor's time of all.

    Wants ``VLLM_ALLOW_INSECURE_SERIALIZATION=1``.
    """
    answers = await asyncio.gather(*(each._core.llm.collective_rpc(reload, args=(path,)) for each in engines))
    walls, used = zip(*(worker for workers in answers for worker in workers), strict=True)
    return max(walls), sum(used)
