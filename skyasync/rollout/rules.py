"""What ends an episode besides its environment, and what becomes of one that was given up.

Invariant: an episode that is given up is a whole trajectory like any other: its tokens are those that the engine read
and wrote, its reward is ``give_up_reward``, it is counted, and its cause is logged (once for each kind).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import nan

from skyasync.arrays import Ints
from skyasync.config.parts import reported_metric
from skyasync.config.schema import Config
from skyasync.errors import NonFiniteRewardError, UserError
from skyasync.rollout.types import Group, Segment, Trajectory, TrajectoryId
from skyasync.utils.rpc import ProcessLostError

log = logging.getLogger(__name__)

_warned: set[str] = set()  # kinds of errors and limits that this process has told of


AGENT_SHARE = 0.9
"""Of a step's time an agent program may take at most: one that hangs is given up before it holds up the step."""


@dataclass(frozen=True)
class EpisodeRules:
    """Limits, 0 being none.

    Args:
        max_turns: ``generator.max_turns``: an episode ends after so many actions even if its environment is not done.
        timeout_s: ``generator.episode_timeout_s``.
        in_flight: ``generator.max_concurrent_episodes``.
        on_error: ``environment.on_error``, for environments that fail and episodes that take too long.
        give_up_reward: ``environment.give_up_reward``.
        spread: ``generator.is_num_return_sequences_expand``: each episode is a session of its own, so that a group's
            may go to different engines; false keeps a group on one.
        turn_discount: ``generator.turn_discount``.
        spares: ``generator.spare_samples_per_prompt``.
        on_nonfinite: ``trainer.on_nonfinite``, for rewards, where ``on_error`` does not end their episodes alone.
        metric: ``trainer.algorithm.dynamic_sampling.metric``, which episodes must report.
    """

    max_turns: int = 0
    timeout_s: float = 0.0
    in_flight: int = 0
    on_error: str = "raise"
    give_up_reward: float = 0.0
    spread: bool = True
    turn_discount: float = 1.0
    spares: int = 0
    on_nonfinite: str = "raise"
    metric: str = ""

    @staticmethod
    def of(cfg: Config) -> EpisodeRules:
        """Those of a run."""
        generator, environment = cfg.generator, cfg.environment
        otherwise = AGENT_SHARE * cfg.trainer.step_timeout_s if generator.agent_program else 0.0
        return EpisodeRules(
            generator.max_turns,
            generator.episode_timeout_s or otherwise,
            generator.max_concurrent_episodes,
            environment.on_error,
            environment.give_up_reward,
            generator.is_num_return_sequences_expand,
            generator.turn_discount,
            generator.spare_samples_per_prompt,
            cfg.trainer.on_nonfinite,
            reported_metric(cfg),
        )

    @property
    def leaves_out(self) -> bool:
        """A reward that is not finite leaves its step's update out: no error ends the run, nor the episode alone."""
        return self.on_error == "raise" and self.on_nonfinite == "skip"

    def turns(self) -> Iterable[int]:
        """The numbers of an episode's turns."""
        return range(self.max_turns) if self.max_turns else count()

    @contextmanager
    def blaming(self) -> Iterator[None]:
        """Around what an environment can be blamed for: it ends the run, or its episode alone (``on_error``)."""
        try:
            yield
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, NonFiniteRewardError):
                raise  # a setting or a row is wrong, which no other episode will mend
            if self.on_error == "raise":
                raise
            raise GivenUpError from error

    def session(self, episode: TrajectoryId) -> str:
        """Its requests go to the engine that has answered the session's first."""
        return str(episode if self.spread else episode.prompt)


class GivenUpError(Exception):
    """Ends one episode alone; its cause is why."""


def give_up(trajectory: Trajectory, rules: EpisodeRules, error: GivenUpError, prompt: Ints) -> Trajectory:
    """The trajectory as it is trained (``keep``) or left out of the loss (``mask``).

    An episode without a single action has nothing to carry a reward. ``prompt``: the tokens of the row's own prompt,
    for an episode that failed before it had any.
    """
    kind = type(error.__cause__).__qualname__
    _warn_once(
        kind,
        "episode %s is given up (environment.on_error); others with a %s are counted in env/given_up: %.500s",
        trajectory.id, kind, error.__cause__,
    )  # fmt: skip
    if len(trajectory.segments) == 1 and trajectory.branches:  # it failed at the beginning of a turn
        trajectory.segments = trajectory.branches.pop()
    first, *others = trajectory.segments
    first = Segment("prompt", first.tokens if len(first.tokens) else prompt)
    trajectory.branches = [_without_rewards(branch, rules) for branch in trajectory.branches]
    trajectory.segments = _without_rewards([first, *others], rules)
    if others:
        trajectory.segments[-1].reward = rules.give_up_reward
    trajectory.stop_reason = "abort"
    trajectory.metrics = {"given_up": 1.0}
    return trajectory


def without_number(trajectory: Trajectory, error: Exception) -> Trajectory:
    """The trajectory whose reward is no finite number, as far as it has come: its step is not learnt from."""
    _warn_once("a reward that is not finite", "episode %s: %.500s", trajectory.id, error)
    trajectory.segments[-1].reward = nan
    return trajectory


def check_given_up(groups: Sequence[Group], most: float) -> None:
    """Raises ``UserError`` if a larger share of a step's episodes was given up than may be."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    lost = [trajectory for trajectory in episodes if trajectory.metrics.get("given_up")]
    if len(lost) > most * len(episodes):
        raise UserError(
            f"{len(lost)} of {len(episodes)} episodes of a step were given up, {lost[0].id} first, and "
            f"environment.max_given_up={most:g} is the largest share of them that may be: the log names the kinds of "
            f"errors, environment.on_error=raise shows the first"
        )


def _without_rewards(sequence: list[Segment], rules: EpisodeRules) -> list[Segment]:
    """What it earned counts for nothing, and with ``mask`` none of its actions is trained."""
    first, *others = sequence
    others = [Segment("observation", s.tokens) for s in others] if rules.on_error == "mask" else others
    for segment in others:
        segment.reward = 0.0
    return [first, *others]


def tell_of_no_room(trajectory: Trajectory, max_model_len: int) -> None:
    """Warn, once, of an episode that was ended in the middle since its sequence is full."""
    _warn_once(
        "no room",
        "episode %s is full after %d turns: what its environment said would exceed generator.max_model_len=%d; others "
        "are counted in response/truncated. Raise it, or set generator.max_turns, which the default follows",
        trajectory.id, len(trajectory.actions), max_model_len,
    )  # fmt: skip


def tell_of_lost_process(trajectory: Trajectory, error: BaseException) -> None:
    """Warn, once, of an episode that is played again."""
    _warn_once(
        "a lost process",
        "episode %s is played again from its beginning in another process; others are counted in env/retries: %.500s",
        trajectory.id, error if isinstance(error, ProcessLostError) else error.__cause__,
    )  # fmt: skip


def _warn_once(kind: str, message: str, *args: object) -> None:
    if kind not in _warned:
        _warned.add(kind)
        log.warning(message, *args)
