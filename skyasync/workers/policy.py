"""The policy: its objective, with a critic's value loss if the critic is a head on its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from skyasync.algorithms.kl import top_k_reverse_kl
from skyasync.algorithms.objective import Objective
from skyasync.algorithms.off_policy import approximate_proximal
from skyasync.config.schema import Config
from skyasync.errors import NonFiniteError
from skyasync.inference.settings import computes_on_mapped_weights, loads_as_files
from skyasync.models.backend import (
    ENTROPY,
    LOGPROBS,
    MODEL,
    TOKEN_LOGPROBS,
    VALUE_HEAD,
    VALUES,
    JointLoss,
    LossFn,
    LossTerm,
    ModelSpec,
    OutputRequest,
)
from skyasync.models.batch import TokenBatch, UpdateBatch
from skyasync.weight_sync.full_tensors import FullTensors
from skyasync.weight_sync.transfers.endpoints import WeightSender
from skyasync.workers.critic import ValueLoss
from skyasync.workers.model_worker import ModelWorker
from skyasync.workers.roles import CRITIC_ROLE, ROLES

__all__ = ["NonFiniteError", "PolicyWorker"]


class PolicyLoss(LossFn):
    """The objective of ``trainer.algorithm``, and a teacher's distribution if the batch has one."""

    def __init__(self, cfg: Config) -> None:
        self._objective = Objective(cfg.trainer.algorithm)
        self._approximation = cfg.trainer.algorithm.proximal_logprobs
        self._teacher_weight = cfg.trainer.teacher.weight

    def request(self, batch: UpdateBatch) -> OutputRequest:
        if "entropy" in self._objective.needs:
            names = {LOGPROBS, ENTROPY}
        else:
            names = {LOGPROBS}
        request = OutputRequest.of(*names, entropy_gradient=self._objective.trains_entropy)
        if batch.teacher_top_k is None:
            return request
        tokens, _ = batch.teacher_top_k.chunk(2, -1)
        return replace(request, names=request.names | {TOKEN_LOGPROBS}, token_ids=tokens.long())

    def __call__(self, outputs: Mapping[str, Tensor], batch: UpdateBatch) -> dict[str, LossTerm]:
        current = outputs[LOGPROBS]
        mask = batch.loss_mask
        proximal = batch.proximal_logprobs
        if proximal is None:
            behaviour = batch.behaviour_logprobs
            version = batch.approximated_version
            proximal = current.detach()
            if version is not None:
                proximal = approximate_proximal(
                    current, behaviour, batch.versions, version, method=self._approximation
                )
        token_loss, maps = self._objective.token_loss(
            current=current,
            proximal=proximal,
            behaviour=batch.behaviour_logprobs,
            reference=batch.reference_logprobs,
            advantages=batch.advantages,
            mask=mask,
            entropy=outputs.get(ENTROPY),
            selection=batch.selection,
            correction_exponent=batch.correction_exponent,
        )
        if batch.teacher_top_k is not None:
            kl = top_k_reverse_kl(outputs[TOKEN_LOGPROBS], batch.teacher_top_k.chunk(2, -1)[1])
            token_loss = token_loss + self._teacher_weight * kl
            maps["teacher_kl"] = kl.detach()
        # Beyond the loss tokens the loss has no meaning, and may be NaN.
        loss = (batch.loss_weights.to(token_loss.dtype) * token_loss.where(mask, 0.0)).sum()
        return {MODEL: LossTerm(loss, mask, maps)}


class PolicyWorker(ModelWorker):
    """Holds the policy, and a critic that is a head on its layers
    (``trainer.critic.backbone=shared``)."""

    role_name: ClassVar[str] = "policy"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss, critic = PolicyLoss(self.cfg), self.cfg.trainer.critic
        self.has_value_head = ROLES[CRITIC_ROLE].hosted_by_policy(self.cfg)
        if self.has_value_head:
            self.loss = JointLoss(self.loss, ValueLoss(critic, VALUE_HEAD, critic.value_loss_coef))
        self._critic_loss = ValueLoss(critic, VALUE_HEAD, gradient=0.0)

    def transfer_weights(self, sender: str, method: str, *args: object) -> Any:
        """A call of this rank's end of a weight transfer; see
        ``skyasync.weight_sync.transfers``."""
        return self.weight_sender.call(sender, method, *args)

    @cached_property
    def weight_sender(self) -> WeightSender:
        return WeightSender(
            self._engine_weights,
            lambda: self.backend.adapter(),
            self.rank,
            self.device,
            self.cfg.generator.weight_sync_dir,
            two_buffers=computes_on_mapped_weights(self.cfg),
        )

    def _engine_weights(self) -> FullTensors:
        """The weights as engines load them."""
        if loads_as_files(self.cfg):
            layout = self.backend.file_layout()
        else:
            layout = None
        return FullTensors(self.backend.sharded_weights(), self.backend.dtype, layout)

    def spec(self) -> ModelSpec:
        spec = super().spec()
        if not self.has_value_head:
            return spec
        optimizers = {**spec.optimizers, VALUE_HEAD: self.cfg.trainer.critic.optimizer_config}
        return replace(
            spec,
            optimizers=optimizers,
            value_head_kwargs=ROLES[CRITIC_ROLE].config_kwargs(self.cfg),
        )

    def forward_backward(self, batch: UpdateBatch) -> Tensor | None:
        if batch.critic_alone:
            return self.accumulate(batch, self._critic_loss)
        # Missing ``proximal_logprobs`` are computed for the gradient anyway.
        return self.accumulate(
            batch, self.loss, {LOGPROBS} if batch.proximal_logprobs is None else ()
        )

    def update_policy(
        self, batch: UpdateBatch, schedule_step: int | None = None
    ) -> dict[str, float]:
        """One optimizer step on this rank's rows of a batch: ``forward_backward`` and
        ``optimizer_step``.

        Missing ``proximal_logprobs`` are filled in.
        """
        before = self.forward_backward(batch)
        if before is not None:
            batch.proximal_logprobs = before
        return self.optimizer_step(schedule_step)

    def base_logprobs(self, batch: TokenBatch) -> Tensor:
        """As ``logprobs``, of the model without its adapters: what the policy began as."""
        return self.backend.forward(batch, OutputRequest(adapters=False))[LOGPROBS]

    def values(self, batch: TokenBatch) -> Tensor:
        """As a critic's of its own, ``[batch, length]``."""
        return self.backend.forward(batch, OutputRequest.of(VALUES, value_gradient=0.0))[VALUES]

    def logprobs_and_values(self, batch: TokenBatch) -> Tensor:
        """Both in one pass, ``[batch, length, 2]``."""
        outputs = self.backend.forward(
            batch, OutputRequest.of(LOGPROBS, VALUES, value_gradient=0.0)
        )
        return torch.stack([outputs[LOGPROBS], outputs[VALUES]], -1)

    def export_critic(self, folder: str) -> None:
        """As ``export``, of the critic as a model of its own."""
        self.backend.export(Path(folder), VALUE_HEAD)
