"""Faults inside vLLM's worker process, which imports this module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from tests.weight_sync.policy_and_engine import LAYER, SWAPPED

#: ... and a tensor: flips the lowest bit of the last element of this rank's part, after all checks of received bytes.
BIT_OF = "bit of "
WITHOUT = "without "  # drops weights with this in their names
EXPERTS = tuple(f"model.layers.1.mlp.experts.{expert}.down_proj.weight" for expert in (0, 1))


def update_with(worker: Any, fault: str, info: dict[str, Any], rank: int | None = None) -> str:
    """Load sent weights as an update does, with ``fault`` in between; the error message, or "".

    Args:
        rank: the rank with the fault; by default all ranks.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    from skyasync.weight_sync.transfers.vllm_worker import UpdateInfo
    from skyasync.weight_sync.update import WeightSyncError

    engine = worker.weight_transfer_engine
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(worker.vllm_config))
        _commit(fault if rank in (None, worker.rank) else "", engine, stack)
        try:
            engine.receive_weights(UpdateInfo(info))
        except WeightSyncError as error:
            finalize_layerwise_reload(
                engine.model, engine.model_config
            )  # the error came in the middle of a layer
            return str(error)
    return ""


def load_without_comparison(worker: Any, info: dict[str, Any], skipped: str) -> str:
    """Load sent weights as a broadcast between GPUs does, by a loader that skips some; the error message, or ""."""
    from vllm.config import set_current_vllm_config

    from skyasync.weight_sync.transfers.vllm_worker import refuse_stale
    from skyasync.weight_sync.update import WeightSyncError

    engine = worker.weight_transfer_engine
    load = engine.model.load_weights

    def load_others(weights: Any) -> Any:
        return load((name, tensor) for name, tensor in weights if skipped not in name)

    received = engine._reader.read(info)
    weights = engine._decoder.decode(received.weights, received.digests, received.header)
    with (
        set_current_vllm_config(worker.vllm_config),
        patch.object(engine.model, "load_weights", load_others),
    ):
        try:
            refuse_stale(engine._reload(weights.items()), engine.model)
        except WeightSyncError as error:
            return str(error)
    return ""


def inject_fault(worker: Any, fault: str, rank: int) -> None:
    """Inject this fault into one rank, in every update from now on."""
    if worker.rank == rank:
        _commit(fault, worker.weight_transfer_engine, ExitStack())


def looks(worker: Any, info: dict[str, Any]) -> list[int]:
    """Of an update: digests of bytes that were read, comparisons of linear layers, and the number of these layers."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from skyasync.weight_sync.transfers import vllm_worker as ours

    engine = worker.weight_transfer_engine
    linear = [
        layer for layer in engine.model.modules() if isinstance(layer, LinearBase | ParallelLMHead)
    ]
    methods = {id(layer.quant_method): layer.quant_method for layer in linear}.values()
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(worker.vllm_config))
        digested = stack.enter_context(patch.object(ours, "digest", wraps=ours.digest))
        asked = [
            stack.enter_context(patch.object(method, "apply", wraps=method.apply))
            for method in methods
        ]
        engine.receive_weights(ours.UpdateInfo(info))
        return [digested.call_count, sum(each.call_count for each in asked), len(linear)]


def _commit(fault: str, engine: Any, stack: ExitStack) -> None:
    load = engine.model.load_weights

    def without(part: str) -> Callable[[Any], None]:
        return lambda weights: load((name, tensor) for name, tensor in weights if part not in name)

    def swapped(weights: Any) -> None:
        names = dict(zip(SWAPPED, SWAPPED[::-1], strict=True))
        load((names.get(name, name), tensor) for name, tensor in weights)

    if fault == "stale layer":
        stack.enter_context(patch.object(engine.model, "load_weights", without(LAYER)))
    elif fault.startswith(WITHOUT):
        stack.enter_context(
            patch.object(engine.model, "load_weights", without(fault.removeprefix(WITHOUT)))
        )
    elif fault == "swapped pair":
        stack.enter_context(patch.object(engine.model, "load_weights", swapped))
    elif fault == "swapped experts":
        first, second = EXPERTS
        names = {first: second, second: first}

        def exchanged(weights: Any) -> None:
            load((names.get(name, name), tensor) for name, tensor in weights)

        stack.enter_context(patch.object(engine.model, "load_weights", exchanged))
    elif fault == "head left behind":
        stack.enter_context(patch.object(engine, "_tied_layers", []))
    elif fault == "flipped bit":
        from skyasync.weight_sync.transfers import file

        buffers = engine._reader.buffers
        stack.enter_context(patch.object(buffers, "read", _one_bit_off(buffers.read)))
        stack.enter_context(patch.object(file, "read_weights", _one_bit_off(file.read_weights)))
    elif fault.startswith(BIT_OF):
        loses = _loses_a_bit(engine, fault.removeprefix(BIT_OF))
        stack.enter_context(
            patch.object(engine.model, "load_weights", lambda weights: load(map(loses, weights)))
        )
    else:
        assert not fault


def _one_bit_off(read: Any) -> Any:
    import torch

    def reading(where: Any) -> dict[str, Any]:
        weights = read(where)
        tensor = weights[SWAPPED[0]].clone()
        tensor.view(-1).view(torch.int16)[0] ^= 1
        return weights | {SWAPPED[0]: tensor}

    return reading


def _loses_a_bit(engine: Any, lost: str) -> Callable[[tuple[str, Any]], tuple[str, Any]]:
    import torch

    from skyasync.weight_sync.verify.vllm_layers import own_part

    def loses(named: tuple[str, Any]) -> tuple[str, Any]:
        name, tensor = named
        if name == lost:
            tensor = tensor.clone()
            module, _ = engine.layer_check._place(name, {})
            part = own_part(module, name, tensor)
            part[(-1,) * part.dim()].view(torch.int32).bitwise_xor_(1)
        return name, tensor

    return loses
