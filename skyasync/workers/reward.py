"""One rank of the reward models: what each says of whole sequences.

Invariant: their weights never change; a score is the head's on the state of a sequence's last token.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from skyasync.config.schema import ModelConfig
from skyasync.config.schema.reward_models import RewardModel, reward_models
from skyasync.workers.batch import TokenBatch
from skyasync.workers.valued import ValueWorker
from skyasync.workers.worker import LOOPBACK


class RewardWorker(ValueWorker):
    """Holds the models of ``trainer.reward``, which are given the policy's tokens.

    Args:
        chosen: one of them, which is held alone; by default all are, one beside the other.
        args, kwargs: those of :class:`ValueWorker`.
    """

    role_name: ClassVar[str] = "reward"

    def __init__(self, *args: Any, chosen: RewardModel | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        entries = [chosen] if chosen else list(reward_models(self.cfg.trainer.reward).values())
        self._entry, *others = entries
        options = {"device": self.device.type, "role": self.role.name}
        self._beside = [
            RewardWorker(self.cfg, self.rank, self.world_size, **options, chosen=other) for other in others
        ]  # fmt: skip

    def model_config(self) -> ModelConfig:
        return ModelConfig(self._entry.path, self._entry.dtype)

    def setup(self, host: str = LOOPBACK, port: int = 0) -> None:
        super().setup(host, port)
        for other in self._beside:
            other.setup(host, port)

    def _join(self, host: str, port: int) -> None:
        if self._beside or not dist.is_initialized():  # they share one process group
            super()._join(host, port)

    def scores(self, batch: TokenBatch) -> Tensor:
        """Of each row of tokens: ``[batch]`` of one model, ``[batch, 1, models]`` of several."""
        own = self._scores(batch)
        if not self._beside:
            return own
        return torch.stack([own, *(other._scores(batch) for other in self._beside)], dim=1)[:, None]

    def _scores(self, batch: TokenBatch) -> Tensor:
        lengths = batch.attention_mask.sum(1, keepdim=True)
        return self.values(_before_one_more(batch, lengths)).gather(1, lengths).squeeze(1)

    def _move(self, device: torch.device) -> None:
        super()._move(device)
        for other in self._beside:
            other._move(device)


def _before_one_more(batch: TokenBatch, lengths: Tensor) -> TokenBatch:
    """The rows with another token, the only one that is asked for: its value is that of the state before it."""
    last = torch.zeros_like(pad(batch.attention_mask, (0, 1))).scatter(1, lengths, value=True)
    attended = pad(batch.attention_mask, (0, 1)) | last
    return TokenBatch(pad(batch.tokens, (0, 1)).where(~last, 0), attended, last, batch.group_ids)
