"""A policy on a GPU: CPUs' numbers, packed rows by the compiled kernel, memory that really comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyasync.config.schema import Config
from skyasync.models.batch import UpdateBatch
from skyasync.models.fsdp import backend as fsdp
from skyasync.models.fsdp.sharding import local
from skyasync.workers.policy import PolicyWorker
from tests.models.test_shapes import SHAPES, distance, gradient, ragged, settings
from tests.workers.conftest import comparable, make_batch


def worker_on(device: str, cfg: Config, dtype: str = "float32") -> PolicyWorker:
    cfg.trainer.policy.model.dtype = dtype
    worker = PolicyWorker(cfg, device=device, threads=1)
    worker.setup()
    return worker


def computed(device: str, cfg: Config, dtype: str = "float32") -> tuple[Tensor, Tensor]:
    """Log-probabilities and the gradient."""
    worker = worker_on(device, cfg, dtype)
    logprobs = worker.logprobs(ragged())
    worker.forward_backward(ragged())
    return logprobs, gradient(worker).cpu()


@pytest.mark.parametrize("name", SHAPES)
def test_float32_is_that_of_a_cpu(shapes: dict[str, str], name: str) -> None:
    (expected, steps), (found, taken) = (
        computed(device, settings(shapes[name])) for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert distance(taken, steps) < 1e-4


@pytest.mark.parametrize(
    ("name", "recomputed"),
    [*((name, False) for name in SHAPES), ("qwen3_tied", True), ("gemma2_capped", "selective")],
)
def test_packed_rows_have_the_gradient_of_rows_of_their_own(
    shapes: dict[str, str], name: str, recomputed: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = settings(shapes[name])
    cfg.trainer.policy.gradient_checkpointing = recomputed
    cfg.trainer.micro_batch_tokens = 4096
    packed = computed("cuda", cfg)
    monkeypatch.setattr(fsdp, "can_share_prefixes", lambda config: False)
    cfg.trainer.micro_train_batch_size_per_gpu = 1
    expected = computed("cuda", cfg)
    torch.testing.assert_close(packed[0], expected[0], atol=1e-4, rtol=0)
    assert distance(packed[1], expected[1]) < 1e-4


@pytest.mark.parametrize("name", SHAPES)
def test_bfloat16_is_near_float32(shapes: dict[str, str], name: str) -> None:
    expected, found = (
        computed("cuda", settings(shapes[name]), dtype) for dtype in ("float32", "bfloat16")
    )
    assert (found[0] - expected[0]).abs().mean() < 0.03
    assert distance(found[1], expected[1]) < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_layers_learn_the_same(cfg: Config, dtype: str) -> None:
    expected = computed("cuda", settings(cfg.trainer.policy.model.path), dtype)
    compiled = settings(cfg.trainer.policy.model.path)
    compiled.trainer.policy.torch_compile = True
    found = computed("cuda", compiled, dtype)
    limit = 1e-4 if dtype == "float32" else 0.05
    assert distance(found[1], expected[1]) < limit


def alone(seed: int) -> UpdateBatch:
    """Rows that share no prompt: a GPU adds up gradients of shared tokens in any order, and the last bit varies."""
    return make_batch(groups=12, samples=1, seed=seed)


def train(cfg: Config, dtype: str, *, away: bool = False) -> tuple[list[Any], list[Tensor]]:
    """Metrics of three updates, and the weights."""
    worker, metrics = worker_on("cuda", cfg, dtype), []
    for seed in range(3):
        metrics.append(comparable(worker.update_policy(alone(seed))))
        if away:
            worker.offload()
            worker.onload()
    return metrics, [local(p).detach().cpu() for p in worker.backend.model.parameters()]


@pytest.mark.parametrize("kind", ["away", "optimizer", "parameters"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_host_memory_changes_no_bit(cfg: Config, kind: str, dtype: str) -> None:
    expected = train(cfg, dtype)
    if kind != "away":
        cfg.trainer.policy.cpu_offload = kind
    found = train(cfg, dtype, away=kind == "away")
    assert found[0] == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_offloaded_policy_leaves_the_gpu_empty_in_both_directions_by_pinned_memory(
    cfg: Config, dtype: str
) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    worker = worker_on("cuda", cfg, dtype)
    worker.update_policy(make_batch())
    held = torch.cuda.memory_allocated() - before
    worker.offload()
    assert all(local(p).is_pinned() for p in worker.backend.model.parameters())
    assert torch.cuda.memory_allocated() - before < held / 10
    worker.onload()
    assert 0.9 * held < torch.cuda.memory_allocated() - before < 1.1 * held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_goes_on_bit_for_bit(cfg: Config, dtype: str, tmp_path: Path) -> None:
    first = worker_on("cuda", cfg, dtype)
    first.update_policy(alone(0))
    assert not first.save(str(tmp_path)).problem
    second = worker_on("cuda", cfg, dtype)
    second.load(str(tmp_path))
    later = [worker.update_policy(alone(1)) for worker in (first, second)]
    assert later[0] == later[1]


@pytest.mark.parametrize("kind", ["adamw_8bit", "muon"])
def test_other_optimizers_take_a_step(cfg: Config, kind: str) -> None:
    cfg.trainer.policy.optimizer_config.name = kind
    worker = worker_on("cuda", cfg, "bfloat16")
    assert worker.update_policy(make_batch())["grad_norm"] > 0
