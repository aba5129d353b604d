"""The ranks of each role, as a memory plan sees them: what one of them holds and how it computes.

Invariant: pure; what a role is comes from the table of roles and the settings alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyasync.config.schema import Config
from skyasync.models import VOCABULARY
from skyasync.models.axes import Axes
from skyasync.planning.activations import FLOAT32
from skyasync.planning.adapters import adapter_parameters, between_halves
from skyasync.planning.axes import divided, filters
from skyasync.planning.shape import ModelShape
from skyasync.planning.training_memory import Lines, Rank, held, learnt, scoring, updating
from skyasync.planning.work import expert_bytes, largest_micro_batch
from skyasync.workers.roles import CRITIC_ROLE, POLICY, ROLES, Role

BITS = {"nf4": 4 + 32 / 64, "int8": 8.0}
"""Of a number that is held as a code, with its share of a scale; of a row of int8 that is next to nothing."""


@dataclass(frozen=True)
class Other:
    """A role's model beside the policy; ``shape`` is a rank's part of it."""

    name: str
    shape: ModelShape
    rank: Rank
    shared: bool  # on the policy's devices
    ranks: int

    @property
    def held(self) -> Lines:
        return named(held(self.shape, self.rank), self.name)

    @property
    def learnt(self) -> int:
        """Bytes that its checkpoint needs of a rank; nothing is saved of what is not trained."""
        return sum(learnt(self.shape, self.rank).values()) if self.rank.trained else 0

    @property
    def phase(self) -> str:
        return "update" if self.rank.trained else "log-probabilities"

    @property
    def at_work(self) -> Lines:
        return (updating if self.rank.trained else scoring)(self.shape, self.rank)


def other_role(cfg: Config, shape: ModelShape, role: Role, policy: Rank, *, gpus: bool, ranks: int) -> Other:
    shape = shape if role.head == VOCABULARY else shape.with_value_head
    if role.trains:
        rank, own = trained_rank(cfg, shape, role, gpus=gpus, ranks=ranks)
    else:
        b, axes = bytes_of(role.model(cfg).dtype, gpus=gpus), role.axes(cfg, ranks)
        rank = Rank(
            _sharing(cfg, role, axes), b, policy.work, trained=False, vocabulary=role.head == VOCABULARY,
            shaped=policy.shaped, split=axes.tensor > 1, offloads=_offloads(cfg, role, gpus=gpus),
        )  # fmt: skip
        own = divided(shape, axes.tensor, gathers=filters(cfg))
    return Other(role.name, own, rank, role.shares(cfg), ranks)


def trained_rank(cfg: Config, shape: ModelShape, role: Role, *, gpus: bool, ranks: int) -> tuple[Rank, ModelShape]:
    trainer, sampling = cfg.trainer, cfg.generator.sampling_params
    axes = role.axes(cfg, ranks)
    work, count = largest_micro_batch(
        cfg, shape, gpus=gpus, ranks=axes.data, context=axes.context, rows_limit=trainer.micro_train_batch_size_per_gpu
    )
    lora = getattr(role.settings(cfg), "lora", None)
    optimizer = role.settings(cfg).optimizer_config
    asked = str(role.settings(cfg).gradient_checkpointing).lower()
    sharing = _sharing(cfg, role, axes)
    rank = Rank(
        ranks=sharing,
        replicas=axes.data * axes.context // sharing,
        routed=expert_bytes(cfg, shape) if role.name == POLICY else 0,
        split=axes.tensor > 1,
        b=bytes_of(role.model(cfg).dtype, gpus=gpus),
        work=work,
        micro_batches=count,
        adapters=adapter_parameters(shape, lora) if lora and lora.rank else 0,
        between=between_halves(shape, lora) if lora and lora.rank else 0,
        checkpointing=gpus if asked == "auto" else asked != "false",
        selective=asked == "selective",
        reduced_once=getattr(role.settings(cfg), "reduce_gradients", "") == "update",
        vocabulary=role.head == VOCABULARY,
        entropy=trainer.algorithm.use_entropy_loss,
        shaped=sampling.temperature not in (0.0, 1.0),
        muon=optimizer.name == "muon",
        master=2 if optimizer.bf16_stochastic_round else FLOAT32,
        eight_bits=optimizer.name == "adamw_8bit",
        offloads=_offloads(cfg, role, gpus=gpus),
        bits=BITS.get(lora.base_dtype, 0.0) if lora and lora.rank else 0.0,
        critic=role.name == POLICY and ROLES[CRITIC_ROLE].hosted_by_policy(cfg),
    )
    return rank, divided(shape, axes.tensor, gathers=filters(cfg))


def _sharing(cfg: Config, role: Role, axes: Axes) -> int:
    """Ranks over which its weights are sharded."""
    return getattr(role.settings(cfg), "fsdp_size", 0) or axes.data * axes.context


def _offloads(cfg: Config, role: Role, *, gpus: bool) -> str:
    """What its devices lend to the host; without GPUs they are one."""
    return getattr(role.settings(cfg), "cpu_offload", "none") if gpus else "none"


def bytes_of(dtype: str, *, gpus: bool) -> int:
    return {"float32": 4, "bfloat16": 2}.get(dtype, 2 if gpus else 4)


def named(lines: Lines, who: str, count: int = 1) -> Lines:
    return {f"{who}: {what}": count * size for what, size in lines.items()}
