"""A language model that judges responses: one reward function, ``judge:NAME``.

Invariant: a response has one verdict, or is counted as unjudged; a question that is being asked or was answered is not
asked again. A judge that is gone, or never says anything that its parser reads, ends the run with one line; one that
fails here and there does not.

| who waits   | for what                | woken by                                                       |
|-------------|-------------------------|----------------------------------------------------------------|
| ``score``   | its question's task     | the task; who gives up waiting leaves it to the others         |
| the task    | its turn, the answer    | another task's end; the server or engine, within its own limit |
| the task    | a parser of the user's  | the process that runs it, or ``READ_S``                        |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

from skyasync.config.schema.judges import JudgeConfig, is_text
from skyasync.errors import UserError, nearest
from skyasync.processes.apart import NoAnswerError
from skyasync.rewards.chat_server import Messages, UnansweredError
from skyasync.rewards.judge import Judge
from skyasync.rewards.score import Score
from skyasync.rewards.verdicts import Reader, adjusted, known_to_judge, question

log = logging.getLogger(__name__)

READ_S = 5.0  # for a parser of the user's, on one answer
ILLEGIBLE = 32  # answers, the first of all, without a verdict among them: the parser is wrong, or the prompt
REMEMBERED = 100_000  # verdicts
_SHOWN = 200


class Asked(Protocol):
    """Whoever answers: a server, or an engine."""

    async def ask(self, messages: Messages) -> str: ...
    async def close(self) -> None: ...


def prompt_text(name: str, judge: JudgeConfig) -> str:
    """The prompt itself, where the configuration names its file.

    Raises:
        UserError: if there is no such file.
    """
    if is_text(judge.prompt):
        return judge.prompt
    path = Path(judge.prompt).expanduser()
    if not path.is_file():
        close = nearest(path.name, [beside.name for beside in path.parent.glob("*") if beside.is_file()], count=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(
            f"environment.judges.{name}.prompt={judge.prompt}: there is no such file{hint} (to write the prompt itself "
            f"here, include a placeholder such as {{response}})"
        )
    return path.read_text(encoding="utf-8")


class LLMJudge:
    """One of ``environment.judges``.

    Args:
        remembers: a question that was answered is not asked again.
    """

    def __init__(self, name: str, judge: JudgeConfig, asked: Asked, *, remembers: bool = True) -> None:
        self._name, self._judge, self._asked, self._remembers = name, judge, asked, remembers
        self._prompt, self._reader = prompt_text(name, judge), Reader(judge.parser)
        self._turns = asyncio.Semaphore(judge.max_concurrent)
        self._verdicts: dict[bytes, Score] = {}
        self._asking: dict[bytes, asyncio.Task[Score]] = {}
        self._answers = self._legible = 0
        self._told = False
        self._parsing = Judge()

    async def score(self, known: Mapping[str, Any]) -> Score:
        """The verdict on a response.

        Args:
            known: the row's columns, ``prompt``, ``messages``, ``response`` and ``label``.

        Raises:
            UserError: if the row lacks what the prompt shows, the server refuses, or no answer can be read.
            RuntimeError: if nothing has answered for as long as this question was tried.
        """
        asked = question(self._name, self._prompt, known_to_judge(known))
        key = blake2b(asked.encode(errors="surrogatepass"), digest_size=16).digest()
        if key in self._verdicts:
            return self._verdicts[key]
        if key not in self._asking:
            task = self._asking[key] = asyncio.get_running_loop().create_task(self._verdict(key, asked))
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # told to those who wait
        return await asyncio.shield(self._asking[key])

    async def close(self) -> None:
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._asked.close()
        await asyncio.to_thread(self._parsing.close)

    async def _verdict(self, key: bytes, asked: str) -> Score:
        try:
            async with self._turns:
                score = await self._ask(asked)
        finally:
            self._asking.pop(key, None)
        if self._remembers and not score.unjudged:
            self._verdicts[key] = score
            if len(self._verdicts) > REMEMBERED:
                del self._verdicts[next(iter(self._verdicts))]
        return score

    async def _ask(self, asked: str) -> Score:
        system = [{"role": "system", "content": self._judge.system_prompt}] if self._judge.system_prompt else []
        before = self._answers
        try:
            said = await self._asked.ask([*system, {"role": "user", "content": asked}])
        except UnansweredError as problem:
            if problem.tried and self._answers == before:  # nor was any other question answered meanwhile
                raise RuntimeError(f"judge {self._name} (environment.judges.{self._name}): {problem}") from problem
            return self._unjudged(str(problem))
        self._answers += 1
        found = await self._read(said)
        if found is None:
            self._check_legible(said)
            return self._unjudged(f"parser={self._judge.parser} finds no verdict in {_shown(said)}")
        self._legible += 1
        return adjusted(found, self._judge)

    async def _read(self, said: str) -> Score | None:
        if self._reader.trusted:
            return self._reader(said)
        name, arguments = f"judge:{self._name}", {"text": said}
        try:
            return await asyncio.to_thread(self._parsing.call, name, self._reader.portable, arguments, READ_S)
        except NoAnswerError as problem:
            log.warning("the parser of judge %s: %s", self._name, problem)
            return None

    def _unjudged(self, why: str) -> Score:
        if not self._told:
            self._told = True
            log.warning("judge %s gave no verdict (others are counted, env/<judge>/unjudged): %s", self._name, why)
        return Score(0.0, unjudged=True)

    def _check_legible(self, said: str) -> None:
        if not self._legible and self._answers >= ILLEGIBLE:
            hint = "" if said.strip() else f" (it is empty: max_tokens={self._judge.max_tokens} may end its thinking)"
            raise UserError(
                f"judge {self._name}: environment.judges.{self._name}.parser={self._judge.parser} finds no verdict in "
                f"any of its first {self._answers} answers; the last one{hint}: {_shown(said)}. Change the parser, or "
                f"the prompt, which says how to answer"
            )


def _shown(said: str) -> str:
    return repr(said if len(said) <= _SHOWN else f"{said[:60]}...{said[-(_SHOWN - 63) :]}")
