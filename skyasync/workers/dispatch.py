"""All roles of a run behind one object, wherever their ranks are.

Invariant: every role of the table is started, asked, trained, moved, saved and stopped in the same way. A batch is cut
into one shard per rank, and whatever comes back is in the batch's order; how the ranks are called, and fail, is in
``skyasync.workers.ranks``.

    trainer ──▶ dispatch ──▶ one shard of the batch per rank (object store, once) ──▶ actors of the role
                   ▲                                                                    │
                   └───────────── results in the batch's order ◀────────────────────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.inference.settings import adapter_rank, computes_on_mapped_weights, maps_weights
from skyasync.models.backend import SaveResult, files_of
from skyasync.models.batch import TokenBatch, UpdateBatch
from skyasync.utils.manifest import Sums
from skyasync.utils.task_group import within
from skyasync.weight_sync.transfers.base import WeightTransfer
from skyasync.weight_sync.transfers.broadcast import BroadcastTransfer
from skyasync.weight_sync.transfers.cuda_ipc import CudaIPCTransfer
from skyasync.weight_sync.transfers.file import FileTransfer
from skyasync.weight_sync.transfers.remote import RemoteEngines
from skyasync.weight_sync.transfers.shared_memory import SharedMemoryTransfer
from skyasync.workers.ranks import RankGroup, WorkerPlacement
from skyasync.workers.roles import POLICY, REFERENCE, ROLES

AS_THE_POLICY = {(REFERENCE, "logprobs"): "base_logprobs"}
"""The policy's methods for what it answers in the place of another role, if they have other names."""

AS_SAMPLED = ("logprobs", "values", "logprobs_and_values")
"""What the policy is asked of tokens with the experts that were chosen for them."""


class RoleRanks(Protocol):
    """The ranks of one role; ``RankGroup`` says what each method does."""

    @property
    def busy_s(self) -> float: ...
    async def start(self, cfg: Config, total_steps: int = 0) -> None: ...
    async def on_rows(self, method: str, batch: TokenBatch) -> Tensor | None: ...
    async def call(self, method: str, *args: object) -> list[Any]: ...
    async def call_first(self, method: str, *args: object) -> Any: ...
    def kill(self) -> None: ...


class Started(dict[str, RoleRanks]):
    """The ranks of each role of the run, by its name."""

    def __missing__(self, role: str) -> RoleRanks:
        keys = ROLES[role].enabled_by
        why = f" ({' or '.join(keys)})" if keys else ""
        raise RuntimeError(f"no {role} was started: nothing in the configuration asked for one{why}")


class Dispatch:
    """Implements :class:`skyasync.workers.dispatch.Dispatch`.

    Args:
        groups: of the run's roles, by their names, the policy first.
        transfer: how the policy's weights reach the engines; by default through this machine's memory.
    """

    def __init__(self, cfg: Config, groups: Mapping[str, RoleRanks], transfer: WeightTransfer | None = None) -> None:
        self._cfg, self._groups = cfg, Started(groups)
        self.transfer = transfer or memory_transfer(cfg, self._groups)

    def set_threads(self, threads: int) -> None:
        """CPU threads of each policy rank; call before ``start``."""
        trainer = self._cfg.trainer
        trainer = replace(trainer, policy=replace(trainer.policy, threads=threads))
        self._cfg = replace(self._cfg, trainer=trainer)

    async def start(self, total_steps: int = 0) -> None:
        """Load what the roles hold. ``cfg.trainer.policy.model.path`` is a folder or hub name.

        Args:
            total_steps: optimizer steps of the run, for learning rates that decay.
        """
        try:
            async with within(self._cfg.trainer.step_timeout_s, f"loading the models ({', '.join(self._groups)})"):
                await asyncio.gather(*(group.start(self._cfg, total_steps) for group in self._groups.values()))
        except BaseException:
            await self.shutdown()
            raise

    # ---------------------------------------------------------------- any role

    async def ask(self, role: str, method: str, batch: TokenBatch) -> Tensor:
        if (holder := self._holder(role)) != role:
            role, method = holder, AS_THE_POLICY.get((role, method), method)
        asked = TokenBatch(batch.tokens, batch.attention_mask, batch.loss_mask, batch.group_ids)
        if role == POLICY and method in AS_SAMPLED:  # others choose experts of their own
            asked.routed_experts = batch.routed_experts
        vars(asked).update({name: getattr(batch, name) for name in ROLES[role].columns})
        answer = await self._groups[role].on_rows(method, asked)
        assert answer is not None, f"{method} of the role {role} returns nothing"
        return answer

    async def call(self, role: str, method: str, *args: object) -> list[Any]:
        """The same call on every rank of a role; results by rank."""
        return await self._groups[role].call(method, *args)

    async def forward_backward(self, batch: UpdateBatch, role: str = POLICY) -> None:
        sent, holder = copy(batch), self._holder(role)
        if holder != POLICY:
            sent.routed_experts = None
        sent.critic_alone = holder != role
        before = await self._groups[holder].on_rows("forward_backward", sent)
        if role == POLICY and batch.proximal_logprobs is None:
            batch.proximal_logprobs = before

    async def optimizer_step(
        self, schedule_step: int | None = None, scale: float = 1.0, role: str = POLICY
    ) -> dict[str, float]:
        async with self.transfer.changing():
            found: dict[str, float] = (
                await self._groups[self._holder(role)].call("optimizer_step", schedule_step, scale)
            )[0]
        return {name.removeprefix(f"{role}/"): value for name, value in found.items()}

    async def examine(self, scale: float = 1.0, role: str = POLICY) -> str:
        found: list[str] = await self._groups[self._holder(role)].call("examine", scale)
        return next(filter(None, found), "")

    async def drop_gradient(self, role: str = POLICY) -> None:
        await self._groups[self._holder(role)].call("drop_gradient")

    def _holder(self, role: str) -> str:
        """Whose ranks hold what a role trains: its own, or the policy's."""
        return POLICY if role not in self._groups and ROLES[role].hosted_by_policy(self._cfg) else role

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return (await self.call(POLICY, "score", sequences))[0]

    # ---------------------------------------------------------------- all roles

    async def offload(self) -> None:
        """Weights and moments to host memory, of the policy and of all roles on its devices.

        Until ``onload`` nothing can be asked of them but ``save`` and ``load``.
        """
        await asyncio.gather(*(group.call("offload") for group in self._on_the_policys_devices()))

    async def onload(self) -> None:
        """Undo ``offload``, bit for bit."""
        await asyncio.gather(*(group.call("onload") for group in self._on_the_policys_devices()))

    def _on_the_policys_devices(self) -> list[RoleRanks]:
        return [group for name, group in self._groups.items() if name == POLICY or ROLES[name].shares(self._cfg)]

    async def save(self, folder: Path) -> Sums:
        sums: Sums = {}
        for role in self._trained():
            sums |= _arrived(folder / role, await self.call(role, "save", str(folder / role)))
        return sums

    async def begin_save(self, folder: Path) -> None:
        self._saving = folder
        for role in self._trained():
            await self.call(role, "begin_save", str(folder / role))

    async def saved(self) -> Sums | None:
        sums: Sums = {}
        for role in self._trained():
            ranks = await self.call(role, "saved")
            if None in ranks:
                return None
            sums |= _arrived(self._saving / role, ranks)
        return sums

    async def verify(self, folder: Path, sums: Sums) -> list[str]:
        """What is wrong with a checkpoint's files, in words; the policy's ranks read all of them."""
        return [problem for rank in await self.call(POLICY, "verify", str(folder), sums) for problem in rank]

    async def load(self, folder: Path) -> None:
        for role in self._trained():
            if not (folder / role).is_dir():
                raise UserError(f"{folder} holds no {role}: it was saved by a run without one")
            async with self.transfer.changing():
                await self.call(role, "load", str(folder / role))

    def _trained(self) -> list[str]:
        return [role for role in self._groups if ROLES[role].trains]

    async def export(self, folder: Path, role: str = POLICY) -> None:
        holder = self._holder(role)
        await self.call(holder, "export" if holder == role else f"export_{role}", str(folder))

    async def begin_profile(self) -> None:
        await asyncio.gather(*(group.call("begin_profile") for group in self._groups.values()))

    async def end_profile(self, folder: Path) -> None:
        await asyncio.gather(*(group.call("end_profile", str(folder)) for group in self._groups.values()))

    async def stats(self) -> dict[str, Any]:
        others = {f"{role}_busy_s": group.busy_s for role, group in self._groups.items() if role != POLICY}
        return {"busy_s": self._groups[POLICY].busy_s, **others}

    @property
    def lost(self) -> tuple[str, BaseException] | None:
        """The role that has lost a rank's process, and the error by which that was seen; None if none has."""
        found = ((name, getattr(group, "lost", None)) for name, group in self._groups.items())
        return next(((name, error) for name, error in found if error is not None), None)

    async def shutdown(self) -> None:
        """End what the roles hold; safe to call twice."""
        for group in self._groups.values():
            group.kill()


class RayWorkerDispatch(Dispatch):
    """Every rank is a Ray actor.

    Making it starts the ranks' processes and waits for nothing; :meth:`start` loads the models.

    Args:
        placements: where the ranks of each role go, by its name; roles without an entry are not started.
        weight_sync_backend: how the engines expect the weights, ``shared_memory``, ``nccl`` or ``cuda_ipc``.
        living: the places of the engines that are alive, which the last two need; all of them without it.
        nodes: of Ray, of the living engines by their places; without it all are on the node of the policy's rank 0.
    """

    def __init__(
        self,
        cfg: Config,
        placements: Mapping[str, WorkerPlacement],
        weight_sync_backend: str = "shared_memory",
        living: Callable[[], Sequence[int]] | None = None,
        nodes: Callable[[], Mapping[int, str]] | None = None,
    ) -> None:
        groups = {role: RankGroup(ROLES[role], placement) for role, placement in placements.items()}
        self._policy, generator = groups[POLICY], cfg.generator
        alive = living or (lambda: range(generator.own_engines))
        transfer: WeightTransfer
        if weight_sync_backend == "nccl":
            gpus, silence_s = placements[POLICY].num_gpus > 0, generator.heartbeat_timeout_s
            workers = generator.devices_per_engine
            transfer = BroadcastTransfer(self._policy, workers, alive, timeout_s=silence_s, recovers=not gpus)
        elif weight_sync_backend == "cuda_ipc":
            transfer = CudaIPCTransfer(self._policy, self._policy.ranks, alive)
        else:
            transfer = memory_transfer(cfg, groups, nodes)
        super().__init__(cfg, groups, transfer)


def memory_transfer(
    cfg: Config, groups: Mapping[str, RoleRanks], nodes: Callable[[], Mapping[int, str]] | None = None
) -> WeightTransfer:
    """Through memory of the machine of the policy's rank 0, or a folder that other machines see."""
    policy, generator, remote = groups[POLICY], cfg.generator, None
    if nodes is not None and not generator.weight_sync_dir:
        workers = 1 if adapter_rank(cfg) else generator.inference_engine_tensor_parallel_size
        remote = RemoteEngines(policy, nodes, workers=workers, timeout_s=generator.heartbeat_timeout_s)
    if maps_weights(cfg):
        return SharedMemoryTransfer(policy, computed_on=computes_on_mapped_weights(cfg), remote=remote)
    encoding = "adapter" if adapter_rank(cfg) else generator.weight_sync_mode
    return FileTransfer(policy, encoding, remote)


def _arrived(folder: Path, ranks: Sequence[SaveResult | None]) -> Sums:
    """The files of all ranks of a role, by path from the checkpoint's folder; they can be seen from here."""
    files = files_of(ranks)
    if not folder.is_dir() or not any(folder.iterdir()):
        raise UserError(
            f"the {folder.name}'s processes wrote {folder} on another machine, where this one cannot see it: "
            f"trainer.ckpt_path must be a folder that all nodes share"
        )
    return {f"{folder.name}/{name}": entry for name, entry in files.items()}
