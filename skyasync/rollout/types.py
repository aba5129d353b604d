"""Prompts, requests, trajectories, groups and rollouts: the data from a dataset to the loss.

Invariant: a prompt keeps one identity (epoch, row, repetition) all the way. The segments of a
trajectory, concatenated, are exactly the tokens that the engine read and wrote; text is never
tokenised again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np

from skyasync.arrays import NO_FLOATS, NO_INTS, Experts, Floats, Ints, floats, ints, joined
from skyasync.envs.base import Conversation
from skyasync.errors import UserError, unknown
from skyasync.inference.interface import GenerationOutput, SamplingParams
from skyasync.models.images import Images


class PromptId(NamedTuple):
    """The identity of a prompt: the pass over the dataset (-1 in evaluation), and the row in it."""

    epoch: int
    row: int

    def __str__(self) -> str:
        # A part of request ids, of messages and of recorded files.
        if self.epoch >= 0:
            return f"e{self.epoch}-i{self.row}"
        return f"eval-i{self.row}"


class TrajectoryId(NamedTuple):
    """The identity of a sample of a prompt."""

    prompt: PromptId
    repetition: int

    def __str__(self) -> str:
        return f"{self.prompt}-r{self.repetition}"

    @property
    def instance_id(self) -> str:
        """The prompt, by SkyRL's name; ``repetition_id`` is the sample."""
        return str(self.prompt)

    @property
    def repetition_id(self) -> int:
        return self.repetition


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset.

    Args:
        messages: the conversation so far.
        extras: for the environment: the other columns of the row.
        eval_set: the name of the held-out set (``data.val_sets``), if it is of one.
    """

    id: PromptId
    messages: Conversation
    env_class: str
    extras: dict[str, Any] = field(default_factory=dict)
    eval_set: str = ""


@dataclass(frozen=True)
class RolloutRequest:
    """One trajectory to generate: a sample of a prompt, and how to sample it.

    Args:
        extras: for its environment: those of the prompt, and ``max_turns``.
    """

    id: TrajectoryId
    prompt: Prompt
    extras: dict[str, Any]
    sampling: SamplingParams
    is_eval: bool = False


@dataclass(eq=False)
class Segment:
    """Consecutive tokens of one kind, int32 ``[tokens]``; lists become arrays.

    Only actions have ``logprobs`` (float32) and ``versions`` (int32), one per token, and
    ``experts``: those of the tokens from the last one of the previous action (else from the first
    of the sequence) to the last but one of its own. ``images`` are those whose placeholders are in
    a prompt or an observation.
    """

    kind: Literal["prompt", "action", "observation"]
    tokens: Ints
    logprobs: Floats = field(default_factory=lambda: NO_FLOATS)
    versions: Ints = field(default_factory=lambda: NO_INTS)
    reward: float = 0.0  # earned by this action; lands on its last token
    experts: Experts | None = None
    images: Images = ()

    def __post_init__(self) -> None:
        self.tokens = ints(self.tokens)
        self.logprobs = floats(self.logprobs)
        self.versions = ints(self.versions)
        if self.kind != "action":
            return
        count = len(self.tokens)
        if count != len(self.logprobs) or count != len(self.versions):
            raise ValueError(
                f"an action has {count} tokens, {len(self.logprobs)} log-probabilities and "
                f"{len(self.versions)} versions: they must have equal lengths"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segment):
            return NotImplemented
        return (
            self.kind == other.kind
            and self.reward == other.reward
            and self.images == other.images
            and np.array_equal(self.tokens, other.tokens)
            and np.array_equal(self.logprobs, other.logprobs)
            and np.array_equal(self.versions, other.versions)
            # two None are equal too
            and np.array_equal(self.experts, other.experts)  # type: ignore[arg-type]
        )


def images_in(segments: Iterable[Segment]) -> Images:
    """The images of a sequence, in the order of their placeholders."""
    return tuple(image for segment in segments for image in segment.images)


def action_of(output: GenerationOutput, segments: Sequence[Segment]) -> Segment:
    """The action that an engine wrote after these segments."""
    # An engine returns the experts of all tokens, also of those that earlier actions have.
    known_experts = sum(len(s.experts) for s in segments if s.experts is not None)
    experts = None if output.experts is None else output.experts[known_experts:]
    return Segment("action", output.token_ids, output.logprobs, output.versions, experts=experts)


@dataclass
class Trajectory:
    """One episode. ``stop_reason`` is that of the last action: "stop", "length" or "abort".

    Most episodes are one sequence, ``segments``. The calls of an episode may not all extend each
    other (sub-agents, an edited history). Then ``segments`` is the sequence that ended last;
    ``branches`` are the others by their end.
    """

    id: TrajectoryId
    segments: list[Segment] = field(default_factory=lambda: [Segment("prompt", NO_INTS)])
    stop_reason: str = "stop"
    metrics: dict[str, float] = field(default_factory=dict)
    branches: list[list[Segment]] = field(default_factory=list)

    def restart(self) -> None:
        """Forget everything that was played."""
        self.segments = [Segment("prompt", NO_INTS)]
        self.branches = []
        self.stop_reason = "stop"
        self.metrics = {}

    def copy(self) -> Trajectory:
        """A copy whose segments are new, and whose arrays are shared: they are never changed."""
        segments = [replace(segment) for segment in self.segments]
        branches = [[replace(segment) for segment in branch] for branch in self.branches]
        return Trajectory(self.id, segments, self.stop_reason, dict(self.metrics), branches)

    @property
    def sequences(self) -> list[list[Segment]]:
        """Sequences in the order of their ends; each is one row in training."""
        return [*self.branches, self.segments]

    @property
    def all_segments(self) -> list[Segment]:
        """The segments of all sequences."""
        return [segment for sequence in self.sequences for segment in sequence]

    @property
    def reward(self) -> float:
        return sum(s.reward for sequence in self.sequences for s in sequence)

    @property
    def ended_early(self) -> bool:
        """Whether it was stopped without a response: the rejection of its group was certain."""
        return self.stop_reason == "abort" and not self.actions

    @property
    def actions(self) -> list[Segment]:
        return [s for sequence in self.sequences for s in sequence if s.kind == "action"]

    @property
    def tokens(self) -> Ints:
        return joined(*(segment.tokens for segment in self.all_segments))

    @property
    def response_length(self) -> int:
        """Generated tokens, observations not counted."""
        return sum(len(s.tokens) for s in self.actions)

    @property
    def versions(self) -> Ints:
        return joined(*(s.versions for s in self.actions))


@dataclass
class Group:
    """All samples of one prompt."""

    prompt: Prompt
    trajectories: list[Trajectory]

    @property
    def rewards(self) -> list[float]:
        """The rewards of the trajectories that ended by themselves."""
        return [t.reward for t in self.trajectories if not t.ended_early]

    @property
    def played(self) -> list[Trajectory]:
        """The trajectories that ended by themselves and did not fail."""
        return [t for t in self.trajectories if not t.ended_early and not t.metrics.get("given_up")]

    def metric_values(self, metric: str) -> list[float]:
        """The metric of trajectories that ended; the reward without one, or for a failed episode.

        Raises:
            UserError: if no trajectory has this metric.
        """
        if metric:
            played = self.played
            if played and not any(metric in t.metrics for t in played):
                reported_names = {name for t in played for name in t.metrics}
                raise UserError(
                    unknown(
                        "metric in trainer.algorithm.dynamic_sampling.metric",
                        metric,
                        reported_names,
                    )
                )
        return [t.metrics.get(metric, t.reward) for t in self.trajectories if not t.ended_early]

    @property
    def oldest_version(self) -> int:
        actions = [action for t in self.trajectories for action in t.actions]
        return min((int(a.versions.min()) for a in actions if len(a.tokens)), default=0)


@dataclass
class Rollout:
    """The groups of one step, their metrics, and the prompts that the step consumes.

    Args:
        positions: of these prompts in the stream: those of the groups, and those that were rejected
            for them. A step that trains several rollouts at once has the positions of all.
        rejected: prompts that were rolled out for the step and are not among its groups.
        results: the rewards of every prompt that was rolled out for it, failed episodes left out.
    """

    groups: list[Group]
    positions: Sequence[int]
    metrics: dict[str, float] = field(default_factory=dict)
    rejected: list[PromptId] = field(default_factory=list)
    results: list[tuple[Prompt, list[float]]] = field(default_factory=list)


class GeneratorInput(TypedDict):
    """The input of a user's generator: parallel lists, one entry per trajectory."""

    prompts: list[Conversation]
    env_classes: list[str]
    env_extras: list[dict[str, Any]]
    sampling_params: Any  # inference.interface.SamplingParams
    trajectory_ids: list[TrajectoryId]
    is_eval: bool


class GeneratorOutput(TypedDict):
    """The output of a user's generator: lists that are parallel to those of the input.

    With ``trajectory_ids`` they may be longer: rows of one id are the sequences of one trajectory,
    in the order in which they ended. Its reward is their sum; its ``stop_reasons`` and
    ``trajectory_metrics`` are those of the last row.
    """

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]  # actions and observations, in order
    rewards: Sequence[float] | Sequence[list[float]]  # per trajectory, or per response token
    loss_masks: list[list[int]]  # 1 on action tokens
    stop_reasons: list[str]
    # behaviour log-probability per response token, 0 on observations
    rollout_logprobs: NotRequired[list[list[float]]]
    # policy version per response token, -1 on observations
    rollout_versions: NotRequired[list[list[int]]]
    rollout_metrics: NotRequired[dict[str, float]]
    trajectory_metrics: NotRequired[list[dict[str, float]]]
    trajectory_ids: NotRequired[list[TrajectoryId]]  # of each row; by default those of the input
