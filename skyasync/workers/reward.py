"""One rank of a reward model: what it says of whole sequences.

Invariant: its weights never change; a score is the head's on the state of a sequence's last token.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from skyasync.workers.batch import TokenBatch
from skyasync.workers.valued import ValueWorker


class RewardWorker(ValueWorker):
    """Holds ``trainer.reward.model``, which is given the policy's tokens."""

    role_name: ClassVar[str] = "reward"

    def scores(self, batch: TokenBatch) -> Tensor:
        """``[batch]``: of each row of tokens."""
        lengths = batch.attention_mask.sum(1, keepdim=True)
        return self.values(_before_one_more(batch, lengths)).gather(1, lengths).squeeze(1)


def _before_one_more(batch: TokenBatch, lengths: Tensor) -> TokenBatch:
    """The rows with another token, the only one that is asked for: its value is that of the state before it."""
    last = torch.zeros_like(pad(batch.attention_mask, (0, 1))).scatter(1, lengths, value=True)
    attended = pad(batch.attention_mask, (0, 1)) | last
    return TokenBatch(pad(batch.tokens, (0, 1)).where(~last, 0), attended, last, batch.group_ids)
