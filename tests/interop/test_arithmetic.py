"""Recipes as other frameworks have them, number by number: what is computed there is computed here, or it is said.

The recipes are written for these tests, with the settings of published ones. The numbers stand here as the
framework's own code makes them of its settings and defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import nn, optim
from transformers import get_scheduler

from skyasync.config import Config, load_config
from skyasync.config.schema.models import OptimizerConfig
from skyasync.interop.recipe import detect, read_recipe
from skyasync.interop.translation import translated
from skyasync.workers.model_worker import learning_rate

pytestmark = pytest.mark.slow

STEPS = (1, 10, 100)


@dataclass(frozen=True)
class Schedule:
    """A learning rate: its peak, transformers' schedule, warm-up and length in optimizer steps."""

    peak: float
    name: str = "constant"
    warm_up: int = 0
    length: int = 1000
    least: float = 0.0

    def rate(self, step: int) -> float:
        """The rate of optimizer step ``step``, counted from 1, as their schedulers give it."""
        optimizer = optim.SGD([nn.Parameter()], lr=self.peak)
        options = {"min_lr_rate": self.least} if self.least else {}
        scheduler = get_scheduler(
            self.name, optimizer, self.warm_up, self.length, scheduler_specific_kwargs=options
        )
        for _ in range(step - 1):
            optimizer.step()
            scheduler.step()
        return float(optimizer.param_groups[0]["lr"])


@dataclass(frozen=True)
class Batch:
    """``prompts`` per training step, ``responses`` of each, responses per optimizer step, passes over a batch."""

    prompts: int
    responses: int
    update: int
    passes: int = 1


@dataclass(frozen=True)
class Penalty:
    """The KL term: where it is applied, its weight, its estimator, the bound of the estimate."""

    place: str = ""
    weight: float = 0.0
    estimator: str = ""
    bound: float = 0.0


@dataclass(frozen=True)
class Arithmetic:
    """What a recipe computes."""

    schedule: Schedule
    betas: tuple[float, float]
    weight_decay: float
    batch: Batch
    loss: str
    clip: tuple[float, ...]  # low, high, and the bound of dual clip
    reduction: str
    advantage: str
    whitened: bool  # advantages over the batch's tokens
    penalty: Penalty
    correction: str
    lengths: tuple[int, int]  # prompt, response
    plan: str
    staleness: int
    precision: tuple[str, str] = (
        "bfloat16",
        "float32",
    )  # of passes, of the weights that the optimizer changes


def arithmetic(cfg: Config, schedule: Schedule) -> Arithmetic:
    """What our configuration computes; ``schedule`` is its own if the rates are."""
    trainer, algorithm, sampling = cfg.trainer, cfg.trainer.algorithm, cfg.generator.sampling_params
    optimizer = trainer.policy.optimizer_config
    samples = cfg.generator.n_samples_per_prompt
    clip = (algorithm.eps_clip_low, algorithm.eps_clip_high)
    if algorithm.policy_loss_type == "dual_clip":
        clip = (*clip, algorithm.clip_ratio_c)
    return Arithmetic(
        schedule=schedule,
        betas=(optimizer.adam_betas[0], optimizer.adam_betas[1]),
        weight_decay=optimizer.weight_decay,
        batch=Batch(
            prompts=trainer.train_batch_size,
            responses=samples,
            update=(trainer.policy_mini_batch_size or trainer.train_batch_size) * samples,
            passes=trainer.update_epochs_per_batch,
        ),
        loss=algorithm.policy_loss_type
        + (" to behaviour" if algorithm.ratio_anchor == "behaviour" else ""),
        clip=clip,
        reduction=algorithm.loss_reduction,
        advantage=advantage(cfg),
        whitened=whitened(cfg),
        penalty=penalty(cfg),
        correction=correction(cfg),
        lengths=(trainer.max_prompt_length, sampling.max_generate_length),
        plan=trainer.plan,
        staleness=staleness(cfg),
        precision=(
            trainer.policy.model.dtype,
            "bfloat16" if optimizer.bf16_stochastic_round else "float32",
        ),
    )


def advantage(cfg: Config) -> str:
    algorithm = cfg.trainer.algorithm
    if algorithm.advantage_estimator == "normalized":
        return f"mean {algorithm.reward_norm_mean}, deviation {algorithm.reward_norm_std}"
    if algorithm.advantage_estimator == "gae":
        return f"gae {algorithm.gamma:g} {algorithm.lambd:g}"
    return algorithm.advantage_estimator


def whitened(cfg: Config) -> bool:
    algorithm = cfg.trainer.algorithm
    by_estimator = {"reinforce++": True, "reinforce++_baseline": True, "gae": algorithm.gae_whiten}
    return (
        by_estimator.get(algorithm.advantage_estimator, False)
        or algorithm.advantage_batch_normalize
    )


def penalty(cfg: Config) -> Penalty:
    algorithm = cfg.trainer.algorithm
    place = "loss" if algorithm.use_kl_loss else "reward" if algorithm.use_kl_in_reward else ""
    if not place:
        return Penalty()
    return Penalty(place, algorithm.kl_loss_coef, algorithm.kl_estimator_type, algorithm.kl_clamp)


def correction(cfg: Config) -> str:
    algorithm = cfg.trainer.algorithm
    bounds = {
        "token_tis": f" {algorithm.token_tis_ratio_clip_low:g} {algorithm.token_tis_ratio_clip_high:g}",
        "icepop": f" {algorithm.icepop_low:g} {algorithm.icepop_high:g}",
    }
    name = algorithm.off_policy_correction
    if algorithm.policy_loss_type == "decoupled_ppo":
        return f"decoupled {algorithm.behave_imp_weight_cap:g}"
    if name == "auto":
        assert algorithm.policy_loss_type == "rollout_is", (
            "auto is a choice of ours, not of the recipe"
        )
        name = "none"
    masks = [
        f"{mask} {algorithm.geo_mask_low:g} {algorithm.geo_mask_high:g}"
        for mask in algorithm.off_policy_masks
    ]
    return ", ".join([name + bounds.get(name, ""), *masks])


def staleness(cfg: Config) -> int:
    plans = {"sync": 0, "one_step_off": cfg.trainer.async_queue_size}
    return plans.get(cfg.trainer.plan, cfg.trainer.max_staleness)


OPENRLHF_MATH = """
ROOT=/data
python3 -m openrlhf.cli.train_ppo_ray \\
  --actor.model_name_or_path acme/thinker --reward.remote_url $ROOT/judge.py --data.prompt_dataset acme/sums \\
  --data.input_key question --data.label_key answer --data.apply_chat_template --ckpt.output_dir $ROOT/final \\
  --actor.num_gpus_per_node 8 --ref.num_gpus_per_node 8 --vllm.num_engines 8 --train.colocate_all \\
  --algo.kl.init_coef 1e-4 --algo.kl.use_loss --algo.kl.estimator k2 --algo.advantage.estimator reinforce_baseline \\
  --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0 1 --actor.eps_clip_low_high 0.2 0.27 \\
  --train.batch_size 1024 --rollout.batch_size 512 --rollout.n_samples_per_prompt 16 --train.num_episodes 100 \\
  --data.max_len 9216 --rollout.max_new_tokens 8192 --actor.adam.lr 1e-6 --train.max_tokens_per_gpu 32768 \\
  --algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 0.5 5.0 \\
  --algo.advantage.is_correction_type icepop --reward.stop_properly_penalty_coef 0.0
"""
OPENRLHF_PPO = """
python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path acme/chat --reward.model_name_or_path acme/judge \\
  --critic.num_gpus_per_node 8 --train.colocate_all --train.batch_size 128 --rollout.batch_size 1024 \\
  --rollout.n_samples_per_prompt 1 --data.max_len 2048 --actor.adam.lr 5e-7 --critic.adam.lr 9e-6 \\
  --algo.kl.init_coef 0.01 --data.prompt_dataset acme/prompts --algo.advantage.is_correction_enable
"""
OPENRLHF_ASYNC = """
python3 -m openrlhf.cli.train_ppo_ray --train.async_enable --actor.model_name_or_path acme/chat \\
  --reward.remote_url /data/judge.py --data.prompt_dataset acme/prompts --algo.advantage.estimator group_norm \\
  --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 1024 --data.max_len 4096 \\
  --rollout.max_new_tokens 3072 --algo.kl.init_coef 0 --train.async_queue_size 2 --actor.lr_scheduler constant
"""
SKYRL_SYNC = """
python -m skyrl.train.entrypoints.main_base data.train_data="['/data/train.parquet']" \\
  trainer.policy.model.path=acme/chat trainer.algorithm.advantage_estimator=grpo trainer.strategy=fsdp \\
  trainer.placement.policy_num_gpus_per_node=4 generator.inference_engine.num_engines=4 trainer.epochs=20 \\
  trainer.train_batch_size=1024 trainer.policy_mini_batch_size=256 trainer.max_prompt_length=512 \\
  generator.sampling_params.max_generate_length=1024 trainer.policy.optimizer_config.lr=1.0e-6 \\
  trainer.algorithm.use_kl_loss=true environment.env_class=gsm8k generator.n_samples_per_prompt=5
"""
SKYRL_ASYNC = SKYRL_SYNC.replace(
    "skyrl.train.entrypoints.main_base", "examples.train.async.main_async"
).replace("trainer.epochs=20", "trainer.epochs=20 trainer.placement.colocate_all=false")
SKYRL_DAPO = """
python -m examples.train.algorithms.dapo.main_dapo trainer.policy.model.path=acme/base trainer.strategy=fsdp \\
  trainer.algorithm.policy_loss_type=dual_clip trainer.algorithm.clip_ratio_c=10.0 \\
  trainer.algorithm.eps_clip_high=0.28 trainer.algorithm.loss_reduction=token_mean \\
  trainer.algorithm.overlong_buffer_len=$((1024 * 4)) trainer.algorithm.use_kl_loss=false \\
  generator.apply_overlong_filtering=true trainer.train_batch_size=512 trainer.policy_mini_batch_size=32 \\
  generator.n_samples_per_prompt=16 trainer.max_prompt_length=$((1024 * 2)) \\
  generator.sampling_params.max_generate_length=$((1024 * 8)) trainer.policy.optimizer_config.lr=1e-6 \\
  trainer.policy.optimizer_config.num_warmup_steps=160 trainer.policy.optimizer_config.weight_decay=0.1 \\
  environment.env_class=aime
"""
SKYRL_FULLY_ASYNC = """
python -m examples.train.fully_async.main_fully_async trainer.policy.model.path=acme/chat trainer.strategy=fsdp \\
  trainer.fully_async.enabled=true trainer.algorithm.policy_loss_type=rollout_is trainer.train_batch_size=256 \\
  trainer.policy_mini_batch_size=256 trainer.placement.colocate_all=false \\
  trainer.algorithm.off_policy_correction.sequence_mask_metric=geometric environment.env_class=gsm8k
"""
ROLL_MATH = """
exp_name: sums
max_steps: 500
rollout_batch_size: 64
prompt_length: 2048
response_length: 4096
num_return_sequences_in_group: 8
adv_estimator: reinforce
reward_clip: 10
advantage_clip: 2.0
dual_clip_loss: true
whiten_advantages: true
add_token_level_kl: false
pretrain: acme/base
actor_train:
  model_args: {dtype: bf16}
  training_args: {learning_rate: 1.0e-6, weight_decay: 0, per_device_train_batch_size: 1,
                  gradient_accumulation_steps: 32, warmup_steps: 20, num_train_epochs: 50}
  strategy_args: {strategy_name: fsdp2_train, strategy_config: {fsdp_size: 8}}
  device_mapping: list(range(0,16))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", top_p: 0.99, top_k: 100, temperature: 0.99}
  strategy_args: {strategy_name: vllm}
  device_mapping: list(range(0,12))
"""
ROLL_GROUPS = """
exp_name: groups
max_steps: 200
rollout_batch_size: 64
prompt_length: 1024
response_length: 2048
num_return_sequences_in_group: 8
adv_estimator: grpo
norm_mean_type: batch
use_kl_loss: true
kl_loss_coef: 0.001
kl_penalty: kl
loss_agg_mode: token-mean
async_generation_ratio: 1
ppo_epochs: 2
pg_clip: 0.1
pretrain: acme/base
actor_train:
  training_args: {learning_rate: 1.0e-6, lr_scheduler_type: cosine, per_device_train_batch_size: 2,
                  gradient_accumulation_steps: 16}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {max_new_tokens: 100, top_p: 1.0, top_k: -1, temperature: 1.0}
  device_mapping: list(range(8,16))
"""
ROLL_AGENTS = """
exp_name: boxes
max_steps: 1024
rollout_batch_size: 1024
sequence_length: 8192
adv_estimator: grpo
pg_clip: 0.2
dual_clip_loss: false
init_kl_coef: 0.0
pretrain: acme/chat
reward_normalization: {grouping: traj_group_id, method: mean_std}
actor_train:
  training_args: {learning_rate: 1.0e-6, per_device_train_batch_size: 2, gradient_accumulation_steps: 64,
                  warmup_steps: 10, lr_scheduler_type: cosine}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {max_new_tokens: 128, top_p: 1.0, top_k: -1, temperature: 1.0}
  device_mapping: list(range(0,8))
train_env_manager: {num_env_groups: 128, group_size: 8, tags: [Boxes]}
"""
AREAL_GROUPS = """
total_train_epochs: 10
rollout: {backend: "sglang:d4p1t1", max_head_offpolicyness: 2, consumer_batch_size: "${train_dataset.batch_size}"}
gconfig: {n_samples: 4, max_new_tokens: 1024}
actor:
  backend: "fsdp:d4p1t1"
  path: acme/small
  optimizer: {type: adam, lr: 1.7e-5, weight_decay: 0.017}
  eps_clip: 0.4
  reward_scaling: 10.0
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  use_decoupled_loss: true
  rejection_sampling: {metric: ratio}
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
  adv_norm: {mean_level: batch, std_level: batch}
ref: {path: "${actor.path}"}
sglang: {context_length: 8192}
train_dataset: {batch_size: 256, path: acme/sums, max_length: 1024}
"""
AREAL_CRITIC = """
total_train_epochs: 1
rollout: {backend: "sglang:d4p1t1", max_head_offpolicyness: 0}
gconfig: {n_samples: 4, max_new_tokens: 2048}
actor:
  backend: "fsdp:d4p1t1"
  path: acme/small
  optimizer: {lr: 2e-5, lr_scheduler_type: cosine, warmup_steps_proportion: 0.02, beta2: 0.95}
  kl_ctl: 0.05
  ppo_n_minibatches: 4
  recompute_logprob: true
  gae_lambda: 0.95
critic: {path: "${actor.path}", optimizer: "${actor.optimizer}"}
ref: {path: "${actor.path}"}
vllm: {max_model_len: 4096}
train_dataset: {batch_size: 128, path: acme/sums}
"""
AREAL_DEFAULTS = """
rollout: {backend: "vllm:d2", max_head_offpolicyness: 4}
gconfig: {n_samples: 8, max_new_tokens: 512}
actor: {backend: "megatron:d2", path: acme/small, kl_ctl: 0.0, eps_clip_higher: 0.3, c_clip: 3.0,
        optimizer: {lr: 1e-5}}
train_dataset: {batch_size: 64, path: acme/sums, max_length: 256}
"""

RECIPES = {
    "openrlhf-math.sh": (OPENRLHF_MATH, Arithmetic(
        Schedule(1e-6, "cosine_with_min_lr", 30, 1000, 0.1), (0.9, 0.95), 0.0, Batch(512, 16, 1024), "ppo",
        (0.2, 0.27), "token_mean", "reinforce++_baseline", whitened=True,
        penalty=Penalty("loss", 1e-4, "k2", 10.0), correction="icepop 0.5 5", lengths=(1024, 8192), plan="sync",
        staleness=0)),
    "openrlhf-ppo.sh": (OPENRLHF_PPO, Arithmetic(
        Schedule(5e-7, "cosine_with_min_lr", 30, 1000, 0.1), (0.9, 0.95), 0.0, Batch(1024, 1, 128), "ppo",
        (0.2, 0.2), "token_mean", "gae 1 1", whitened=True, penalty=Penalty("reward", 0.01, "k1", 10.0),
        correction="token_tis 0.5 5", lengths=(512, 1536), plan="sync", staleness=0)),
    "openrlhf-async.sh": (OPENRLHF_ASYNC, Arithmetic(
        Schedule(1e-6, "constant_with_warmup", 30), (0.9, 0.95), 0.0, Batch(128, 8, 1024), "ppo", (0.2, 0.2),
        "token_mean", "grpo", whitened=False, penalty=Penalty(), correction="none", lengths=(1024, 3072),
        plan="one_step_off", staleness=2)),
    "skyrl-sync.sh": (SKYRL_SYNC, Arithmetic(
        Schedule(1e-6), (0.9, 0.999), 0.01, Batch(1024, 5, 1280), "ppo", (0.2, 0.2), "token_mean", "grpo",
        whitened=False, penalty=Penalty("loss", 0.001, "k3", 10.0), correction="none", lengths=(512, 1024),
        plan="sync", staleness=0)),
    "skyrl-async.sh": (SKYRL_ASYNC, Arithmetic(
        Schedule(1e-6), (0.9, 0.999), 0.01, Batch(1024, 5, 1280), "ppo", (0.2, 0.2), "token_mean", "grpo",
        whitened=False, penalty=Penalty("loss", 0.001, "k3", 10.0), correction="none", lengths=(512, 1024),
        plan="one_step_off", staleness=1)),
    "skyrl-dapo.sh": (SKYRL_DAPO, Arithmetic(
        Schedule(1e-6, "constant_with_warmup", 160), (0.9, 0.999), 0.1, Batch(512, 16, 512), "dual_clip",
        (0.2, 0.28, 10.0), "token_mean", "grpo", whitened=False, penalty=Penalty(), correction="none",
        lengths=(2048, 8192), plan="sync", staleness=0)),
    "skyrl-fully-async.sh": (SKYRL_FULLY_ASYNC, Arithmetic(
        Schedule(1e-6), (0.9, 0.999), 0.01, Batch(256, 5, 1280), "rollout_is", (0.2, 0.2), "token_mean", "grpo",
        whitened=False, penalty=Penalty("loss", 0.001, "k3", 10.0), correction="none, geometric_mask 0.99 1.01",
        lengths=(512, 1024), plan="fully_async", staleness=4)),
    "roll-math.yaml": (ROLL_MATH, Arithmetic(
        Schedule(1e-6, "linear", 20, 500), (0.9, 0.999), 0.0, Batch(64, 8, 512), "dual_clip", (0.2, 0.2, 1.4),
        "sequence_mean", "reinforce++", whitened=True, penalty=Penalty(), correction="none", lengths=(2048, 4096),
        plan="sync", staleness=0)),
    "roll-groups.yaml": (ROLL_GROUPS, Arithmetic(
        Schedule(1e-6, "cosine", 0, 1600), (0.9, 0.999), 0.0, Batch(64, 8, 128, 2), "ppo", (0.1, 0.1), "token_mean",
        "grpo", whitened=False, penalty=Penalty("loss", 0.001, "k3", 10.0), correction="none", lengths=(1024, 2048),
        plan="fully_async", staleness=1)),
    "roll-agents.yaml": (ROLL_AGENTS, Arithmetic(
        Schedule(1e-6, "cosine", 10, 1024), (0.9, 0.999), 0.0, Batch(128, 8, 1024), "ppo", (0.2, 0.2),
        "sequence_mean", "mean group, deviation group", whitened=False, penalty=Penalty(), correction="none",
        lengths=(1024, 128), plan="sync", staleness=0)),
    "areal-groups.yaml": (AREAL_GROUPS, Arithmetic(
        Schedule(1.7e-5, "constant_with_warmup", 1), (0.9, 0.999), 0.017, Batch(256, 4, 1024), "decoupled_ppo",
        (0.4, 0.4), "token_mean", "mean group, deviation group", whitened=True, penalty=Penalty(),
        correction="decoupled 5", lengths=(1024, 1024), plan="fully_async", staleness=2)),
    "areal-critic.yaml": (AREAL_CRITIC, Arithmetic(
        Schedule(2e-5, "cosine", 20, 1000), (0.9, 0.95), 0.01, Batch(128, 4, 128), "ppo", (0.2, 0.2), "token_mean",
        "gae 1 0.95", whitened=False, penalty=Penalty("reward", 0.05, "k1", 10.0), correction="none",
        lengths=(2048, 2048), plan="sync", staleness=0)),
    "areal-defaults.yaml": (AREAL_DEFAULTS, Arithmetic(
        Schedule(1e-5, "constant_with_warmup", 1), (0.9, 0.999), 0.01, Batch(64, 8, 128), "dual_clip to behaviour",
        (0.2, 0.3, 3.0), "token_mean", "mean none, deviation none", whitened=False, penalty=Penalty(),
        correction="none", lengths=(256, 512), plan="fully_async", staleness=4)),
}  # fmt: skip

#: What cannot be the same here is said behind the translation.
REMARKS = {
    "openrlhf-math.sh": [],
    "openrlhf-ppo.sh": ["prompts of more than 512 tokens"],
    "openrlhf-async.sh": [],
    "skyrl-sync.sh": ["use_kl_loss: reduced by token_mean"],
    "skyrl-async.sh": ["use_kl_loss: reduced by token_mean"],
    "skyrl-dapo.sh": [],
    "skyrl-fully-async.sh": ["use_kl_loss: reduced by token_mean"],
    "roll-math.yaml": ["temperature; there at 1", "filter_logprobs"],
    "roll-groups.yaml": [],
    "roll-agents.yaml": [],
    "areal-groups.yaml": ["there with FSDP all are bfloat16"],
    "areal-critic.yaml": [
        "each optimizer step; there with each batch",
        "there with FSDP all are bfloat16",
    ],
    "areal-defaults.yaml": [],
}


def translate(name: str, folder: Path) -> tuple[str, Config]:
    recipe, _ = RECIPES[name]
    (folder / name).write_text(recipe)
    read = read_recipe([str(folder / name)])
    text = translated(read, detect(read))
    (folder / "ours.yaml").write_text(text)
    return text, load_config(["--config", str(folder / "ours.yaml")])


def same_rates(config: OptimizerConfig, schedule: Schedule) -> None:
    """The rates are equal; in the warm-up ours are those of the next step there."""
    for step in STEPS:
        there = step + 1 if step <= schedule.warm_up else step
        ours = learning_rate(step - 1, config, schedule.length)
        assert ours == pytest.approx(schedule.rate(there), rel=1e-6), step


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_computes_here_what_it_computes_there(name: str, tmp_path: Path) -> None:
    text, cfg = translate(name, tmp_path)
    expected = RECIPES[name][1]
    same_rates(cfg.trainer.policy.optimizer_config, expected.schedule)
    assert arithmetic(cfg, expected.schedule) == expected
    warms_up = expected.schedule.warm_up > 1
    assert ("(k-1)/W there" in text) == warms_up or not warms_up


@pytest.mark.parametrize("name", RECIPES)
def test_what_differs_is_said_behind_the_translation(name: str, tmp_path: Path) -> None:
    text, _ = translate(name, tmp_path)
    _, heading, remarks = text.partition("# What differs from ")
    lines = remarks.splitlines()[1:]
    assert bool(heading) == bool(REMARKS[name])
    assert len(lines) == len(REMARKS[name])
    assert [part for part in REMARKS[name] if part not in remarks] == []


def test_a_critic_s_optimizer_may_be_a_reference_to_the_policy_s(tmp_path: Path) -> None:
    _, cfg = translate("areal-critic.yaml", tmp_path)
    critic, policy = cfg.trainer.critic.optimizer_config, cfg.trainer.policy.optimizer_config
    assert (critic.lr, critic.adam_betas, critic.scheduler) == (2e-5, [0.9, 0.95], "cosine")
    assert critic.warmup_ratio == policy.warmup_ratio == 0.02


def test_a_critic_begins_as_the_reward_model_where_it_does_there(tmp_path: Path) -> None:
    _, cfg = translate("openrlhf-ppo.sh", tmp_path)
    assert cfg.trainer.critic.model.path == "acme/judge"
    same_rates(
        cfg.trainer.critic.optimizer_config, Schedule(9e-6, "cosine_with_min_lr", 30, 1000, 0.1)
    )
    assert cfg.trainer.critic.value_clip == 0.5
