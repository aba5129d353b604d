"""The judges of a run, and whom they ask: servers, or the run's own engines.

Invariant: an episode that was played to its end has its judges' verdicts in its reward before its group is complete;
what is trained, filtered, kept or evaluated never lacks one. Nothing here blocks the event loop: an episode that waits
for its verdict holds up no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from skyasync.config.judges import PREFIX, JudgeConfig, judges_of
from skyasync.config.schema import Config
from skyasync.envs.base import Conversation
from skyasync.envs.reward import known_of, metrics_of
from skyasync.errors import UserError, unknown
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.rewards.chat_server import ChatServer, Messages, UnansweredError, key_of
from skyasync.rewards.llm_judge import LLMJudge
from skyasync.rewards.score import Score
from skyasync.rewards.settings import short_names
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Trajectory

NO_JUDGES = (
    "the row's reward functions name a judge, and there are none: set environment.judges.NAME (a generator of your own "
    "takes them from BasePPOExp.get_judges)"
)
Weighted = Sequence[tuple[str, float]]


class EngineAsked:
    """The run's engines as a judge: they answer with the weights that they have then, between their other requests."""

    def __init__(
        self, name: str, judge: JudgeConfig, client: InferenceClient, chat: ChatTokenizer, max_model_len: int
    ) -> None:
        self._name, self._judge, self._client = name, judge, client
        self._chat, self._max_model_len, self._numbers = chat, max_model_len, count()

    async def ask(self, messages: Messages) -> str:
        """The engine's answer.

        Raises:
            UnansweredError: if the question leaves no room for one, or the engine was told to end it.
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
        unjudged: ``environment.reward_unjudged``.
    """

    def __init__(self, judges: Mapping[str, LLMJudge], unjudged: str = "zero") -> None:
        self._judges, self._unjudged = judges, unjudged

    @classmethod
    def of(
        cls, cfg: Config, keys: Mapping[str, str], client: InferenceClient, tokenizer: Tokenizer, max_model_len: int
    ) -> Judges:
        """Those of a run.

        Args:
            keys: of their servers, by the judges' names; those that are missing are read from the environment.
        """
        chat, made = ChatTokenizer(tokenizer, cfg.data.apply_chat_template), {}
        for name, judge in judges_of(cfg.environment.judges).items():
            if judge.engine:
                engine = EngineAsked(name, judge, client, chat, max_model_len)
                made[name] = LLMJudge(name, judge, engine, remembers=False)
            else:
                server = ChatServer(name, judge, keys[name] if name in keys else key_of(name, judge))
                made[name] = LLMJudge(name, judge, server, remembers=judge.cache)
        return cls(made, cfg.environment.reward_unjudged)

    async def add(
        self, trajectory: Trajectory, weighted: Weighted, row: dict[str, Any], messages: Conversation, response: str
    ) -> None:
        """Ask the judges among a row's reward functions, and add what they say to the episode's reward and metrics.

        Raises:
            UserError: for a judge that there is not, or one that cannot judge the row.
            TimeoutError: for a response without a verdict, where ``environment.reward_unjudged`` is raise.
        """
        asked = [(func, weight) for func, weight in weighted if func.startswith(PREFIX)]
        if not asked or not trajectory.actions:
            return
        known = known_of(row, messages, response)
        scores = await asyncio.gather(*(self._judge(func).score(known) for func, _ in asked))
        self._refuse_unjudged([func for func, _ in asked], scores)
        trajectory.actions[-1].reward += sum(w * score.reward for (_, w), score in zip(asked, scores, strict=True))
        names = dict(zip((func for func, _ in weighted), short_names([func for func, _ in weighted]), strict=True))
        found = metrics_of([names[func] for func, _ in asked], scores, [False] * len(asked), row.get("domain"))
        trajectory.metrics = {**trajectory.metrics, **found}

    async def close(self) -> None:
        await asyncio.gather(*(judge.close() for judge in self._judges.values()))

    def _judge(self, func: str) -> LLMJudge:
        name = func.removeprefix(PREFIX)
        if name not in self._judges:
            raise UserError(f"{unknown('judge', name, self._judges)} (environment.judges)")
        return self._judges[name]

    def _refuse_unjudged(self, funcs: Sequence[str], scores: Sequence[Score]) -> None:
        for func, score in zip(funcs, scores, strict=True):
            if score.unjudged and self._unjudged == "raise":
                raise TimeoutError(
                    f"reward function {func} gave no verdict; environment.reward_unjudged=zero counts it as 0"
                )
