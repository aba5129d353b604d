"""The names of ``openrlhf.utils`` that users' reward and agent files import, where OpenRLHF is not installed.

``MultiTurnAgentExecutor.execute`` plays an ``AgentInstance`` turn by turn, ``SingleTurnAgentExecutor.execute`` asks
once and has the answer judged; both work in tokens, through whatever ``llm_engine`` they are given. The older
``AgentExecutorBase(agent_instance_cls, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)`` is the first of
them, given its parts when it is made.

Invariant: the stand-ins are in ``sys.modules`` while such a file is loaded, and at no other time; where OpenRLHF is
installed a file gets OpenRLHF. The tokens in a result are those that the engine read and wrote, in their order. In our
words, after OpenRLHF's documentation and the names in ``openrlhf/utils/agent.py`` over its history.
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
from typing import Any

from skyasync.envs.base import InvalidEnvOutputError
from skyasync.envs.images import NO_IMAGES
from skyasync.rewards.answer_match import extract_boxed_answer

Foreign = Any  # objects of the user's file or of its libraries
_ROOT = "openrlhf"
_LOCK = threading.RLock()  # one file at a time; a file may load another


@contextmanager
def stand_ins() -> Iterator[None]:
    """While the block runs, ``openrlhf.utils`` can be imported."""
    if _installed():
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
    """The modules under this name; of a copy, as other threads import while this one looks."""
    return {name: module for name, module in sys.modules.copy().items() if name.partition(".")[0] == _ROOT}


def grade_answer(given: str | None, truth: str | None) -> bool:
    """Whether two answers are the same text, number or, with math-verify installed, expression."""
    if given is None or truth is None:
        return False
    if _plain(given) == _plain(truth):
        return True
    try:
        return float(_plain(given)) == float(_plain(truth))
    except ValueError:
        pass
    if importlib.util.find_spec("math_verify") is None:
        return False
    from skyasync.rewards.answer_match import math_verify

    try:
        return bool(math_verify(f"${given}$", truth))
    except Exception:
        return False  # what is no expression equals none


def _plain(answer: str) -> str:
    return re.sub(r"[\s$,]|\\left|\\right|\\!", "", answer).rstrip(".").lower()


def _installed() -> bool:
    """A package, not a folder of this name that happens to lie beside the user's files."""
    known = sys.modules.get(_ROOT)
    spec = known.__spec__ if known is not None else importlib.util.find_spec(_ROOT)
    return spec is not None and spec.origin is not None


def _modules() -> dict[str, ModuleType]:
    graders = {"extract_boxed_answer": extract_boxed_answer, "grade_answer": grade_answer}
    agents = (AgentInstanceBase, AgentExecutorBase, SingleTurnAgentExecutor, MultiTurnAgentExecutor)
    names: dict[str, dict[str, Foreign]] = {
        _ROOT: {},
        f"{_ROOT}.utils": graders,
        f"{_ROOT}.utils.math_utils": graders,
        f"{_ROOT}.utils.logging_utils": {"init_logger": logging.getLogger},
        f"{_ROOT}.utils.agent": {found.__name__: found for found in agents},
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
    """An episode's own state; a subclass defines ``step``, and ``reset`` if the first observation is another."""

    def __init__(self, *args: Foreign, **kwargs: Foreign) -> None: ...

    async def reset(self, states: dict[str, Foreign], **kwargs: Foreign) -> dict[str, Foreign]:
        return states

    async def step(self, state_dict: dict[str, Foreign], **kwargs: Foreign) -> dict[str, Foreign]:
        raise NotImplementedError("AgentInstance must define step(states)")


class AgentExecutorBase:
    """Plays an episode from a prompt. A subclass overrides ``execute``, or says which agent is to be played."""

    def __init__(
        self, agent_instance_cls: Foreign = None, max_steps: int = 0, max_length: int = 0,
        llm_engine: Foreign = None, hf_tokenizer: Foreign = None, result_queue: Foreign = None,
    ) -> None:  # fmt: skip
        self.agent_instance_cls, self.max_steps, self.max_length = agent_instance_cls, max_steps, max_length
        self.llm_engine, self.hf_tokenizer, self.result_queue = llm_engine, hf_tokenizer, result_queue

    async def generate(self, prompt_ids: list[int], sampling_params: Foreign) -> Foreign:
        return await self.llm_engine.generate(prompt_ids, sampling_params)

    async def execute(
        self, prompt: str, label: Foreign, sampling_params: Foreign, max_length: int = 0,
        hf_tokenizer: Foreign = None, llm_engine: Foreign = None, images: Foreign = None,
    ) -> dict[str, Foreign]:  # fmt: skip
        if self.agent_instance_cls is None:
            raise NotImplementedError("AgentExecutor must define execute, or name its agent when it is made")
        refuse_images(images)
        engine, tokenizer = llm_engine or self.llm_engine, hf_tokenizer or self.hf_tokenizer
        agent = await new_instance(self.agent_instance_cls)
        begun = await awaited(agent.reset({"observation": prompt, "label": label}))
        talk = _Talk(begun["observation"], tokenizer, max_length or self.max_length, engine)
        reward, result, turns = 0.0, {}, 0
        while (not self.max_steps or turns < self.max_steps) and talk.room > 0:
            turns += 1
            before = talk.text
            action = await talk.generate(sampling_params)
            result = await awaited(agent.step({
                "observation_text": before, "action_text": action, "label": label, "sampling_params": sampling_params,
            }))  # fmt: skip
            refuse_images(result.get("environment_images"))
            reward += number(result["rewards"])
            if not result["done"] or result.get("environment_feedback"):
                talk.append(result.get("environment_feedback") or "")
            sampling_params = result.get("sampling_params") or sampling_params
            if result["done"]:
                break
        return talk.result(prompt, label) | {
            "reward": reward,
            "scores": result.get("scores", reward),
            "extra_logs": result.get("extra_logs") or {},
        }


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Turn by turn, as long as the agent wants."""


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One answer, judged by a reward file or by servers."""

    def __init__(self, remote_rm_url: str | list[str] | None = None) -> None:
        super().__init__()
        self.reward_endpoints = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or ())

    async def execute(
        self, prompt: str, label: Foreign, sampling_params: Foreign, max_length: int = 0,
        hf_tokenizer: Foreign = None, llm_engine: Foreign = None, images: Foreign = None,
    ) -> dict[str, Foreign]:  # fmt: skip
        refuse_images(images)
        talk = _Talk(prompt, hf_tokenizer, max_length, llm_engine)
        await talk.generate(sampling_params)
        result = talk.result(prompt, label) | {"reward": None, "scores": None, "extra_logs": {}}
        if self.reward_endpoints:
            query = hf_tokenizer.decode(result["observation_tokens"], skip_special_tokens=False)
            result |= await _judged(self.reward_endpoints, query, prompt, label)
        return result


class _Talk:
    """One sequence of tokens that grows by what the engine writes and what is said to it."""

    def __init__(self, text: str, tokenizer: Foreign, max_length: int, engine: Foreign) -> None:
        self.text, self._tokenizer, self._max_length, self._engine = text, tokenizer, max_length, engine
        self._tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        self._ranges: list[tuple[int, int]] = []
        self._logprobs: list[float] = [0.0] * len(self._tokens)
        self._cut = False

    @property
    def room(self) -> int:
        return self._max_length - len(self._tokens)

    async def generate(self, sampling_params: Foreign) -> str:
        asked = deepcopy(sampling_params)
        asked.max_tokens = min(asked.max_tokens or self.room, self.room)
        (output,) = (await self._engine.generate(self._tokens, asked)).outputs
        written = list(output.token_ids)
        self._ranges.append((len(self._tokens), len(self._tokens) + len(written)))
        self._tokens = self._tokens + written
        self._logprobs += [known[t].logprob for t, known in zip(written, output.logprobs or (), strict=False)]
        self._cut = output.finish_reason == "length"
        self.text += output.text
        return str(output.text)

    def append(self, text: str) -> None:
        said = self._tokenizer.encode(text, add_special_tokens=False)
        self.text, self._tokens, self._logprobs = (
            self.text + text,
            self._tokens + said,
            self._logprobs + [0.0] * len(said),
        )

    def result(self, prompt: str, label: Foreign) -> dict[str, Foreign]:
        return {
            "prompt": prompt, "label": label, "images": None, "mm_train_inputs": None, "truncated": self._cut,
            "observation_tokens": self._tokens, "action_ranges": self._ranges, "rollout_log_probs": self._logprobs,
        }  # fmt: skip


async def _judged(endpoints: list[str], query: str, prompt: str, label: Foreign) -> dict[str, Foreign]:
    from skyasync.interop.openrlhf.rewards import OpenRLHFSignature
    from skyasync.rewards.registry import find
    from skyasync.rewards.score import as_score

    name = ",".join(endpoints)
    function = find(f"{name}:reward_func" if name.endswith(".py") else name)
    lists = ([query], [prompt], [label])
    answer = (
        await function(*lists) if inspect.iscoroutinefunction(function) else await asyncio.to_thread(function, *lists)
    )
    score = as_score(name, OpenRLHFSignature().answer(answer))
    logs = dict(score.metrics)
    return {"reward": score.reward, "scores": logs.pop("score", score.reward), "extra_logs": logs}


def refuse_images(images: Foreign) -> None:
    """Raises ``InvalidEnvOutputError`` if there are any: they would be dropped without a word."""
    if images is not None and len(images):
        raise InvalidEnvOutputError(NO_IMAGES)


async def new_instance(agent_class: Foreign) -> Foreign:
    """An instance; its ``__init__`` may be ``async def``, as Ray allows."""
    instance = agent_class.__new__(agent_class)
    await awaited(instance.__init__())
    return instance


async def awaited(answer: Foreign) -> Foreign:
    return await answer if inspect.isawaitable(answer) else answer


def number(value: Foreign) -> Foreign:
    """A tensor or array of one element as a number; anything else as it is, to be judged where all rewards are."""
    return value.item() if hasattr(value, "item") and getattr(value, "size", None) is not None else value
