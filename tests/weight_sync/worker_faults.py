"""Faults inside vLLM's worker process, where this module is imported to make them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from tests.weight_sync.pair import LAYER, SWAPPED

EXPERTS = tuple(f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1))


def update_with(worker: Any, fault: str, info: dict[str, Any]) -> str:
    """Load what was sent as an update does, with ``fault`` on the way; the message of the refusal, or nothing."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    from skyasync.weight_sync.update import WeightSyncError
    from skyasync.weight_sync.vllm_shared_memory import SharedMemoryUpdateInfo

    engine = worker.weight_transfer_engine
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(worker.vllm_config))
        _commit(fault, engine, stack)
        try:
            engine.receive_weights(SharedMemoryUpdateInfo(**info))
        except WeightSyncError as error:
            finalize_layerwise_reload(engine.model, engine.model_config)  # what was refused in the midst of a layer
            return str(error)
    return ""


def looks(worker: Any, info: dict[str, Any]) -> list[int]:
    """Of an update: digests of what was read, questions to linear layers, and how many of these there are."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from skyasync.weight_sync import vllm_shared_memory as ours

    engine = worker.weight_transfer_engine
    linear = [layer for layer in engine.model.modules() if isinstance(layer, LinearBase | ParallelLMHead)]
    methods = {id(layer.quant_method): layer.quant_method for layer in linear}.values()
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(worker.vllm_config))
        digested = stack.enter_context(patch.object(ours, "digest", wraps=ours.digest))
        asked = [stack.enter_context(patch.object(method, "apply", wraps=method.apply)) for method in methods]
        engine.receive_weights(ours.SharedMemoryUpdateInfo(**info))
        return [digested.call_count, sum(each.call_count for each in asked), len(linear)]


def _commit(fault: str, engine: Any, stack: ExitStack) -> None:
    load = engine.model.load_weights

    def without_a_layer(weights: Any) -> None:
        load((name, tensor) for name, tensor in weights if LAYER not in name)

    def swapped(weights: Any) -> None:
        names = dict(zip(SWAPPED, SWAPPED[::-1], strict=True))
        load((names.get(name, name), tensor) for name, tensor in weights)

    if fault == "stale layer":
        stack.enter_context(patch.object(engine.model, "load_weights", without_a_layer))
    elif fault == "swapped pair":
        stack.enter_context(patch.object(engine.model, "load_weights", swapped))
    elif fault == "swapped experts":
        first, second = EXPERTS
        names = {first: second, second: first}

        def exchanged(weights: Any) -> None:
            load((names.get(name, name), tensor) for name, tensor in weights)

        stack.enter_context(patch.object(engine.model, "load_weights", exchanged))
    elif fault == "head left behind":
        stack.enter_context(patch.object(engine, "_tied", []))
    elif fault == "flipped bit":
        stack.enter_context(patch.object(engine._borrower, "read", _one_bit_off(engine._borrower.read)))
    else:
        assert not fault


def _one_bit_off(read: Any) -> Any:
    import torch

    def reading(info: Any) -> dict[str, Any]:
        weights = read(info)
        tensor = weights[SWAPPED[0]].clone()
        tensor.view(-1).view(torch.int16)[0] ^= 1
        return weights | {SWAPPED[0]: tensor}

    return reading
