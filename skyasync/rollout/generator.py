"""Plays episodes: the engine writes, the environment answers, until it is done.

Invariant: every trajectory asked for comes back, in the order asked, with exactly the tokens the engine
read and wrote. If one episode fails, the others are cancelled and its error is raised; where its environment is to
blame and ``environment.on_error`` says so, only that episode ends, and is counted (``env/given_up``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from skyasync.arrays import NO_INTS, Ints, ints, joined
from skyasync.engines.client import InferenceClient
from skyasync.engines.protocol import GenerationRequest, SamplingParams
from skyasync.envs.base import Conversation, Seen
from skyasync.envs.pool import EnvPool
from skyasync.errors import WHILE_PLAYING, NonFiniteRewardError, UserError
from skyasync.processes.link import ProcessLostError
from skyasync.rollout.begun import Begun, request_id
from skyasync.rollout.chat import LONG, ChatTokenizer, PlainText
from skyasync.rollout.contract import Generator, TrajectoryGenerator
from skyasync.rollout.early_end import Decided, EarlyEnd, HasMetric
from skyasync.rollout.judging import NO_JUDGES, Judges
from skyasync.rollout.requests import request_seed
from skyasync.rollout.rules import (
    EpisodeRules,
    GivenUpError,
    give_up,
    tell_of_lost_process,
    tell_of_no_room,
    without_number,
)
from skyasync.rollout.spares import first_complete, with_spares
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import GeneratorInput, Segment, Trajectory, TrajectoryId, action_of
from skyasync.utils.task_group import together

__all__ = ["EpisodeGenerator", "EpisodeRules", "Generator"]

PLAYS = 3  # of an episode whose environment's process is lost: another one may have ended it


class EpisodeGenerator(TrajectoryGenerator):
    """Single-turn and multi-turn episodes against text environments.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        max_model_len: an episode ends before its tokens would exceed this.
        rules: what else ends an episode.
        apply_chat_template: see ``ChatTokenizer``.
        as_template_shows: of earlier turns the model reads what the template shows, not what it wrote.
        decided: says when a training group need not be played to its end; see ``EarlyEnd``.
        judges: models that judge responses, behind the end of an episode.
    """

    def __init__(
        self,
        client: InferenceClient,
        environments: EnvPool,
        tokenizer: Tokenizer,
        max_model_len: int,
        rules: EpisodeRules = EpisodeRules(),  # noqa: B008  (frozen)
        apply_chat_template: bool = True,
        as_template_shows: bool = True,
        decided: Decided | None = None,
        judges: Judges | None = None,
    ) -> None:
        self._decided, self._judges = decided, judges
        self._client, self._begun = client, Begun(client)
        self._environments = environments
        self._chat = ChatTokenizer(tokenizer, apply_chat_template)
        self._plain = PlainText(tokenizer, apply_chat_template)
        self._max_model_len, self._as_template_shows = max_model_len, as_template_shows
        self._rules = rules
        self._turn = asyncio.Semaphore(rules.in_flight) if rules.in_flight else nullcontext()

    async def roll_out(self, input_batch: GeneratorInput) -> list[Trajectory]:
        spares = 0 if input_batch["is_eval"] else self._rules.spares
        started = with_spares(input_batch, spares) if spares else input_batch
        episodes = [
            self._episode(identity, prompt, env_class, extras, started["sampling_params"])
            for identity, prompt, env_class, extras in zip(
                started["trajectory_ids"],
                started["prompts"],
                started["env_classes"],
                started["env_extras"],
                strict=True,
            )
        ]
        if self._decided is not None and not input_batch["is_eval"]:
            groups, asked = EarlyEnd(self._decided, input_batch["trajectory_ids"]), input_batch["trajectory_ids"]
            episodes = [groups.play(identity, episode) for identity, episode in zip(asked, episodes, strict=True)]
        if self._rules.metric and not input_batch["is_eval"]:
            looks, asked = HasMetric(self._rules.metric, input_batch["trajectory_ids"]), started["trajectory_ids"]
            episodes = [looks.play(identity, episode) for identity, episode in zip(asked, episodes, strict=True)]
        try:
            if spares:
                by_name = dict(zip(started["trajectory_ids"], episodes, strict=True))
                return await first_complete(input_batch["trajectory_ids"], by_name, self._client.progress)
            async with together() as tasks:
                played = [tasks.start(episode) for episode in episodes]
            return [episode.result() for episode in played]
        finally:
            self._begun.remove(started["trajectory_ids"])

    async def begun(self) -> list[Trajectory]:
        return await self._begun.now()

    def go_on_from(self, trajectories: Sequence[Trajectory]) -> None:
        self._begun.give_back(trajectories)

    async def close(self) -> None:
        """Ask no judge any more, and end the environments' processes."""
        if self._judges is not None:
            await self._judges.close()
        self._environments.end()

    async def _episode(
        self,
        identity: TrajectoryId,
        prompt: Conversation,
        env_class: str,
        extras: dict[str, Any],
        sampling: SamplingParams,
    ) -> Trajectory:
        trajectory = Trajectory(identity, [Segment("prompt", NO_INTS)])
        self._begun.add(trajectory)
        try:
            async with self._turn, self._time_limit(identity):
                for losses in count(1):
                    try:
                        said = await self._play(trajectory, prompt, env_class, extras, sampling)
                        break
                    except (ProcessLostError, GivenUpError) as error:
                        self._begin_again(trajectory, error, losses)
            if losses > 1:
                trajectory.metrics = trajectory.metrics | {"retries": trajectory.metrics.get("retries", 0) + losses - 1}
            if weighted := self._environments.judged_by(env_class, extras):
                if self._judges is None:
                    raise UserError(NO_JUDGES)
                await self._judges.add(trajectory, weighted, extras, prompt, said)
        except BaseException as error:
            self._environments.abandon(str(identity))
            self._begun.remove([identity])
            if isinstance(error, NonFiniteRewardError) and self._rules.leaves_out:
                return without_number(trajectory, error)
            if isinstance(error, GivenUpError):
                return give_up(trajectory, self._rules, error, self._chat.prompt(prompt))
            if not any(note.startswith(WHILE_PLAYING) for note in getattr(error, "__notes__", ())):  # many may share it
                error.add_note(f"{WHILE_PLAYING} {identity}")
            raise
        if self._rules.on_error != "raise":
            trajectory.metrics |= {"given_up": 0.0}  # a mean over all episodes
        return trajectory

    def _begin_again(self, trajectory: Trajectory, error: Exception, losses: int) -> None:
        """Make the episode what it was at its beginning, if the process of its environment was lost, which others may
        have ended; else raise the error."""
        cause = error if isinstance(error, ProcessLostError) else error.__cause__
        if not isinstance(cause, ProcessLostError) or losses == PLAYS:
            raise error
        tell_of_lost_process(trajectory, error)
        self._begun.again(trajectory)
        vars(trajectory).update(vars(Trajectory(trajectory.id, [Segment("prompt", NO_INTS)])))

    async def _play(
        self,
        trajectory: Trajectory,
        prompt: Conversation,
        env_class: str,
        extras: dict[str, Any],
        sampling: SamplingParams,
    ) -> str:
        """One episode to its end; returns the text of its last action."""
        episode, text = str(trajectory.id), ""
        raw = self._environments.takes_text(env_class)
        frame = self._plain if raw else self._chat
        opening = self._plain.opening(prompt) if raw else prompt
        with self._rules.blaming():
            start = await self._environments.init(episode, env_class, extras, opening)
        tools = self._environments.tools(env_class)
        tokens = frame.prompt(start, tools)  # replaced, never changed: requests hold it
        said = [] if isinstance(start, str) else list(start)
        trajectory.segments[0].tokens = tokens
        sees = self._environments.sees_tokens(env_class, extras)
        for turn in self._rules.turns():
            action = await self._act(trajectory, tokens, turn, sampling)
            read = partial(frame.text, action.tokens, sampling)
            text = await asyncio.to_thread(read) if len(action.tokens) >= LONG else read()
            seen = await _seen(frame, tokens, action.tokens) if sees else None
            with self._rules.blaming():
                step = await self._environments.step(episode, text, seen)
            action.reward = step["reward"]
            trajectory.metrics = step["metrics"]
            tokens = joined(tokens, action.tokens)
            if step["done"]:
                return text
            if turn + 1 == self._rules.max_turns:
                break
            observation = ints(frame.observation(step["observations"], action.tokens))
            tokens, anew = joined(tokens, observation), None
            if self._as_template_shows:
                said += [{"role": "assistant", "content": text}, *step["observations"]]
                anew = frame.anew(said, tools, tokens)
            if len(tokens if anew is None else anew) >= self._max_model_len:
                trajectory.stop_reason = "length"
                tell_of_no_room(trajectory, self._max_model_len)
                break
            if anew is None:
                trajectory.segments.append(Segment("observation", observation))
            else:
                trajectory.branches.append(trajectory.segments)
                trajectory.segments, tokens = [Segment("prompt", anew)], anew
            sampling = replace(sampling, **step["sampling_params"])
        with self._rules.blaming():
            trajectory.metrics |= await self._environments.close(episode)
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
            session_id=self._rules.session(trajectory.id),
        )
        had = self._begun.turn(trajectory.id, turn, tokens, seeded=seed is not None)
        output = await (self._client.go_on(request, had) if had else self._client.generate(request))
        trajectory.stop_reason = output.finish_reason or "stop"
        action = action_of(output, trajectory.segments)
        trajectory.segments.append(action)
        return action

    @asynccontextmanager
    async def _time_limit(self, identity: TrajectoryId) -> AsyncIterator[None]:
        limit_s = self._rules.timeout_s
        try:
            async with asyncio.timeout(limit_s or None) as timer:
                yield
        except TimeoutError as error:
            if not timer.expired():
                raise
            late = f"episode {identity} did not end within {limit_s:g} s (generator.episode_timeout_s)"
            with self._rules.blaming():
                raise TimeoutError(late) from error


async def _seen(frame: ChatTokenizer | PlainText, read: Ints, wrote: Ints) -> Seen:
    """A turn's tokens for an environment that judges them."""
    is_long = len(read) + len(wrote) >= LONG
    return await asyncio.to_thread(frame.seen, read, wrote) if is_long else frame.seen(read, wrote)
