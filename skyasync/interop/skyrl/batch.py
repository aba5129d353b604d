"""A training batch as SkyRL's code sees it: names in brackets, responses from the left, uids in its metadata.

    ours   tokens of a row from its beginning, right-padded             [batch, length]
    theirs prompts padded on the left, responses after them             sequences, attention_mask [batch, P + R]
           everything else from a response's first token, right-padded  [batch, R]

Invariant: there is one batch, ours. Reads are views of it, and writes go into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from skyasync.envs import Foreign
from skyasync.errors import UserError
from skyasync.models.batch import TokenBatch, TrainingBatch
from skyasync.rollout.generator_api import generator_output, groups_from_output
from skyasync.rollout.types import GeneratorOutput, Group, Prompt

#: Theirs, and ours for it.
NAMES = {
    "loss_mask": "loss_mask",
    "rewards": "rewards",
    "rollout_logprobs": "behaviour_logprobs",
    "action_log_probs": "proximal_logprobs",
    "base_action_log_probs": "reference_logprobs",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
}
_SAMPLED = ("sequences", "attention_mask", "response_mask")


class TrainingInputBatch(MutableMapping[str, Any]):
    """A batch of ours by their names. Its length is the number of rows.

    Args:
        prompt_lengths: ``[batch]``, tokens in front of each response.
        uids: of each row's prompt.
    """

    def __init__(self, batch: TokenBatch, prompt_lengths: Tensor, uids: list[str]) -> None:
        self.batch, self.batch_size = batch, len(batch)
        lengths = batch.attention_mask.sum(1)
        self._prompts = int(prompt_lengths.max()) if len(batch) else 0
        self._responses = int((lengths - prompt_lengths).max()) if len(batch) else 0
        self._starts = prompt_lengths.unsqueeze(1)
        self._valid = torch.arange(self._responses) < (lengths - prompt_lengths).unsqueeze(1)
        # The column of each response token in our rows, [batch, R]; padding points at the last column.
        self._columns = (self._starts + torch.arange(self._responses)).clamp(max=batch.tokens.shape[1] - 1)
        self.metadata: dict[str, Any] = {
            "uids": list(uids),
            "response_length": self._responses,
            "avg_response_length": float(batch.loss_mask.sum()) / max(len(batch), 1),
            "metrics": {},
        }
        self._own: dict[str, Foreign] = {}  # what user code has added by names of its own
        self._removed: set[str] = set()

    def __len__(self) -> int:
        return len(self.batch)

    def __iter__(self) -> Iterator[str]:
        return (name for name in (*_SAMPLED, *NAMES, *self._own) if name not in self._removed)

    def __contains__(self, name: object) -> bool:
        return name in [*self]

    def __getitem__(self, name: str) -> Foreign:
        if name not in self:
            raise KeyError(name)
        if name in self._own:
            return self._own[name]
        if name == "response_mask":
            return self._valid.to(torch.long)
        if name in NAMES:
            rows = vars(self.batch).get(NAMES[name])
            return None if rows is None else torch.where(self._valid, rows.gather(1, self._columns), rows.new_zeros(()))
        source = self.batch.tokens if name == "sequences" else self.batch.attention_mask.to(torch.long)
        columns = torch.arange(self._prompts + self._responses) - (self._prompts - self._starts)
        inside = (columns >= 0) & (columns < self.batch.attention_mask.sum(1, keepdim=True))
        return torch.where(inside, source.gather(1, columns.clamp(0, source.shape[1] - 1)), source.new_zeros(()))

    def __setitem__(self, name: str, value: Foreign) -> None:
        if name in _SAMPLED:
            raise KeyError(f"{name} says what was sampled, and cannot be set: change loss_mask, rewards or advantages")
        self._removed.discard(name)
        if name not in NAMES:
            self._own[name] = value
            return
        rows = None
        if value is not None:
            given = torch.as_tensor(value).detach().cpu()
            if given.shape != self._valid.shape:
                raise ValueError(
                    f"{name} must be [{len(self)}, {self._responses}], as it is read; found {[*given.shape]}"
                )
            given = given != 0 if name == "loss_mask" else given.to(torch.float32)
            rows = torch.zeros(self.batch.tokens.shape, dtype=given.dtype)
            row, column = self._valid.nonzero(as_tuple=True)
            rows[row, self._columns[row, column]] = given[row, column]
        setattr(self.batch, NAMES[name], rows)

    def __delitem__(self, name: str) -> None:
        """Hide an entry from user code; the batch that is trained keeps it."""
        if name not in self:
            raise KeyError(name)
        self._own.pop(name, None)
        self._removed.add(name)

    def to(self, *arguments: object, **named: object) -> TrainingInputBatch:
        """The batch itself: it stays on the CPU."""
        return self

    def as_training(self) -> TrainingBatch:
        """The batch with what the hooks have set.

        Raises:
            KeyError: if it has no advantages.
        """
        if vars(self.batch).get("advantages") is None:
            raise KeyError("compute_advantages_and_returns has set no data['advantages']")
        return self.batch if isinstance(self.batch, TrainingBatch) else self.batch.to_stage(TrainingBatch)


def as_output(groups: Sequence[Group]) -> tuple[dict[str, Any], list[str]]:
    """Parallel lists, and uids.

    Rewards are numbers if each trajectory earned its own at its end, else lists of one per token.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    output: dict[str, Any] = dict(generator_output(trajectories))
    uids = [str(g.prompt.id) for g in groups for t in g.trajectories for _ in t.sequences]
    earlier = [action.reward for trajectory in trajectories for action in trajectory.actions[:-1]]
    if not any(earlier) and all(len(trajectory.sequences) == 1 for trajectory in trajectories):
        output["rewards"] = [trajectory.reward for trajectory in trajectories]
    if any(value != value for row in output["rollout_logprobs"] for value in row):  # a generator gave none
        del output["rollout_logprobs"]
    return output, uids


def as_groups(
    output: Mapping[str, Any], uids: Sequence[str], prompts: Mapping[str, Prompt], version: int
) -> list[Group]:
    """One group per uid, in their order.

    Raises:
        UserError: for a uid without a prompt, or lists of other lengths.
    """
    if len(uids) != len(output["response_ids"]):
        raise UserError(f"there are {len(uids)} uids for {len(output['response_ids'])} responses")
    columns = {name: value for name, value in output.items() if isinstance(value, list) and len(value) == len(uids)}
    groups = []
    for uid in dict.fromkeys(uids):
        if uid not in prompts:
            raise UserError(f"uid {uid!r} is that of no prompt of this step")
        rows = [row for row, other in enumerate(uids) if other == uid]
        part = {name: [value[row] for row in rows] for name, value in columns.items()}
        samples = len(set(map(str, part.get("trajectory_ids", rows))))
        groups += groups_from_output(cast(GeneratorOutput, part), [prompts[uid]], version, samples)
    return groups
