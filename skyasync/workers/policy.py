"""One rank of the policy: its loss, and the ways its weights leave it for the engines."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyasync.algorithms.distillation import top_k_reverse_kl
from skyasync.algorithms.objective import Objective
from skyasync.algorithms.proximal import approximate_proximal
from skyasync.engines.settings import computes_on_lent_weights
from skyasync.errors import NonFiniteError
from skyasync.routing import Routers
from skyasync.weight_sync.adapter_file import write_adapter
from skyasync.weight_sync.changed_weights import ChangedWeights, Published
from skyasync.weight_sync.kept_file import KeptFile
from skyasync.weight_sync.lent import Lender
from skyasync.weight_sync.nccl import NCCLSender, Rendezvous
from skyasync.weight_sync.shared_memory import remove_weights, write_weights
from skyasync.weight_sync.update import WeightUpdate
from skyasync.workers import checkpoint
from skyasync.workers.base import put_rows, sharded_afterwards
from skyasync.workers.batch import TokenBatch, UpdateBatch
from skyasync.workers.file_names import as_in_files, has_other_names, wants_file_names
from skyasync.workers.model import TokenScores, Wrapped
from skyasync.workers.packing import Layout, MicroBatch
from skyasync.workers.shared_critic import SharedCritic
from skyasync.workers.totals import Totals
from skyasync.workers.trained import Examined, TrainedWorker

__all__ = ["NonFiniteError", "PolicyWorker"]


class PolicyWorker(TrainedWorker):
    """Holds the policy.

    Args:
        args, kwargs: those of :class:`TrainedWorker`.
    """

    role_name: ClassVar[str] = "policy"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.objective = Objective(self.cfg.trainer.algorithm)
        self._lender = Lender(computed_on=computes_on_lent_weights(self.cfg))
        # What was published last, where that is wanted.
        self._changed = ChangedWeights()
        self.kept = KeptFile(named=bool(self.cfg.generator.weight_sync_dir))

    def replayed(self, model: PreTrainedModel) -> Routers | None:
        return Routers(model) if self.cfg.trainer.policy.router_replay != "none" else None

    def add_beside(self, wrapper: Wrapped) -> None:
        if SharedCritic.wanted(self.cfg):
            self.critic = SharedCritic(wrapper, self.cfg, self.total_steps)

    def update_policy(self, batch: UpdateBatch, schedule_step: int | None = None) -> dict[str, float]:
        """One optimizer step on this rank's rows of a batch: ``forward_backward`` and ``optimizer_step``.

        Missing ``proximal_logprobs`` are filled in.
        """
        before = self.forward_backward(batch)
        if before is not None:
            batch.proximal_logprobs = before
        return self.optimizer_step(schedule_step)

    def _fills(self, batch: UpdateBatch) -> bool:
        """Its ``proximal_logprobs``: the policy before the step, which the gradient computes anyway."""
        return batch.proximal_logprobs is None and not batch.critic_alone

    def forward_backward(self, batch: UpdateBatch) -> Tensor | None:
        if self.critic:
            self.critic.begin_part(batch)
        return super().forward_backward(batch)

    def _backward(self, micro: MicroBatch[UpdateBatch], totals: Totals) -> Tensor:
        """Returns the current log-probabilities, ``[rows, length]``; values, where the critic alone learns."""
        batch = micro.batch
        if self.critic and self.critic.alone:
            values: Tensor = self.model(micro.layout.to(self.device), values_alone=True)
            self.critic.loss(values, batch, self._here).backward()
            return values.detach()
        taught = None if batch.teacher_top_k is None else self._here(batch.teacher_top_k).chunk(2, -1)
        scores: TokenScores = self.model(
            micro.layout.to(self.device),
            others=taught[0].long() if taught else None,
            with_entropy="entropy" in self.objective.needs,
            entropy_gradient=self.objective.trains_entropy,
            value_share=self.critic.settings.value_loss_coef if self.critic else None,
        )
        current = scores.logprobs
        proximal = self._proximal(batch, current)
        mask = self._here(batch.loss_mask)
        token_loss, maps = self.objective.token_loss(
            current=current,
            proximal=proximal,
            behaviour=self._here(batch.behaviour_logprobs),
            reference=self._here(batch.reference_logprobs),
            advantages=self._here(batch.advantages),
            mask=mask,
            entropy=scores.entropy,
            selection=self._here(batch.selection),
        )
        if taught and scores.others is not None:
            kl = top_k_reverse_kl(scores.others, taught[1])
            token_loss = token_loss + self.cfg.trainer.teacher.weight * kl
            maps["teacher_kl"] = kl.detach()
        # Where there is no loss token the loss has no meaning, and may be anything.
        weights = self._here(batch.loss_weights).to(token_loss.dtype)
        loss = (weights * token_loss.where(mask, 0.0)).sum()
        totals.add(loss, mask, maps)
        if self.critic and scores.values is not None:
            loss = loss + self.critic.loss(scores.values, batch, self._here)
        loss.backward()
        return current.detach()

    def _look(self, scale: float) -> Examined:
        if self.critic is None:
            return super()._look(scale)
        found = Examined({}) if self.critic.alone else super()._look(scale)
        metrics, problem = self.critic.look(scale, self.sum_over_ranks, self.mesh)
        return Examined(found.metrics | metrics, found.norm, "; ".join(filter(None, (found.problem, problem))))

    def _clip(self) -> None:
        if self.critic:
            self.critic.clip()
        if not (self.critic and self.critic.alone):
            super()._clip()

    def _change(self, scheduled: int) -> dict[str, float]:
        metrics = {} if self.critic and self.critic.alone else super()._change(scheduled)
        return metrics | (self.critic.change(scheduled) if self.critic else {})

    def drop_gradient(self) -> None:
        super().drop_gradient()
        if self.critic:
            self.critic.drop_gradient()

    def _move(self, device: torch.device) -> None:
        if self.critic:
            self.critic.drop_gradient()
            self.critic.move(device)
        super()._move(device)

    def _beside(self) -> checkpoint.Beside | None:
        return self.critic.beside if self.critic else None

    def _proximal(self, batch: UpdateBatch, current: Tensor) -> Tensor:
        if batch.proximal_logprobs is not None:
            return self._here(batch.proximal_logprobs)
        if batch.approximated_version is None:
            return current.detach()
        behaviour, versions = self._here(batch.behaviour_logprobs), self._here(batch.versions)
        method = self.cfg.trainer.algorithm.proximal_logprobs
        return approximate_proximal(current, behaviour, versions, batch.approximated_version, method=method)

    def base_logprobs(self, batch: TokenBatch) -> Tensor:
        """As ``logprobs``, of the model without its adapters: what the policy began as."""
        assert self.adapters is not None
        with self.adapters.aside():
            return self.logprobs(batch)

    def values(self, batch: TokenBatch) -> Tensor:
        """As a critic's of its own, ``[batch, length]``."""
        return self._pass(batch, 1, lambda layout: self.model(layout, values_alone=True)[..., None])[..., 0]

    def logprobs_and_values(self, batch: TokenBatch) -> Tensor:
        """Both in one pass, ``[batch, length, 2]``."""

        def both(layout: Layout) -> Tensor:
            scores: TokenScores = self.model(layout, value_share=0.0)
            assert scores.values is not None
            return torch.stack([scores.logprobs, scores.values], -1)

        return self._pass(batch, 2, both)

    def _pass(self, batch: TokenBatch, kinds: int, said: Callable[[Layout], Tensor]) -> Tensor:
        result = torch.zeros(*batch.tokens.shape, kinds)
        with torch.no_grad(), sharded_afterwards(self.model):
            for micro in self._micro_batches(batch, self.cfg.trainer.micro_forward_batch_size_per_gpu):
                put_rows(result, micro, said(micro.layout.to(self.device)))
        return result

    def export_critic(self, folder: str) -> None:
        """As ``export``, of a critic of its own that says what the one on this model's layers does."""
        assert self.critic is not None
        self.critic.export(self.weights(), self.dtype, self.path, Path(folder), keep=self.rank == 0)

    def publish(self) -> str | None:
        """Write the full weights to shared memory; the path on rank 0, None on the others. All ranks call it.

        What has been kept is dropped before: there is room for one file.
        """
        weights = self._as_engines_load()
        if self.rank != 0:
            return None
        self.kept.drop()
        return write_weights(weights, self.cfg.generator.weight_sync_dir)

    def _as_engines_load(self) -> Mapping[str, Tensor]:
        """The full weights on rank 0, nothing on the others. All ranks call it."""
        weights = checkpoint.full_weights(self.weights(), self.dtype, keep=self.rank == 0)
        if self.rank != 0 or not wants_file_names(self.cfg):
            return weights
        with self.adapters.aside() if self.adapters else nullcontext():
            return as_in_files(self.model.model, weights)

    def lend(self) -> dict[str, Any] | None:
        """As ``publish``, into memory that engines of this machine have mapped; what they need to find it on rank 0."""
        if wants_file_names(self.cfg) and has_other_names(self.model.model):
            loaded = self._as_engines_load()
            kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in loaded.items()}
            return self._lender.write(kinds, loaded.items()) if self.rank == 0 else None
        weights = self.weights()
        whole = checkpoint.gathered(weights)
        if self.rank != 0:
            for _ in whole:  # each is one that all ranks gather
                pass
            return None
        kinds = {
            name: (self.dtype if w.dtype.is_floating_point else w.dtype, tuple(w.shape)) for name, w in weights.items()
        }
        return self._lender.write(kinds, whole)

    def prove_lent(self) -> None:
        """Raises WeightSyncError unless the memory holds what ``lend`` wrote."""
        self._lender.prove()

    def publish_changes(self) -> Published | None:
        """As ``publish``, of what has changed since the last time, or of all. All ranks call it."""
        weights = self._as_engines_load()
        return self._changed.publish(weights, self.cfg.generator.weight_sync_dir) if self.rank == 0 else None

    def publish_adapter(self) -> Published | None:
        """As ``publish``, of the adapters alone. All ranks call it."""
        assert self.adapters is not None
        adapter = self.adapters.alone()
        return write_adapter(adapter, self.cfg.generator.weight_sync_dir) if self.rank == 0 else None

    def take_weights(self, path: str) -> bool:
        """Go on with what an engine has handed back, moments as they are. All ranks call it; whether it is rounded."""
        return checkpoint.load_weights(self.model.model, Path(path))

    def publish_whole(self, fell_back: bool) -> Published:
        """All of what ``publish_changes`` published last. Of rank 0.

        Args:
            fell_back: somebody could not take the changes.
        """
        publish = self._changed.fall_back if fell_back else self._changed.whole
        return publish(self.cfg.generator.weight_sync_dir)

    def free_address(self) -> tuple[str, int]:
        """This node's address, and a port that is free at the moment."""
        _, host = self.node()
        with socket.create_server((host, 0)) as listener:
            return host, listener.getsockname()[1]

    def open_broadcast(self, rendezvous: Rendezvous) -> None:
        """Get ready to send weights by NCCL, in a new group. All ranks call it, with the same rendezvous."""
        if (former := getattr(self, "_sender", None)) is not None:
            former.close()
        model = self.adapters or self.model.model
        self._sender = NCCLSender(model, rendezvous, rank=self.rank, dtype=self.dtype, device=self.device)

    def announce(self, version: int) -> WeightUpdate:
        """The message that tells engines of a broadcast."""
        return self._sender.update(version)

    def broadcast(self) -> None:
        """Send the weights; ends when every engine has them. All ranks call it, engines meanwhile receive."""
        self._sender.send()

    def release(self, path: str) -> None:
        """Remove what ``publish`` wrote; what was lent stays, as engines compute on it."""
        if not self._lender.settle(path):
            self.kept.drop()
            remove_weights(path)

    def keep(self, path: str) -> str:
        """Instead of ``release``: where what ``publish`` wrote can be read until the next ``publish``."""
        return path if self._lender.settle(path) else self.kept.keep(path)
