"""The agent program for OpenRLHF's agent files whose ``AgentExecutor`` has its own ``execute``.

The executor gets a prompt's text, sampling parameters that it may change, the model's tokenizer,
and an ``llm_engine`` with ``generate(token_ids, sampling_params)``. The engine's calls go to the
endpoint, whose record is trained on.

Invariant: the ``action_ranges`` of a result are actions that the engine wrote after the tokens that
it had read. Otherwise the episode fails with an error. A call of the engine that is in no range is
not trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextvars import ContextVar
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from skyasync.agents.api.chat import COMPLETION_FIELDS
from skyasync.agents.programs import AgentScore
from skyasync.envs.base import Conversation
from skyasync.interop.openrlhf.agent_file import (
    PATH_KEY,
    load_agent,
    new_executor,
    refuse_row_with_images,
    sampling_object,
)
from skyasync.interop.openrlhf.rewards import OpenRLHFSignature
from skyasync.interop.openrlhf.user_modules import refuse_images
from skyasync.registry import accepted
from skyasync.rewards.signature import as_score
from skyasync.rollout.chat import PlainText
from skyasync.rollout.tokenizer import Tokenizer, load_tokenizer, with_template

if TYPE_CHECKING:
    from aiohttp import ClientSession

_EPISODE: ContextVar[_ExecutorEpisode] = ContextVar("episode")
NOTHING: dict[str, object] = {}
#: Sampling parameters that are no fields of the endpoint. Two are fixed; two are about the text,
#: which is decoded here.
_NOT_SENT = frozenset({"n", "logprobs", "skip_special_tokens", "include_stop_str_in_output"})


async def play(
    data: dict[str, object],
    base_url: str,
    api_key: str,
    config: dict[str, object] = NOTHING,
    is_eval: bool = False,
) -> AgentScore:
    """One episode of the file's executor; an agent program."""
    import aiohttp

    refuse_row_with_images(data)
    path = str(config[PATH_KEY])
    tokenizer_key = cast("tuple[str, str, str]", config["tokenizer"])
    tokenizer = _tokenizer(*tokenizer_key)
    sampling = cast("dict[bool, dict[str, object]]", config["sampling"])[is_eval]
    max_length = cast(int, config["max_length"])
    headers = {"Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=None)  # a response may wait long for an engine
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
        episode = _ExecutorEpisode(http, base_url, tokenizer, sampling)
        # Tasks that the executor starts inherit it.
        _EPISODE.set(episode)
        executor = _executor(path, tokenizer_key, max_length)
        text = PlainText(tokenizer, bool(config["chat_template"]))
        optional = {
            "prompt": text.opening(cast(Conversation, data["prompt"])),
            "label": data.get("label"),
            "sampling_params": sampling_object(sampling),
            "max_length": max_length,
            "hf_tokenizer": tokenizer,
            "llm_engine": ENGINE,
            "images": None,
        }
        result = await executor.execute(**accepted(executor.execute, optional))
        if result is None:
            # Older files put their result into result_queue.
            result = episode.queued_result
        return episode.score(result)


class _CurrentEpisode:
    """The engine and the result queue for all episodes of the process.

    It is ``llm_engine``, and ``result_queue`` of older files. A call is for the episode of its
    task.
    """

    async def generate(
        self,
        prompt_token_ids: object,
        sampling_params: object,
        *args: object,
        multi_modal_data: object = None,
    ) -> SimpleNamespace:
        refuse_images(multi_modal_data)
        episode = _EPISODE.get(None)
        if episode is None:
            raise RuntimeError(
                "llm_engine.generate was called outside of the episode that it belongs to (from a server's thread, "
                "say): an agent behind a server of its own is a program, generator.agent_program"
            )
        # Newer files pass vLLM's TokensPrompt.
        if isinstance(prompt_token_ids, Mapping):
            prompt_token_ids = prompt_token_ids["prompt_token_ids"]
        tokens = list(cast("list[int]", prompt_token_ids))
        return await episode.generate(tokens, sampling_params)

    async def put(self, result: Mapping[str, object]) -> None:
        _EPISODE.get().queued_result = result


ENGINE = _CurrentEpisode()


class _ExecutorEpisode:
    """One episode: its calls of the engine, and its score."""

    def __init__(
        self, http: ClientSession, base_url: str, tokenizer: Tokenizer, sampling: dict[str, object]
    ) -> None:
        self._http = http
        self._url = f"{base_url}/completions"
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._calls: list[tuple[str, list[int], list[int]]] = []  # id, tokens read, tokens written
        self.queued_result: Mapping[str, object] | None = None

    async def generate(self, tokens: list[int], sampling_params: object) -> SimpleNamespace:
        """The engine's response, with the names of vLLM's ``RequestOutput``."""
        body: dict[str, object] = {"prompt": tokens, "return_token_ids": True, "logprobs": 1}
        defaults = sampling_object(self._sampling)
        for name, default in vars(defaults).items():
            value = getattr(sampling_params, name, default)
            # Without a limit the engine's context is the limit.
            if name == "max_tokens":
                if value:
                    body[name] = value
            elif name not in _NOT_SENT and value != default and value is not None:
                # The endpoint has the run's sampling parameters: only changes are sent.
                if name not in COMPLETION_FIELDS:
                    raise ValueError(
                        f"the executor has changed sampling_params.{name} to {value!r}, which is not changed call by "
                        f"call: set generator.sampling_params.{name}"
                    )
                body[name] = list(value) if isinstance(value, tuple) else value
        async with self._http.post(self._url, json=body) as response:
            answer = await response.json()
        if response.status != 200:
            raise RuntimeError(f"llm_engine.generate: {answer['error']['message']}")
        (choice,) = answer["choices"]  # n is fixed at 1
        wrote: list[int] = choice["token_ids"]
        self._calls.append((answer["id"], tokens, wrote))
        skip_special_tokens = getattr(sampling_params, "skip_special_tokens", False)
        text = self._tokenizer.decode(wrote, skip_special_tokens=skip_special_tokens)
        logprobs = []
        for token, value in zip(wrote, choice["logprobs"]["token_logprobs"], strict=True):
            logprobs.append({token: SimpleNamespace(logprob=value)})
        output = SimpleNamespace(
            token_ids=wrote,
            text=text,
            logprobs=logprobs,
            finish_reason=choice["finish_reason"],
            index=0,
        )
        return SimpleNamespace(
            outputs=[output], prompt_token_ids=tokens, request_id=answer["id"], finished=True
        )

    def score(self, result: Mapping[str, object] | None) -> AgentScore:
        """The score of what ``execute`` has returned.

        Raises:
            ValueError: if it lacks a reward, or has ranges that the engine did not write.
        """
        if not isinstance(result, Mapping) or result.get("reward") is None:
            raise ValueError(
                f"execute must return a dictionary with a reward; it returned {result!r:.120}"
            )
        images = cast("list[object] | None", result.get("images"))
        refuse_images(images)
        answer = {
            "rewards": result["reward"],
            "scores": result.get("scores"),
            "extra_logs": result.get("extra_logs"),
        }
        score = as_score("execute", OpenRLHFSignature().answer(answer))
        ranges = result.get("action_ranges")
        observation_tokens = result.get("observation_tokens")
        if ranges is None or observation_tokens is None:
            return AgentScore(score.reward, score.metrics)  # all calls are trained on
        tokens = [int(token) for token in cast("list[int]", observation_tokens)]
        untrained = {call_id for call_id, _, _ in self._calls}
        for start, end in cast("list[tuple[int, int]]", ranges):
            call_id = self._call_id(tokens[:start], tokens[start:end])
            if call_id is None:
                raise ValueError(
                    f"execute returned action_ranges with {(start, end)}, tokens that the engine did not generate: "
                    f"only generated tokens can be trained; check the offsets (they index observation_tokens, "
                    f"prompt included)"
                )
            untrained.discard(call_id)
        return AgentScore(score.reward, score.metrics, left_out=frozenset(untrained))

    def _call_id(self, read: list[int], wrote: list[int]) -> str | None:
        """The call that read and wrote these tokens; None if there was none."""
        for call_id, call_read, call_wrote in self._calls:
            if call_read == read and call_wrote == wrote:
                return call_id
        return None


@cache
def _tokenizer(path: str, template: str, arguments: str) -> Tokenizer:
    return with_template(load_tokenizer(path), template, json.loads(arguments))


@cache
def _executor(path: str, tokenizer: tuple[str, str, str], max_length: int) -> SimpleNamespace:
    """The process's one executor."""
    optional = {
        "max_length": max_length,
        "hf_tokenizer": _tokenizer(*tokenizer),
        "llm_engine": ENGINE,
        "result_queue": ENGINE,
    }
    executor_class = load_agent(path)["AgentExecutor"]
    return cast(SimpleNamespace, new_executor(executor_class, optional))
