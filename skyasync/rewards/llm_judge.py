"""A language model that grades responses: one reward function, ``judge:NAME``.

Invariant: a response has one grade, or is counted as one without a reward. A question that is in
flight or was answered is not sent again. A judge that has failed, or never gives an answer that its
parser reads, ends the run with one line; a single failure does not. A key is sent in the request's
header, and is in no message, whatever the server answers.

| who waits   | for what                       | woken by                                                       |
|-------------|--------------------------------|----------------------------------------------------------------|
| ``score``   | its question's task            | the task; a cancelled caller leaves it to the others           |
| the task    | its turn, the answer           | another task's end; the server or engine, within its own limit |
| the task    | a parser in the user's module  | the subprocess that runs it, or ``READ_S``                     |

A judge is the run's own engines, or a server in OpenAI's form:

| the server                                                  | then                                               |
|-------------------------------------------------------------|----------------------------------------------------|
| cannot be reached, is late, or sends no chat completion;     | another try after a pause (``Retry-After`` counts) |
| answers 408, 409, 425, 429, 5xx                              |                                                    |
| answers 401, 403, 404                                        | ``UserError``                                      |
| answers another 4xx (a question that is too long)            | ``UnansweredError``                                |
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import random
from collections.abc import Mapping
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from skyasync.config.schema.judges import JudgeConfig
from skyasync.errors import UserError
from skyasync.rewards.judge_prompts import (
    BUILTIN_PARSERS,
    fill_prompt,
    judge_inputs,
    parse_grade,
    prompt_text,
)
from skyasync.rewards.signature import Inputs, Score
from skyasync.utils.subprocess_worker import NoAnswerError, SubprocessPool

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger(__name__)

Messages = list[dict[str, str]]

READ_S = 5.0  # for a user's parser on one answer: a regular expression may backtrack without end
PARSERS = 8  # subprocesses that run a user's parser
# So many first answers without any grade: the parser or the prompt is wrong, and the run ends.
ILLEGIBLE = 32
CACHED_GRADES = 100_000  # at most in memory; the oldest are dropped
LONGEST_PAUSE_S = 30.0  # between two tries
MOST_BYTES = 16 << 20  # of a server's answer, which is read into memory
SHOWN = 300  # characters of a server's answer in a message
# HTTP status codes
TRANSIENT = (408, 409, 425, 429)  # another try may succeed, as with every 5xx
PERMANENT = (401, 403, 404)  # every question will fail: the key or the address is wrong
BUSY = (429, 503)  # the server works, but has too many requests


class JudgeModel(Protocol):
    """A server, or an engine."""

    async def ask(self, messages: Messages) -> str: ...
    async def close(self) -> None: ...


class LLMJudge:
    """One of ``environment.judges``.

    Args:
        remembers: a question that was answered is not asked again.
    """

    def __init__(
        self, name: str, judge: JudgeConfig, model: JudgeModel, *, remembers: bool = True
    ) -> None:
        self._name = name
        self._judge = judge
        self._model = model
        self._remembers = remembers
        self._prompt = prompt_text(name, judge)
        self._request_slots = asyncio.Semaphore(judge.max_concurrent)
        # Both by the digest of the question.
        self._scores: dict[bytes, Score] = {}
        self._in_flight: dict[bytes, asyncio.Task[Score]] = {}
        self._answers = 0
        self._graded_answers = 0
        self._warned = False
        self._parsers = SubprocessPool(PARSERS)

    async def score(self, inputs: Inputs) -> Score:
        """The grade of a response.

        Args:
            inputs: the row's columns, ``prompt``, ``messages``, ``response`` and ``label``.

        Raises:
            UserError: if the row lacks a column that the prompt shows, the server refuses, or no
                answer can be read.
            RuntimeError: if no question was answered for as long as this one was tried.
        """
        question = fill_prompt(self._name, self._prompt, judge_inputs(inputs))
        # A response may hold half a surrogate pair, which cannot be encoded otherwise.
        encoded = question.encode(errors="surrogatepass")
        key = blake2b(encoded, digest_size=16).digest()
        if key in self._scores:
            return self._scores[key]
        if key not in self._in_flight:
            task = asyncio.get_running_loop().create_task(self._grade(key, question))
            task.add_done_callback(_retrieve_exception)
            self._in_flight[key] = task
        # Shielded: a cancelled caller leaves the task to the others that wait for it.
        return await asyncio.shield(self._in_flight[key])

    async def close(self) -> None:
        """Cancel the requests in flight; end the connections and the parsers' subprocesses."""
        tasks = list(self._in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._model.close()
        await asyncio.to_thread(self._parsers.close)  # it waits for subprocesses

    async def _grade(self, key: bytes, question: str) -> Score:
        try:
            async with self._request_slots:
                score = await self._ask(question)
        finally:
            self._in_flight.pop(key, None)
        if self._remembers and not score.no_reward:
            self._scores[key] = score
            if len(self._scores) > CACHED_GRADES:
                oldest = next(iter(self._scores))  # dictionaries are in order of insertion
                del self._scores[oldest]
        return score

    async def _ask(self, question: str) -> Score:
        messages = [{"role": "user", "content": question}]
        if self._judge.system_prompt:
            messages.insert(0, {"role": "system", "content": self._judge.system_prompt})
        parser = f"parser={self._judge.parser}"
        answers_at_start = self._answers
        try:
            answer = await self._model.ask(messages)
        except UnansweredError as problem:
            # If no other question was answered meanwhile, the judge has failed, not the question.
            if problem.tried and self._answers == answers_at_start:
                raise RuntimeError(
                    f"judge {self._name} (environment.judges.{self._name}): {problem}"
                ) from problem
            return self._no_reward(str(problem))
        self._answers += 1
        score = await self._parsed(answer)
        if score is not None:
            self._graded_answers += 1
            reward = (score.reward - self._judge.offset) * self._judge.scale
            if self._judge.clip:
                low, high = self._judge.clip
                reward = min(max(reward, low), high)
            return Score(reward, {**score.metrics, "raw": score.reward})
        if self._graded_answers == 0 and self._answers >= ILLEGIBLE:
            if answer.strip():
                hint = ""
            else:
                hint = f" (it is empty: max_tokens={self._judge.max_tokens} may end its thinking)"
            raise UserError(
                f"judge {self._name}: environment.judges.{self._name}.{parser} finds no grade in any of its first "
                f"{self._answers} answers; the last one{hint}: {_excerpt(answer)}. Change the parser, or the prompt, "
                f"which says how to answer"
            )
        return self._no_reward(f"{parser} finds no grade in {_excerpt(answer)}")

    async def _parsed(self, answer: str) -> Score | None:
        parser = self._judge.parser
        if parser in BUILTIN_PARSERS:
            return parse_grade(parser, answer)
        # A user's parser runs in a subprocess: one that hangs can only be ended with its process.
        name = f"judge:{self._name}"
        portable = pickle.dumps(partial(parse_grade, parser))
        arguments = {"text": answer}
        try:
            return await asyncio.to_thread(self._parsers.call, name, portable, arguments, READ_S)
        except NoAnswerError as problem:
            log.warning("the parser of judge %s: %s", self._name, problem)
            return None

    def _no_reward(self, reason: str) -> Score:
        if not self._warned:
            self._warned = True
            log.warning(
                "judge %s gave no grade (others are counted, env/<judge>/no_reward): %s",
                self._name,
                reason,
            )
        return Score(0.0, no_reward=True)


def _retrieve_exception(task: asyncio.Task[Score]) -> None:
    """Avoid asyncio's warning about an exception that no caller waits for any more."""
    if not task.cancelled():
        task.exception()


def _excerpt(answer: str) -> str:
    """The beginning and the end of an answer, where its grade should be."""
    if len(answer) <= 200:
        return repr(answer)
    return repr(f"{answer[:60]}...{answer[-137:]}")


# ---------------------------------------------------------------- servers


class UnansweredError(Exception):
    """There is no answer to this question; the message says why.

    ``tried``: all tries failed. If not, the server refused the question at once.
    """

    tried = False


class TemporaryServerError(Exception):
    """One try failed; another may succeed.

    Args:
        after_s: the pause that the server asks for, in seconds.
        busy: the server answered that it has too many requests.
    """

    def __init__(self, message: str, after_s: float = 0.0, *, busy: bool = False) -> None:
        super().__init__(message)
        self.after_s = after_s
        self.busy = busy


def key_of(name: str, judge: JudgeConfig) -> str:
    """The server's key, from the environment.

    Raises:
        UserError: if the variable is not set, or has characters that no header can have.
    """
    if not judge.api_key_env:
        return ""
    value = os.environ.get(judge.api_key_env, "").strip()
    where = f"environment.judges.{name}.api_key_env={judge.api_key_env}: this environment variable"
    if not value:
        raise UserError(f"{where} is {'empty' if judge.api_key_env in os.environ else 'not set'}")
    if not (value.isascii() and value.isprintable()):
        raise UserError(f"{where} holds no key: it has characters that no header can have")
    return value


class ChatServer:
    """One judge's server.

    Args:
        key: sent with each request; "" sends none.
    """

    def __init__(self, name: str, judge: JudgeConfig, key: str) -> None:
        self._name = name
        self._judge = judge
        self._key = key
        self._url = f"{judge.base_url.rstrip('/')}/chat/completions"
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, messages: Messages) -> str:
        """The model's answer.

        Raises:
            UnansweredError: for this question alone, or after the last try.
            UserError: if the server refuses every question.
        """
        judge = self._judge
        problem = ""
        for number in range(judge.retries + 1):
            try:
                return await self._try(self._body(messages), judge.timeout_s)
            except TemporaryServerError as error:
                problem = str(error)
                if number < judge.retries:
                    # Random, so that many questions that failed together do not return together.
                    pause_s = min(2.0**number * random.uniform(0.75, 1.25), LONGEST_PAUSE_S)
                    # A server's Retry-After counts more, but may not stop the run for hours.
                    server_pause_s = min(error.after_s, 2 * LONGEST_PAUSE_S)
                    await asyncio.sleep(max(pause_s, server_pause_s))
        failure = UnansweredError(
            f"{self._url} gave no answer in {judge.retries + 1} tries; the last: {problem}"
        )
        failure.tried = True
        raise failure

    async def probe(self) -> None:
        """Ask a short question once, so that a server that fails is an error before the run.

        Raises:
            UserError: if it cannot be reached, refuses, or does not answer in OpenAI's form.
        """
        where = f"environment.judges.{self._name}"
        body = self._body([{"role": "user", "content": "Answer with the number 1."}])
        try:
            await self._try(body, self._judge.timeout_s)
        except TemporaryServerError as error:
            if not error.busy:  # a busy server works
                raise UserError(f"{where}: {self._url} does not answer: {error}") from error
        except UnansweredError as error:
            raise UserError(f"{where}: {error}") from error
        finally:
            await self.close()

    async def close(self) -> None:
        session = self._session
        self._session = None
        if session is not None:
            await session.close()

    def _body(self, messages: Messages) -> dict[str, Any]:
        judge = self._judge
        fields: dict[str, Any] = {
            "model": judge.model,
            "messages": messages,
            "max_tokens": judge.max_tokens,
            "temperature": judge.temperature,
            **judge.extra_body,
        }
        # extra_body removes a field by setting it to null: some servers reject fields.
        return {name: value for name, value in fields.items() if value is not None}

    async def _try(self, body: Mapping[str, Any], limit_s: float) -> str:
        import aiohttp

        if self._session is None:  # made here: a session belongs to the event loop that runs now
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            connector = aiohttp.TCPConnector(limit=self._judge.max_concurrent)
            self._session = aiohttp.ClientSession(
                headers=headers, connector=connector, timeout=aiohttp.ClientTimeout()
            )
        try:
            async with (
                asyncio.timeout(limit_s) as timer,
                self._session.post(self._url, json=body) as response,
            ):
                content = bytearray()
                # In chunks, so that an endless answer does not fill the memory.
                async for chunk in response.content.iter_any():
                    content += chunk
                    if len(content) > MOST_BYTES:
                        raise TemporaryServerError(f"its answer has more than {MOST_BYTES:,} bytes")
                text = content.decode(errors="replace")
                status = response.status
                if status < 400:
                    return self._content(text)
                problem = f"status {status}: {self._shown(text)}"
                if status in TRANSIENT or status >= 500:
                    pause = response.headers.get("Retry-After", "")
                    pause_s = float(pause) if pause.isdecimal() else 0.0
                    raise TemporaryServerError(problem, pause_s, busy=status in BUSY)
                if status in PERMANENT:
                    where = f"environment.judges.{self._name}"
                    if status == 404:
                        hint = f"{where}.base_url, {where}.model"
                    else:
                        hint = f"{where}.api_key_env"
                    raise UserError(f"judge {self._name}: {self._url} refuses ({hint}): {problem}")
                raise UnansweredError(f"{self._url} refuses the question, {problem}")
        except TimeoutError as error:
            if not timer.expired():  # the connection's own timeout
                raise TemporaryServerError(self._hidden(f"{error or 'timeout'}")) from None
            raise TemporaryServerError(
                f"no answer within {limit_s:g} s (environment.judges.{self._name}.timeout_s)"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise TemporaryServerError(self._hidden(str(error) or type(error).__name__)) from None

    def _content(self, text: str) -> str:
        """The message of a chat completion, given as its JSON."""
        try:
            content = json.loads(text)["choices"][0]["message"]["content"]
            if isinstance(content, list):  # some servers answer with a list of parts
                texts = [part.get("text", "") for part in content if isinstance(part, dict)]
                content = "".join(texts)
        except (ValueError, LookupError, TypeError, RecursionError):
            raise TemporaryServerError(
                f"this is not a chat completion: {self._shown(text)}"
            ) from None
        return str(content or "")

    def _shown(self, text: str) -> str:
        """The text for a message: one line, without the key."""
        line = " ".join(self._hidden(text).split())
        if len(line) <= SHOWN:
            return line
        return f"{line[: SHOWN - 3]}..."

    def _hidden(self, text: str) -> str:
        if self._key:  # a server may repeat the request's header in its error
            return text.replace(self._key, "***")
        return text
