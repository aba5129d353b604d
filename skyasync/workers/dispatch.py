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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.inference.settings import adapter_rank, computes_on_lent_weights, lends_weights
from skyasync.models.backend import SaveResult, files_of
from skyasync.models.batch import TokenBatch, UpdateBatch
from skyasync.state.manifest import Sums
from skyasync.together import within
from skyasync.utils.manifest import Sums
from skyasync.utils.task_group import within
from skyasync.weight_sync.changed_weights import Published
from skyasync.weight_sync.update import WeightUpdate
from skyasync.workers.across import Across
from skyasync.workers.broadcast import Broadcast
from skyasync.workers.parts import Parts
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
    """Implements :class:`skyasync.workers.protocol.WorkerDispatch`.

    Args:
        groups: of the run's roles, by their names, the policy first.
    """

    def __init__(self, cfg: Config, groups: Mapping[str, RoleRanks]) -> None:
        self._cfg, self._groups = cfg, Started(groups)
        self._broadcast: Broadcast | None = None
        self._parts: Parts | None = None
        self._across: Across | None = None  # to other nodes, where engines read what lies on one
        self._changing: Callable[[], AbstractAsyncContextManager[None]] = nullcontext  # around what changes weights

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
        async with self._changing():
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

    # ---------------------------------------------------------------- the policy's weights, for engines

    async def publish_weights(self, version: int) -> WeightUpdate:
        if self._broadcast is not None:
            return await self._broadcast.publish(version)
        if self._parts is not None:
            return await self._parts.begin(version)
        update = await self._published(version)
        return await self._across.publish(update) if self._across is not None else update

    async def _published(self, version: int) -> WeightUpdate:
        """On rank 0's node."""
        if self._lends:
            info = (await self._groups[POLICY].call("lend"))[0]
            if computes_on_lent_weights(self._cfg):
                await self._groups[POLICY].call_first("prove_lent")
            return WeightUpdate(version, "shared_memory", info)
        if self._sends_changes:
            return _as_update(version, (await self._groups[POLICY].call("publish_changes"))[0])
        if adapter_rank(self._cfg):
            return _as_update(version, (await self._groups[POLICY].call("publish_adapter"))[0])
        path = (await self._groups[POLICY].call("publish"))[0]
        return WeightUpdate(version=version, backend="shared_memory", info={"path": path})

    async def send_weights(self, update: WeightUpdate) -> None:
        """While the engines take them. What they read from where it lies is looked through meanwhile, once for all.

        What they compute on, which takes them no time, has been looked through before it was published: they do not
        stand still for it, and never compute on what is wrong.
        """
        if self._broadcast is not None:
            await self._broadcast.send()
        elif "kinds" in update.info and not computes_on_lent_weights(self._cfg):
            await self._groups[POLICY].call_first("prove_lent")

    async def next_part(self, update: WeightUpdate) -> WeightUpdate | None:
        """Of an update that goes in parts: the first, or the one behind this; None behind the last."""
        assert self._parts is not None
        return await self._parts.next(update)

    async def end_parts(self) -> None:
        """Nobody reads a part any more."""
        assert self._parts is not None
        await self._parts.end()

    async def release_weights(self, update: WeightUpdate) -> None:
        if self._broadcast is not None:
            await self._broadcast.settle()
        elif self._parts is not None:
            await self._parts.forget(update)
        else:
            await self._groups[POLICY].call_first("release", update.info["path"])
            if self._across is not None:
                await self._across.settle(update)

    async def keep_weights(self, update: WeightUpdate) -> WeightUpdate:
        """Instead of ``release_weights``: how an engine that comes late gets them, until the next ``publish_weights``.
        Of changes, and by NCCL and CUDA IPC, nothing is kept: all weights are written, or sent, when they are asked
        for."""
        if self._broadcast is not None or self._parts is not None:
            return replace(update, info={})
        if self._sends_changes:
            await self.release_weights(update)
            return replace(update, info={})
        path = await self._groups[POLICY].call_first("keep", update.info["path"])
        late = {"late": True} if "kinds" in update.info else {}
        if self._across is not None:
            await self._across.settle(update, kept=True)
        return replace(update, info={**update.info, "path": path, **late})

    @property
    def _lends(self) -> bool:
        return self._broadcast is None and self._parts is None and lends_weights(self._cfg)

    async def publish_whole(self, update: WeightUpdate, *, fell_back: bool) -> WeightUpdate:
        """The same weights, all of them, instead of what has changed; ``fell_back``: somebody could not take that. By
        NCCL and CUDA IPC: for one engine that comes late; ``release_weights`` is their end."""
        if self._broadcast is not None:
            return await self._broadcast.publish_alone(update.version)
        if self._parts is not None:
            return await self._parts.alone(update.version)
        whole = _as_update(update.version, await self._groups[POLICY].call_first("publish_whole", fell_back))
        return await self._across.publish(whole, living=fell_back) if self._across is not None else whole

    @property
    def _sends_changes(self) -> bool:
        return self._broadcast is None and self._cfg.generator.weight_sync_mode == "delta"

    def give_up_sync(self, cause: BaseException) -> bool:
        """An engine has died while weights were on their way to all: by NCCL the policy's ranks wait for it there, and
        are lost. Whether they are."""
        if self._broadcast is not None:
            self._broadcast.give_up("an engine has died in a weight sync by NCCL, in which they wait for it", cause)
        return self._broadcast is not None

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
            async with self._changing():
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
        if self._across is not None:
            self._across.close()
        for group in self._groups.values():
            group.kill()


class RayWorkerDispatch(Dispatch):
    """Every rank is a Ray actor.

    Making it starts the ranks' processes and waits for nothing; :meth:`start` loads the models.

    Args:
        placements: where the ranks of each role go, by its name; roles without an entry are not started.
        weight_sync_backend: how the engines expect the weights, ``shared_memory``, ``nccl`` or ``cuda_ipc``.
        living: the places of the engines that live, by which the last two go; all of them without it.
        nodes: of Ray, of the engines that live; without it all are where rank 0 of the policy is.
    """

    def __init__(
        self,
        cfg: Config,
        placements: Mapping[str, WorkerPlacement],
        weight_sync_backend: str = "shared_memory",
        living: Callable[[], Sequence[int]] | None = None,
        nodes: Callable[[], Collection[str]] | None = None,
    ) -> None:
        groups = {role: RankGroup(ROLES[role], placement) for role, placement in placements.items()}
        super().__init__(cfg, groups)
        self._policy = groups[POLICY]
        every = range(cfg.generator.own_engines)
        if weight_sync_backend == "nccl":
            self._broadcast = Broadcast(self._policy, cfg.generator.devices_per_engine, living or (lambda: every))
            self._changing = self._broadcast.changing
        elif weight_sync_backend == "cuda_ipc":
            self._parts = Parts(self._policy, self._policy.ranks, living or (lambda: every))
        elif nodes is not None and not cfg.generator.weight_sync_dir:
            computed_on, silence_s = computes_on_lent_weights(cfg), cfg.generator.heartbeat_timeout_s
            self._across = Across(self._policy, nodes, computed_on=computed_on, silence_s=silence_s)


def _as_update(version: int, file: Published) -> WeightUpdate:
    return WeightUpdate(version, "shared_memory", {"path": file.path}, file.content, file.base, file.metrics)


def _arrived(folder: Path, ranks: Sequence[SaveResult | None]) -> Sums:
    """The files of all ranks of a role, by path from the checkpoint's folder; they can be seen from here."""
    files = files_of(ranks)
    if not folder.is_dir() or not any(folder.iterdir()):
        raise UserError(
            f"the {folder.name}'s processes wrote {folder} on another machine, where this one cannot see it: "
            f"trainer.ckpt_path must be a folder that all nodes share"
        )
    return {f"{folder.name}/{name}": entry for name, entry in files.items()}
