"""The table of the workers' roles, such as policy and critic.

Invariant: placement, start and stop, shared devices, checkpoints and memory plans of a role follow
from its entry. To add a role, write its worker (a :class:`skyasync.workers.worker.Worker`) and an
entry here, or call ``register_role`` in a program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter
from typing import Any

from skyasync.config.schema import Config
from skyasync.errors import UserError, unknown
from skyasync.models import SCORE, VALUE, VOCABULARY, MeshShape
from skyasync.registry import absolute_reference, resolve_reference

POLICY = "policy"
REFERENCE = "reference"
CRITIC_ROLE = "critic"
REWARD_ROLE = "reward"
TEACHER_ROLE = "teacher"


Condition = Callable[[Config], bool]


def always(cfg: Config) -> bool:
    return True


def never(cfg: Config) -> bool:
    return False


def estimator_needs_values(cfg: Config) -> bool:
    from skyasync.algorithms import ADVANTAGE_ESTIMATORS

    return "values" in ADVANTAGE_ESTIMATORS.about(cfg.trainer.algorithm.advantage_estimator).inputs


@dataclass(frozen=True)
class Role:
    """One entry of the table.

    Args:
        worker: the class of its ranks, a ``Worker``, or ``module:Class`` (``file.py:Class``), which
            is imported in their processes alone.
        section: its part of the configuration, with ``model`` (the policy's if that has no path),
            ``optimizer_config``, ``gradient_checkpointing``, and ``threads`` of its ranks.
        trains: its weights change: it has an optimizer, and a folder in every checkpoint.
        enabled_if: whether a run has the role.
        enabled_by: the keys that this depends on, for errors.
        ranks: keys whose product is the number of its ranks; none: one.
        colocated_if: if this holds, it has as many ranks as the policy, on the same devices. They
            wait in host memory while engines have the devices (``trainer.placement.colocate_all``).
        columns: fields of a batch that it needs besides tokens, masks and groups; ``ask`` sends no
            others.
        gpu: separate devices are GPUs, if there are any.
        base: its default model is the policy's starting weights. If the policy trains adapters on
            frozen weights, it answers for the role (``base_logprobs``), which has no ranks.
        shared_backbone_if: if this holds, it is a head on the policy's layers, and has no ranks.
        head: the output of its model for a token (``skyasync.models.heads``): ``vocabulary`` (a
            causal language model's logits), ``value`` (one number; a head that the files lack is
            new), ``score`` (one number).
    """

    name: str
    worker: str | type[Any]
    section: str = ""
    trains: bool = False
    enabled_if: Condition = always
    enabled_by: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    colocated_if: Condition = never
    columns: tuple[str, ...] = ()
    gpu: bool = True
    head: str = VOCABULARY
    base: bool = False
    shared_backbone_if: Condition = never

    def has_ranks(self, cfg: Config) -> bool:
        """Whether a run of this configuration has ranks for the role."""
        return self.enabled_if(cfg) and not self.hosted_by_policy(cfg)

    def hosted_by_policy(self, cfg: Config) -> bool:
        """Whether the policy's ranks compute it: without adapters, or by a head on its layers."""
        if self.shared_backbone_if(cfg):
            return self.enabled_if(cfg)
        # The policy's weights are the base model's only if adapters are trained in their place.
        if not (self.base and self.colocated_if(cfg) and cfg.trainer.policy.lora.rank):
            return False
        # The model may be named, if it is the same one.
        model = self.own_model(cfg)
        policy = ROLES[POLICY].own_model(cfg)
        same_model = model.path in ("", policy.path) and model.dtype in ("auto", policy.dtype)
        return same_model and self.config_kwargs(cfg) == policy.config_kwargs

    def on_policys_devices(self, cfg: Config) -> bool:
        """Whether it is the policy, or is on its devices."""
        return self.name == POLICY or self.colocated_if(cfg)

    def size(self, cfg: Config) -> int:
        """The number of its ranks."""
        # Colocated roles have a rank on each device of the policy.
        entry = ROLES[POLICY] if self.colocated_if(cfg) else self
        return prod(attrgetter(key)(cfg) for key in entry.ranks)

    def mesh_shape(self, cfg: Config, ranks: int) -> MeshShape:
        """The device mesh of its ranks: the policy's on its devices, else data parallel."""
        if not self.on_policys_devices(cfg):
            return MeshShape(ranks)
        parallel = cfg.trainer.parallel
        return MeshShape.of(
            ranks,
            parallel.context,
            parallel.tensor,
            parallel.pipeline,
            max(1, parallel.expert),
        )

    def settings(self, cfg: Config) -> Any:
        """Its section of the configuration; None without one."""
        if self.section:
            return attrgetter(self.section)(cfg)
        return None

    def own_model(self, cfg: Config) -> Any:
        """The ``ModelConfig`` of its section, which may lack a path; None without one."""
        if self.section:
            return vars(self.settings(cfg)).get("model")
        return None

    def model(self, cfg: Config) -> Any:
        """The ``ModelConfig`` of the model that it loads."""
        model = self.own_model(cfg)
        if model is not None and model.path:
            return model
        return ROLES[POLICY].own_model(cfg)

    def config_kwargs(self, cfg: Config) -> dict[str, Any]:
        """Changes of its model's configuration; the policy's if the model is the policy's."""
        model = self.own_model(cfg)
        policy = ROLES[POLICY].own_model(cfg)
        # Another model has nothing of the policy's configuration, even if it changes nothing.
        if model is not None and (model.config_kwargs or model.path not in ("", policy.path)):
            return dict(model.config_kwargs)
        return dict(policy.config_kwargs)

    def threads(self, cfg: Config) -> int:
        """CPU threads of each of its ranks, by default as the policy's; 0 if no section has any."""
        threads = 0
        if self.section:
            threads = vars(self.settings(cfg)).get("threads", 0)
        return threads or ROLES[POLICY].settings(cfg).threads

    def worker_class(self) -> Any:
        if isinstance(self.worker, str):
            return resolve_reference(self.worker, kind="worker")
        return self.worker


class Roles(dict[str, Role]):
    """Name -> role, the policy first."""

    def names(self) -> list[str]:
        return sorted(self)

    def user_parts(self) -> dict[str, Role]:
        """The roles that a user has added or replaced; they are sent to every process of a run."""
        return {name: role for name, role in self.items() if _BUILTIN_ROLES.get(name) != role}

    def __missing__(self, name: str) -> Role:
        raise UserError(unknown("role", name, self))


_BUILTIN_ROLES = {
    role.name: role
    for role in (
        Role(
            POLICY,
            "skyasync.workers.policy:PolicyWorker",
            section="trainer.policy",
            trains=True,
            ranks=(
                "trainer.placement.policy_num_nodes",
                "trainer.placement.policy_num_gpus_per_node",
            ),
        ),
        Role(
            REFERENCE,
            "skyasync.workers.frozen:ReferenceWorker",
            section="trainer.ref",
            enabled_if=lambda cfg: (
                cfg.trainer.algorithm.use_kl_loss or cfg.trainer.algorithm.use_kl_in_reward
            ),
            enabled_by=("trainer.algorithm.use_kl_loss", "trainer.algorithm.use_kl_in_reward"),
            ranks=("trainer.placement.ref_num_nodes", "trainer.placement.ref_num_gpus_per_node"),
            colocated_if=lambda cfg: cfg.trainer.placement.colocate_policy_ref,
            base=True,
        ),
        Role(
            CRITIC_ROLE,
            "skyasync.workers.critic:CriticWorker",
            section="trainer.critic",
            trains=True,
            enabled_if=estimator_needs_values,
            enabled_by=("trainer.algorithm.advantage_estimator",),
            ranks=(
                "trainer.placement.critic_num_nodes",
                "trainer.placement.critic_num_gpus_per_node",
            ),
            colocated_if=lambda cfg: (
                cfg.trainer.placement.colocate_policy_critic or cfg.trainer.placement.colocate_all
            ),
            head=VALUE,
            shared_backbone_if=lambda cfg: cfg.trainer.critic.backbone == "shared",
        ),
        Role(
            REWARD_ROLE,
            "skyasync.workers.frozen:RewardWorker",
            section="trainer.reward",
            enabled_if=lambda cfg: bool(cfg.trainer.reward.model.path or cfg.trainer.reward.models),
            enabled_by=("trainer.reward.model.path", "trainer.reward.models"),
            ranks=(
                "trainer.placement.reward_num_nodes",
                "trainer.placement.reward_num_gpus_per_node",
            ),
            head=SCORE,
        ),
        Role(
            TEACHER_ROLE,
            "skyasync.workers.frozen:TeacherWorker",
            section="trainer.teacher",
            enabled_if=lambda cfg: bool(cfg.trainer.teacher.model.path),
            enabled_by=("trainer.teacher.model.path",),
            ranks=(
                "trainer.placement.teacher_num_nodes",
                "trainer.placement.teacher_num_gpus_per_node",
            ),
            colocated_if=lambda cfg: cfg.trainer.placement.colocate_policy_teacher,
        ),
    )
}
ROLES = Roles(_BUILTIN_ROLES)


def register_role(role: Role) -> None:
    """Add a role to the table, or replace one, for all runs of this program."""
    worker = role.worker
    if isinstance(worker, str):  # other processes may have another working directory
        worker = absolute_reference(worker)
    ROLES[role.name] = replace(role, worker=worker)


def roles_with_ranks(cfg: Config) -> list[Role]:
    """The roles that have ranks in a run of this configuration, the policy first."""
    return [role for role in ROLES.values() if role.has_ranks(cfg)]
