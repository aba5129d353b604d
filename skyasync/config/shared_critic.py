"""What a critic on the policy's layers has no use for: a model, processes and axes of its own.

Invariant: each key that only a model of its own reads is refused by its name, where it is not at its default.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from skyasync.config.algorithm import CRITIC
from skyasync.config.conditions import holds
from skyasync.config.keys import Keys
from skyasync.config.schema import Config
from skyasync.config.values import written

_SHARED = "trainer.critic.backbone=shared"
_OF_A_MODEL = (
    "trainer.critic.model.",
    "trainer.critic.gradient_checkpointing",
    "trainer.critic.reduce_gradients",
    "trainer.critic.fsdp_size",
    "trainer.critic.cpu_offload",
    "trainer.critic.threads",
    "trainer.placement.colocate_policy_critic",
    "trainer.placement.critic_num_",
)
_OF_MATRICES = ("name", "bf16_stochastic_round", "muon_momentum")


def check_shared_critic(cfg: Config) -> Iterator[str]:
    if not (holds(CRITIC, cfg) and holds(_SHARED, cfg)):
        return
    policys = ("", cfg.trainer.policy.model.path)
    optimizer = tuple(f"trainer.critic.optimizer_config.{name}" for name in _OF_MATRICES)
    for key in Keys.of(type(cfg)):
        value = attrgetter(key.path)(cfg)
        if value == key.default or (key.path == "trainer.critic.model.path" and value in policys):
            continue
        way = f"remove it (its default is {written(key.default)}), or set trainer.critic.backbone=own"
        if key.path.startswith(_OF_A_MODEL):
            yield f"{key.path}={written(value)} is of a critic's own model, and {_SHARED} has none: {way}"
        elif key.path in optimizer:
            yield f"{key.path}={written(value)} is for matrices of a model, and {_SHARED} trains one vector: {way}"
    if (kind := cfg.trainer.policy.cpu_offload) == "parameters":
        yield (
            f"{_SHARED} is a vector on the policy's device, and trainer.policy.cpu_offload={kind} keeps its layers on "
            f"the host: set trainer.policy.cpu_offload=optimizer or none, or trainer.critic.backbone=own"
        )
