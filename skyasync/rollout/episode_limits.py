"""Limits that end episodes besides their environments, and the trajectories of failed episodes.

Invariant: a failed episode is a complete trajectory like any other: its tokens are those that the
engine read and wrote, its reward is ``environment.give_up_reward``, it is counted, and its cause is
logged (once for each type of error).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan

from skyasync.config.parts import reported_metric
from skyasync.config.schema import Config
from skyasync.errors import NonFiniteRewardError, UserError
from skyasync.rollout.types import Group, Segment, Trajectory, TrajectoryId

log = logging.getLogger(__name__)

_warned: set[str] = set()  # types of errors and limits that this process has logged

AGENT_SHARE = 0.9
"""The fraction of a step's time that an agent program may take: it fails before the step does."""
MAX_ATTEMPTS = 3
"""To play an episode whose process is lost: another episode may have ended it."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of episodes, 0 for none, and what happens to failed ones.

    Args:
        max_turns: ``generator.max_turns``: an episode ends after so many actions even if its
            environment is not done.
        timeout_s: ``generator.episode_timeout_s``.
        in_flight: ``generator.max_concurrent_episodes``.
        on_error: ``environment.on_error``, for environments that fail and episodes that take too
            long.
        give_up_reward: ``environment.give_up_reward``.
        spread: ``generator.is_num_return_sequences_expand``: each episode is a session of its own,
            so that those of a group may go to different engines; false keeps a group on one.
        turn_discount: ``generator.turn_discount``.
        spares: ``generator.oversample_per_prompt``.
        on_nonfinite: ``trainer.on_nonfinite``, for rewards, if ``on_error`` does not end their
            episodes alone.
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
    def of(cfg: Config) -> EpisodeLimits:
        generator = cfg.generator
        timeout_s = generator.episode_timeout_s
        if generator.agent_program and not timeout_s:
            timeout_s = AGENT_SHARE * cfg.trainer.step_timeout_s
        return EpisodeLimits(
            max_turns=generator.max_turns,
            timeout_s=timeout_s,
            in_flight=generator.max_concurrent_episodes,
            on_error=cfg.environment.on_error,
            give_up_reward=cfg.environment.give_up_reward,
            spread=generator.is_num_return_sequences_expand,
            turn_discount=generator.turn_discount,
            spares=generator.oversample_per_prompt,
            on_nonfinite=cfg.trainer.on_nonfinite,
            metric=reported_metric(cfg),
        )

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a reward that is not finite skips the update of its step, without an error."""
        return self.on_error == "raise" and self.on_nonfinite == "skip"

    @contextmanager
    def environment_errors(self) -> Iterator[None]:
        """A context for calls of an environment.

        By ``on_error`` its errors end the run, or the episode alone (EpisodeFailedError).
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, UserError) and not isinstance(error, NonFiniteRewardError):
                raise  # a setting or a row is wrong: every other episode would fail too
            if self.on_error == "raise":
                raise
            raise EpisodeFailedError from error

    def session(self, episode: TrajectoryId) -> str:
        """The session of an episode, whose requests go to the same engine."""
        return str(episode if self.spread else episode.prompt)


class EpisodeFailedError(Exception):
    """Ends one episode alone. Its cause is the environment's error."""


def failed_episode(
    trajectory: Trajectory, limits: EpisodeLimits, error: Exception, prompt: Segment
) -> Trajectory:
    """The trajectory as it is trained (``on_error=keep``) or left out of the loss (``mask``).

    An episode without a single action has nothing to carry a reward.

    Args:
        error: why it failed.
        prompt: of the row, for an episode that failed before it had any.
    """
    kind = type(error).__qualname__
    message = "episode %s is given up (environment.on_error); others with a %s are counted in env/given_up: %.500s"
    warn_once(kind, message, trajectory.id, kind, error)
    if len(trajectory.segments) == 1 and trajectory.branches:
        # It failed at the beginning of a turn: that sequence has no action to carry the reward.
        trajectory.segments = trajectory.branches.pop()
    for sequence in trajectory.sequences:
        opening = sequence[0] if len(sequence[0].tokens) else prompt
        sequence[0] = Segment("prompt", opening.tokens, images=opening.images)
        for number, segment in enumerate(sequence[1:], 1):
            if limits.on_error == "mask":
                # An observation is no action, so the loss leaves it out.
                sequence[number] = Segment("observation", segment.tokens, images=segment.images)
            segment.reward = 0.0
    if len(trajectory.segments) > 1:
        trajectory.segments[-1].reward = limits.give_up_reward
    trajectory.stop_reason = "abort"
    trajectory.metrics = {"given_up": 1.0}
    return trajectory


def nonfinite_episode(trajectory: Trajectory, error: Exception) -> Trajectory:
    """The trajectory so far, with NaN as its reward, by which the update is skipped."""
    warn_once("a reward that is not finite", "episode %s: %.500s", trajectory.id, error)
    trajectory.segments[-1].reward = nan
    return trajectory


def check_given_up(groups: Sequence[Group], max_fraction: float) -> None:
    """Raises ``UserError`` if more than this fraction of a step's episodes failed."""
    episodes = [trajectory for group in groups for trajectory in group.trajectories]
    failed_episodes = [trajectory for trajectory in episodes if trajectory.metrics.get("given_up")]
    if len(failed_episodes) > max_fraction * len(episodes):
        raise UserError(
            f"{len(failed_episodes)} of {len(episodes)} episodes of a step were given up, "
            f"{failed_episodes[0].id} first, and environment.max_given_up={max_fraction:g} is the "
            f"largest share of them that may be: the log names the kinds of errors, "
            f"environment.on_error=raise shows the first"
        )


def warn_once(kind: str, message: str, *args: object) -> None:
    """Log the first warning of its kind."""
    if kind not in _warned:
        _warned.add(kind)
        log.warning(message, *args)
