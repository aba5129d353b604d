"""The judges of a run: language models behind a server, or the run's own engines, that grade finished episodes.

Invariant: the reward of a finished episode includes the grades of its judges before its group is complete; no
trajectory is trained, filtered, stored or evaluated without them. An episode that waits for its grade holds up no
other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from skyasync.config.schema import Config
from skyasync.config.schema.judges import PREFIX, JudgeConfig, judges_of
from skyasync.envs.base import Conversation
from skyasync.envs.reward import known_of, metrics_of
from skyasync.errors import UserError, unknown
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.rewards.llm_judge import ChatServer, LLMJudge, Messages, UnansweredError, key_of
from skyasync.rewards.settings import short_names
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Trajectory

NO_JUDGES = (
    "the row's reward functions name a judge, and there are none: set environment.judges.NAME (a generator of your own "
    "takes them from BasePPOExp.get_judges)"
)
Weighted = Sequence[tuple[str, float]]


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
        room = self._max_model_len - len(tokens)
        if room < 1:
            raise UnansweredError(
                f"its question has {len(tokens)} tokens, which leaves no room for an answer within "
                f"generator.max_model_len={self._max_model_len}"
            )
        sampling = SamplingParams(max_tokens=min(judge.max_tokens, room), temperature=judge.temperature)
        request = GenerationRequest(f"judge-{self._name}-{next(self._numbers)}", tokens, sampling)
        output = await self._client.generate(request)
        if output.finish_reason == "abort":
            raise UnansweredError("the engine has ended its request")
        return self._chat.text(output.token_ids)

    async def close(self) -> None: ...


class Judges:
    """All of ``environment.judges``.

    Args:
        judges: by their names.
        unjudged: ``environment.reward_on_timeout``.
    """

    def __init__(self, judges: Mapping[str, LLMJudge], unjudged: str = "zero") -> None:
        self._judges, self._unjudged = judges, unjudged

    @classmethod
    def of(
        cls, cfg: Config, keys: Mapping[str, str], client: InferenceClient, tokenizer: Tokenizer, max_model_len: int
    ) -> Judges:
        """The judges of a run.

        Args:
            keys: API keys of servers, by the judges' names; missing ones are read from environment variables.
        """
        chat, made = ChatTokenizer(tokenizer, cfg.data.apply_chat_template), {}
        for name, judge in judges_of(cfg.environment.judges).items():
            if judge.engine:
                engine = EngineJudge(name, judge, client, chat, max_model_len)
                made[name] = LLMJudge(name, judge, engine, remembers=False)
            else:
                server = ChatServer(name, judge, keys[name] if name in keys else key_of(name, judge))
                made[name] = LLMJudge(name, judge, server, remembers=judge.cache)
        return cls(made, cfg.environment.reward_on_timeout)

    async def add(
        self, trajectory: Trajectory, weighted: Weighted, row: dict[str, Any], messages: Conversation, response: str
    ) -> None:
        """Ask the judges among a row's reward functions, and add their grades to the episode's reward and metrics.

        Raises:
            UserError: for a judge that does not exist, or that cannot grade the row.
            TimeoutError: for a response without a grade, if ``environment.reward_on_timeout`` is raise.
        """
        judges = [(func, weight) for func, weight in weighted if func.startswith(PREFIX)]
        if not judges or not trajectory.actions:
            return
        known = known_of(row, messages, response)
        scores = await asyncio.gather(*(self._judge(func).score(known) for func, _ in judges))
        for (func, _), score in zip(judges, scores, strict=True):
            if score.no_reward and self._unjudged == "raise":
                raise TimeoutError(
                    f"reward function {func} gave no verdict; environment.reward_on_timeout=zero counts it as 0"
                )
        trajectory.actions[-1].reward += sum(w * score.reward for (_, w), score in zip(judges, scores, strict=True))
        funcs = [func for func, _ in weighted]
        names = dict(zip(funcs, short_names(funcs), strict=True))
        found = metrics_of([names[func] for func, _ in judges], scores, [False] * len(judges), row.get("domain"))
        trajectory.metrics = {**trajectory.metrics, **found}

    async def close(self) -> None:
        await asyncio.gather(*(judge.close() for judge in self._judges.values()))

    def _judge(self, func: str) -> LLMJudge:
        name = func.removeprefix(PREFIX)
        if name not in self._judges:
            raise UserError(f"{unknown('judge', name, self._judges)} (environment.judges)")
        return self._judges[name]
