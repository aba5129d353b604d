"""A run of every plan whose policy is two stages of layers, or a mixture whose experts two ranks divide."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.end_to_end.runs import Train

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

PLANS = {
    "sync": [],
    "one_step_off": [],
    "streamed": ["trainer.stream_groups=1"],
    "fully_async": ["trainer.max_staleness=2"],
    "colocated_async": ["trainer.max_staleness=2", "trainer.placement.colocate_all=true"],
    "hybrid_async": ["trainer.max_staleness=2", "generator.hybrid_engines=1"],
}


@pytest.fixture(scope="module")
def mixture(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four experts in each of two layers, with random weights and the tiny model's tokenizer."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(models["tied"], folder)
    tokens = AutoConfig.from_pretrained(folder)
    config = Qwen3MoeConfig(
        vocab_size=tokens.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
        num_key_value_heads=2,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("divided", ["pipeline", "expert"])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_trains_it_and_its_weights_arrive(
    plan: str, divided: str, train: Train, mixture: str, tmp_path: Path
) -> None:
    (tmp_path / "letters.py").write_text(
        "def letters(response):\n    return float(len(set(response)))\n"
    )
    judged = [
        "environment.env_class=reward",
        f"environment.reward_funcs=[{tmp_path / 'letters.py'}:letters]",
    ]
    model = [f"trainer.policy.model.path={mixture}"] if divided == "expert" else []
    ranks = ["trainer.placement.policy_num_gpus_per_node=2", f"trainer.parallel.{divided}=2"]
    run = train(
        f"trainer.plan={plan}",
        *PLANS[plan],
        *ranks,
        *model,
        *judged,
        "trainer.max_training_steps=3",
    )
    assert run.series("step") == [1, 2, 3]
    assert all(norm > 0 for norm in run.series("policy/grad_norm"))
    assert max(row.get("sync/logprob_gap", 0.0) for row in run.metrics) <= 1e-4
    assert any("sync/logprob_gap" in row for row in run.metrics)
