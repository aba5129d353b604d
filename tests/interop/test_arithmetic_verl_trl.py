"""Recipes of verl and TRL, in the settings of published ones: each number is that of the source's arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, log
from pathlib import Path

import pytest
import torch

from skyasync.algorithms import CORRECTIONS
from skyasync.algorithms.advantages import compute_advantages
from skyasync.algorithms.binding import bind
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
    assert {
        step: learning_rate(step - 1, optimizer, total) for step in expected.rates
    } == pytest.approx(expected.rates)
    assert (trainer.train_batch_size, generator.n_samples_per_prompt) == (
        expected.prompts,
        expected.samples,
    )
    assert (updates, trainer.max_training_steps) == (expected.updates, expected.steps)
    bound = algorithm.clip_ratio_c if algorithm.policy_loss_type == "dual_clip" else 0.0
    assert (algorithm.eps_clip_low, algorithm.eps_clip_high, bound) == expected.clip
    assert placement_of_kl(found.config) == expected.kl
    assert (
        trainer.max_prompt_length,
        generator.sampling_params.max_generate_length,
    ) == expected.lengths
    assert (algorithm.policy_loss_type, algorithm.loss_reduction) == (
        expected.loss,
        expected.reduction,
    )
    assert (algorithm.ratio_anchor, algorithm.off_policy_correction) == (
        expected.anchor,
        expected.correction,
    )
    assert trainer.policy.model.dtype == expected.dtype, "of the passes; master weights are float32"
    assert trainer.allow_uncorrected is False or algorithm.ratio_anchor == "proximal"
    if expected.scale is not None:
        epsilon, unbiased = expected.scale
        rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.25], [0.0, 0.0]])
        mask = torch.ones(4, 2, dtype=torch.bool)
        advantages, _ = compute_advantages(
            algorithm, rewards, mask, torch.zeros(4, dtype=torch.long)
        )
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
        (
            "data.truncation=left",
            "#   data.truncation=left: prompts above trainer.max_prompt_length are left out",
        ),
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
    assert recipe.keys == {
        "actor_rollout_ref.actor.optim.lr": 1e-6,
        "trainer.total_epochs": 3,
        "trainer.test_freq": 2,
    }


ASYNC_MAIN = "python -m verl.experimental.fully_async_policy.fully_async_main"
CORRECTED = "algorithm.rollout_correction."


def of_words(
    folder: Path, *words: str, program: str = "python3 -m verl.trainer.main_ppo"
) -> Translation:
    """The translation of a verl command with these words."""
    (folder / "run.sh").write_text(f"{program} data.train_files=a.parquet {' '.join(words)}\n")
    return Translation(read_recipe([str(folder / "run.sh")]), folder)


def differences(found: Translation) -> str:
    return found.text.partition("# What differs from")[2]


@pytest.mark.parametrize(
    ("threshold", "interval", "ahead"),
    [(0.5, 4, 5.0), (0.1, 4, 3.4), (1.0, 1, 1.0), (0.5, 1, 0.5)],
)
def test_prompts_ahead_are_those_that_the_asynchronous_program_submits(
    threshold: float, interval: int, ahead: float, tmp_path: Path
) -> None:
    found = of_words(
        tmp_path, f"async_training.staleness_threshold={threshold}",
        f"async_training.trigger_parameter_sync_step={interval}", "data.train_batch_size=0",
        f"{ACTOR}ppo_mini_batch_size=32", "async_training.require_batches=4", f"{ROLLOUT}n=8",
        program=ASYNC_MAIN,
    )  # fmt: skip
    trainer = found.config.trainer
    most = (
        32 * 4 * (threshold + 1) * interval
    )  # prompts in flight or in the queue after a weight sync
    assert (trainer.async_generation_ratio + 1) * trainer.train_batch_size == pytest.approx(most)
    assert (trainer.async_generation_ratio, trainer.max_staleness) == (ahead, ceil(ahead))


def test_without_a_staleness_threshold_the_programs_own_counts(tmp_path: Path) -> None:
    found = of_words(tmp_path, f"{ROLLOUT}n=8", program=ASYNC_MAIN)
    assert (found["trainer.sync_interval"], found["trainer.async_generation_ratio"]) == (4, 3.4)
    assert found["trainer.max_staleness"] == 4


def test_a_threshold_of_zero_is_on_policy_after_each_sync(tmp_path: Path) -> None:
    words = ("async_training.staleness_threshold=0", "async_training.trigger_parameter_sync_step=1")
    found = of_words(tmp_path, *words, f"{ROLLOUT}n=8", program=ASYNC_MAIN)
    assert (found["trainer.plan"], found["trainer.max_staleness"]) == ("fully_async", 0)


def test_intervals_of_the_asynchronous_program_count_weight_syncs(tmp_path: Path) -> None:
    words = (
        "trainer.test_freq=20",
        "trainer.save_freq=5",
        "async_training.trigger_parameter_sync_step=4",
    )
    found = of_words(tmp_path, *words, f"{ROLLOUT}n=8", program=ASYNC_MAIN)
    assert (found["trainer.eval_interval"], found["trainer.ckpt_interval"]) == (80, 20)
    assert "20 weight syncs there, 4 steps from one to the next" in found.text
    synchronous = of_words(tmp_path, "trainer.test_freq=20", f"{ROLLOUT}n=8")
    assert synchronous["trainer.eval_interval"] == 20


def test_the_proximal_policy_of_the_asynchronous_program_is_said(tmp_path: Path) -> None:
    words = (f"{CORRECTED}bypass_mode=False", f"{ROLLOUT}n=8")
    found = of_words(
        tmp_path, *words, "async_training.trigger_parameter_sync_step=4", program=ASYNC_MAIN
    )
    assert "there that of the last weight sync" in differences(found)
    one = of_words(
        tmp_path, *words, "async_training.trigger_parameter_sync_step=1", program=ASYNC_MAIN
    )
    assert "there that of the last weight sync" not in differences(one)


def kept_there(option: str, bound: str, log_ratio: torch.Tensor) -> torch.Tensor:
    """Which tokens verl keeps, ``[batch, length]``; ``log_ratio`` is of the trained over the engine's policy."""
    if option.endswith("k1"):
        values = -log_ratio
    elif option.endswith("k2"):
        values = log_ratio.square() / 2
    else:
        values = log_ratio.exp() - 1 - log_ratio
    if option.startswith("seq_sum"):
        values = values.sum(1, keepdim=True)
    elif option.startswith("seq_mean"):
        values = values.mean(1, keepdim=True)
    elif option.startswith("seq_max"):
        values = values.amax(1, keepdim=True)
    if not option.endswith("k1"):
        return (values <= float(bound)).expand_as(log_ratio)
    low, _, high = bound.rpartition("_")
    lowest = float(low) if low else 1 / float(high)
    return ((values >= log(lowest)) & (values <= log(float(high)))).expand_as(log_ratio)


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ("token_k1", "0.6_1.6"), ("token_k1", "1.4"), ("seq_sum_k1", "0.5_2.5"), ("seq_mean_k1", "0.9_1.2"),
        ("token_k2", "0.05"), ("token_k3", "0.04"), ("seq_sum_k2", "0.4"), ("seq_sum_k3", "0.4"),
        ("seq_mean_k2", "0.05"), ("seq_mean_k3", "0.05"), ("seq_max_k2", "0.2"), ("seq_max_k3", "0.2"),
        ("token_k1,seq_max_k2", "0.6_1.6,0.5"), ("token_k1,seq_mean_k1", "1.3"),
    ],
)  # fmt: skip
def test_a_rejection_keeps_the_same_tokens(options: str, bounds: str, tmp_path: Path) -> None:
    words = (f"{CORRECTED}rollout_rs='{options}'", f"{CORRECTED}rollout_rs_threshold='{bounds}'")
    found = of_words(tmp_path, *words, "algorithm.adv_estimator=grpo", f"{ROLLOUT}n=8")
    algorithm = found.config.trainer.algorithm
    torch.manual_seed(0)
    behaviour = -torch.rand(64, 6, dtype=torch.float64) - 0.5
    proximal = behaviour + 0.3 * torch.randn(64, 6, dtype=torch.float64)
    tensors = {
        "proximal": proximal,
        "behaviour": behaviour,
        "mask": torch.ones(64, 6, dtype=torch.bool),
    }
    names = options.split(",")
    limits = bounds.split(",") if "," in bounds else [bounds] * len(names)
    there = torch.ones(64, 6, dtype=torch.bool)
    for name, limit in zip(names, limits, strict=True):
        there &= kept_there(name, limit, proximal - behaviour)
    here = torch.ones(64, 6, dtype=torch.bool)
    for mask in algorithm.off_policy_masks:
        here &= bind(CORRECTIONS[mask], algorithm)(tensors).bool()
    assert 0 < here.sum() < here.numel(), "the bounds cut in between"
    assert here.equal(there)
    assert (
        f"{CORRECTED}rollout_rs"
        not in found.text.partition("without a counterpart")[2].partition("# What")[0]
    )


def test_two_rejections_by_the_same_mask_are_said(tmp_path: Path) -> None:
    words = (
        f"{CORRECTED}rollout_rs='token_k2,seq_max_k3'",
        f"{CORRECTED}rollout_rs_threshold='0.1'",
    )
    found = of_words(tmp_path, *words, f"{ROLLOUT}n=8")
    assert found[f"{A}off_policy_masks"] == []
    assert found.why(f"{CORRECTED}rollout_rs")


def test_ppo_around_the_engines_policy_has_no_further_weight(tmp_path: Path) -> None:
    words = (
        f"{CORRECTED}bypass_mode=true",
        f"{CORRECTED}rollout_is=token",
        f"{CORRECTED}rollout_is_threshold=2.0",
    )
    found = of_words(tmp_path, *words, "algorithm.adv_estimator=grpo", f"{ROLLOUT}n=8")
    algorithm = found.config.trainer.algorithm
    assert (algorithm.policy_loss_type, algorithm.ratio_anchor) == ("dual_clip", "behaviour")
    assert algorithm.off_policy_correction == "none"
    assert "metrics alone" in found.why(f"{CORRECTED}rollout_is")


def test_reinforce_around_the_engines_policy_has_a_truncated_weight(tmp_path: Path) -> None:
    words = (
        f"{CORRECTED}bypass_mode=true",
        f"{CORRECTED}loss_type=reinforce",
        f"{CORRECTED}rollout_is=token",
    )
    found = of_words(tmp_path, *words, f"{CORRECTED}rollout_is_threshold=3.0", f"{ROLLOUT}n=8")
    algorithm = found.config.trainer.algorithm
    assert (algorithm.policy_loss_type, algorithm.ratio_anchor) == ("tis", "behaviour")
    assert (algorithm.tis_low, algorithm.tis_high, algorithm.off_policy_correction) == (
        0.0,
        3.0,
        "none",
    )
    plain = of_words(tmp_path, *words[:2], f"{ROLLOUT}n=8")
    assert plain[f"{A}policy_loss_type"] == "vanilla"
    decoupled = of_words(tmp_path, f"{CORRECTED}loss_type=reinforce", f"{ROLLOUT}n=8")
    assert decoupled[f"{A}policy_loss_type"] == "dual_clip"
    assert "no effect there without" in decoupled.why(f"{CORRECTED}loss_type")


def test_the_asynchronous_programs_replace_the_loss(tmp_path: Path) -> None:
    mode = f"{ACTOR}policy_loss.loss_mode=gspo"
    found = of_words(tmp_path, mode, f"{ROLLOUT}n=8", program=ASYNC_MAIN)
    assert found[f"{A}policy_loss_type"] == "dual_clip"
    assert "bypass_mode decides" in found.why(f"{ACTOR}policy_loss.loss_mode")
    decoupled = of_words(
        tmp_path, mode, f"{ROLLOUT}n=8", f"{CORRECTED}bypass_mode=False", program=ASYNC_MAIN
    )
    assert decoupled[f"{A}policy_loss_type"] == "gspo"


def test_the_thresholds_of_dppo_are_its_clip_range(tmp_path: Path) -> None:
    words = (
        f"{ACTOR}policy_loss.loss_mode=dppo_kl",
        f"{ACTOR}clip_ratio_low=0.04",
        f"{ACTOR}clip_ratio_high=0.05",
    )
    found = of_words(tmp_path, *words, f"{ACTOR}clip_ratio_c=1000.0", f"{ROLLOUT}n=8")
    dppo = found.config.trainer.algorithm.dppo
    assert (dppo.divergence, dppo.delta_low, dppo.delta_high) == ("kl", 0.04, 0.05)
    assert found.config.trainer.algorithm.extra["ratio_cap"] == 1000.0
    assert "the divergence is from the engine's policy" in differences(found)


def test_a_norm_without_a_constant_divides_by_the_longest_response(tmp_path: Path) -> None:
    words = (
        f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm",
        "data.max_response_length=3000",
        f"{ROLLOUT}n=8",
    )
    assert of_words(tmp_path, *words)[f"{A}max_seq_len"] == 3000
    assert of_words(tmp_path, *words, f"{ACTOR}loss_scale_factor=500")[f"{A}max_seq_len"] == 500


def test_the_bound_of_gspos_ratio_is_said(tmp_path: Path) -> None:
    mode = f"{ACTOR}policy_loss.loss_mode=gspo"
    found = of_words(tmp_path, mode, "algorithm.adv_estimator=grpo", f"{ROLLOUT}n=8")
    assert "there by exp(10)" in differences(found)
    assert "token_gradient" not in found[f"{A}extra"]
    per_token = of_words(
        tmp_path, mode, "algorithm.adv_estimator=reinforce_plus_plus", f"{ROLLOUT}n=8"
    )
    assert per_token[f"{A}extra"] == {"token_gradient": True}


def test_a_kl_penalty_in_the_reward_meets_the_group_as_it_does_there(tmp_path: Path) -> None:
    words = ("algorithm.use_kl_in_reward=True", "algorithm.adv_estimator=grpo", f"{ROLLOUT}n=8")
    found = of_words(tmp_path, *words)
    assert found[f"{A}use_kl_in_reward"] is True
    assert "behind that comparison" not in found.text


def test_arguments_of_the_chat_template_are_entries_of_ours(tmp_path: Path) -> None:
    found = of_words(
        tmp_path, "+data.apply_chat_template_kwargs.enable_thinking=False", f"{ROLLOUT}n=8"
    )
    assert found["data.chat_template_kwargs"] == {"enable_thinking": False}
    assert "Not known as keys" not in found.text


def test_a_default_that_does_not_load_is_said(tmp_path: Path) -> None:
    found = of_words(tmp_path, "algorithm.adv_estimator=grpo")
    assert "generator.n_samples_per_prompt=1, verl's default, is left out" in differences(found)


def test_steps_have_precedence_over_epochs_in_trl(tmp_path: Path) -> None:
    command = "accelerate launch --num_processes 1 -m trl.scripts.grpo --learning_rate 1e-5"
    (tmp_path / "run.sh").write_text(f"{command} --max_steps 50 --num_train_epochs 2\n")
    found = Translation(read_recipe([str(tmp_path / "run.sh")]), tmp_path)
    assert (found["trainer.epochs"], found["trainer.max_training_steps"]) == (0, 50)
    assert "max_steps decides" in found.why("num_train_epochs")
    (tmp_path / "run.sh").write_text(f"{command}\n")
    assert Translation(read_recipe([str(tmp_path / "run.sh")]), tmp_path)["trainer.epochs"] == 3


ARGUMENTS = """
import argparse
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("--lr", "--learning-rate", dest="rate", type=float, default=2e-6)
parser.add_argument("--num-generations", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=16)
parser.add_argument("--mode", default="colocate")
parser.add_argument("--url", default="http://10.0.0.1:8000")
parser.add_argument("--name", required=True)
args = parser.parse_args()


def judge(prompts, completions, **kwargs):
    return [float(len(text)) for text in completions]


class Maze:
    pass


GRPOTrainer(model="acme/small", reward_funcs=judge, environment_factory=Maze, train_dataset="a.jsonl", args=GRPOConfig(
    learning_rate=args.rate, num_generations=args.num_generations, gradient_accumulation_steps=args.accumulate,
    use_vllm=True, vllm_mode=args.mode, vllm_server_base_url=args.url if args.mode == "server" else None,
    run_name=args.name))
"""


def test_defaults_of_a_programs_flags_are_read(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ARGUMENTS)
    found = Translation(read_recipe([str(tmp_path / "train.py")]), tmp_path)
    assert found["trainer.policy.optimizer_config.lr"] == 2e-6
    assert (found["generator.n_samples_per_prompt"], found["trainer.train_batch_size"]) == (4, 32)
    assert (found["generator.engines"], found["trainer.placement.colocate_all"]) == ([], True)
    assert "environment.env_class" in found.why("environment_factory")


def test_a_batch_that_cannot_be_computed_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ARGUMENTS.replace("default=16", "required=True"))
    found = Translation(read_recipe([str(tmp_path / "train.py")]), tmp_path)
    assert "write trainer.train_batch_size" in found.why("gradient_accumulation_steps")


def test_a_step_of_the_separate_mode_is_a_weight_sync_there(tmp_path: Path) -> None:
    words = (
        "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=4",
        "data.train_batch_size=256", f"{ACTOR}ppo_mini_batch_size=64", "trainer.total_training_steps=100",
        "trainer.test_freq=5", "trainer.v1.separate_async.num_warmup_batches=1", f"{ROLLOUT}n=8",
        "trainer.v1.sampler.max_off_policy_threshold=8",
    )  # fmt: skip
    found = of_words(tmp_path, *words)
    trainer = found.config.trainer
    assert (trainer.plan, trainer.sync_interval) == ("fully_async", 4)
    assert (trainer.train_batch_size, trainer.policy_mini_batch_size) == (64, 0)
    assert (trainer.max_training_steps, trainer.eval_interval) == (400, 20)
    assert (trainer.async_generation_ratio + 1) * trainer.train_batch_size == 2 * 256
    assert trainer.max_staleness == 7
    assert "num_warmup_batches" in found.why("trainer.v1.sampler.max_off_policy_threshold")
