"""Recipes of verl and TRL, in the settings of published ones: each number is that of the source's arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import pytest
import torch

from skyasync.algorithms.advantages import compute_advantages
from skyasync.config.schema import Config
from skyasync.interop.recipe import read_recipe
from skyasync.workers.model_worker import learning_rate
from tests.interop.test_documented_recipes import A, Translation

pytestmark = pytest.mark.slow

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
VERL_GRPO = f"""
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=1024 data.max_prompt_length=1024 \\
  data.max_response_length=2048 data.train_files=a.parquet {ACTOR}optim.lr=1e-6 {ACTOR}ppo_mini_batch_size=256 \\
  {ACTOR}use_kl_loss=True {ACTOR}kl_loss_coef=0.001 {ACTOR}kl_loss_type=low_var_kl {ACTOR}entropy_coeff=0 \\
  {ROLLOUT}name=vllm {ROLLOUT}n=5 {ROLLOUT}tensor_model_parallel_size=2 trainer.n_gpus_per_node=8 \\
  trainer.total_epochs=15
"""
VERL_PPO = f"""
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=gae data.train_batch_size=1024 data.max_prompt_length=512 \\
  data.max_response_length=512 data.train_files=a.parquet {ACTOR}optim.lr=1e-6 \\
  {ACTOR}optim.lr_warmup_steps_ratio=0.25 {ACTOR}optim.lr_scheduler_type=cosine \\
  {ACTOR}ppo_mini_batch_size=256 {ACTOR}ppo_epochs=2 \\
  algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.01 critic.optim.lr=1e-5 {ROLLOUT}name=vllm \\
  trainer.total_training_steps=50
"""
VERL_ASYNC = f"""
python -m verl.experimental.fully_async_policy.fully_async_main data.train_batch_size=0 data.max_prompt_length=2048 \\
  data.max_response_length=8192 data.train_files=a.parquet algorithm.adv_estimator=grpo {ACTOR}optim.lr=1e-6 \\
  {ACTOR}optim.lr_warmup_steps=10 {ACTOR}optim.weight_decay=0.1 {ACTOR}ppo_mini_batch_size=32 \\
  {ACTOR}use_kl_loss=False {ACTOR}clip_ratio_low=0.2 {ACTOR}clip_ratio_high=0.28 \\
  {ACTOR}clip_ratio_c=10.0 {ACTOR}loss_agg_mode=seq-mean-token-mean \\
  actor_rollout_ref.hybrid_engine=False {ROLLOUT}n=16 {ROLLOUT}name=vllm {ROLLOUT}tensor_model_parallel_size=1 \\
  rollout.total_rollout_steps=51200 rollout.nnodes=1 rollout.n_gpus_per_node=8 async_training.require_batches=4
"""
TRL_GSPO = """
accelerate launch --num_processes 1 -m trl.scripts.grpo --learning_rate 1e-5 --dtype bfloat16 --use_peft \\
  --max_completion_length 1024 --per_device_train_batch_size 8 --num_generations 8 \\
  --importance_sampling_level sequence \\
  --epsilon 3e-4 --epsilon_high 4e-4 --beta 0.0 --loss_type grpo --gradient_accumulation_steps 2 \\
  --steps_per_generation 8 --max_steps 400 --warmup_steps 40 --save_steps 100
"""
TRL_RLOO = """
from trl import RLOOConfig, RLOOTrainer
RLOOTrainer(model="a/b", reward_funcs=["m:f"], train_dataset="a.jsonl", args=RLOOConfig(
    learning_rate=1e-5, max_completion_length=1024, gradient_accumulation_steps=2, steps_per_generation=8,
    use_vllm=True, vllm_mode="colocate", max_steps=4000, lr_scheduler_type="constant"))
"""
TRL_ASYNC = """
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
AsyncGRPOTrainer(model="a/b", reward_funcs=["m:f"], train_dataset="a.jsonl", args=AsyncGRPOConfig(
    per_device_train_batch_size=16, gradient_accumulation_steps=2, max_steps=200, learning_rate=1e-5, epsilon_high=0.3))
"""


@dataclass(frozen=True)
class Arithmetic:
    """What a recipe computes. Rates are by optimizer step, from 1; lengths are of prompts and responses.

    ``kl`` is where the term is, its weight, estimator and clamp. ``scale`` divides a group's advantages.
    """

    rates: Mapping[int, float]
    prompts: int
    samples: int
    updates: int
    steps: int
    clip: tuple[float, float, float]
    kl: tuple[str, float, str, float]
    lengths: tuple[int, int]
    loss: str
    reduction: str
    anchor: str
    scale: tuple[float, bool] | None
    correction: str = "none"
    dtype: str = "bfloat16"


NO_KL = ("none", 0.0, "", 0.0)
EXPECTED = {
    "verl_grpo.sh": (VERL_GRPO, Arithmetic(
        {1: 1e-6, 10: 1e-6, 100: 1e-6}, 1024, 5, 4, 0, (0.2, 0.2, 3.0), ("loss", 0.001, "k3", 10.0), (1024, 2048),
        "dual_clip", "token_mean", "proximal", (1e-6, True))),
    # 50 steps of 4 mini-batches and 2 epochs: a warm-up of 12 steps (rounded down there) is one of 100 optimizer steps
    "verl_ppo.sh": (VERL_PPO, Arithmetic(
        {1: 1e-8, 10: 1e-7, 100: 1e-6}, 1024, 1, 8, 50, (0.2, 0.2, 3.0), ("reward", 0.01, "k1", 0.0), (512, 512),
        "dual_clip", "token_mean", "proximal", None)),
    # a warm-up of 10 steps of 4 mini-batches
    "verl_async.sh": (VERL_ASYNC, Arithmetic(
        {1: 1e-6 / 40, 10: 1e-6 / 4, 100: 1e-6}, 128, 16, 4, 400, (0.2, 0.28, 10.0), NO_KL, (2048, 8192),
        "dual_clip", "sequence_mean", "behaviour", (1e-6, True))),
    # 64 responses, 16 for an optimizer step; 400 optimizer steps are 100 steps
    "trl_gspo.sh": (TRL_GSPO, Arithmetic(
        {1: 1e-5 / 40, 10: 1e-5 / 4, 100: 1e-5 * (1 - 59 / 360)}, 8, 8, 4, 100, (3e-4, 4e-4, 0.0), NO_KL, (512, 1024),
        "gspo", "sequence_mean", "proximal", (1e-4, True))),
    "trl_rloo.py": (TRL_RLOO, Arithmetic(
        {1: 1e-5, 10: 1e-5, 100: 1e-5}, 32, 2, 4, 1000, (0.2, 0.2, 0.0), ("reward", 0.05, "k1", 0.0), (512, 1024),
        "gspo", "sequence_mean", "proximal", None)),
    "trl_async.py": (TRL_ASYNC, Arithmetic(
        {1: 1e-5, 10: 1e-5, 100: 1e-5}, 4, 8, 1, 200, (0.2, 0.3, 0.0), NO_KL, (512, 2048),
        "ppo", "token_mean", "behaviour", (1e-8, False))),
}  # fmt: skip


def placement_of_kl(config: Config) -> tuple[str, float, str, float]:
    algorithm = config.trainer.algorithm
    if algorithm.use_kl_loss:
        place = "loss"
    elif algorithm.use_kl_in_reward:
        place = "reward"
    else:
        return NO_KL
    return place, algorithm.kl_loss_coef, algorithm.kl_estimator_type, algorithm.kl_clamp


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_computes_here_what_it_computes_there(name: str, tmp_path: Path) -> None:
    text, expected = EXPECTED[name]
    (tmp_path / name).write_text(text)
    found = Translation(read_recipe([str(tmp_path / name)]), tmp_path)
    trainer, generator = found.config.trainer, found.config.generator
    algorithm, optimizer = trainer.algorithm, trainer.policy.optimizer_config
    mini = trainer.policy_mini_batch_size or trainer.train_batch_size
    updates = ceil(trainer.train_batch_size / mini) * trainer.update_epochs_per_batch
    total = trainer.max_training_steps * updates
    assert {step: learning_rate(step - 1, optimizer, total) for step in expected.rates} == pytest.approx(expected.rates)
    assert (trainer.train_batch_size, generator.n_samples_per_prompt) == (expected.prompts, expected.samples)
    assert (updates, trainer.max_training_steps) == (expected.updates, expected.steps)
    bound = algorithm.clip_ratio_c if algorithm.policy_loss_type == "dual_clip" else 0.0
    assert (algorithm.eps_clip_low, algorithm.eps_clip_high, bound) == expected.clip
    assert placement_of_kl(found.config) == expected.kl
    assert (trainer.max_prompt_length, generator.sampling_params.max_generate_length) == expected.lengths
    assert (algorithm.policy_loss_type, algorithm.loss_reduction) == (expected.loss, expected.reduction)
    assert (algorithm.ratio_anchor, algorithm.off_policy_correction) == (expected.anchor, expected.correction)
    assert trainer.policy.model.dtype == expected.dtype, "of the passes; master weights are float32"
    assert trainer.allow_uncorrected is False or algorithm.ratio_anchor == "proximal"
    if expected.scale is not None:
        epsilon, unbiased = expected.scale
        rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.25], [0.0, 0.0]])
        mask = torch.ones(4, 2, dtype=torch.bool)
        advantages, _ = compute_advantages(algorithm, rewards, mask, torch.zeros(4, dtype=torch.long))
        scores = rewards.sum(1)
        there = (scores - scores.mean()) / (scores.std(correction=int(unbiased)) + epsilon)
        assert torch.allclose(advantages[:, 1], there, rtol=1e-7, atol=1e-7)


def test_a_warm_up_in_steps_says_what_a_step_is(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(VERL_ASYNC)
    found = Translation(read_recipe([str(tmp_path / "run.sh")]), tmp_path)
    line = next(line for line in found.text.splitlines() if "num_warmup_steps: 40" in line)
    assert "4 of them in a step there" in line
    assert f"{A}allow_uncorrected" not in found.text


@pytest.mark.parametrize(
    ("words", "remark"),
    [
        ("data.shuffle=False", "#   data.shuffle=false: prompts are shuffled by trainer.seed"),
        ("data.truncation=left", "#   data.truncation=left: prompts above trainer.max_prompt_length are left out"),
        (
            f"{ACTOR}fsdp_config.model_dtype=bf16",
            f"#   {ACTOR}fsdp_config.model_dtype=bf16: the type of",
        ),
    ],
)
def test_what_cannot_be_as_there_is_said(words: str, remark: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(f"{VERL_GRPO.strip()} {words}\n")
    found = Translation(read_recipe([str(tmp_path / "run.sh")]), tmp_path)
    without = found.text.partition("# Keys of verl without a counterpart here:")[2]
    assert remark in without.partition("# Keys of verl that need no setting")[0]
    assert found.config.trainer.policy.model.dtype == "bfloat16"


BRANCHES = """
case "$(uname)" in
  a|b) LR=1e-6; MORE+=(trainer.total_epochs=3) ;;
  c) LR=2e-6; MORE+=(trainer.save_freq=7) ;;
esac
if nvidia-smi; then MORE+=(trainer.test_freq=2); else MORE+=(trainer.nnodes=9); fi
python -m verl.trainer.main_ppo actor_rollout_ref.actor.optim.lr=$LR "${MORE[@]}"
"""


def test_of_branches_that_are_not_known_only_the_first_adds_flags(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(BRANCHES)
    recipe = read_recipe([str(tmp_path / "run.sh")])
    assert recipe.branches
    assert recipe.keys == {"actor_rollout_ref.actor.optim.lr": 1e-6, "trainer.total_epochs": 3, "trainer.test_freq": 2}
