"""All roles of a run as one object, on any number of ranks each.

Invariant: every role of the table is started, called, trained, offloaded, saved and stopped in the
same way. A batch is cut into one shard per rank, and results are in the batch's order; how the
ranks are called, and fail, is in ``skyasync.workers.ranks``.

    trainer ──▶ dispatch ──▶ one shard of the batch per rank (object store, once) ──▶ actors of the
    role
                   ▲                                                                    │
                   └───────────── results in the batch's order ◀────────────────────────┘
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.inference.settings import adapter_rank, computes_on_mapped_weights, maps_weights
from skyasync.models.backend import SaveResult
from skyasync.models.batch import TokenBatch, UpdateBatch
from skyasync.utils.manifest import Sums
from skyasync.utils.task_group import within
from skyasync.weight_sync.transfers import TRANSFERS
from skyasync.weight_sync.transfers.base import WeightTransfer
from skyasync.weight_sync.transfers.file import FileTransfer
from skyasync.weight_sync.transfers.remote import RemoteEngines
from skyasync.weight_sync.transfers.shared_memory import SharedMemoryTransfer
from skyasync.workers.ranks import RankGroup, WorkerPlacement
from skyasync.workers.roles import POLICY, REFERENCE, ROLES

if TYPE_CHECKING:
    RoleRanks: TypeAlias = "RankGroup | LocalGroup"

HOSTED_METHODS = {(REFERENCE, "logprobs"): "base_logprobs"}
"""The policy's methods that compute what a hosted role's method does, if their names differ."""

WITH_ROUTED_EXPERTS = ("logprobs", "values", "logprobs_and_values")
"""Methods of the policy that replay the experts that were chosen for the tokens."""


class StartedRoles(dict[str, "RoleRanks"]):
    """The ranks of each role of the run, by its name."""

    def __missing__(self, role: str) -> RoleRanks:
        keys = ROLES[role].enabled_by
        why = f" ({' or '.join(keys)})" if keys else ""
        raise RuntimeError(
            f"no {role} was started: nothing in the configuration asked for one{why}"
        )


class Dispatch:
    """What the trainer calls.

    Args:
        groups: of the run's roles, by their names, the policy first.
        transfer: how the policy's weights reach the engines; by default through this machine's
            memory.
    """

    def __init__(
        self, cfg: Config, groups: Mapping[str, RoleRanks], transfer: WeightTransfer | None = None
    ) -> None:
        self._cfg = cfg
        self._groups = StartedRoles(groups)
        self._trained = [role for role in groups if ROLES[role].trains]
        self.transfer = transfer or memory_transfer(cfg, self._groups)

    def set_threads(self, threads: int) -> None:
        """CPU threads of each policy rank; call before ``start``."""
        trainer = self._cfg.trainer
        trainer = replace(trainer, policy=replace(trainer.policy, threads=threads))
        self._cfg = replace(self._cfg, trainer=trainer)

    async def start(self, total_steps: int = 0) -> None:
        """Load the models.

        Args:
            total_steps: optimizer steps of the run, for learning rates that decay.
        """
        try:
            async with within(
                self._cfg.trainer.step_timeout_s, f"loading the models ({', '.join(self._groups)})"
            ):
                await asyncio.gather(
                    *(group.start(self._cfg, total_steps) for group in self._groups.values())
                )
        except BaseException:
            await self.shutdown()
            raise

    # ---------------------------------------------------------------- one role

    def _host_of(self, role: str) -> str:
        """The role whose ranks compute a role: its own, or the policy's."""
        if role not in self._groups and ROLES[role].hosted_by_policy(self._cfg):
            return POLICY
        return role

    async def ask(self, role: str, method: str, batch: TokenBatch) -> Tensor:
        """What a role computes of a batch: ``[batch, length]`` or ``[batch]``, in the batch's
        order.

        The policy's ranks answer for a role that they host (a reference under adapters, a critic on
        its layers). Workers are sent tokens, masks, groups, and the ``columns`` of the role's
        entry.

        Args:
            method: of the role's worker: ``logprobs`` of policy, reference and teacher, ``values``
                of the critic.
        """
        host = self._host_of(role)
        if host != role:
            role, method = host, HOSTED_METHODS.get((role, method), method)
        sent = TokenBatch(
            batch.tokens,
            batch.attention_mask,
            batch.loss_mask,
            batch.group_ids,
            images=batch.images,
        )
        if (
            role == POLICY and method in WITH_ROUTED_EXPERTS
        ):  # other models choose experts of their own
            sent.routed_experts = batch.routed_experts
        vars(sent).update({name: vars(batch)[name] for name in ROLES[role].columns})
        answer = await self._groups[role].on_rows(method, sent)
        assert answer is not None, f"{method} of the role {role} returns nothing"
        return answer

    async def call(self, role: str, method: str, *args: object) -> list[Any]:
        """The same call on every rank of a role; results by rank."""
        return await self._groups[role].call(method, *args)

    async def forward_backward(self, batch: UpdateBatch, role: str = POLICY) -> None:
        """Add the gradient of these rows to the gradient since the last optimizer step.

        A missing ``proximal_logprobs`` means that the current policy is the proximal one; it is
        filled in.
        """
        sent = copy(batch)
        host = self._host_of(role)
        if host != POLICY:
            sent.routed_experts = None
        sent.critic_alone = host != role
        before = await self._groups[host].on_rows("forward_backward", sent)
        if role == POLICY and batch.proximal_logprobs is None:
            batch.proximal_logprobs = before

    async def optimizer_step(
        self,
        schedule_step: int | None = None,
        scale: float = 1.0,
        role: str = POLICY,
        lr_scale: float = 1.0,
        beta1: float | None = None,
    ) -> dict[str, float]:
        """Change the weights; returns metrics (loss, grad_norm, lr, ...).

        Args:
            schedule_step: optimizer step by which the learning rate goes; by default the workers'
                own count.
            scale: gradient and loss are multiplied by it first: one over the loss's denominator, if
                the loss weights lack it.
            lr_scale: factor of the scheduled learning rate.
            beta1: AdamW's first decay rate; None: the settings'.
        """
        host = self._host_of(role)
        async with self.transfer.changing():
            results = await self.call(host, "optimizer_step", schedule_step, scale, lr_scale, beta1)
        metrics = results[0]
        return {name.removeprefix(f"{role}/"): value for name, value in metrics.items()}

    async def examine(self, scale: float = 1.0, role: str = POLICY) -> str:
        """What is not finite of the accumulated loss and gradient, "" if all is; before the
        step."""
        return next(filter(None, await self.call(self._host_of(role), "examine", scale)), "")

    async def drop_gradient(self, role: str = POLICY) -> None:
        """Instead of the step: forget the gradient. Weights, optimizer state and the count of steps
        stay."""
        await self.call(self._host_of(role), "drop_gradient")

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """As ``InferenceEngine.score``, by the trainer's policy."""
        return (await self.call(POLICY, "score", sequences))[0]

    async def export(self, folder: Path, role: str = POLICY) -> None:
        """Write a role's model as a Hugging Face folder (safetensors, config, tokenizer)."""
        host = self._host_of(role)
        await self.call(host, "export" if host == role else f"export_{role}", str(folder))

    # ---------------------------------------------------------------- all roles

    async def offload(self) -> None:
        """Weights and optimizer state to host memory, of the policy and of all roles on its
        devices.

        Until ``onload`` only ``save`` and ``load`` may be called.
        """
        await self._call_on_policys_devices("offload")

    async def onload(self) -> None:
        """Undo ``offload``, bitwise."""
        await self._call_on_policys_devices("onload")

    async def _call_on_policys_devices(self, method: str) -> None:
        groups = [
            group
            for role, group in self._groups.items()
            if ROLES[role].on_policys_devices(self._cfg)
        ]
        await asyncio.gather(*(group.call(method) for group in groups))

    async def save(self, folder: Path) -> Sums:
        """Write model and optimizer state of each role that trains into ``folder/<role>``.

        Returns:
            What the files that are synced by now must hold, by path from ``folder``.

        Raises:
            OSError: if the disk does not take them. The models are as they were, and can continue.
        """
        sums: Sums = {}
        for role in self._trained:
            sums |= _written(folder / role, await self.call(role, "save", str(folder / role)))
        return sums

    async def begin_save(self, folder: Path) -> None:
        """As ``save``, but of a copy of the state: this returns when the copy is made. One at a
        time."""
        self._saving = folder
        for role in self._trained:
            await self.call(role, "begin_save", str(folder / role))

    async def saved(self) -> Sums | None:
        """What ``save`` would return, or raise, of the last ``begin_save``; None while it is being
        written."""
        sums: Sums = {}
        for role in self._trained:
            ranks = await self.call(role, "saved")
            if None in ranks:
                return None
            sums |= _written(self._saving / role, ranks)
        return sums

    async def verify(self, folder: Path, sums: Sums) -> list[str]:
        """What is wrong with a checkpoint's files, in words; the policy's ranks read all of
        them."""
        return [
            problem
            for rank in await self.call(POLICY, "verify", str(folder), sums)
            for problem in rank
        ]

    async def load(self, folder: Path) -> None:
        """Read what ``save`` wrote there."""
        for role in self._trained:
            if not (folder / role).is_dir():
                raise UserError(f"{folder} holds no {role}: it was saved by a run without one")
            async with self.transfer.changing():
                await self.call(role, "load", str(folder / role))

    async def begin_profile(self) -> None:
        """From here on what the workers compute is recorded."""
        await asyncio.gather(*(group.call("begin_profile") for group in self._groups.values()))

    async def end_profile(self, folder: Path) -> None:
        """Write what was recorded there, a trace and a table of each rank."""
        await asyncio.gather(
            *(group.call("end_profile", str(folder)) for group in self._groups.values())
        )

    async def stats(self) -> dict[str, Any]:
        """``busy_s`` of the policy since the start, and ``<role>_busy_s`` of the others."""
        return {
            "busy_s" if role == POLICY else f"{role}_busy_s": group.busy_s
            for role, group in self._groups.items()
        }

    @property
    def lost(self) -> tuple[str, BaseException] | None:
        """The role that has lost a rank's process, and the error that showed it; None if none
        has."""
        return next(
            ((role, group.lost) for role, group in self._groups.items() if group.lost is not None),
            None,
        )

    async def shutdown(self) -> None:
        """End the ranks of all roles; safe to call twice."""
        for group in self._groups.values():
            group.kill()


class RayWorkerDispatch(Dispatch):
    """Every rank is a Ray actor.

    Making it starts the ranks' processes and waits for nothing; :meth:`start` loads the models.

    Args:
        placements: where the ranks of each role go, by its name; roles without an entry are not
            started.
        weight_sync_backend: how the engines expect the weights, a name in ``TRANSFERS``.
        healthy: the indices of the healthy engines, if they matter to the way; by default all of
            them.
        nodes: Ray's names of the nodes of healthy engines, by index; by default all are on the node
            of the policy's rank 0.
    """

    def __init__(
        self,
        cfg: Config,
        placements: Mapping[str, WorkerPlacement],
        weight_sync_backend: str = "shared_memory",
        healthy: Callable[[], Sequence[int]] | None = None,
        nodes: Callable[[], Mapping[int, str]] | None = None,
    ) -> None:
        groups = {role: RankGroup(ROLES[role], placement) for role, placement in placements.items()}
        self._policy = groups[POLICY]
        if weight_sync_backend == "shared_memory":
            transfer = memory_transfer(cfg, groups, nodes)
        else:
            healthy = healthy or (lambda: range(cfg.generator.own_engines))
            gpus = placements[POLICY].num_gpus > 0
            transfer = TRANSFERS.find(weight_sync_backend).of_run(
                self._policy, cfg, healthy, gpus=gpus
            )
        super().__init__(cfg, groups, transfer)


def memory_transfer(
    cfg: Config,
    groups: Mapping[str, RoleRanks],
    nodes: Callable[[], Mapping[int, str]] | None = None,
) -> WeightTransfer:
    """Through memory of the machine of the policy's rank 0, or a folder that other machines see."""
    policy = groups[POLICY]
    generator = cfg.generator
    remote = None
    if nodes is not None and not generator.weight_sync_dir:
        if adapter_rank(cfg):
            workers = 1
        else:
            workers = generator.devices_per_engine
        remote = RemoteEngines(
            policy, nodes, workers=workers, timeout_s=generator.heartbeat_timeout_s
        )
    if maps_weights(cfg):
        return SharedMemoryTransfer(
            policy, computed_on=computes_on_mapped_weights(cfg), remote=remote
        )
    if adapter_rank(cfg):
        encoding = "adapter"
    else:
        encoding = generator.weight_sync_mode
    return FileTransfer(policy, encoding, remote)


def _written(folder: Path, ranks: Sequence[SaveResult | None]) -> Sums:
    """The files of all ranks of a role, by path from the checkpoint's folder; an ``OSError`` if one
    could not write."""
    results = [
        result for result in ranks if result is not None
    ]  # a user's own worker may return nothing
    for result in results:
        if result.problem:
            raise OSError(result.problem)
    if not folder.is_dir() or not any(folder.iterdir()):
        raise UserError(
            f"the {folder.name}'s processes wrote {folder} on another machine, where this one cannot see it: "
            f"trainer.ckpt_path must be a folder that all nodes share"
        )
    return {
        f"{folder.name}/{name}": entry for result in results for name, entry in result.files.items()
    }


class LocalGroup:
    """One rank of a role, in ``thread``, with the methods of ``RankGroup``. It is loaded when it is
    made."""

    lost: BaseException | None = None

    def __init__(
        self, cfg: Config, role: str, thread: ThreadPoolExecutor, total_steps: int = 0
    ) -> None:
        entry = ROLES[role]
        self.worker = entry.worker_class()(
            cfg, threads=entry.threads(cfg), role=role, total_steps=total_steps
        )
        self.worker.setup()
        self._thread = thread
        self.busy_s = 0.0

    async def start(self, cfg: Config, total_steps: int = 0) -> None: ...

    async def call(self, method: str, *args: object) -> list[Any]:
        return [await self.call_first(method, *args)]

    async def call_first(self, method: str, *args: object) -> Any:
        def timed() -> object:
            start = time.monotonic()
            try:
                return methodcaller(method, *args)(self.worker)
            finally:
                self.busy_s += time.monotonic() - start

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)

    on_rows = call_first

    def kill(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class LocalDispatch(Dispatch):
    """Every role has one rank in this process, and is loaded when this is made: no cluster, no
    actors.

    The same worker classes do the same work as in Ray actors, one call at a time in one thread; the
    event loop is not blocked. For experiments that start many short runs, and for tests.

    Args:
        total_steps: optimizer steps of the run, for learning rates that decay.
    """

    def __init__(
        self, cfg: Config, *, roles: Sequence[str] = (POLICY,), total_steps: int = 0
    ) -> None:
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="roles")
        groups = {role: LocalGroup(cfg, role, thread, total_steps) for role in roles}
        super().__init__(cfg, groups)
        self._policy = groups[POLICY].worker
