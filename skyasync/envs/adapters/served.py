"""Environments that a server plays over HTTP: OpenEnv's and NeMo Gym's.

``environment.env_class=openenv:URL`` or ``nemo_gym:URL`` names such an environment. It exchanges
text with the model, as every environment does; the server sees no tokens.

Invariant: an answer has at most ``MAX_BYTES`` and comes within ``timeout_s``, or the episode fails
as one whose environment raises. A request that may change the server's episode is sent once: if it
fails the episode is over. A server that refuses or loses the first request of an episode is asked
again (``environment.max_retries``).
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn
from urllib.parse import urlsplit

import aiohttp

from skyasync.envs.base import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    Conversation,
    EnvConfig,
    InvalidEnvOutputError,
    Metrics,
    Row,
)
from skyasync.errors import TransientError, UserError

MAX_BYTES = 16 << 20  # of one answer, which is read into memory
CHECK_S = 10.0  # for the answer of a server before the run
BUSY = (429, 502, 503, 504)  # HTTP statuses after which another try may succeed

Answer = Any  # JSON of a server, not checked


class ServedEnv(BaseTextEnv):
    """An environment of a server.

    Its settings are the row's columns, or else those in ``environment.env_config.openenv`` (or
    ``nemo_gym``).

    Args (of these settings):
        max_steps: the episode ends after so many responses; 0 leaves it to the server and
            ``generator.max_turns``.
        timeout_s: the longest wait for an answer of the server.
    """

    #: The name before the address, and the key in ``environment.env_config``.
    hub: ClassVar[str]
    #: The path of the server's description.
    description_path: ClassVar[str]
    #: The end of the error message for another type of server.
    not_served: ClassVar[str]
    #: The server's address; set by ``at``.
    url: ClassVar[str] = ""
    #: The server's description; read by the first episode of a process.
    description: ClassVar[Answer] = None

    @classmethod
    def at(cls, url: str) -> type[ServedEnv]:
        """The environment at an address.

        Raises:
            UserError: if it is no address.
        """
        try:
            address = urlsplit(url)
            has_host = bool(address.hostname) and address.port != 0
            is_address = has_host and address.scheme in ("http", "https")
        except ValueError:  # of a port that is not a number, too
            is_address = False
        if not is_address or address.query or address.fragment:
            raise UserError(
                f"environment {cls.hub}:{url}: {url or 'nothing'!r} is not the address of a server: write it as in "
                f"{cls.hub}:http://127.0.0.1:8000"
            )
        return type(cls.__name__, (cls,), {"url": url.rstrip("/")})

    @classmethod
    def check_server(cls) -> None:
        """Raise ``UserError`` if no server of this type answers at the address. Blocks."""
        where = f"environment {cls.hub}:{cls.url}"
        # Without the proxies of the environment: servers of environments are in the same network.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(cls.url + cls.description_path, timeout=CHECK_S) as response:
                description = _parsed(response.read(MAX_BYTES + 1), cls.description_path)
        except urllib.error.HTTPError as error:
            raise UserError(
                f"{where} answers HTTP {error.code} to {cls.description_path}: {cls.not_served}"
            ) from None
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise UserError(
                f"{where} does not answer ({reason}): start its server, or correct the address"
            ) from None
        except InvalidEnvOutputError as error:
            raise UserError(f"{where}: {error}: {cls.not_served}") from None
        if not cls.is_described_by(description):
            raise UserError(
                f"{where}: {cls.description_path} describes something else: {cls.not_served}"
            )

    @classmethod
    def is_described_by(cls, description: Answer) -> bool:
        """Whether this is the description of a server of this type."""
        raise NotImplementedError

    def __init__(self, env_config: EnvConfig | None = None, extras: Row | None = None) -> None:
        super().__init__(env_config, extras)
        self.settings: EnvConfig = {**self.env_config.get(self.hub, {}), **self.extras}
        self.max_steps = int(self.settings.get("max_steps") or self.extras.get("max_turns") or 0)
        self.timeout_s = float(self.settings.get("timeout_s", 60.0))
        self.metrics: Metrics = {}
        self._http: aiohttp.ClientSession | None = None
        self._failed = ""

    async def start(self) -> tuple[Conversation, str]:
        """Begin the episode; returns messages after the row's, and a description of the tools."""
        raise NotImplementedError

    async def play(self, action: str) -> BaseTextEnvStepOutput:
        """The server's answer to a response, which ``self.turns`` counts already."""
        raise NotImplementedError

    async def init(self, prompt: Conversation) -> tuple[Conversation, dict[str, Any]]:
        if type(self).description is None:
            type(self).description = await self.request(
                "GET", self.description_path, repeatable=True
            )
            if not self.is_described_by(self.description):
                raise InvalidEnvOutputError(f"{self.url}{self.description_path}: {self.not_served}")
        messages, tools = await self.start()
        opening = [*prompt, *messages]
        # Many chat templates reject two messages of one role in a row.
        if len(opening) > 1 and opening[-1]["role"] == opening[-2]["role"]:
            final = opening.pop()
            content = f"{opening[-1]['content']}\n{final['content']}".strip("\n")
            opening[-1] = {**opening[-1], "content": content}
        if tools and opening[0]["role"] == "system":
            opening[0] = {**opening[0], "content": f"{opening[0]['content']}\n\n{tools}"}
        elif tools:
            opening.insert(0, {"role": "system", "content": tools})
        return opening, {}

    async def step(self, action: str) -> BaseTextEnvStepOutput:
        if self._failed:
            raise ConnectionError(self._failed)
        self.turns += 1
        output = await self.play(action)
        if self.turns == self.max_steps or output["done"]:
            output |= {"done": True, "observations": []}
        return output

    def get_metrics(self) -> Metrics:
        return {**self.metrics, "steps": float(self.turns)}

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    @property
    def http(self) -> aiohttp.ClientSession:
        """The connection of this episode, with its cookies."""
        if self._http is None:
            jar = aiohttp.CookieJar(unsafe=True)  # also cookies of hosts that are IP addresses
            self._http = aiohttp.ClientSession(cookie_jar=jar)
        return self._http

    async def request(
        self, method: str, path: str, body: object = None, *, repeatable: bool = False
    ) -> Answer:
        """The JSON that the server answers with.

        Args:
            repeatable: it may be sent again: it begins the episode or changes nothing at the
                server.

        Raises:
            TransientError: if the server is away or busy, and may be asked again.
            ConnectionError: if it is away.
            InvalidEnvOutputError: if it answers an error, no JSON, or too much.
        """
        status, data = await self.exchange(method, path, body, repeatable=repeatable)
        if status >= 400:
            excerpt = data[:300].decode(errors="replace")
            problem = f"{self.url}{path} answered HTTP {status}: {excerpt}"
            if status in BUSY:
                self.fail(problem, repeatable=repeatable)
            raise InvalidEnvOutputError(problem)
        return _parsed(data, f"{self.url}{path}")

    async def exchange(
        self, method: str, path: str, body: object = None, *, repeatable: bool = False
    ) -> tuple[int, bytes]:
        """The status and the content of any answer, errors included."""
        url = f"{self.url}{path}"
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            async with self.http.request(
                method, url, json=body, timeout=timeout, allow_redirects=False
            ) as answer:
                content = bytearray()
                # In chunks, so that an endless answer does not fill the memory.
                async for chunk in answer.content.iter_any():
                    content += chunk
                    if len(content) > MAX_BYTES:
                        raise InvalidEnvOutputError(
                            f"{url} answered with more than {MAX_BYTES >> 20} MiB"
                        )
                return answer.status, bytes(content)
        except TimeoutError:
            self.fail(
                f"{url} did not answer within {self.timeout_s:g} s (timeout_s)",
                repeatable=repeatable,
            )
        except aiohttp.ClientError as error:
            self.fail(
                f"{url} is unreachable: {type(error).__name__}: {error}", repeatable=repeatable
            )

    def fail(self, problem: str, *, repeatable: bool = False) -> NoReturn:
        """Raise for a server that did not answer.

        Raises:
            TransientError: if the request is repeatable.
            ConnectionError: if not; the episode is over.
        """
        if repeatable:
            raise TransientError(problem)
        self._failed = problem
        raise ConnectionError(problem)


def _parsed(data: bytes | str, source: str) -> Answer:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise InvalidEnvOutputError(f"{source} answered no JSON: {data[:80]!r}") from None


def numbers(values: object) -> Metrics:
    """The entries that are numbers or truth values, by name."""
    result: Metrics = {}
    if isinstance(values, Mapping):
        for name, value in values.items():
            if isinstance(value, bool | int | float):
                result[str(name)] = float(value)
    return result


def about_tools(schemas: list[dict[str, Any]]) -> str:
    """A text for the model: the tools and how to call them. It needs no support of templates."""
    lines = "\n".join(json.dumps(schema) for schema in schemas)
    return (
        f"Tools:\n<tools>\n{lines}\n</tools>\n"
        'Call a tool like this: <tool_call>{"name": "TOOL", "arguments": {"NAME": "VALUE"}}</tool_call>'
    )
