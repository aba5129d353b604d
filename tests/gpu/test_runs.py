"""Runs on one GPU that policy and embedded engine share in turns, by Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import models  # noqa: F401
from tests.end_to_end.runs import train_in

SHARED = ("trainer.placement.colocate_all=true", "generator.gpu_memory_utilization=0.3", "trainer.max_training_steps=6")
GAP = {"float32": 1e-4, "bfloat16": 0.1}


@pytest.mark.parametrize("plan", ["sync", "colocated_async"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_trains_on_the_gpu(
    ray_session: None,
    models: dict[str, str],  # noqa: F811
    tmp_path: Path,
    plan: str,
    dtype: str,
) -> None:
    import ray

    assert ray.cluster_resources()["GPU"] >= 1
    train = train_in(tmp_path, models["tied"])
    run = train(f"trainer.plan={plan}", f"trainer.policy.model.dtype={dtype}", f"generator.dtype={dtype}", *SHARED)
    assert run.series("step") == [1, 2, 3, 4, 5, 6]
    assert max(run.series("sync/logprob_gap")) <= GAP[dtype]
    assert all(norm > 0 for norm in run.series("policy/grad_norm"))
