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
        names = {LOGPROBS}
        if "entropy" in self._objective.needs:
            names.add(ENTROPY)
        request = OutputRequest.of(*names, entropy_gradient=self._objective.trains_entropy)
        if batch.teacher_top_k is None:
            return request
        token_ids, _ = batch.teacher_top_k.chunk(2, -1)  # twice [batch, length, k]
        return replace(request, names=request.names | {TOKEN_LOGPROBS}, token_ids=token_ids.long())

    def __call__(self, outputs: Mapping[str, Tensor], batch: UpdateBatch) -> dict[str, LossTerm]:
        current = outputs[LOGPROBS]  # [batch, length], like all tensors below
        mask = batch.loss_mask
        proximal = batch.proximal_logprobs
        if proximal is None and batch.approximated_version is not None:
            proximal = approximate_proximal(
                current,
                batch.behaviour_logprobs,
                batch.versions,
                batch.approximated_version,
                method=self._approximation,
            )
        elif proximal is None:  # the first update: the current policy is the proximal one
            proximal = current.detach()
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
            _, teacher_logprobs = batch.teacher_top_k.chunk(2, -1)  # twice [batch, length, k]
            kl = top_k_reverse_kl(outputs[TOKEN_LOGPROBS], teacher_logprobs)
            token_loss = token_loss + self._teacher_weight * kl
            maps["teacher_kl"] = kl.detach()
        # Beyond the loss tokens the loss has no meaning, and may be NaN.
        loss = (batch.loss_weights.to(token_loss.dtype) * token_loss.where(mask, 0.0)).sum()
        return {MODEL: LossTerm(loss, mask, maps)}


class PolicyWorker(ModelWorker):
    """Holds the policy, and a critic on its layers if ``trainer.critic.backbone=shared``."""

    role_name: ClassVar[str] = "policy"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        critic = self.cfg.trainer.critic
        self.loss = PolicyLoss(self.cfg)
        self.has_value_head = ROLES[CRITIC_ROLE].hosted_by_policy(self.cfg)
        if self.has_value_head:
            self.loss = JointLoss(self.loss, ValueLoss(critic, VALUE_HEAD, critic.value_loss_coef))
        # Of the head alone: no gradient flows to the policy's layers.
        self._critic_loss = ValueLoss(critic, VALUE_HEAD, gradient=0.0)

    def transfer_weights(self, sender: str, method: str, *args: object) -> Any:
        """Call this rank's sender of a weight transfer; see ``skyasync.weight_sync.transfers``."""
        return self.weight_sender.call(sender, method, *args)

    @cached_property
    def weight_sender(self) -> WeightSender:
        return WeightSender(
            self._engine_weights,
            lambda: self.backend.adapter(),  # the newest one at every weight sync
            self.rank,
            self.device,
            self.cfg.generator.weight_sync_dir,
            two_buffers=computes_on_mapped_weights(self.cfg),
        )

    def _engine_weights(self) -> FullTensors:
        """The weights as engines load them."""
        layout = self.backend.file_layout() if loads_as_files(self.cfg) else None
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
        if batch.critic_alone:  # in the critic's warm-up steps
            return self.accumulate(batch, self._critic_loss)
        # Missing ``proximal_logprobs`` are computed for the gradient anyway.
        returns = {LOGPROBS} if batch.proximal_logprobs is None else set()
        return self.accumulate(batch, self.loss, returns)

    def update_policy(
        self, batch: UpdateBatch, schedule_step: int | None = None
    ) -> dict[str, float]:
        """Make one optimizer step on this rank's rows of a batch.

        Missing ``proximal_logprobs`` are filled in.
        """
        logprobs = self.forward_backward(batch)
        if logprobs is not None:
            batch.proximal_logprobs = logprobs
        return self.optimizer_step(schedule_step)

    def base_logprobs(self, batch: TokenBatch) -> Tensor:
        """Log-probabilities by the model without adapters: the policy's starting weights."""
        return self.backend.forward(batch, OutputRequest(adapters=False))[LOGPROBS]

    def values(self, batch: TokenBatch) -> Tensor:
        """Values by the head on the policy's layers, ``[batch, length]``."""
        return self.backend.forward(batch, OutputRequest.of(VALUES, value_gradient=0.0))[VALUES]

    def logprobs_and_values(self, batch: TokenBatch) -> Tensor:
        """``logprobs`` and ``values`` in one pass, ``[batch, length, 2]``."""
        request = OutputRequest.of(LOGPROBS, VALUES, value_gradient=0.0)
        outputs = self.backend.forward(batch, request)
        return torch.stack([outputs[LOGPROBS], outputs[VALUES]], -1)

    def export_critic(self, folder: str) -> None:
        """Write the critic as a Hugging Face folder of a separate model."""
        self.backend.export(Path(folder), VALUE_HEAD)
