"""All roles of a run as one object, on any number of ranks each.

Invariant: every role of the table is started, called, trained, offloaded, saved and stopped in the
same way. A batch is cut into one shard per rank, and results are in the batch's order; how the
ranks are called, and fail, is in ``skyasync.workers.ranks``.

    trainer ──▶ dispatch ──▶ one shard of the batch per rank ──▶ actors of the role
                   ▲                                                    │
                   └───────────── results in the batch's order ◀────────┘
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
"""Role and method -> the policy's method for a role that it hosts, if their names differ."""

WITH_ROUTED_EXPERTS = ("logprobs", "values", "logprobs_and_values")
"""Methods of the policy that replay the experts of the tokens."""


class StartedRoles(dict[str, "RoleRanks"]):
    """The ranks of each role of the run, by its name."""

    def __missing__(self, role: str) -> RoleRanks:
        keys = ROLES[role].enabled_by
        hint = f" ({' or '.join(keys)})" if keys else ""
        raise RuntimeError(
            f"no {role} was started: nothing in the configuration asked for one{hint}"
        )


class Dispatch:
    """The calls of the trainer to the models.

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
        self._trained_roles = [role for role in groups if ROLES[role].trains]
        self.transfer = transfer or memory_transfer(cfg, self._groups)

    def set_threads(self, threads: int) -> None:
        """Set the CPU threads of each policy rank; call it before ``start``."""
        policy = replace(self._cfg.trainer.policy, threads=threads)
        self._cfg = replace(self._cfg, trainer=replace(self._cfg.trainer, policy=policy))

    async def start(self, total_steps: int = 0) -> None:
        """Load the models.

        Args:
            total_steps: optimizer steps of the run, for learning rates that decay.
        """
        phase = f"loading the models ({', '.join(self._groups)})"
        starts = [group.start(self._cfg, total_steps) for group in self._groups.values()]
        try:
            async with within(self._cfg.trainer.step_timeout_s, phase):
                await asyncio.gather(*starts)
        except BaseException:  # also a cancellation: no process may be left
            await self.shutdown()
            raise

    # ---------------------------------------------------------------- one role

    def _host_of(self, role: str) -> str:
        """The role whose ranks compute a role: the policy if it hosts the role."""
        if role not in self._groups and ROLES[role].hosted_by_policy(self._cfg):
            return POLICY
        return role

    async def ask(self, role: str, method: str, batch: TokenBatch) -> Tensor:
        """Let a role compute something of a batch.

        The policy's ranks answer for a role that they host (a reference under adapters, a critic on
        its layers). Workers get tokens, masks, groups, and the ``columns`` of the role's entry.

        Args:
            method: of the role's worker: ``logprobs`` of policy, reference and teacher, ``values``
                of the critic.

        Returns:
            ``[batch, length]`` or ``[batch]``, in the batch's order.
        """
        host = self._host_of(role)
        if host != role:
            method = HOSTED_METHODS.get((role, method), method)
        host_batch = TokenBatch(
            batch.tokens,
            batch.attention_mask,
            batch.loss_mask,
            batch.group_ids,
            images=batch.images,
        )
        # The experts are the policy's: other models choose theirs.
        if host == POLICY and method in WITH_ROUTED_EXPERTS:
            host_batch.routed_experts = batch.routed_experts
        for name in ROLES[host].columns:
            setattr(host_batch, name, getattr(batch, name))
        result = await self._groups[host].on_rows(method, host_batch)
        assert result is not None, f"{method} of the role {host} returns nothing"
        return result

    async def call(self, role: str, method: str, *args: object) -> list[Any]:
        """Call a method of every rank of a role with the same arguments; results by rank."""
        return await self._groups[role].call(method, *args)

    async def forward_backward(self, batch: UpdateBatch, role: str = POLICY) -> None:
        """Add the gradient of these rows to the gradient since the last optimizer step.

        A missing ``proximal_logprobs`` means that the current policy is the proximal one; it is
        filled in.
        """
        host = self._host_of(role)
        host_batch = copy(batch)
        if host != POLICY:  # the experts are the policy's
            host_batch.routed_experts = None
        # The policy's ranks train the critic's head without the policy.
        host_batch.critic_alone = host != role
        logprobs = await self._groups[host].on_rows("forward_backward", host_batch)
        if role == POLICY and batch.proximal_logprobs is None:
            batch.proximal_logprobs = logprobs

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
            schedule_step: optimizer step by which the learning rate goes; by default as the workers
                count.
            scale: gradient and loss are multiplied by it first: one over the loss's denominator, if
                the loss weights lack it.
            lr_scale: factor of the scheduled learning rate.
            beta1: AdamW's first decay rate; None: by the settings.
        """
        host = self._host_of(role)
        # A transfer may be sending these weights to a late engine: that ends first.
        async with self.transfer.changing():
            results = await self.call(host, "optimizer_step", schedule_step, scale, lr_scale, beta1)
        # The metrics are of all ranks together.
        return {name.removeprefix(f"{role}/"): value for name, value in results[0].items()}

    async def examine(self, scale: float = 1.0, role: str = POLICY) -> str:
        """The problem of a loss or gradient that is not finite, before the step; "" if both are."""
        problems = await self.call(self._host_of(role), "examine", scale)
        return next(filter(None, problems), "")

    async def drop_gradient(self, role: str = POLICY) -> None:
        """Drop the gradient instead of a step.

        Weights, optimizer state and the count of steps stay.
        """
        await self.call(self._host_of(role), "drop_gradient")

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Score sequences as ``InferenceEngine.score``, by the trainer's policy."""
        results = await self.call(POLICY, "score", sequences)
        return results[0]

    async def export(self, folder: Path, role: str = POLICY) -> None:
        """Write a role's model as a Hugging Face folder (safetensors, config, tokenizer)."""
        host = self._host_of(role)
        method = "export" if host == role else f"export_{role}"
        await self.call(host, method, str(folder))

    # ---------------------------------------------------------------- all roles

    async def offload(self) -> None:
        """Move weights and optimizer state of the policy and of roles on its devices to the host.

        Until ``onload`` only ``save`` and ``load`` may be called.
        """
        await self._call_on_policy_devices("offload")

    async def onload(self) -> None:
        """Undo ``offload``, bitwise."""
        await self._call_on_policy_devices("onload")

    async def _call_on_policy_devices(self, method: str) -> None:
        calls = []
        for role, group in self._groups.items():
            if ROLES[role].on_policys_devices(self._cfg):
                calls.append(group.call(method))
        await asyncio.gather(*calls)

    async def save(self, folder: Path) -> Sums:
        """Write model and optimizer state of each role that trains into ``folder/<role>``.

        Returns:
            Sizes and checksums of files that are synced, by their path in ``folder``.

        Raises:
            OSError: if the disk does not take them. The models are unchanged, and can continue.
        """
        sums: Sums = {}
        for role in self._trained_roles:
            results = await self.call(role, "save", str(folder / role))
            sums |= _file_sums(folder / role, results)
        return sums

    async def begin_save(self, folder: Path) -> None:
        """Begin a ``save`` of a copy of the state; returns when the copy is made.

        One at a time; see ``saved``.
        """
        self._saved_folder = folder
        for role in self._trained_roles:
            await self.call(role, "begin_save", str(folder / role))

    async def saved(self) -> Sums | None:
        """Return, or raise, the result of ``begin_save`` as ``save``; None until it is written."""
        sums: Sums = {}
        for role in self._trained_roles:
            results = await self.call(role, "saved")
            if None in results:
                return None
            sums |= _file_sums(self._saved_folder / role, results)
        return sums

    async def verify(self, folder: Path, sums: Sums) -> list[str]:
        """The problems of a checkpoint's files, which the policy's ranks read."""
        problems: list[str] = []
        for rank_problems in await self.call(POLICY, "verify", str(folder), sums):
            problems += rank_problems
        return problems

    async def load(self, folder: Path) -> None:
        """Read the models from a folder of ``save``."""
        for role in self._trained_roles:
            # Such as a critic, if the earlier run had another advantage estimator.
            if not (folder / role).is_dir():
                raise UserError(f"{folder} holds no {role}: it was saved by a run without one")
            async with self.transfer.changing():
                await self.call(role, "load", str(folder / role))

    async def begin_profile(self) -> None:
        """Record the work of all ranks from here on."""
        await self._call_all("begin_profile")

    async def end_profile(self, folder: Path) -> None:
        """Write the recorded work into a folder: a trace and a table of each rank."""
        await self._call_all("end_profile", str(folder))

    async def _call_all(self, method: str, *args: object) -> None:
        calls = [group.call(method, *args) for group in self._groups.values()]
        await asyncio.gather(*calls)

    async def stats(self) -> dict[str, Any]:
        """``busy_s`` of the policy since the start, and ``<role>_busy_s`` of other roles."""
        stats: dict[str, Any] = {}
        for role, group in self._groups.items():
            name = "busy_s" if role == POLICY else f"{role}_busy_s"
            stats[name] = group.busy_s
        return stats

    @property
    def lost(self) -> tuple[str, BaseException] | None:
        """The first role that has lost a rank's process, and its error; None if no role has."""
        for role, group in self._groups.items():
            if group.lost is not None:
                return (role, group.lost)
        return None

    async def shutdown(self) -> None:
        """End the ranks of all roles; safe to call twice."""
        for group in self._groups.values():
            group.kill()


class RayWorkerDispatch(Dispatch):
    """Calls ranks that are Ray actors.

    Making it starts the ranks' processes and waits for nothing; :meth:`start` loads the models.

    Args:
        placements: of each role's ranks, by its name; roles without an entry are not started.
        weight_sync_backend: the engines' weight transfer, a name in ``TRANSFERS``.
        healthy: the indices of the healthy engines; by default all of them.
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
            transfer_class = TRANSFERS.find(weight_sync_backend)
            transfer = transfer_class.of_run(self._policy, cfg, healthy, gpus=gpus)
        super().__init__(cfg, groups, transfer)


def memory_transfer(
    cfg: Config,
    groups: Mapping[str, RoleRanks],
    nodes: Callable[[], Mapping[int, str]] | None = None,
) -> WeightTransfer:
    """The transfer through memory of the machine of the policy's rank 0, or a shared folder."""
    policy = groups[POLICY]
    generator = cfg.generator
    remote = None
    # Engines on other machines read a shared folder, if there is one.
    if nodes is not None and not generator.weight_sync_dir:
        # An adapter is loaded once, weights by each worker of an engine.
        workers = 1 if adapter_rank(cfg) else generator.devices_per_engine
        remote = RemoteEngines(
            policy, nodes, workers=workers, timeout_s=generator.heartbeat_timeout_s
        )
    if maps_weights(cfg):
        return SharedMemoryTransfer(
            policy, computed_on=computes_on_mapped_weights(cfg), remote=remote
        )
    encoding = "adapter" if adapter_rank(cfg) else generator.weight_sync_mode
    return FileTransfer(policy, encoding, remote)


def _file_sums(folder: Path, results: Sequence[SaveResult | None]) -> Sums:
    """The files of all ranks of a role, by their path in the checkpoint.

    Raises:
        OSError: if a rank could not write.
    """
    sums: Sums = {}
    for result in results:
        if result is None:  # a user's worker may return nothing
            continue
        if result.problem:
            raise OSError(result.problem)
        for name, entry in result.files.items():
            sums[f"{folder.name}/{name}"] = entry
    if not folder.is_dir() or not any(folder.iterdir()):
        raise UserError(
            f"the {folder.name}'s processes wrote {folder} on another machine, where this one cannot see it: "
            f"trainer.ckpt_path must be a folder that all nodes share"
        )
    return sums


class LocalGroup:
    """One rank of a role in a thread, with the methods of ``RankGroup``.

    Making it loads the model.
    """

    lost: BaseException | None = None

    def __init__(
        self, cfg: Config, role: str, thread: ThreadPoolExecutor, total_steps: int = 0
    ) -> None:
        entry = ROLES[role]
        worker_class = entry.worker_class()
        self.worker = worker_class(
            cfg, threads=entry.threads(cfg), role=role, total_steps=total_steps
        )
        self.worker.setup()
        self._thread = thread
        self.busy_s = 0.0

    async def start(self, cfg: Config, total_steps: int = 0) -> None: ...

    async def call(self, method: str, *args: object) -> list[Any]:
        return [await self.call_first(method, *args)]

    async def call_first(self, method: str, *args: object) -> Any:
        call = methodcaller(method, *args)

        def timed_call() -> object:
            began_s = time.monotonic()
            try:
                return call(self.worker)
            finally:
                self.busy_s += time.monotonic() - began_s

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed_call)

    on_rows = call_first  # the rank has all rows of a batch

    def kill(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class LocalDispatch(Dispatch):
    """Calls one rank of every role, in this process: no cluster, no actors.

    Making it loads the models. The worker classes do the same work as in Ray actors, one call at a
    time in one thread; the event loop is not blocked. For experiments that start many short runs,
    and for tests.

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
