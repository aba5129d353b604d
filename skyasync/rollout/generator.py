"""Plays episodes: the engine writes, the environment answers, until it is done.

Invariant: every trajectory asked for comes back, in the order asked, with exactly the tokens the engine
read and wrote; if one episode fails, the others are cancelled and its error is raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from skyasync.engines.client import InferenceClient
from skyasync.engines.protocol import GenerationRequest, SamplingParams
from skyasync.envs.base import Conversation
from skyasync.envs.pool import EnvPool
from skyasync.errors import UserError
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.convert import generator_output
from skyasync.rollout.early_end import Decided, EarlyEnd
from skyasync.rollout.requests import request_seed
from skyasync.rollout.types import GeneratorInput, GeneratorOutput, Segment, Trajectory, TrajectoryId

T = TypeVar("T")
_WHILE = "while playing the episode"


class Generator(Protocol):
    """Anything that turns prompts into trajectories; override ``BasePPOExp.get_generator`` to use your own."""

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput: ...


class EpisodeGenerator:
    """Single-turn and multi-turn episodes against text environments.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        max_model_len: an episode ends before its tokens would exceed this.
        max_turns: an episode ends after so many actions even if its environment is not done.
        apply_chat_template: see ``ChatTokenizer``.
        decided: says when a training group need not be played to its end; see ``EarlyEnd``.
    """

    def __init__(
        self,
        client: InferenceClient,
        environments: EnvPool,
        tokenizer: Any,
        max_model_len: int,
        max_turns: int = 1,
        apply_chat_template: bool = True,
        decided: Decided | None = None,
    ) -> None:
        self._decided = decided
        self._client = client
        self._environments = environments
        self._chat = ChatTokenizer(tokenizer, apply_chat_template)
        self._max_model_len = max_model_len
        self._max_turns = max_turns

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        episodes = [
            self._episode(identity, prompt, env_class, extras, input_batch["sampling_params"])
            for identity, prompt, env_class, extras in zip(
                input_batch["trajectory_ids"],
                input_batch["prompts"],
                input_batch["env_classes"],
                input_batch["env_extras"],
                strict=True,
            )
        ]
        if self._decided is not None and not input_batch["is_eval"]:
            groups, asked = EarlyEnd(self._decided, input_batch["trajectory_ids"]), input_batch["trajectory_ids"]
            episodes = [groups.play(identity, episode) for identity, episode in zip(asked, episodes, strict=True)]
        return generator_output(await all_or_error(episodes))

    async def _episode(
        self,
        identity: TrajectoryId,
        prompt: Conversation,
        env_class: str,
        extras: dict[str, Any],
        sampling: SamplingParams,
    ) -> Trajectory:
        episode = str(identity)
        try:
            conversation = await self._environments.init(episode, env_class, extras, prompt)
            trajectory = Trajectory(identity, [Segment("prompt", self._chat.prompt(conversation))])
            await self._play(trajectory, sampling)
            trajectory.metrics |= await self._environments.close(episode)  # if the environment was not done
            return trajectory
        except BaseException as error:
            self._environments.abandon(episode)
            if not any(note.startswith(_WHILE) for note in getattr(error, "__notes__", ())):  # many may share it
                error.add_note(f"{_WHILE} {episode}")
            raise

    async def _play(self, trajectory: Trajectory, sampling: SamplingParams) -> None:
        tokens = trajectory.segments[0].tokens  # replaced, never changed: requests hold it
        for turn in range(self._max_turns):
            action = await self._act(trajectory, tokens, turn, sampling)
            step = await self._environments.step(str(trajectory.id), self._chat.text(action.tokens, sampling))
            action.reward = float(step["reward"])
            trajectory.metrics = step["metrics"]
            tokens = tokens + action.tokens
            if step["done"] or turn + 1 == self._max_turns:
                return
            observation = self._chat.observation(step["observations"], action.tokens)
            if len(tokens) + len(observation) >= self._max_model_len:
                trajectory.stop_reason = "length"
                return
            trajectory.segments.append(Segment("observation", observation))
            tokens = tokens + observation

    async def _act(self, trajectory: Trajectory, tokens: list[int], turn: int, sampling: SamplingParams) -> Segment:
        """One action of the model, appended to the trajectory."""
        room = self._max_model_len - len(tokens)
        if room < 1:
            raise UserError(
                f"the prompt of {trajectory.id} has {len(tokens)} tokens, which leaves no room for a response: raise "
                f"generator.max_model_len={self._max_model_len} or lower trainer.max_prompt_length"
            )
        request_id = f"{trajectory.id}-t{turn}"
        seed = request_seed(sampling.seed, request_id)
        output = await self._client.generate(
            GenerationRequest(
                request_id=request_id,
                prompt_token_ids=tokens,
                sampling=replace(sampling, max_tokens=min(sampling.max_tokens, room), seed=seed),
                session_id=str(trajectory.id.prompt),
            )
        )
        trajectory.stop_reason = output.finish_reason or "stop"
        action = Segment("action", output.token_ids, output.logprobs, output.versions)
        trajectory.segments.append(action)
        return action


async def all_or_error(coroutines: list[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; at the first error the others are cancelled and it is raised as it was."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
