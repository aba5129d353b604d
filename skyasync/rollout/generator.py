"""Plays episodes: the engine writes, the environment answers, until it is done; then the judges grade.

Invariant: every trajectory requested comes back, in the order requested, with exactly the tokens that the engine read
and wrote. If one episode fails, the others are cancelled and its error is raised. If its environment failed and
``environment.on_error`` allows it, only that episode ends, and is counted (``env/given_up``). The reward of a finished
episode includes the grades of its judges before its group is complete; waiting for a grade holds up no other episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from skyasync.arrays import ints, joined
from skyasync.config.schema import Config
from skyasync.config.schema.judges import PREFIX, JudgeConfig, judges_of
from skyasync.envs.base import Conversation, InvalidEnvOutputError
from skyasync.envs.pool import EnvPool
from skyasync.envs.reward import known_of, metrics_of
from skyasync.envs.tools import schemas
from skyasync.errors import WHILE_PLAYING, NonFiniteRewardError, UserError, unknown
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.models.images import images_of
from skyasync.rewards.llm_judge import ChatServer, LLMJudge, Messages, UnansweredError, key_of
from skyasync.rewards.settings import short_names
from skyasync.rollout.chat import LONG, ChatTokenizer, PlainText
from skyasync.rollout.episode_limits import (
    MAX_ATTEMPTS,
    EpisodeFailedError,
    EpisodeLimits,
    failed_episode,
    nonfinite_episode,
    warn_once,
)
from skyasync.rollout.generator_api import Generator, TrajectoryGenerator, request_seed
from skyasync.rollout.group_sampling import GroupMonitor, StopRule, play_episodes, with_extra_samples
from skyasync.rollout.partial_rollouts import PartialRollouts, request_id
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import RolloutRequest, Segment, Trajectory, TrajectoryId, action_of
from skyasync.utils.rpc import ProcessLostError

__all__ = ["EpisodeGenerator", "EpisodeLimits", "Generator", "Judges"]


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

    async def partial_rollouts(self) -> list[Trajectory]:
        return await self._partial.now()

    def resume_from(self, trajectories: Sequence[Trajectory]) -> None:
        self._partial.resume(trajectories)

    async def close(self) -> None:
        """Close the judges' clients, and end the processes of the environments."""
        if self._judges is not None:
            await self._judges.close()
        self._environments.end()

    async def _episode(self, request: RolloutRequest) -> Trajectory:
        """The trajectory of one request, with its grades; a failed episode's if only that episode ends."""
        trajectory, prompt = Trajectory(request.id), request.prompt
        self._partial.add(trajectory)
        try:
            async with self._in_flight, self._time_limit(request.id):
                response = await self._play_with_retries(trajectory, request)
            env_class, env_config = self._environments.env_class(prompt.env_class), self._environments.env_config
            if weighted := env_class.graded_by(env_config, request.extras):
                if self._judges is None:
                    raise UserError(
                        "the row's reward functions name a judge, and there are none: set environment.judges.NAME (a "
                        "generator of your own takes them from BasePPOExp.get_judges)"
                    )
                await self._judges.add(trajectory, weighted, request.extras, prompt.messages, response)
        except BaseException as error:
            self._environments.abandon(str(request.id))
            self._partial.remove([request.id])
            if isinstance(error, NonFiniteRewardError) and self._limits.skips_nonfinite:
                return nonfinite_episode(trajectory, error)
            if isinstance(error, EpisodeFailedError) and isinstance(error.__cause__, Exception):
                opening = Segment("prompt", self._chat.prompt(prompt.messages), images=images_of(prompt.messages))
                return failed_episode(trajectory, self._limits, error.__cause__, opening)
            notes: list[str] = vars(error).get("__notes__", [])
            if not any(note.startswith(WHILE_PLAYING) for note in notes):  # many may share it
                error.add_note(f"{WHILE_PLAYING} {request.id}")
            raise
        if self._limits.on_error != "raise":
            trajectory.metrics |= {"given_up": 0.0}  # a mean over all episodes
        return trajectory

    @asynccontextmanager
    async def _time_limit(self, identity: TrajectoryId) -> AsyncIterator[None]:
        limit_s = self._limits.timeout_s
        try:
            async with asyncio.timeout(limit_s or None) as timer:
                yield
        except TimeoutError as error:
            if not timer.expired():
                raise
            message = f"episode {identity} did not end within {limit_s:g} s (generator.episode_timeout_s)"
            with self._limits.environment_errors():
                raise TimeoutError(message) from error

    async def _play_with_retries(self, trajectory: Trajectory, request: RolloutRequest) -> str:
        """The text of the last action. The episode starts again if the process of its environment is lost."""
        for attempt in count(1):
            try:
                response = await self._play(trajectory, request)
            except (ProcessLostError, EpisodeFailedError) as error:
                lost = error.__cause__ if isinstance(error, EpisodeFailedError) else error
                if not isinstance(lost, ProcessLostError) or attempt == MAX_ATTEMPTS:
                    raise
                message = (
                    "episode %s is played again from its beginning in another process; others are counted in "
                    "env/retries: %.500s"
                )
                warn_once("a lost process", message, trajectory.id, lost)
                self._partial.restart(trajectory)
            else:
                break
        if attempt > 1:
            retries = trajectory.metrics.get("retries", 0) + attempt - 1
            trajectory.metrics = trajectory.metrics | {"retries": retries}
        return response

    async def _play(self, trajectory: Trajectory, request: RolloutRequest) -> str:
        """One episode to its end; the text of its last action."""
        limits, environments, sampling = self._limits, self._environments, request.sampling
        episode, name, text = str(trajectory.id), request.prompt.env_class, ""
        env_class = environments.env_class(name)
        as_text = env_class.raw_text
        frame = self._plain if as_text else self._chat
        if as_text and images_of(request.prompt.messages):
            raise UserError(f"environment {name} reads plain text (raw_text): rows with images need messages")
        opening = self._plain.opening(request.prompt.messages) if as_text else request.prompt.messages
        with limits.environment_errors():
            start = await environments.init(episode, name, request.extras, opening)
        tools = schemas(env_class)  # type: ignore[arg-type]  # a class can be hashed
        tokens = frame.prompt(start, tools)  # replaced, never changed: requests hold it
        messages = [] if isinstance(start, str) else list(start)
        images = images_of(start)
        trajectory.segments[0].tokens, trajectory.segments[0].images = tokens, images
        sees_tokens = env_class.sees_tokens(environments.env_config, request.extras)
        for turn in range(limits.max_turns) if limits.max_turns else count():
            # The model acts.
            free = self._max_model_len - len(tokens)
            if free < 1:
                raise UserError(
                    f"the prompt of {trajectory.id} has {len(tokens)} tokens, which leaves no room for a response: "
                    f"raise generator.max_model_len={self._max_model_len} or lower trainer.max_prompt_length"
                )
            request_name = request_id(trajectory.id, turn)
            seed = request_seed(sampling.seed, request_name)
            most = min(sampling.max_tokens, free)
            limited = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most), seed=seed)
            session = limits.session(trajectory.id)
            generation = GenerationRequest(request_name, tokens, limited, session_id=session, images=images)
            recorded = self._partial.turn(trajectory.id, turn, tokens, images, seeded=seed is not None)
            output = await (self._client.go_on(generation, recorded) if recorded else self._client.generate(generation))
            trajectory.stop_reason = output.finish_reason or "stop"
            action = action_of(output, trajectory.segments)
            trajectory.segments.append(action)
            # The environment answers.
            text = await _in_thread(len(action.tokens) >= LONG, partial(frame.text, action.tokens, sampling))
            seen = None
            if sees_tokens:
                is_long = len(tokens) + len(action.tokens) >= LONG
                seen = await _in_thread(is_long, partial(frame.seen, tokens, action.tokens))
            with limits.environment_errors():
                step = await environments.step(episode, text, seen)
            action.reward = step["reward"]
            trajectory.metrics = step["metrics"]
            tokens = joined(tokens, action.tokens)
            if step["done"]:
                return text
            if turn + 1 == limits.max_turns:
                break
            # Its answer is what the model reads next, unless there is no room for it.
            read = step["observations"]
            with limits.environment_errors():
                try:
                    observation, shown = ints(frame.observation(read, action.tokens)), images_of(read)
                except UserError as error:  # of this episode's text and images
                    raise InvalidEnvOutputError(str(error)) from error
            images = (*images, *shown)
            tokens, reframed = joined(tokens, observation), None
            if self._as_template_shows:
                messages += [{"role": "assistant", "content": text}, *read]
                reframed = frame.reframed(messages, tools, tokens)
            if len(tokens if reframed is None else reframed) >= self._max_model_len:
                trajectory.stop_reason = "length"
                message = (
                    "episode %s is full after %d turns: what its environment said would exceed "
                    "generator.max_model_len=%d; others are counted in response/truncated. Raise it, or set "
                    "generator.max_turns, which the default follows"
                )
                warn_once("no room", message, trajectory.id, len(trajectory.actions), self._max_model_len)
                break
            if reframed is None:
                trajectory.segments.append(Segment("observation", observation, images=shown))
            else:
                trajectory.branches.append(trajectory.segments)
                trajectory.segments, tokens = [Segment("prompt", reframed, images=images)], reframed
            sampling = replace(sampling, **step["sampling_params"])
        with limits.environment_errors():
            trajectory.metrics |= await environments.close(episode)
        return text


async def _in_thread(is_long: bool, call: partial[Any]) -> Any:  # noqa: ANN401  (the result of the call)
    """The call's result; of long texts by a thread, so that the event loop continues."""
    return await asyncio.to_thread(call) if is_long else call()


# ---------------------------------------------------------------- judges


class Judges:
    """All of ``environment.judges``: language models that grade finished episodes.

    Args:
        judges: by their names.
        on_timeout: ``environment.reward_on_timeout``, for responses without a grade.
    """

    def __init__(self, judges: Mapping[str, LLMJudge], on_timeout: str = "zero") -> None:
        self._judges, self._on_timeout = judges, on_timeout

    @classmethod
    def of(
        cls, cfg: Config, keys: Mapping[str, str], client: InferenceClient, tokenizer: Tokenizer, max_model_len: int
    ) -> Judges:
        """The judges of a run.

        Args:
            keys: API keys of servers, by the judges' names; missing ones are read from environment variables.
        """
        chat, judges = ChatTokenizer(tokenizer, cfg.data.apply_chat_template), {}
        for name, judge in judges_of(cfg.environment.judges).items():
            if judge.engine:
                engine = EngineJudge(name, judge, client, chat, max_model_len)
                judges[name] = LLMJudge(name, judge, engine, remembers=False)
            else:
                server = ChatServer(name, judge, keys[name] if name in keys else key_of(name, judge))
                judges[name] = LLMJudge(name, judge, server, remembers=judge.cache)
        return cls(judges, cfg.environment.reward_on_timeout)

    async def add(
        self,
        trajectory: Trajectory,
        weighted: Sequence[tuple[str, float]],
        row: dict[str, Any],
        messages: Conversation,
        response: str,
    ) -> None:
        """Ask the judges among a row's reward functions, and add their grades to the episode's reward and metrics.

        Raises:
            UserError: for a judge that does not exist, or that cannot grade the row.
            TimeoutError: for a response without a grade, if ``environment.reward_on_timeout`` is raise.
        """
        graded = [(func, weight) for func, weight in weighted if func.startswith(PREFIX)]
        if not graded or not trajectory.actions:
            return
        judges = [func.removeprefix(PREFIX) for func, _ in graded]
        for name in judges:
            if name not in self._judges:
                raise UserError(f"{unknown('judge', name, self._judges)} (environment.judges)")
        known = known_of(row, messages, response)
        scores = await asyncio.gather(*(self._judges[name].score(known) for name in judges))
        for (func, _), score in zip(graded, scores, strict=True):
            if score.no_reward and self._on_timeout == "raise":
                raise TimeoutError(
                    f"reward function {func} gave no grade; environment.reward_on_timeout=zero counts it as 0"
                )
        grades = zip(graded, scores, strict=True)
        trajectory.actions[-1].reward += sum(weight * score.reward for (_, weight), score in grades)
        funcs = [func for func, _ in weighted]
        names = dict(zip(funcs, short_names(funcs), strict=True))
        metrics = metrics_of([names[func] for func, _ in graded], scores, [False] * len(graded), row.get("domain"))
        trajectory.metrics = {**trajectory.metrics, **metrics}

    async def close(self) -> None:
        await asyncio.gather(*(judge.close() for judge in self._judges.values()))


class EngineJudge:
    """The run's engines as a judge: they answer with their current weights, between their other requests."""

    def __init__(
        self, name: str, judge: JudgeConfig, client: InferenceClient, chat: ChatTokenizer, max_model_len: int
    ) -> None:
        self._name, self._judge, self._client = name, judge, client
        self._chat, self._max_model_len, self._numbers = chat, max_model_len, count()

    async def ask(self, messages: Messages) -> str:
        """The engine's answer.

        Raises:
            UnansweredError: if the question leaves no room for one, or the request was aborted.
        """
        judge, tokens = self._judge, self._chat.prompt(messages)
        free = self._max_model_len - len(tokens)
        if free < 1:
            raise UnansweredError(
                f"its question has {len(tokens)} tokens, which leaves no room for an answer within "
                f"generator.max_model_len={self._max_model_len}"
            )
        sampling = SamplingParams(max_tokens=min(judge.max_tokens, free), temperature=judge.temperature)
        request = GenerationRequest(f"judge-{self._name}-{next(self._numbers)}", tokens, sampling)
        output = await self._client.generate(request)
        if output.finish_reason == "abort":
            raise UnansweredError("the engine has ended its request")
        return self._chat.text(output.token_ids)

    async def close(self) -> None: ...
