"""A judge behind an address, by OpenAI's chat completions.

Invariant: a question is answered, or one of two errors says why: ``UnansweredError``, whose cause lies in the question
or passes, or ``UserError``, which no other question would spare. A key is sent in the request's header, and stands in
no message, whatever the server says.

| the server                                         | then                                               |
|----------------------------------------------------|----------------------------------------------------|
| is out of reach, late, or says nonsense; says 408, | another try after a pause (``Retry-After`` counts) |
| 409, 425, 429, 5xx                                 |                                                    |
| says 401, 403, 404                                 | ``UserError``                                      |
| says another 4xx (a question that is too long)     | ``UnansweredError``                                |
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from skyasync.config.schema.judges import JudgeConfig
from skyasync.errors import UserError

if TYPE_CHECKING:
    import aiohttp

Messages = list[dict[str, str]]

LONGEST_PAUSE_S = 30.0
_PASSING = (408, 409, 425, 429)
_FOR_GOOD = (401, 403, 404)
_SHOWN = 300  # characters of what a server says
_BUSY = (429, 503)


class UnansweredError(Exception):
    """There is no answer to this question; the message says why. ``tried``: in all tries that it may have."""

    tried = False


class TemporaryServerError(Exception):
    """One try has failed, and another may not. ``after_s``: what the server asks to wait; ``busy``: it is there."""

    def __init__(self, message: str, after_s: float = 0.0, *, busy: bool = False) -> None:
        super().__init__(message)
        self.after_s, self.busy = after_s, busy


def key_of(name: str, judge: JudgeConfig) -> str:
    """The server's key, from the environment.

    Raises:
        UserError: if the variable is not set, or holds what no header can.
    """
    if not judge.api_key_env:
        return ""
    found = os.environ.get(judge.api_key_env, "").strip()
    where = f"environment.judges.{name}.api_key_env={judge.api_key_env}: this environment variable"
    if not found:
        raise UserError(f"{where} is {'empty' if judge.api_key_env in os.environ else 'not set'}")
    if not (found.isascii() and found.isprintable()):
        raise UserError(f"{where} holds no key: it has characters that no header can have")
    return found


class ChatServer:
    """One judge's server.

    Args:
        key: "" sends none.
    """

    def __init__(self, name: str, judge: JudgeConfig, key: str) -> None:
        self._name, self._judge, self._key = name, judge, key
        self._url = f"{judge.base_url.rstrip('/')}/chat/completions"
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, messages: Messages) -> str:
        """The model's answer.

        Raises:
            UnansweredError: for this question alone, or after the last try.
            UserError: if the server refuses whoever asks.
        """
        judge, problem = self._judge, ""
        for number in range(judge.retries + 1):
            try:
                return await self._try(self._body(messages), judge.timeout_s)
            except TemporaryServerError as error:
                problem = str(error)
                if number < judge.retries:
                    pause_s = min(2.0**number * random.uniform(0.75, 1.25), LONGEST_PAUSE_S)
                    await asyncio.sleep(max(pause_s, min(error.after_s, 2 * LONGEST_PAUSE_S)))
        failure = UnansweredError(f"{self._url} gave no answer in {judge.retries + 1} tries; the last: {problem}")
        failure.tried = True
        raise failure

    async def probe(self) -> None:
        """Ask it something short, once: what would refuse every question is told before a run has begun.

        Raises:
            UserError: if it cannot be reached, refuses, or does not answer in OpenAI's form.
        """
        where = f"environment.judges.{self._name}"
        body = self._body([{"role": "user", "content": "Answer with the number 1."}])
        try:
            await self._try(body, self._judge.timeout_s)
        except TemporaryServerError as error:
            if not error.busy:
                raise UserError(f"{where}: {self._url} does not answer: {error}") from error
        except UnansweredError as error:
            raise UserError(f"{where}: {error}") from error
        finally:
            await self.close()

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _body(self, messages: Messages) -> dict[str, Any]:
        judge = self._judge
        own = {"model": judge.model, "messages": messages, "max_tokens": judge.max_tokens}
        fields: dict[str, Any] = {**own, "temperature": judge.temperature, **judge.extra_body}
        return {name: value for name, value in fields.items() if value is not None}

    async def _try(self, body: Mapping[str, Any], limit_s: float) -> str:
        import aiohttp

        try:
            async with asyncio.timeout(limit_s) as timer, self._open().post(self._url, json=body) as response:
                said = await response.text(errors="replace")
                self._check_status(response.status, said, response.headers.get("Retry-After", ""))
                return self._content(said)
        except TimeoutError as error:
            if not timer.expired():
                raise TemporaryServerError(self._hidden(f"{error or 'timeout'}")) from None
            raise TemporaryServerError(
                f"no answer within {limit_s:g} s (environment.judges.{self._name}.timeout_s)"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise TemporaryServerError(self._hidden(str(error) or type(error).__name__)) from None

    def _open(self) -> aiohttp.ClientSession:
        """Made where it is used: it belongs to the event loop that runs then."""
        import aiohttp

        if self._session is None:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            connector = aiohttp.TCPConnector(limit=self._judge.max_concurrent)
            self._session = aiohttp.ClientSession(headers=headers, connector=connector, timeout=aiohttp.ClientTimeout())
        return self._session

    def _check_status(self, status: int, said: str, after: str) -> None:
        if status < 400:
            return
        problem = f"status {status}: {self._shown(said)}"
        if status in _PASSING or status >= 500:
            raise TemporaryServerError(problem, float(after) if after.isdecimal() else 0.0, busy=status in _BUSY)
        if status in _FOR_GOOD:
            where = f"environment.judges.{self._name}"
            hint = {404: f"{where}.base_url, {where}.model"}.get(status, f"{where}.api_key_env")
            raise UserError(f"judge {self._name}: {self._url} refuses ({hint}): {problem}")
        raise UnansweredError(f"{self._url} refuses the question, {problem}")

    def _content(self, said: str) -> str:
        try:
            message = json.loads(said)["choices"][0]["message"]
            content = message["content"]
        except (ValueError, LookupError, TypeError):
            raise TemporaryServerError(f"this is no chat completion: {self._shown(said)}") from None
        if isinstance(content, list):
            content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
        return str(content or "")

    def _shown(self, said: str) -> str:
        text = " ".join(self._hidden(said).split())
        return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."

    def _hidden(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text
