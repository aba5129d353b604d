"""The classes of ``openrlhf.utils.agent`` that users' agent files inherit from, where OpenRLHF is not installed.

``MultiTurnAgentExecutor.execute`` plays an ``AgentInstance`` turn by turn, ``SingleTurnAgentExecutor.execute`` asks
once and has the answer judged; both work in tokens, through whatever ``llm_engine`` they are given. The older
``AgentExecutorBase(agent_instance_cls, max_steps, max_length, llm_engine, hf_tokenizer, result_queue)`` is the first of
them with its parts handed over when it is made.

Invariant: the tokens in a result are those that the engine read and wrote, one behind the other. In our words, after
OpenRLHF's documentation and the names in ``openrlhf/utils/agent.py`` over its history.
"""

from __future__ import annotations

import inspect
from copy import deepcopy
from typing import Any

from skyasync.envs.base import InvalidEnvOutputError
from skyasync.envs.images import NO_IMAGES

Foreign = Any  # objects of the user's file or of its libraries


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
        reward, told, turns = 0.0, {}, 0
        while (not self.max_steps or turns < self.max_steps) and talk.room > 0:
            turns += 1
            before = talk.text
            action = await talk.generate(sampling_params)
            told = await awaited(agent.step({
                "observation_text": before, "action_text": action, "label": label, "sampling_params": sampling_params,
            }))  # fmt: skip
            refuse_images(told.get("environment_images"))
            reward += number(told["rewards"])
            if not told["done"] or told.get("environment_feedback"):
                talk.append(told.get("environment_feedback") or "")
            sampling_params = told.get("sampling_params") or sampling_params
            if told["done"]:
                break
        return talk.result(prompt, label) | {
            "reward": reward,
            "scores": told.get("scores", reward),
            "extra_logs": told.get("extra_logs") or {},
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
    from asyncio import to_thread

    from skyasync.rewards.forms import unbatched
    from skyasync.rewards.registry import find
    from skyasync.rewards.score import as_score

    name = ",".join(endpoints)
    function = find(f"{name}:reward_func" if name.endswith(".py") else name)
    lists = ([query], [prompt], [label])
    answer = await function(*lists) if inspect.iscoroutinefunction(function) else await to_thread(function, *lists)
    score = as_score(name, unbatched(answer))
    logs = dict(score.metrics)
    return {"reward": score.reward, "scores": logs.pop("score", score.reward), "extra_logs": logs}


def names() -> dict[str, dict[str, Foreign]]:
    """What ``openrlhf.utils.agent`` has, for ``skyasync.rewards.openrlhf.stand_ins``."""
    classes = (AgentInstanceBase, AgentExecutorBase, SingleTurnAgentExecutor, MultiTurnAgentExecutor)
    return {"agent": {found.__name__: found for found in classes}}


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
