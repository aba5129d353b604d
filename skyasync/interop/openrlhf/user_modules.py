"""The names of ``openrlhf.utils`` that users' reward and agent files import, if OpenRLHF is not
installed.

``MultiTurnAgentExecutor.execute`` plays an ``AgentInstance`` turn by turn.
``SingleTurnAgentExecutor.execute`` takes one answer and its reward. Both work in tokens, through
the ``llm_engine`` that they are given. The older ``AgentExecutorBase`` also plays turn by turn; it
is given its parts (``agent_instance_cls``, ``max_steps``, ``max_length``, ``llm_engine``,
``hf_tokenizer``, ``result_queue``) when it is made.

Invariant: the stand-ins are in ``sys.modules`` only while such a file is loaded; a file gets
OpenRLHF itself if that is installed. The tokens in a result are those that the engine read and
wrote, in their order. Source: OpenRLHF's documentation and the names in ``openrlhf/utils/agent.py``
over its history.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from types import ModuleType
from typing import Any, cast

from skyasync.envs.base import InvalidEnvOutputError
from skyasync.envs.images import NO_IMAGES
from skyasync.rewards.answer_match import extract_boxed_answer
from skyasync.rewards.signature import single_value

Foreign = Any  # objects of the user's file or of its libraries
_ROOT = "openrlhf"
_LOCK = threading.RLock()  # one file at a time; a file may load another


@contextmanager
def stand_ins() -> Iterator[None]:
    """While the block runs, ``openrlhf.utils`` can be imported."""
    known = sys.modules.get(_ROOT)
    if known is not None:
        spec = known.__spec__
    else:
        spec = importlib.util.find_spec(_ROOT)
    if (
        spec is not None and spec.origin is not None
    ):  # a package, and not only a folder of this name
        yield
        return
    with _LOCK:
        before = _loaded()
        sys.modules.update(_modules())
        try:
            yield
        finally:
            for name in _loaded():
                del sys.modules[name]
            sys.modules.update(before)


def _loaded() -> dict[str, ModuleType]:
    """The modules under this name, from a copy, as other threads import at the same time."""
    return {
        name: module
        for name, module in sys.modules.copy().items()
        if name.partition(".")[0] == _ROOT
    }


def grade_answer(given: str | None, truth: str | None) -> bool:
    """Whether two answers are the same text, number or, with math-verify installed, expression."""
    if given is None or truth is None:
        return False
    one, other = (
        re.sub(r"[\s$,]|\\left|\\right|\\!", "", text).rstrip(".").lower()
        for text in (given, truth)
    )
    if one == other:
        return True
    try:
        return float(one) == float(other)
    except ValueError:
        pass
    if importlib.util.find_spec("math_verify") is None:
        return False
    from skyasync.rewards.answer_match import math_verify

    try:
        return bool(math_verify(f"${given}$", truth))
    except Exception:
        return False  # not an expression


def _modules() -> dict[str, ModuleType]:
    graders = {"extract_boxed_answer": extract_boxed_answer, "grade_answer": grade_answer}
    agents = (AgentInstanceBase, AgentExecutorBase, SingleTurnAgentExecutor, MultiTurnAgentExecutor)
    names: dict[str, dict[str, Foreign]] = {
        _ROOT: {},
        f"{_ROOT}.utils": graders,
        f"{_ROOT}.utils.math_utils": graders,
        f"{_ROOT}.utils.logging_utils": {"init_logger": logging.getLogger},
        f"{_ROOT}.utils.agent": {agent.__name__: agent for agent in agents},
    }
    made = {}
    for name, values in names.items():
        module = made[name] = ModuleType(name)
        vars(module).update(values, __path__=[])
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, module)
    return made


class AgentInstanceBase:
    """An episode's own state; a subclass defines ``step``, and ``reset`` if the first observation
    is another."""

    def __init__(self, *args: Foreign, **kwargs: Foreign) -> None: ...

    async def reset(self, states: dict[str, Foreign], **kwargs: Foreign) -> dict[str, Foreign]:
        return states

    async def step(self, state_dict: dict[str, Foreign], **kwargs: Foreign) -> dict[str, Foreign]:
        raise NotImplementedError("AgentInstance must define step(states)")


class AgentExecutorBase:
    """Plays an episode from a prompt. A subclass overrides ``execute``, or names the agent to
    play."""

    def __init__(
        self,
        agent_instance_cls: Foreign = None,
        max_steps: int = 0,
        max_length: int = 0,
        llm_engine: Foreign = None,
        hf_tokenizer: Foreign = None,
        result_queue: Foreign = None,
    ) -> None:
        self.agent_instance_cls = agent_instance_cls
        self.max_steps = max_steps
        self.max_length = max_length
        self.llm_engine = llm_engine
        self.hf_tokenizer = hf_tokenizer
        self.result_queue = result_queue

    async def generate(self, prompt_ids: list[int], sampling_params: Foreign) -> Foreign:
        return await self.llm_engine.generate(prompt_ids, sampling_params)

    async def execute(
        self,
        prompt: str,
        label: Foreign,
        sampling_params: Foreign,
        max_length: int = 0,
        hf_tokenizer: Foreign = None,
        llm_engine: Foreign = None,
        images: Foreign = None,
    ) -> dict[str, Foreign]:
        if self.agent_instance_cls is None:
            raise NotImplementedError(
                "AgentExecutor must define execute, or name its agent when it is made"
            )
        refuse_images(images)
        engine = llm_engine or self.llm_engine
        tokenizer = hf_tokenizer or self.hf_tokenizer
        agent = await new_instance(self.agent_instance_cls)
        first = await awaited(agent.reset({"observation": prompt, "label": label}))
        episode = _TokenEpisode(
            first["observation"], tokenizer, max_length or self.max_length, engine
        )
        reward = 0.0
        result = {}
        turns = 0
        while (not self.max_steps or turns < self.max_steps) and episode.free > 0:
            turns += 1
            before = episode.text
            action = await episode.generate(sampling_params)
            states = {"observation_text": before, "action_text": action, "label": label}
            result = await awaited(agent.step({**states, "sampling_params": sampling_params}))
            refuse_images(result.get("environment_images"))
            reward += cast(float, single_value(result["rewards"]))
            if not result["done"] or result.get("environment_feedback"):
                episode.append(result.get("environment_feedback") or "")
            sampling_params = result.get("sampling_params") or sampling_params
            if result["done"]:
                break
        return episode.result(prompt, label) | {
            "reward": reward,
            "scores": result.get("scores", reward),
            "extra_logs": result.get("extra_logs") or {},
        }


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Turn by turn, until the agent is done."""


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One answer, whose reward comes from a file or from servers."""

    def __init__(self, remote_rm_url: str | list[str] | None = None) -> None:
        super().__init__()
        if isinstance(remote_rm_url, str):
            self.reward_endpoints = [remote_rm_url]
        else:
            self.reward_endpoints = list(remote_rm_url or ())

    async def execute(
        self,
        prompt: str,
        label: Foreign,
        sampling_params: Foreign,
        max_length: int = 0,
        hf_tokenizer: Foreign = None,
        llm_engine: Foreign = None,
        images: Foreign = None,
    ) -> dict[str, Foreign]:
        refuse_images(images)
        episode = _TokenEpisode(prompt, hf_tokenizer, max_length, llm_engine)
        await episode.generate(sampling_params)
        result = episode.result(prompt, label) | {"reward": None, "scores": None, "extra_logs": {}}
        if not self.reward_endpoints:
            return result
        from skyasync.interop.openrlhf.rewards import OpenRLHFSignature
        from skyasync.rewards import find
        from skyasync.rewards.signature import as_score

        name = ",".join(self.reward_endpoints)
        function = find(f"{name}:reward_func" if name.endswith(".py") else name)
        query = hf_tokenizer.decode(result["observation_tokens"], skip_special_tokens=False)
        if inspect.iscoroutinefunction(function):
            answer = await function([query], [prompt], [label])
        else:
            answer = await asyncio.to_thread(function, [query], [prompt], [label])
        score = as_score(name, OpenRLHFSignature().answer(answer))
        logs = dict(score.metrics)
        return result | {
            "reward": score.reward,
            "scores": logs.pop("score", score.reward),
            "extra_logs": logs,
        }


class _TokenEpisode:
    """One sequence of tokens that grows by what the engine writes and what the environment
    appends."""

    def __init__(self, text: str, tokenizer: Foreign, max_length: int, engine: Foreign) -> None:
        self.text = text
        self._tokenizer = tokenizer
        self._engine = engine
        self._tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        self.free = max_length - len(self._tokens)  # tokens that still fit
        self._ranges: list[tuple[int, int]] = []
        self._logprobs: list[float] = [0.0] * len(self._tokens)
        self._truncated = False

    async def generate(self, sampling_params: Foreign) -> str:
        request = deepcopy(sampling_params)
        request.max_tokens = min(request.max_tokens or self.free, self.free)
        (output,) = (await self._engine.generate(self._tokens, request)).outputs
        start = len(self._tokens)
        wrote = list(output.token_ids)
        self._ranges.append((start, start + len(wrote)))
        self._tokens = self._tokens + wrote
        self.free -= len(wrote)
        self._logprobs += [
            known[t].logprob for t, known in zip(wrote, output.logprobs or (), strict=False)
        ]
        self._truncated = output.finish_reason == "length"
        self.text += output.text
        return str(output.text)

    def append(self, text: str) -> None:
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        self.text += text
        self._tokens = self._tokens + tokens
        self._logprobs += [0.0] * len(tokens)
        self.free -= len(tokens)

    def result(self, prompt: str, label: Foreign) -> dict[str, Foreign]:
        return {
            "prompt": prompt,
            "label": label,
            "images": None,
            "mm_train_inputs": None,
            "truncated": self._truncated,
            "observation_tokens": self._tokens,
            "action_ranges": self._ranges,
            "rollout_log_probs": self._logprobs,
        }


def refuse_images(images: Foreign) -> None:
    """Raises ``InvalidEnvOutputError`` if there are any: they would be dropped silently."""
    if images is not None and len(images):
        raise InvalidEnvOutputError(NO_IMAGES)


async def new_instance(agent_class: Foreign) -> Foreign:
    """An instance; its ``__init__`` may be ``async def``, as Ray allows."""
    instance = agent_class.__new__(agent_class)
    await awaited(instance.__init__())
    return instance


async def awaited(answer: Foreign) -> Foreign:
    if inspect.isawaitable(answer):
        return await answer
    return answer
