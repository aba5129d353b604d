"""Settings of optimizers that do not go together, or that what is trained leaves no room for.

Invariant: what a device must have, such as a dtype, is asked where the device is known.
"""

from __future__ import annotations

from collections.abc import Iterator

from skyasync.config.algorithm import CRITIC
from skyasync.config.conditions import holds
from skyasync.config.models import CriticConfig, PolicyConfig
from skyasync.config.schema import SCHEDULES, Config, OptimizerConfig
from skyasync.errors import unknown


def check_optimizers(cfg: Config) -> Iterator[str]:
    policy, critic = cfg.trainer.policy, cfg.trainer.critic
    yield from _check_section("trainer.policy", policy, cfg.trainer.parallel.tensor)
    if holds(CRITIC, cfg):
        placement = cfg.trainer.placement
        beside = placement.colocate_policy_critic or placement.colocate_all
        yield from _check_section("trainer.critic", critic, cfg.trainer.parallel.tensor if beside else 1)
    if policy.lora.rank and policy.optimizer_config.bf16_stochastic_round:
        yield (
            f"trainer.policy.optimizer_config.bf16_stochastic_round=true spares float32 masters of weights that "
            f"trainer.policy.lora.rank={policy.lora.rank} freezes; adapters are float32: remove one of them"
        )


def _check_section(name: str, section: PolicyConfig | CriticConfig, tensor: int) -> Iterator[str]:
    optimizer = section.optimizer_config
    yield from _check_optimizer(f"{name}.optimizer_config", optimizer)
    if optimizer.bf16_stochastic_round and section.model.dtype == "float32":
        yield (
            f"{name}.optimizer_config.bf16_stochastic_round=true is for weights in bfloat16, and {name}.model.dtype="
            f"float32: set that to bfloat16, or remove it"
        )
    if tensor > 1 and optimizer.name == "adamw_8bit":
        yield (
            f"{name}.optimizer_config.name=adamw_8bit has blocks within whole rows of matrices, and "
            f"trainer.parallel.tensor={tensor} splits them: choose adamw or muon, or leave tensor at 1"
        )


def _check_optimizer(name: str, optimizer: OptimizerConfig) -> Iterator[str]:
    if len(optimizer.adam_betas) != 2:
        yield f"{name}.adam_betas has {len(optimizer.adam_betas)} entries: AdamW takes two, [0.9,0.999]"
    if optimizer.name != "muon" and optimizer.muon_momentum != OptimizerConfig().muon_momentum:
        yield f"{name}.muon_momentum={optimizer.muon_momentum} has no effect with {name}.name={optimizer.name}"
    if optimizer.name == "muon" and optimizer.bf16_stochastic_round:
        yield (
            f"{name}.bf16_stochastic_round=true rounds AdamW's steps, and {name}.name=muon turns float32 masters: "
            f"choose adamw or adamw_8bit, or remove it"
        )
    if optimizer.num_warmup_steps and optimizer.warmup_ratio:
        yield (
            f"{name}.num_warmup_steps={optimizer.num_warmup_steps} and {name}.warmup_ratio={optimizer.warmup_ratio} "
            f"both say how long the warm-up is: set one of them to 0"
        )
    allowed, given = SCHEDULES[optimizer.scheduler], optimizer.scheduler_kwargs
    for word in given:
        if word not in allowed:
            what = unknown("setting", str(word), allowed) if allowed else f"{optimizer.scheduler} takes none"
            yield f"{name}.scheduler_kwargs.{word} has no effect with {name}.scheduler={optimizer.scheduler}: {what}"
    if optimizer.scheduler.endswith("_with_min_lr") and ("min_lr" in given) == ("min_lr_rate" in given):
        yield (
            f"{name}.scheduler={optimizer.scheduler} ends at a rate that must be said once: "
            f"{name}.scheduler_kwargs={{min_lr_rate: 0.1}} (of lr) or {{min_lr: 1e-7}}"
        )
    if optimizer.scheduler == "warmup_stable_decay" and "num_decay_steps" not in given:
        yield f"{name}.scheduler=warmup_stable_decay needs {name}.scheduler_kwargs={{num_decay_steps: 100}}"
