"""A critic on the policy's own layers: one linear map of the states behind the last of them, which learns beside them.

Invariant: the head learns by the whole gradient of its loss, with an optimizer, a learning rate and a clip of its own
(``trainer.critic``); of that gradient the layers below get the share ``value_loss_coef``, and none at 0. No weight
that leaves for the engines is the head's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from skyasync.algorithms.losses.value import clipped_value_loss
from skyasync.config.schema import Config
from skyasync.weight_sync.full_tensors import FileLayout, FullTensors, specs_in
from skyasync.workers import checkpoint
from skyasync.workers.checkpoint import Beside
from skyasync.workers.heads import HEADS, new_head, put
from skyasync.workers.mesh import Mesh
from skyasync.workers.model import Wrapped
from skyasync.workers.norms import clip, total_norm
from skyasync.workers.offload import move_moments
from skyasync.workers.optimizers import make_optimizer
from skyasync.workers.roles import CRITIC_ROLE, ROLES, VALUE
from skyasync.workers.schedule import learning_rate
from skyasync.workers.totals import Totals
from skyasync.workers.values import SCORE_LAYER

if TYPE_CHECKING:
    from skyasync.workers.batch import UpdateBatch

KEY = "trainer.critic.backbone"


class SharedCritic:
    """The head of one rank, which this puts on the policy.

    Args:
        wrapper: the policy's, which is neither sharded nor has memory yet.
        total_steps: optimizer steps of the run.

    Attributes:
        alone: of the gradient in hand the policy has no part.
    """

    def __init__(self, wrapper: Wrapped, cfg: Config, total_steps: int) -> None:
        self.settings, self.alone = cfg.trainer.critic, False
        self._cfg, self._wrapper, self._total_steps = cfg, wrapper, total_steps
        self.layer = nn.Linear(wrapper.model.config.hidden_size, 1, bias=False, dtype=torch.float32)
        wrapper.value_head = self.layer
        self._totals, self._norm = Totals(), torch.zeros(())

    @classmethod
    def wanted(cls, cfg: Config) -> bool:
        return ROLES[CRITIC_ROLE].is_the_policys(cfg)

    def step_aside(self) -> None:
        """While the policy is read from its files, which know of no head."""
        self._wrapper.value_head = None

    def begin(self, device: torch.device) -> None:
        """Give the head memory and its first numbers, and put it back."""
        self.layer.to_empty(device=device)
        put(self.layer.weight, new_head("weight", self.layer.weight))
        self._wrapper.value_head = self.layer
        options = self.settings.optimizer_config
        self.optimizer = make_optimizer(self._wrapper, self.layer.parameters(), options)

    def begin_part(self, batch: UpdateBatch) -> None:
        """Raises ``ValueError`` if the batch has nothing for it to learn."""
        if batch.values is None or batch.returns is None:
            raise ValueError("a critic learns from values and returns, and the batch has none")
        self.alone = batch.critic_alone

    def loss(self, values: Tensor, batch: UpdateBatch, here: Callable[[Tensor], Tensor]) -> Tensor:
        """Of a micro-batch, with what becomes its metrics noted.

        Args:
            values: the current ones, ``[rows, length]``.
            here: moves a tensor to the values' device.
        """
        assert batch.values is not None and batch.returns is not None
        mask = here(batch.loss_mask)
        token_loss, maps = clipped_value_loss(
            values, here(batch.values), here(batch.returns), clip=self.settings.value_clip or math.inf
        )
        weights = here(batch.loss_weights).to(token_loss.dtype)
        loss = (weights * token_loss.where(mask, 0.0)).sum()
        self._totals.add(loss, mask, {"clip_frac": maps["value_clip_fraction"].double()})
        return loss

    def look(
        self, scale: float, sum_over_ranks: Callable[[Tensor], Tensor], mesh: Mesh | None
    ) -> tuple[dict[str, float], str]:
        """Scale the head's gradient; its metrics, and what is not finite, "" if all is. All ranks call it."""
        metrics = self._totals.reduce(sum_over_ranks)
        metrics["loss"] *= scale
        gradient = self.layer.weight.grad
        assert gradient is not None
        gradient.mul_(scale)
        self._norm = total_norm([gradient], mesh)
        metrics["grad_norm"] = float(self._norm)
        wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(metrics[name])]
        named = {f"{CRITIC_ROLE}/{name}": value for name, value in metrics.items()}
        return named, f"the critic's {wrong[0]} is not finite: {named}" if wrong else ""

    def clip(self) -> None:
        """The gradient that was looked at, to the configured norm."""
        gradient = self.layer.weight.grad
        if (limit := self.settings.optimizer_config.max_grad_norm) and gradient is not None:
            clip([gradient], self._norm, limit)

    def change(self, scheduled: int) -> dict[str, float]:
        """One optimizer step of the head."""
        rate = learning_rate(scheduled, self.settings.optimizer_config, self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        return {f"{CRITIC_ROLE}/lr": rate}

    def drop_gradient(self) -> None:
        self._totals, self.alone = Totals(), False
        self.optimizer.zero_grad()

    def move(self, device: torch.device) -> None:
        move_moments(self.optimizer, device)

    @property
    def beside(self) -> Beside:
        """What a checkpoint of the policy holds of the head."""
        return Beside(CRITIC_ROLE, self.layer, self.optimizer, f"{KEY}=shared")

    def export(self, weights: Mapping[str, Any], dtype: torch.dtype, path: str, folder: Path, *, keep: bool) -> None:
        """As a folder of a critic of its own: the policy's layers under the head. All ranks call it, one keeps it.

        Args:
            weights: the policy's, by the names of its files.
            path: what it was loaded from.
        """
        with torch.device("meta"):
            empty = HEADS[VALUE].told(ROLES[CRITIC_ROLE].config_kwargs(self._cfg)).empty(path, dtype)
        names = {name for name, _ in (*empty.named_parameters(), *empty.named_buffers())}
        chosen = {name: value for name, value in weights.items() if name in names}
        chosen[f"{SCORE_LAYER}.weight"] = self.layer.weight.detach()
        tensors = FullTensors(chosen, dtype, FileLayout(empty, specs_in(chosen, dtype)))
        if keep:
            checkpoint.export(empty, tensors, path, folder)
        else:
            tensors.only_gather()
