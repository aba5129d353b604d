"""Plays episodes: the engine writes, the environment answers, until it is done.

Invariant: every trajectory requested comes back, in the order requested, with exactly the tokens that the engine read
and wrote. If one episode fails, the others are cancelled and its error is raised. If its environment failed and
``environment.on_error`` allows it, only that episode ends, and is counted (``env/given_up``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial

from skyasync.arrays import Ints, ints, joined
from skyasync.envs.base import TurnTokens
from skyasync.envs.pool import EnvPool
from skyasync.errors import WHILE_PLAYING, NonFiniteRewardError, UserError
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.rollout.chat import LONG, ChatTokenizer, PlainText
from skyasync.rollout.episode_limits import (
    MAX_ATTEMPTS,
    EpisodeFailedError,
    EpisodeLimits,
    failed_episode,
    nonfinite_episode,
    warn_of_full_sequence,
    warn_of_lost_process,
)
from skyasync.rollout.generator import NO_JUDGES, Judges
from skyasync.rollout.generator_api import Generator, TrajectoryGenerator, request_seed
from skyasync.rollout.group_sampling import GroupMonitor, StopRule, play_episodes, with_extra_samples
from skyasync.rollout.partial_rollouts import PartialRollouts, request_id
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import RolloutRequest, Segment, Trajectory, TrajectoryId, action_of
from skyasync.utils.rpc import ProcessLostError

__all__ = ["EpisodeGenerator", "EpisodeLimits", "Generator"]


class EpisodeGenerator(TrajectoryGenerator):
    """Single-turn and multi-turn episodes against text environments.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        max_model_len: an episode ends before its tokens would exceed this.
        limits: what else ends an episode.
        apply_chat_template: see ``ChatTokenizer``.
        as_template_shows: of earlier turns the model reads what the template shows, not what it wrote.
        stops: when a training group need not be played to its end; see ``GroupMonitor``.
        judges: models that grade responses after the end of an episode.
    """

    def __init__(
        self,
        client: InferenceClient,
        environments: EnvPool,
        tokenizer: Tokenizer,
        max_model_len: int,
        limits: EpisodeLimits = EpisodeLimits(),  # noqa: B008  (frozen)
        apply_chat_template: bool = True,
        as_template_shows: bool = True,
        stops: StopRule | None = None,
        judges: Judges | None = None,
    ) -> None:
        self._client, self._environments, self._judges = client, environments, judges
        self._chat = ChatTokenizer(tokenizer, apply_chat_template)
        self._plain = PlainText(tokenizer, apply_chat_template)
        self._max_model_len, self._as_template_shows = max_model_len, as_template_shows
        self._limits, self._stops = limits, stops
        self._in_flight = asyncio.Semaphore(limits.in_flight) if limits.in_flight else nullcontext()
        self._partial = PartialRollouts(client)

    async def generate_trajectories(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        requested = [request.id for request in requests]
        extra, monitor = 0, None
        if not any(request.is_eval for request in requests):
            extra = self._limits.spares
            if self._stops is not None or self._limits.metric:
                monitor = GroupMonitor(requested, self._stops, self._limits.metric)
        episodes = {request.id: self._episode(request) for request in with_extra_samples(requests, extra)}
        try:
            return await play_episodes(requested, episodes, monitor, self._client.progress if extra else None)
        finally:
            self._partial.remove(episodes)

    async def begun(self) -> list[Trajectory]:
        return await self._partial.now()

    def go_on_from(self, trajectories: Sequence[Trajectory]) -> None:
        self._partial.resume(trajectories)

    async def close(self) -> None:
        """Close the judges' clients, and end the processes of the environments."""
        if self._judges is not None:
            await self._judges.close()
        self._environments.end()

    async def _episode(self, request: RolloutRequest) -> Trajectory:
        trajectory, prompt = Trajectory(request.id), request.prompt
        self._partial.add(trajectory)
        try:
            async with self._in_flight, self._time_limit(request.id):
                response = await self._attempts(trajectory, request)
            if weighted := self._environments.judged_by(prompt.env_class, request.extras):
                if self._judges is None:
                    raise UserError(NO_JUDGES)
                await self._judges.add(trajectory, weighted, request.extras, prompt.messages, response)
        except BaseException as error:
            self._environments.abandon(str(request.id))
            self._partial.remove([request.id])
            if isinstance(error, NonFiniteRewardError) and self._limits.skips_nonfinite:
                return nonfinite_episode(trajectory, error)
            if isinstance(error, EpisodeFailedError) and isinstance(error.__cause__, Exception):
                return failed_episode(trajectory, self._limits, error.__cause__, self._chat.prompt(prompt.messages))
            if not any(note.startswith(WHILE_PLAYING) for note in getattr(error, "__notes__", ())):  # many may share it
                error.add_note(f"{WHILE_PLAYING} {request.id}")
            raise
        if self._limits.on_error != "raise":
            trajectory.metrics |= {"given_up": 0.0}  # a mean over all episodes
        return trajectory

    async def _attempts(self, trajectory: Trajectory, request: RolloutRequest) -> str:
        """The text of the last action. The episode starts again if the process of its environment is lost."""
        attempt = 1
        while True:
            try:
                response = await self._play(trajectory, request)
            except (ProcessLostError, EpisodeFailedError) as error:
                lost = error.__cause__ if isinstance(error, EpisodeFailedError) else error
                if not isinstance(lost, ProcessLostError) or attempt == MAX_ATTEMPTS:
                    raise
                warn_of_lost_process(trajectory, lost)
                self._partial.restart(trajectory)
                attempt += 1
                continue
            if attempt > 1:
                retries = trajectory.metrics.get("retries", 0) + attempt - 1
                trajectory.metrics = trajectory.metrics | {"retries": retries}
            return response

    async def _play(self, trajectory: Trajectory, request: RolloutRequest) -> str:
        """One episode to its end; the text of its last action."""
        limits, environments, sampling = self._limits, self._environments, request.sampling
        episode, env_class, text = str(trajectory.id), request.prompt.env_class, ""
        as_text = environments.takes_text(env_class)
        frame = self._plain if as_text else self._chat
        opening = self._plain.opening(request.prompt.messages) if as_text else request.prompt.messages
        with limits.environment_errors():
            start = await environments.init(episode, env_class, request.extras, opening)
        tools = environments.tools(env_class)
        tokens = frame.prompt(start, tools)  # replaced, never changed: requests hold it
        messages = [] if isinstance(start, str) else list(start)
        trajectory.segments[0].tokens = tokens
        sees_tokens = environments.sees_tokens(env_class, request.extras)
        for turn in limits.turns():
            action = await self._act(trajectory, tokens, turn, sampling)
            decode = partial(frame.text, action.tokens, sampling)
            text = await asyncio.to_thread(decode) if len(action.tokens) >= LONG else decode()
            seen = await _seen(frame, tokens, action.tokens) if sees_tokens else None
            with limits.environment_errors():
                step = await environments.step(episode, text, seen)
            action.reward = step["reward"]
            trajectory.metrics = step["metrics"]
            tokens = joined(tokens, action.tokens)
            if step["done"]:
                return text
            if turn + 1 == limits.max_turns:
                break
            observation = ints(frame.observation(step["observations"], action.tokens))
            tokens, reframed = joined(tokens, observation), None
            if self._as_template_shows:
                messages += [{"role": "assistant", "content": text}, *step["observations"]]
                reframed = frame.reframed(messages, tools, tokens)
            if len(tokens if reframed is None else reframed) >= self._max_model_len:
                trajectory.stop_reason = "length"
                warn_of_full_sequence(trajectory, self._max_model_len)
                break
            if reframed is None:
                trajectory.segments.append(Segment("observation", observation))
            else:
                trajectory.branches.append(trajectory.segments)
                trajectory.segments, tokens = [Segment("prompt", reframed)], reframed
            sampling = replace(sampling, **step["sampling_params"])
        with limits.environment_errors():
            trajectory.metrics |= await environments.close(episode)
        return text

    async def _act(self, trajectory: Trajectory, tokens: Ints, turn: int, sampling: SamplingParams) -> Segment:
        """One action of the model, appended to the trajectory."""
        room = self._max_model_len - len(tokens)
        if room < 1:
            raise UserError(
                f"the prompt of {trajectory.id} has {len(tokens)} tokens, which leaves no room for a response: raise "
                f"generator.max_model_len={self._max_model_len} or lower trainer.max_prompt_length"
            )
        name = request_id(trajectory.id, turn)
        seed = request_seed(sampling.seed, name)
        request = GenerationRequest(
            request_id=name,
            prompt_token_ids=tokens,
            sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room), seed=seed),
            session_id=self._limits.session(trajectory.id),
        )
        recorded = self._partial.turn(trajectory.id, turn, tokens, seeded=seed is not None)
        output = await (self._client.go_on(request, recorded) if recorded else self._client.generate(request))
        trajectory.stop_reason = output.finish_reason or "stop"
        action = action_of(output, trajectory.segments)
        trajectory.segments.append(action)
        return action

    @asynccontextmanager
    async def _time_limit(self, identity: TrajectoryId) -> AsyncIterator[None]:
        limit_s = self._limits.timeout_s
        try:
            async with asyncio.timeout(limit_s or None) as timer:
                yield
        except TimeoutError as error:
            if not timer.expired():
                raise
            late = f"episode {identity} did not end within {limit_s:g} s (generator.episode_timeout_s)"
            with self._limits.environment_errors():
                raise TimeoutError(late) from error


async def _seen(frame: ChatTokenizer | PlainText, read: Ints, wrote: Ints) -> TurnTokens:
    """The tokens of a turn, for an environment that reads them."""
    is_long = len(read) + len(wrote) >= LONG
    return await asyncio.to_thread(frame.seen, read, wrote) if is_long else frame.seen(read, wrote)
