"""The names of ``openrlhf.utils`` that users' files import, for machines without OpenRLHF.

``MultiTurnAgentExecutor.execute`` plays an ``AgentInstance`` turn by turn.
``SingleTurnAgentExecutor.execute`` takes one answer and its reward. Both work in tokens, with the
``llm_engine`` from their arguments. The older ``AgentExecutorBase`` also plays turn by turn; its
constructor takes ``agent_instance_cls``, ``max_steps``, ``max_length``, ``llm_engine``,
``hf_tokenizer`` and ``result_queue``.

Invariant: these modules are in ``sys.modules`` only while such a file is loaded, and only if
OpenRLHF is not installed. The tokens in a result are those that the engine read and wrote, in their
order. Source: OpenRLHF's documentation and the names in ``openrlhf/utils/agent.py`` over its
history.
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
    loaded_root = sys.modules.get(_ROOT)
    if loaded_root is not None:
        spec = loaded_root.__spec__
    else:
        spec = importlib.util.find_spec(_ROOT)
    # A folder of this name has a spec, too, as a namespace package without an origin.
    if spec is not None and spec.origin is not None:
        yield
        return
    with _LOCK:
        previous_modules = _loaded()
        sys.modules.update(_modules())
        try:
            yield
        finally:
            for name in _loaded():
                del sys.modules[name]
            sys.modules.update(previous_modules)


def _loaded() -> dict[str, ModuleType]:
    """The loaded modules with this root."""
    modules = {}
    for name, module in sys.modules.copy().items():  # a copy: other threads import meanwhile
        root, _, _ = name.partition(".")
        if root == _ROOT:
            modules[name] = module
    return modules


def grade_answer(answer: str | None, truth: str | None) -> bool:
    """Whether two answers are the same text, number or, with math-verify installed, expression."""
    if answer is None or truth is None:
        return False
    answer_text = _normalized(answer)
    truth_text = _normalized(truth)
    if answer_text == truth_text:
        return True
    try:
        return float(answer_text) == float(truth_text)
    except ValueError:
        pass  # no numbers
    if importlib.util.find_spec("math_verify") is None:
        return False
    from skyasync.rewards.answer_match import math_verify

    try:
        return bool(math_verify(f"${answer}$", truth))
    except Exception:
        return False  # not an expression


def _normalized(text: str) -> str:
    """An answer without blanks, currency signs, thousands separators and LaTeX's spacing."""
    text = re.sub(r"[\s$,]|\\left|\\right|\\!", "", text)
    return text.rstrip(".").lower()


def _modules() -> dict[str, ModuleType]:
    """The modules by name, each an attribute of its parent."""
    graders = {"extract_boxed_answer": extract_boxed_answer, "grade_answer": grade_answer}
    agents = (AgentInstanceBase, AgentExecutorBase, SingleTurnAgentExecutor, MultiTurnAgentExecutor)
    contents: dict[str, dict[str, Foreign]] = {
        _ROOT: {},
        f"{_ROOT}.utils": graders,
        f"{_ROOT}.utils.math_utils": graders,
        f"{_ROOT}.utils.logging_utils": {"init_logger": logging.getLogger},
        f"{_ROOT}.utils.agent": {agent.__name__: agent for agent in agents},
    }
    modules: dict[str, ModuleType] = {}
    for name, attributes in contents.items():
        module = ModuleType(name)
        modules[name] = module
        vars(module).update(attributes, __path__=[])  # __path__ makes it a package
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    return modules


class AgentInstanceBase:
    """The state of an episode.

    A subclass defines ``step``, and ``reset`` if the first observation is not the prompt.
    """

    def __init__(self, *args: Foreign, **kwargs: Foreign) -> None: ...

    async def reset(self, states: dict[str, Foreign], **kwargs: Foreign) -> dict[str, Foreign]:
        return states

    async def step(self, state_dict: dict[str, Foreign], **kwargs: Foreign) -> dict[str, Foreign]:
        raise NotImplementedError("AgentInstance must define step(states)")


class AgentExecutorBase:
    """Plays an episode from a prompt.

    A subclass overrides ``execute``, or passes the class of an agent.
    """

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
        start = await result_of(agent.reset({"observation": prompt, "label": label}))
        episode = _TokenEpisode(
            start["observation"], tokenizer, max_length or self.max_length, engine
        )
        reward = 0.0
        result = {}
        turns = 0
        while (not self.max_steps or turns < self.max_steps) and episode.free > 0:
            turns += 1
            observation = episode.text
            action = await episode.generate(sampling_params)
            states = {
                "observation_text": observation,
                "action_text": action,
                "label": label,
                "sampling_params": sampling_params,
            }
            result = await result_of(agent.step(states))
            refuse_images(result.get("environment_images"))
            reward += cast(float, single_value(result["rewards"]))
            feedback = result.get("environment_feedback") or ""
            if feedback or not result["done"]:
                episode.append(feedback)
            sampling_params = result.get("sampling_params") or sampling_params
            if result["done"]:
                break
        return episode.result(prompt, label) | {
            "reward": reward,
            "scores": result.get("scores", reward),
            "extra_logs": result.get("extra_logs") or {},
        }


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Plays turn by turn, until the agent is done."""


class SingleTurnAgentExecutor(AgentExecutorBase):
    """One answer, whose reward comes from a file or from servers."""

    def __init__(self, remote_rm_url: str | list[str] | None = None) -> None:
        super().__init__()
        endpoints = [remote_rm_url] if isinstance(remote_rm_url, str) else remote_rm_url
        self.reward_endpoints = list(endpoints or ())

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
            # In a thread, so that it does not stop the other episodes.
            answer = await asyncio.to_thread(function, [query], [prompt], [label])
        score = as_score(name, OpenRLHFSignature().answer(answer))
        logs = dict(score.metrics)
        return result | {
            "reward": score.reward,
            "scores": logs.pop("score", score.reward),
            "extra_logs": logs,
        }


class _TokenEpisode:
    """The tokens of an episode: the prompt, then actions and feedback in turn."""

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
        """Append the engine's tokens; their text."""
        request = deepcopy(sampling_params)  # the agent may change and return its own
        request.max_tokens = min(request.max_tokens or self.free, self.free)
        response = await self._engine.generate(self._tokens, request)
        (output,) = response.outputs
        start = len(self._tokens)
        wrote = list(output.token_ids)
        self._ranges.append((start, start + len(wrote)))
        self._tokens = self._tokens + wrote  # a new list: the engine may still have the old one
        self.free -= len(wrote)
        # vLLM gives a mapping per position, from tokens to objects with their log-probability.
        for token, logprobs in zip(wrote, output.logprobs or (), strict=False):
            self._logprobs.append(logprobs[token].logprob)
        self._truncated = output.finish_reason == "length"
        self.text += output.text
        return str(output.text)

    def append(self, text: str) -> None:
        """Append feedback of the environment, which is not trained on."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        self.text += text
        self._tokens = self._tokens + tokens
        self._logprobs += [0.0] * len(tokens)
        self.free -= len(tokens)

    def result(self, prompt: str, label: Foreign) -> dict[str, Foreign]:
        """The episode as ``execute`` returns it, without a reward."""
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
    await result_of(instance.__init__())
    return instance


async def result_of(answer: Foreign) -> Foreign:
    """The answer of a user's method, which may be ``async def`` or not."""
    if inspect.isawaitable(answer):
        return await answer
    return answer
