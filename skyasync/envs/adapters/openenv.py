"""OpenEnv's environments, over a WebSocket of their server; written against openenv 0.10.

An episode is one socket. Its messages are ``{"type": "reset" | "step", "data": {...}}``, answered
with ``{"type": "observation", "data": {"observation", "reward", "done", "metadata"}}`` or
``{"type": "error", "data": {"code", "message"}}``.

Invariant: an action that the server's schema refuses costs a turn, is answered with what was wrong,
and is counted in ``invalid_actions``. A socket that is lost is not opened again: its episode was
lost with it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from skyasync.envs import ENVS
from skyasync.envs.adapters.served import MAX_BYTES, Answer, ServedEnv, about_tools, numbers
from skyasync.envs.base import (
    BaseTextEnvStepOutput,
    Conversation,
    EnvConfig,
    InvalidEnvOutputError,
    Row,
)
from skyasync.envs.tools import read_tool_calls
from skyasync.errors import UserError, unknown

#: Pauses between requests for a session to a full server; the last one is repeated.
PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0)
Schema = Mapping[str, Any]


class RefusedActionError(Exception):
    """The model's action is invalid in this environment; the model reads the message."""


@ENVS.register("openenv")
class OpenEnvEnv(ServedEnv):
    """Settings besides those of ``ServedEnv``:

    Args:
        seed: of the episode.
        reset: further arguments of the environment's ``reset``.
        action_field: the entry of an action that takes the response's text; by default the only one
            that is required. A response with a JSON object of the action's entries is the action.
            In a text for a number the last number counts, for one of several names the last name.
        action_with: entries that every action has.
        execution_errors: "fail", or "show" if the environment raises for actions of the model: an
            error of a step then costs a turn, is shown to the model, and is counted too.
        show: names of the observation's entries that the model reads; by default all that are not
            empty.
    """

    hub = "openenv"
    description_path = "/schema"
    not_served = "it is not a server of openenv"

    @classmethod
    def is_described_by(cls, description: Answer) -> bool:
        return isinstance(description, Mapping) and isinstance(description.get("action"), Mapping)

    def __init__(self, env_config: EnvConfig | None = None, extras: Row | None = None) -> None:
        super().__init__(env_config, extras)
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._fixed: dict[str, Any] = dict(self.settings.get("action_with") or {})
        on_error = self.settings.get("execution_errors", "fail")
        if on_error not in ("fail", "show"):
            raise UserError(unknown("execution_errors", on_error, ("fail", "show")))
        self._shows_errors = on_error == "show"
        self._metadata: object = {}
        self._refused = 0

    async def start(self) -> tuple[Conversation, str]:
        reset = dict(self.settings.get("reset") or {})
        if "seed" in self.settings:
            reset["seed"] = int(self.settings["seed"])
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await self._first_answer(json.dumps({"type": "reset", "data": reset}))
        except TimeoutError:
            self.fail(
                f"{self.url}/ws did not begin an episode within {self.timeout_s:g} s (timeout_s)",
                repeatable=True,
            )
        observation, _, done = self._read(answer)
        if done:
            raise InvalidEnvOutputError(f"{self.url} begins with an episode that is done")
        text = self._text(observation)
        messages = [{"role": "user", "content": text}] if text else []
        if not self._plays_tools:
            return messages, ""
        answer = await self._ask({"type": "list_tools"})
        tool_list, _, _ = self._read(answer)
        schemas = []
        for tool in tool_list.get("tools") or ():
            function = {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema") or {},
            }
            schemas.append({"type": "function", "function": function})
        return messages, about_tools(schemas)

    async def play(self, action: str) -> BaseTextEnvStepOutput:
        reward = 0.0
        done = False
        messages = list[dict[str, str]]()
        try:
            if self._plays_tools:
                moves = self._tool_calls(action)
            else:
                moves = [self._action(action)]
            for move in moves:
                observation, move_reward, done = self._read(await self._ask(move))
                reward += move_reward
                message = {"role": "user", "content": self._text(observation)}
                if self._plays_tools:
                    message |= {"role": "tool", "name": move["tool_name"]}
                messages.append(message)
                if done:
                    break
        except RefusedActionError as error:
            self._refused += 1
            messages.append({"role": "user", "content": f"error: {error}"})
        self.metrics = {**numbers(self._metadata), "invalid_actions": float(self._refused)}
        return {"observations": messages, "reward": reward, "done": done, "metadata": {}}

    async def close(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        await super().close()

    # ---------------------------------------------------------------- the wire

    async def _first_answer(self, reset: str) -> Answer:
        """The answer to the first message.

        A full server is asked until it has a free session, or the caller's time ends.
        """
        pauses_s = iter(PAUSES_S)
        while True:
            try:
                self._socket = await self.http.ws_connect(f"{self.url}/ws", max_msg_size=MAX_BYTES)
            except aiohttp.ClientError as error:
                self.fail(
                    f"{self.url}/ws is unreachable: {type(error).__name__}: {error}",
                    repeatable=True,
                )
            answer = await self._exchange(reset, repeatable=True)
            match answer:
                case {"data": {"code": "CAPACITY_REACHED"}}:
                    await self._socket.close()
                    await asyncio.sleep(next(pauses_s, PAUSES_S[-1]))
                case _:
                    return answer

    async def _ask(self, move: Mapping[str, Any]) -> Answer:
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._exchange(json.dumps({"type": "step", "data": move}))
        except TimeoutError:
            self.fail(f"{self.url}/ws did not answer within {self.timeout_s:g} s (timeout_s)")

    async def _exchange(self, message: str, *, repeatable: bool = False) -> Answer:
        assert self._socket is not None
        # Suppressed: the server has closed the socket. Its last message is read below.
        with suppress(aiohttp.ClientError):
            await self._socket.send_str(message)
        received = await self._socket.receive()
        if received.type is not aiohttp.WSMsgType.TEXT:
            if self._socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
                raise InvalidEnvOutputError(
                    f"{self.url}/ws answered with more than {MAX_BYTES >> 20} MiB"
                )
            self.fail(
                f"{self.url}/ws has closed the session (code {self._socket.close_code})",
                repeatable=repeatable,
            )
        try:
            return json.loads(received.data)
        except (ValueError, RecursionError):
            raise InvalidEnvOutputError(
                f"{self.url}/ws answered no JSON: {received.data[:80]!r}"
            ) from None

    def _read(self, answer: Answer) -> tuple[Mapping[str, Any], float, bool]:
        """The observation, its reward and whether the episode is done."""
        match answer:
            case {"type": "error", "data": {} as data}:
                code = str(data.get("code"))
                if code == "VALIDATION_ERROR" or (self._shows_errors and code == "EXECUTION_ERROR"):
                    raise RefusedActionError(_problems_of(data))
                raise InvalidEnvOutputError(
                    f"{self.url} answered {code}: {str(data.get('message'))[:300]}"
                )
            case {"type": "observation", "data": {"observation": {} as observation} as data}:
                reward = data.get("reward")
                if reward is not None and not isinstance(reward, bool | int | float):
                    problem = f"answered the reward {str(reward)[:80]!r}; it must be a number"
                    raise InvalidEnvOutputError(f"{self.url}/ws {problem}")
                self._metadata = data.get("metadata") or observation.get("metadata")
                return observation, float(reward or 0.0), bool(data.get("done"))
        raise InvalidEnvOutputError(
            f"{self.url}/ws answered {str(answer)[:80]!r}, which is not an observation"
        )

    # ------------------------------------------------ text to actions, observations to text

    @property
    def _schema(self) -> Schema:
        schema: Schema = self.description["action"]
        return schema

    @property
    def _plays_tools(self) -> bool:
        """Whether an action is a call of a tool of the server (MCP).

        Some servers of tools have a schema without entries.
        """
        entries = set(self._schema.get("properties") or ()) - {"metadata"}
        return not entries or {"tool_name", "arguments"} <= entries

    def _tool_calls(self, text: str) -> list[dict[str, Any]]:
        _, calls = read_tool_calls(text)
        if not calls:
            raise RefusedActionError("call a tool: <tool_call>{...}</tool_call>")
        moves = []
        for call in calls:
            name = call["function"]["name"]
            arguments = call["function"]["arguments"]
            moves.append({"type": "call_tool", "tool_name": name, "arguments": arguments})
        return moves

    def _action(self, text: str) -> dict[str, Any]:
        """The action of a response: its JSON object, or the value of one entry."""
        reserved = {"metadata", *self._fixed}
        entries = [name for name in self._schema.get("properties") or () if name not in reserved]
        required = [name for name in self._schema.get("required") or () if name in entries]
        action = _last_object(text)
        # Other objects may be part of the model's reasoning.
        if action and set(action) <= set(entries):
            return {**self._fixed, **action}
        field = self.settings.get("action_field")
        if not field:
            candidates = required if len(required) == 1 else entries
            if len(candidates) != 1:
                raise RefusedActionError(f"answer with a JSON object of: {', '.join(entries)}")
            field = candidates[0]
        if field not in entries:
            raise UserError(unknown(f"action_field of {self.url}", field, entries))
        return {**self._fixed, field: _value(text, self._entry(field))}

    def _entry(self, name: str) -> Schema:
        """The schema of an entry, without references and alternatives to null."""
        entry: Schema = self._schema["properties"][name]
        for _ in range(8):  # bounded: a reference may lead to itself
            alternatives = entry.get("anyOf") or entry.get("allOf") or entry.get("oneOf")
            if alternatives:
                values = [schema for schema in alternatives if schema.get("type") != "null"]
                entry = values[0] if values else {}
            elif "$ref" in entry:
                definitions = self._schema.get("$defs") or {}
                name = str(entry["$ref"]).rpartition("/")[2]
                entry = definitions.get(name, {})
        return entry

    def _text(self, observation: Mapping[str, Any]) -> str:
        """The observation as the model reads it: its only entry, or a line for each."""
        show = self.settings.get("show")
        if show:
            missing = [name for name in show if name not in observation]
            if missing:
                raise UserError(unknown(f"entry of show, of {self.url}", missing[0], observation))
            entries = {name: observation[name] for name in show}
        else:
            error = observation.get("error")
            if self._plays_tools and error:
                return f"error: {error.get('message') if isinstance(error, Mapping) else error}"
            hidden = {"done", "reward", "metadata"}
            if self._plays_tools:
                hidden.add("tool_name")  # the message has the name
            entries = {}
            for name, value in observation.items():
                if name not in hidden and value not in (None, "", [], {}):
                    entries[name] = value
            result = entries.get("result")
            if isinstance(result, Mapping) and "content" in result:  # MCP's form of a result
                content = result["content"] if isinstance(result["content"], list) else []
                items = [item for item in content if isinstance(item, Mapping)]
                return "\n".join(str(item.get("text", item)) for item in items)
            metadata = observation.get("metadata")
            if not entries and isinstance(metadata, Mapping):
                entries = dict(metadata)
        texts = {}
        for name, value in entries.items():
            texts[name] = value if isinstance(value, str) else json.dumps(value)
        if len(texts) == 1:
            return next(iter(texts.values()))
        return "\n".join(f"{name}: {text}" for name, text in texts.items())


def _problems_of(data: Mapping[str, Any]) -> str:
    """The message for the model in an error of the server, at most 500 characters."""
    problems = []
    for problem in data.get("errors") or ():
        if isinstance(problem, Mapping):  # as pydantic writes them: loc is the path to the entry
            path = ".".join(map(str, problem.get("loc") or ()))
            problems.append(f"{path}: {problem.get('msg')}")
    return "; ".join(problems)[:500] or str(data.get("message"))[:500]


def _last_object(text: str) -> dict[str, Any] | None:
    """The last JSON object in a text that is not part of another; None if there is none."""
    end = text.rfind("}") + 1
    decoder = json.JSONDecoder()
    start = text.find("{")
    for _ in range(64):  # a model may write any number of brackets, and each costs a pass
        if start < 0:
            return None
        try:
            parsed, stop = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            start = text.find("{", start + 1)
            continue
        if stop == end and isinstance(parsed, dict):
            return parsed
        start = text.find("{", stop)
    return None


def _value(text: str, entry: Schema) -> object:
    """The value of an action's entry that a response names."""
    names = {str(name).lower(): name for name in entry.get("enum") or ()}
    if names:
        for word in reversed(re.findall(r"[\w.+-]+", text.lower())):
            if word in names:
                return names[word]
        raise RefusedActionError(f"answer with one of: {', '.join(map(str, names.values()))}")
    match entry.get("type"):
        case "integer" | "number" as kind:
            pattern = r"-?\d+" if kind == "integer" else r"-?\d+(?:\.\d+)?"
            numerals = re.findall(pattern, text)
            if not numerals or len(numerals[-1]) > 18:  # a server's integers have 64 bits
                raise RefusedActionError("answer with a number")
            if kind == "integer":
                return int(numerals[-1])
            return float(numerals[-1])
        case "boolean":
            return _value(text, {"enum": ["true", "false"]}) == "true"
        case "string" | None:
            return text.strip()
        case "array":
            return [_value(text, entry.get("items") or {})]
        case _:
            raise RefusedActionError("answer with a JSON object")
