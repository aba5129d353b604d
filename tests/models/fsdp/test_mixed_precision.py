"""One bfloat16 rank on a CPU: without FSDP it computes what FSDP2 does, and its attention is float32's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.workers.policy import PolicyWorker
from tests.models.test_shapes import SHAPES, distance, gradient, ragged, settings
from tests.models.test_shapes import shapes as shapes

CHANGES: dict[str, Callable[[Any], None]] = {
    "": lambda policy: None,
    "compiled": lambda policy: setattr(policy, "torch_compile", True),
    "recomputed": lambda policy: setattr(policy, "gradient_checkpointing", True),
    "frozen": lambda policy: setattr(policy, "freeze", ["model.embed_tokens"]),
}


def trained(
    path: str, change: str = "", dtype: str = "bfloat16"
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Log-probabilities, the gradient of two passes, the weights after a step, and whether FSDP had them."""
    cfg = settings(path)
    cfg.trainer.policy.model.dtype = dtype
    CHANGES[change](cfg.trainer.policy)
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    assert isinstance(worker.backend, FSDPBackend)
    try:
        logprobs = worker.logprobs(ragged())
        before = dict(worker.backend.model.named_parameters())
        worker.forward_backward(ragged())
        worker.forward_backward(ragged())
        found = gradient(worker)
        worker.optimizer_step()
        parameters = dict(worker.backend.model.named_parameters())
        assert all(parameters[name] is before[name] for name in before), (
            "modules have the optimizer's parameters"
        )
        whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in parameters.values()]
        weights = torch.cat([p.detach().flatten() for p in whole])
        return logprobs, found, weights, worker.backend.is_sharded()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        *(("", name) for name in SHAPES),
        *(
            pytest.param(c, name, marks=pytest.mark.matrix)
            for c in ("recomputed", "frozen")
            for name in SHAPES
        ),
        pytest.param("compiled", "llama", marks=pytest.mark.matrix),  # others take up to a minute
    ],
)
def test_without_fsdp_all_is_bit_for_bit_as_with_it(
    shapes: dict[str, str], change: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *found, sharded = trained(shapes[name], change)
    assert not sharded
    monkeypatch.setattr(FSDPBackend, "is_sharded", lambda self: True)
    *expected, sharded = trained(shapes[name], change)
    assert sharded
    for one, other in zip(found, expected, strict=True):
        # Compiled, what is fused and rounded once depends on FSDP's hooks, where graphs break.
        assert distance(one, other) < 0.02 if change == "compiled" else torch.equal(one, other)
    assert found[1].dtype == found[2].dtype == torch.float32


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_attention_is_computed_in_float32(
    shapes: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: list[torch.dtype] = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def recorded(query: Tensor, *args: Any, **options: Any) -> Tensor:
        dtypes.append(query.dtype)
        result: Tensor = kernel(query, *args, **options)
        return result

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    _, found, *_ = trained(shapes[name])
    assert set(dtypes) == {torch.float32}
    _, exact, *_ = trained(shapes[name], dtype="float32")
    assert distance(found, exact) < 0.03
