"""A training batch as SkyRL's code sees it: names in brackets, responses from the left, uids in its metadata.

    ours   tokens of a row from its beginning, right-padded             [batch, length]
    theirs prompts padded on the left, responses behind them            sequences, attention_mask [batch, P + R]
           what belongs to a response from its first token, right-padded everything else          [batch, R]

Invariant: there is one batch, ours. What is read is made of it, and what is set stands in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from skyasync.envs.registry import Foreign
from skyasync.errors import UserError
from skyasync.models.batch import ScoredBatch, TokenBatch, TrainingBatch
from skyasync.rollout.generator_api import generator_output, groups_from_output
from skyasync.rollout.types import GeneratorOutput, Group, Prompt, Trajectory

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
_WHOLE = ("sequences", "attention_mask")


class TrainingInputBatch:
    """A batch of ours by their names.

    Args:
        prompt_lengths: ``[batch]``, tokens in front of each response.
        uids: of each row's prompt.
    """

    def __init__(self, batch: TokenBatch, prompt_lengths: Tensor, uids: list[str]) -> None:
        self.batch, self._starts = batch, prompt_lengths
        lengths = batch.attention_mask.sum(1)
        self._responses = int((lengths - prompt_lengths).max()) if len(batch) else 0
        self._prompts = int(prompt_lengths.max()) if len(batch) else 0
        self._valid = torch.arange(self._responses) < (lengths - prompt_lengths).unsqueeze(1)
        self.metadata: dict[str, Any] = {
            "uids": list(uids),
            "response_length": self._responses,
            "avg_response_length": float(batch.loss_mask.sum()) / max(len(batch), 1),
            "metrics": {},
        }
        self._own: dict[str, Foreign] = {}  # what user code has added under names of its own
        self._gone: set[str] = set()

    @property
    def batch_size(self) -> int:
        return len(self.batch)

    def __len__(self) -> int:
        return len(self.batch)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def keys(self) -> list[str]:
        known = [*_WHOLE, "response_mask", *NAMES, *self._own]
        return [name for name in known if name not in self._gone]

    def __getitem__(self, name: str) -> Foreign:
        if name in self._gone:
            raise KeyError(name)
        if name in self._own:
            return self._own[name]
        if name == "response_mask":
            return self._valid.to(torch.long)
        if name in _WHOLE:
            return self._laid_out(name)
        value = getattr(self.batch, NAMES[name], None)
        return None if value is None else self._responses_of(value)

    def __setitem__(self, name: str, value: Foreign) -> None:
        self._gone.discard(name)
        if name in NAMES:
            setattr(self.batch, NAMES[name], None if value is None else self._rows_of(name, value))
        elif name in (*_WHOLE, "response_mask"):
            raise KeyError(f"{name} says what was sampled, and cannot be set: change loss_mask, rewards or advantages")
        else:
            self._own[name] = value

    def get(self, name: str, default: Foreign = None) -> Foreign:
        return default if name not in self else self[name]  # noqa: SIM401  (which would call itself)

    def pop(self, name: str, *default: Foreign) -> Foreign:
        """It is hidden from user code; the batch that is trained keeps what it needs."""
        if name not in self and default:
            return default[0]
        value = self[name]
        self._own.pop(name, None)
        self._gone.add(name)
        return value

    def to(self, *where: object, **how: object) -> TrainingInputBatch:
        """It stays on the CPU."""
        return self

    def as_training(self) -> TrainingBatch:
        """The batch with what the hooks have set.

        Raises:
            KeyError: if it has no advantages.
        """
        if getattr(self.batch, "advantages", None) is None:
            raise KeyError("compute_advantages_and_returns has set no data['advantages']")
        return self.batch if isinstance(self.batch, TrainingBatch) else self.batch.to_stage(TrainingBatch)

    def as_scored(self) -> ScoredBatch:
        assert isinstance(self.batch, ScoredBatch)
        return self.batch

    def _places(self) -> Tensor:
        """Of each response's tokens in our rows, ``[batch, R]``; padding points at the last column."""
        places = self._starts.unsqueeze(1) + torch.arange(self._responses)
        return places.clamp(max=self.batch.tokens.shape[1] - 1)

    def _responses_of(self, rows: Tensor) -> Tensor:
        taken = rows.gather(1, self._places())
        return torch.where(self._valid, taken, torch.zeros((), dtype=rows.dtype))

    def _rows_of(self, name: str, responses: Foreign) -> Tensor:
        given = torch.as_tensor(responses).detach().cpu()
        if given.shape != self._valid.shape:
            raise ValueError(f"{name} must be [{len(self)}, {self._responses}], as it is read; found {[*given.shape]}")
        dtype = torch.bool if name == "loss_mask" else torch.float32
        given = given != 0 if dtype == torch.bool else given.to(dtype)
        rows = torch.zeros(self.batch.tokens.shape, dtype=dtype)
        row, column = self._valid.nonzero(as_tuple=True)
        rows[row, self._places()[row, column]] = given[row, column]
        return rows

    def _laid_out(self, name: str) -> Tensor:
        source = self.batch.tokens if name == "sequences" else self.batch.attention_mask.to(torch.long)
        places = torch.arange(self._prompts + self._responses) - (self._prompts - self._starts).unsqueeze(1)
        inside = (places >= 0) & (places < self.batch.attention_mask.sum(1, keepdim=True))
        taken = source.gather(1, places.clamp(0, source.shape[1] - 1))
        return torch.where(inside, taken, torch.zeros((), dtype=source.dtype))


Listed = dict[str, Any]


def as_output(groups: Sequence[Group]) -> tuple[Listed, list[str]]:
    """Parallel lists; rewards are numbers where each trajectory earned its own at its end, else one per token."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    output: Listed = dict(generator_output(trajectories))
    uids = [str(g.prompt.id) for g in groups for t in g.trajectories for _ in t.sequences]
    if all(map(_earned_at_the_end, trajectories)):
        output["rewards"] = [trajectory.reward for trajectory in trajectories]
    if any(value != value for row in output["rollout_logprobs"] for value in row):  # a generator gave none
        del output["rollout_logprobs"]
    return output, uids


def as_groups(
    output: Mapping[str, Any], uids: Sequence[str], prompts: Mapping[str, Prompt], version: int
) -> list[Group]:
    """One group per uid, in the order in which they come.

    Raises:
        UserError: for a uid that nobody has, or lists of other lengths.
    """
    if len(uids) != len(output["response_ids"]):
        raise UserError(f"there are {len(uids)} uids for {len(output['response_ids'])} responses")
    groups = []
    for uid in dict.fromkeys(uids):
        if uid not in prompts:
            raise UserError(f"uid {uid!r} is that of no prompt of this step")
        rows = [row for row, found in enumerate(uids) if found == uid]
        part = {name: [value[row] for row in rows] for name, value in output.items() if _per_row(value, len(uids))}
        found = part.get("trajectory_ids")
        samples = len(rows) if found is None else len(dict.fromkeys(map(str, found)))
        groups += groups_from_output(cast(GeneratorOutput, part), [prompts[uid]], version, samples)
    return groups


def through(
    groups: list[Group], version: int, hook: Callable[[Listed, list[str]], tuple[Mapping[str, Any], Sequence[str]]]
) -> list[Group]:
    """The groups that a hook of theirs makes of these."""
    if not groups:
        return groups
    prompts = {str(group.prompt.id): group.prompt for group in groups}
    return as_groups(*hook(*as_output(groups)), prompts, version)


def _earned_at_the_end(trajectory: Trajectory) -> bool:
    actions = trajectory.actions
    return len(trajectory.sequences) == 1 and all(action.reward == 0.0 for action in actions[:-1])


def _per_row(value: object, rows: int) -> bool:
    return isinstance(value, list) and len(value) == rows
