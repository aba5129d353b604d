"""The roles of workers, such as policy and critic: one table, from which everything else about them
follows.

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
        section: its part of the configuration; ``model`` in it is what it loads (the policy's model
            if that has no path), ``optimizer_config`` and ``gradient_checkpointing`` how it is
            trained, ``threads`` of its ranks.
        trains: its weights change: it has an optimizer, and a folder of its own name in every
            checkpoint.
        enabled_if: whether a run has the role.
        enabled_by: the keys that this depends on, for errors.
        ranks: keys whose product is how many ranks it has; none: one.
        colocated_if: if this holds, its ranks are the policy's in number and share their devices,
            and wait in host memory while engines have those (``trainer.placement.colocate_all``).
        columns: what it needs of a batch besides tokens, masks and groups; more is not sent by
            ``ask``.
        gpu: devices of its own are GPUs, if there are any.
        base: its model, unless it names one of its own, is what the policy began as: a policy that
            trains adapters on frozen weights answers for it (``base_logprobs``), and it has no
            ranks.
        shared_backbone_if: if this holds, it is a head on the policy's layers, and has no ranks.
        head: what its model, if it has one, says of a token (``skyasync.models.heads``):
            ``vocabulary`` (a causal language model's logits), ``value`` (one number; a head that
            the files lack is new), ``score`` (one number).
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
        """Whether a run of this configuration has the role, on ranks of its own."""
        return self.enabled_if(cfg) and not self.hosted_by_policy(cfg)

    def hosted_by_policy(self, cfg: Config) -> bool:
        """Whether the policy's ranks compute it: as the policy's model without its adapters, or as
        a head on the policy's layers."""
        if self.shared_backbone_if(cfg):
            return self.enabled_if(cfg)
        if not (self.base and self.colocated_if(cfg) and cfg.trainer.policy.lora.rank):
            return False
        own = self.own_model(cfg)
        policy = ROLES[POLICY].own_model(cfg)
        same_model = own.path in ("", policy.path) and own.dtype in ("auto", policy.dtype)
        return same_model and self.config_kwargs(cfg) == policy.config_kwargs

    def on_policys_devices(self, cfg: Config) -> bool:
        """Whether it is the policy, or is on its devices."""
        return self.name == POLICY or self.colocated_if(cfg)

    def size(self, cfg: Config) -> int:
        """How many ranks it has."""
        entry = ROLES[POLICY] if self.colocated_if(cfg) else self
        return prod(attrgetter(key)(cfg) for key in entry.ranks)

    def mesh_shape(self, cfg: Config, ranks: int) -> MeshShape:
        """How its ranks divide the work: as the policy's if they share devices, else each has rows
        of its own."""
        if not self.on_policys_devices(cfg):
            return MeshShape(ranks)
        parallel = cfg.trainer.parallel
        dimensions = parallel.context, parallel.tensor, parallel.pipeline, max(1, parallel.expert)
        return MeshShape.of(ranks, *dimensions)

    def settings(self, cfg: Config) -> Any:
        """Its section; None without one."""
        if self.section:
            return attrgetter(self.section)(cfg)
        return None

    def own_model(self, cfg: Config) -> Any:
        """The ``ModelConfig`` of its section, which may lack a path; None if the section has
        none."""
        if self.section:
            return vars(self.settings(cfg)).get("model")
        return None

    def model(self, cfg: Config) -> Any:
        """The ``ModelConfig`` of what it loads."""
        own = self.own_model(cfg)
        if own is not None and own.path:
            return own
        return ROLES[POLICY].own_model(cfg)

    def config_kwargs(self, cfg: Config) -> dict[str, Any]:
        """What its model's configuration is changed by: its own, or the policy's if the model is
        the policy's."""
        own = self.own_model(cfg)
        policy = ROLES[POLICY].own_model(cfg)
        if own is not None and (own.config_kwargs or own.path not in ("", policy.path)):
            return dict(own.config_kwargs)
        return dict(policy.config_kwargs)

    def threads(self, cfg: Config) -> int:
        """CPU threads of each of its ranks; by default those of the policy's; 0 if neither section
        says."""
        if self.section:
            own = vars(self.settings(cfg)).get("threads", 0)
        else:
            own = 0
        return own or ROLES[POLICY].settings(cfg).threads

    def worker_class(self) -> Any:
        if isinstance(self.worker, str):
            return resolve_reference(self.worker, kind="worker")
        return self.worker


class Roles(dict[str, Role]):
    """Name -> role, the policy first."""

    def names(self) -> list[str]:
        return sorted(self)

    def user_parts(self) -> dict[str, Role]:
        """What a user has added or replaced; it travels to every process of a run."""
        return {name: role for name, role in self.items() if _OURS.get(name) != role}

    def __missing__(self, name: str) -> Role:
        raise UserError(unknown("role", name, self))


_OURS = {
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
ROLES = Roles(_OURS)


def register_role(role: Role) -> None:
    """Add a role to the table, or replace one, for all runs of this program."""
    worker = absolute_reference(role.worker) if isinstance(role.worker, str) else role.worker
    ROLES[role.name] = replace(role, worker=worker)


def roles_with_ranks(cfg: Config) -> list[Role]:
    """The roles that have ranks in a run of this configuration, the policy first."""
    return [role for role in ROLES.values() if role.has_ranks(cfg)]
