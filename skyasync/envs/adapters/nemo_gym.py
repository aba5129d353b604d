"""NeMo Gym's resources servers, over HTTP; written against nemo-gym 0.7.

The rows are those of the server's data: ``responses_create_params`` (the conversation and its
tools) and what the server needs to judge. Two kinds of servers are told apart by what they serve:

| serves               | an episode                                                                                    |
|----------------------|-----------------------------------------------------------------------------------------------|
| ``/verify``          | ``/seed_session``; a POST for each tool call; ``/verify`` with all that was said: the reward  |
| ``/reset``, ``/step``| ``/reset``; ``/step`` with each response: observation, reward, end                            |

Invariant: the model calls only the tools that its row names. ``/verify`` is asked once with an
answer; a tool is called once for each call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from skyasync.envs import ENVS
from skyasync.envs.adapters.served import Answer, ServedEnv, about_tools, numbers
from skyasync.envs.base import BaseTextEnvStepOutput, Conversation, InvalidEnvOutputError
from skyasync.envs.tools import read_tool_calls
from skyasync.errors import unknown

Item = dict[str, Any]  # of a response, in the form of OpenAI's Responses API
SHOWN = ("name", "description", "parameters")  # of a tool, to the model


@ENVS.register("nemo_gym")
class NemoGymEnv(ServedEnv):
    """Its settings are those of ``ServedEnv``.

    Numbers that the server adds to the row in its answer are metrics, by their names. An episode
    that the server marks as not measured (``mask_sample``) fails.
    """

    hub = "nemo_gym"
    description_path = "/openapi.json"
    not_served = (
        "it is not a resources server of NeMo Gym (agents and models have separate servers)"
    )

    @classmethod
    def is_described_by(cls, description: Answer) -> bool:
        if isinstance(description, Mapping):
            paths = description.get("paths")
        else:
            paths = None
        return isinstance(paths, Mapping) and (
            "/verify" in paths or {"/reset", "/step"} <= set(paths)
        )

    def __init__(
        self, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None
    ) -> None:
        super().__init__(env_config, extras)
        self._row = {
            name: value
            for name, value in self.extras.items()
            if name not in ("max_steps", "max_turns")
        }
        params = self._row.setdefault("responses_create_params", {"input": []})
        self._tools: list[dict[str, Any]] = [
            t for t in params.get("tools") or () if t.get("type") == "function"
        ]
        self._items_so_far: list[Item] = []
        self._info: Mapping[str, Any] = {}
        self._unverified = False

    @property
    def _verifies(self) -> bool:
        return "/verify" in self.description["paths"]

    async def start(self) -> tuple[Conversation, str]:
        schemas = [
            {"type": "function", "function": {k: v for k, v in t.items() if k in SHOWN}}
            for t in self._tools
        ]
        tools = about_tools(schemas) if schemas else ""
        if self._verifies:
            await self.request("POST", "/seed_session", self._row, repeatable=True)
            return [], tools
        answer = await self._result("/reset", repeatable=True)
        self._info = answer.get("info") or {}
        observation = answer.get("observation")
        return ([{"role": "user", "content": str(observation)}] if observation else []), tools

    async def play(self, action: str) -> BaseTextEnvStepOutput:
        if self._unverified:  # the answer was lost: this is another try
            self.turns -= 1
            return await self._verify()
        items, calls = self._items(action)
        if not self._verifies:
            return await self._step(items)
        self._items_so_far += items
        messages = [await self._call(call) for call in calls]
        if calls and self.turns != self.max_steps:
            return {"observations": messages, "reward": 0.0, "done": False, "metadata": {}}
        return await self._verify()

    async def close(self) -> None:
        try:
            if self._info.get("supports_explicit_close") is True and not self._failed:
                await self.exchange("POST", "/close", {})
        finally:
            await super().close()

    def _items(self, action: str) -> tuple[list[Item], list[Item]]:
        """A response as items, and those of them that are calls."""
        thoughts, ended, text = action.rpartition("</think>")
        items: list[Item] = []
        if ended:
            thought = {"type": "summary_text", "text": thoughts.replace("<think>", "").strip()}
            items.append({"type": "reasoning", "id": f"rs_{self.turns}", "summary": [thought]})
        message_text, functions = read_tool_calls(text)
        calls = [
            {
                "type": "function_call",
                "id": f"fc_{self.turns}_{number}",
                "call_id": f"call_{self.turns}_{number}",
                "name": call["function"]["name"],
                "arguments": json.dumps(call["function"]["arguments"]),
                "status": "completed",
            }
            for number, call in enumerate(functions)
        ]
        if message_text or not calls:
            content = [{"type": "output_text", "text": message_text, "annotations": []}]
            message = {
                "type": "message",
                "id": f"msg_{self.turns}",
                "role": "assistant",
                "status": "completed",
            }
            items.append({**message, "content": content})
        return [*items, *calls], calls

    async def _call(self, call: Item) -> dict[str, str]:
        """The tool's answer as a message; an error of the tool is an answer too."""
        names = [tool.get("name") for tool in self._tools]
        if call["name"] in names:
            _, content = await self.exchange(
                "POST", f"/{quote(call['name'], safe='')}", json.loads(call["arguments"])
            )
            output = content.decode(errors="replace")
        else:
            output = json.dumps({"error": unknown("tool", call["name"], map(str, names))})
        self._items_so_far.append(
            {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        )
        return {"role": "tool", "name": call["name"], "content": output}

    async def _verify(self) -> BaseTextEnvStepOutput:
        self._unverified = True
        answer = await self._result("/verify", self._items_so_far, repeatable=True)
        self._unverified = False
        if answer.get("mask_sample") is True:
            reason = answer.get("failure_reason") or answer.get("failure_kind") or "mask_sample"
            raise RuntimeError(f"{self.url} could not judge the episode: {str(reason)[:300]}")
        components = {
            f"reward/{name}": value
            for name, value in numbers(answer.get("reward_components")).items()
        }
        added = {
            n: v
            for n, v in numbers(answer).items()
            if n not in self._row and n not in ("reward", "mask_sample")
        }
        self.metrics = {**added, **components}
        return {
            "observations": [],
            "reward": answer.get("reward", 0.0),
            "done": True,
            "metadata": {},
        }

    async def _step(self, items: list[Item]) -> BaseTextEnvStepOutput:
        answer = await self._result("/step", items)
        info = answer.get("info") or {}
        self.metrics = numbers(info)
        names = {item["call_id"]: item["name"] for item in items if item["type"] == "function_call"}
        messages = [
            {
                "role": "tool",
                "name": names.get(output.get("call_id"), ""),
                "content": str(output.get("output")),
            }
            for output in info.get("tool_outputs") or ()
        ]
        if answer.get("observation"):
            messages.append({"role": "user", "content": str(answer["observation"])})
        done = bool(answer.get("terminated")) or bool(answer.get("truncated"))
        return {
            "observations": messages,
            "reward": answer.get("reward", 0.0),
            "done": done,
            "metadata": {},
        }

    async def _result(
        self, path: str, items: list[Item] | None = None, *, repeatable: bool = False
    ) -> Mapping[str, Any]:
        """The answer to the row and, as an object of OpenAI's Responses API, what was said."""
        response = {
            "id": "resp_0",
            "object": "response",
            "created_at": 0,
            "model": "policy",
            "output": items,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self._tools,
        }
        if items is None:
            body = self._row
        else:
            body = {**self._row, "response": response}
        answer = await self.request("POST", path, body, repeatable=repeatable)
        if not isinstance(answer, Mapping) or not isinstance(answer.get("info") or {}, Mapping):
            raise InvalidEnvOutputError(
                f"{self.url}{path} answered {str(answer)[:80]!r}, which is not a result"
            )
        return answer
