"""One rank of the policy: its loss, and what it says of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyasync.algorithms.distillation import top_k_reverse_kl
from skyasync.algorithms.objective import Objective
from skyasync.algorithms.proximal import approximate_proximal
from skyasync.engines.settings import computes_on_mapped_weights, loads_as_files
from skyasync.errors import NonFiniteError
from skyasync.routing import Routers
from skyasync.weight_sync.full_tensors import FileLayout, FullTensors, specs_in
from skyasync.weight_sync.transfers.sender import WeightSender
from skyasync.workers import checkpoint
from skyasync.workers.base import put_rows, sharded_afterwards
from skyasync.workers.batch import TokenBatch, UpdateBatch
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
        self._file_layout: FileLayout | None = None

    def transfer_weights(self, sender: str, method: str, *args: object) -> Any:
        """A call of this rank's end of a weight transfer; see ``skyasync.weight_sync.transfers``."""
        return self.weight_sender.call(sender, method, *args)

    @cached_property
    def weight_sender(self) -> WeightSender:
        return WeightSender(
            self._engine_weights,
            lambda: self.adapters.alone(),  # type: ignore[union-attr]  # asked only of a policy with adapters
            self.rank,
            self.device,
            self.cfg.generator.weight_sync_dir,
            two_buffers=computes_on_mapped_weights(self.cfg),
        )

    def _engine_weights(self) -> FullTensors:
        """The weights as engines load them."""
        weights, model = self.weights(), self.model.model
        if self._file_layout is None and loads_as_files(self.cfg) and FileLayout.differs(model):
            self._file_layout = FileLayout(model, specs_in(weights, self.dtype), self.adapters)
        return FullTensors(weights, self.dtype, self._file_layout)

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

    def take_weights(self, path: str) -> bool:
        """Go on with what an engine has handed back, moments as they are. All ranks call it; whether it is rounded."""
        return checkpoint.load_weights(self.model.model, Path(path))
