"""Shared by the tests of rollouts: prompts, trajectories, a chat tokenizer, scripted engines and environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from skyasync.envs import ENVS, BaseTextEnv
from skyasync.envs.pool import EnvPool, local_pool
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    SamplingParams,
)
from skyasync.rollout.generator import EpisodeGenerator, EpisodeLimits
from skyasync.rollout.generator_api import _read_output, generator_input
from skyasync.rollout.types import (
    GeneratorOutput,
    Group,
    Prompt,
    PromptId,
    RolloutRequest,
    Segment,
    Trajectory,
    TrajectoryId,
)


@cache
def tokenizer() -> Any:
    """A byte-level BPE with the ChatML template, as the tiny model's."""
    from skyasync.examples.tiny.model import Recipe

    return Recipe(corpus_size=64, rarest_merge=8).make_tokenizer()


def tokens_of(text: str) -> list[int]:
    return tokenizer()(text, add_special_tokens=False)["input_ids"]


def prompt(row: int, env: str = "none", epoch: int = 0, **extras: Any) -> Prompt:
    return Prompt(
        PromptId(epoch, row), [{"role": "user", "content": f"question {row}"}], env, extras
    )


def action(tokens: Sequence[int], reward: float = 0.0, version: int = 0) -> Segment:
    return Segment("action", list(tokens), [-0.5] * len(tokens), [version] * len(tokens), reward)


def trajectory(
    *segments: Segment, row: int = 0, repetition: int = 0, stop: str = "stop"
) -> Trajectory:
    return Trajectory(
        TrajectoryId(PromptId(0, row), repetition), [Segment("prompt", [1, 2]), *segments], stop
    )


def groups_from_output(
    output: GeneratorOutput, prompts: Sequence[Prompt], version: int, samples: int
) -> list[Group]:
    """One group per prompt, of ``samples`` trajectories, as they are read from a user's generator."""
    names = {
        prompt.id: [TrajectoryId(prompt.id, repetition) for repetition in range(samples)]
        for prompt in prompts
    }
    requested = [name for of_prompt in names.values() for name in of_prompt]
    read = {trajectory.id: trajectory for trajectory in _read_output(output, requested, version)}
    return [Group(prompt, [read[name] for name in names[prompt.id]]) for prompt in prompts]


class ScriptedEngine(InferenceEngine):
    """Answers ``reply(prompt tokens)``, cut at ``max_tokens``; records its requests."""

    def __init__(self, reply: Callable[[list[int]], str | Exception]) -> None:
        self.reply, self.requests, self.messages = reply, [], 0

    async def generate(self, requests: Sequence[GenerationRequest]) -> Any:
        self.messages += 1
        self.requests += requests
        for request in requests:
            said = self.reply(request.prompt_token_ids)
            if isinstance(said, Exception):
                raise said
            tokens = [*tokens_of(said), tokenizer().eos_token_id]
            cut = tokens[: request.sampling.max_tokens]
            finish = "stop" if len(cut) == len(tokens) else "length"
            yield [
                GenerationOutput(
                    request.request_id, cut, [-0.25] * len(cut), [4] * len(cut), finish
                )
            ]


class RecordedEnv(BaseTextEnv):
    """Records the calls of its methods; subclasses override ``answer``."""

    opened: list[str] = []  # noqa: RUF012  (shared on purpose)
    closed: list[str] = []  # noqa: RUF012

    def init(self, prompt):
        self.opened.append(self.extras.get("name", "?"))
        return prompt, {}

    def step(self, action):
        self.turns += 1
        return self.answer(action)

    def answer(self, action):
        return {"observations": [], "reward": 1.0, "done": True, "metadata": {}}

    def get_metrics(self):
        return {"turns": float(self.turns)}

    def close(self):
        self.closed.append(self.extras.get("name", "?"))


def registered(env: type[BaseTextEnv]) -> str:
    """A name for a class of a test, with empty records."""
    if issubclass(env, RecordedEnv):
        env.opened, env.closed = [], []
    ENVS[env.__qualname__] = env
    return env.__qualname__


def generator(
    engine: Any, *, max_model_len: int = 256, pool: EnvPool | None = None, **rules: Any
) -> EpisodeGenerator:
    """``rules`` are those of ``EpisodeLimits``."""
    client = InferenceClient([engine])
    return EpisodeGenerator(
        client, pool or local_pool(), tokenizer(), max_model_len, EpisodeLimits(**rules)
    )


def requests(
    prompts: Sequence[Prompt], samples: int = 1, max_tokens: int = 32
) -> list[RolloutRequest]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return [
        RolloutRequest(TrajectoryId(p.id, r), p, p.extras, sampling)
        for p in prompts
        for r in range(samples)
    ]


def request(prompts: Sequence[Prompt], samples: int = 1, max_tokens: int = 32) -> Any:
    """The request that users' generators get."""
    return generator_input(requests(prompts, samples, max_tokens))
