"""Runs on one GPU that policy and engine share in turns, by Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.sync_gaps import Shape, configuration
from tests.end_to_end.conftest import models  # noqa: F401
from tests.end_to_end.runs import PARTS, train_in

SHARED = (
    "trainer.placement.colocate_all=true",
    "generator.gpu_memory_utilization=0.3",
    "trainer.max_training_steps=6",
)
GAP = {"float32": 1e-4, "bfloat16": 0.1}


@pytest.mark.parametrize("backend", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
@pytest.mark.parametrize("plan", ["sync", "colocated_async"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_trains_on_the_gpu(
    ray_session: None,
    models: dict[str, str],  # noqa: F811
    tmp_path: Path,
    backend: str,
    plan: str,
    dtype: str,
) -> None:
    import ray

    assert ray.cluster_resources()["GPU"] >= 1
    train = train_in(tmp_path, models["tied"])
    run = train(
        f"generator.backend={backend}", f"trainer.plan={plan}", f"trainer.policy.model.dtype={dtype}",
        f"generator.dtype={dtype}", f"environment.env_class={PARTS}:Distinct", *SHARED,
    )  # fmt: skip
    assert run.series("step") == [1, 2, 3, 4, 5, 6]
    assert max(run.series("sync/logprob_gap")) <= GAP[dtype]
    assert all(norm > 0 for norm in run.series("policy/grad_norm"))


@pytest.mark.vllm
@pytest.mark.parametrize("name", ["adapters", "experts"])
def test_vllm_computes_with_adapters_and_reports_its_experts(
    ray_session: None,
    models: dict[str, str],  # noqa: F811
    tmp_path: Path,
    name: str,
) -> None:
    model = models["tied"]
    settings = ["trainer.policy.lora.rank=8", "trainer.policy.lora.sync=adapter"]
    if name == "experts":
        tokenizer, config = (
            AutoTokenizer.from_pretrained(model),
            configuration(Shape("moe", "tied", "bfloat16"), 32),
        )
        config.vocab_size, config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
        config.pad_token_id = config.bos_token_id = tokenizer.pad_token_id
        model = str(tmp_path / "model")
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        tokenizer.save_pretrained(model)
        settings = ["trainer.policy.router_replay=R3"]
    run = train_in(tmp_path, model)(
        "generator.backend=vllm",
        "trainer.plan=sync",
        "trainer.policy.model.dtype=bfloat16",
        *settings,
        *SHARED,
    )
    assert run.series("step") == [1, 2, 3, 4, 5, 6]
    assert max(run.series("sync/logprob_gap")) <= GAP["bfloat16"]
