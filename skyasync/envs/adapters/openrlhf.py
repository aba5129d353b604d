"""OpenRLHF's agent files, as they are: ``generator.agent_func_path=FILE.py``.

The file defines a class ``AgentExecutor`` that names an agent, a class ``AgentInstance`` with ``step(states)`` (and
``reset(states)`` if it likes), or a function ``async def step(state, action, label)``, which is given
``sampling_params`` too if it takes them. A step gives a tuple
(reward, next state, done[, extra]) or a dictionary with ``rewards``, ``scores``, ``environment_feedback`` (what is
appended) or ``next_state`` / ``next_observation`` (the whole text, which must begin with the state and the action),
``done``, ``sampling_params`` and ``extra_logs``. Source of these forms: OpenRLHF's documentation and
``examples/python/agent_func.py`` over its history. An executor with an ``execute`` of its own is played by
``skyasync.endpoint.openrlhf``.

Invariant: text is appended as it is, and the tokens that the model wrote are never made again from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from inspect import signature
from types import SimpleNamespace
from typing import Any, ClassVar

from skyasync.envs.adapters.openrlhf_file import agent_file, has_own_loop, instance_class, load_agent, takes_sampling
from skyasync.envs.adapters.openrlhf_names import awaited, new_instance, number, refuse_images
from skyasync.envs.base import BaseTextEnv
from skyasync.envs.check import SAMPLING, InvalidEnvOutputError
from skyasync.envs.images import NO_IMAGES, image_column
from skyasync.envs.registry import ENVS
from skyasync.errors import UserError
from skyasync.inference.interface import SamplingParams

PATH_KEY = "agent_func_path"  # where the environment finds the file in its env_config
SAMPLING_KEY = "agent_sampling"  # and how the run samples
PROGRAM = "skyasync.endpoint.openrlhf:play"  # plays executors with a loop of their own
FEEDBACK = ("environment_feedback", "next_state", "next_observation")


@ENVS.register("openrlhf")
class OpenRLHFAgent(BaseTextEnv):
    """One episode of an agent file.

    The rewards of the steps are the rewards of the turns; ``scores`` and ``extra_logs`` of the last step that gave
    them are metrics; ``trainer.algorithm.dynamic_sampling.metric=score`` filters groups by the score.

    Args:
        env_config: the file's path under ``agent_func_path``.
        extras: ``label`` is the agent's.

    Raises:
        UserError: if the file is missing or defines no agent.
        InvalidEnvOutputError: for a step that returns neither form.
    """

    raw_text: ClassVar[bool] = True

    @classmethod
    def load(cls, env_config: dict[str, Any]) -> None:
        """Run the file: what it imports is there when the first episode begins."""
        instance_class(env_config.get(PATH_KEY, ""))

    def __init__(self, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self._file = self.env_config.get(PATH_KEY, "")
        self._agent = load_agent(self._file)  # a function step has these globals to itself
        self._agent_class = instance_class(self._file)
        self._instance: Any = None
        self._sampling = sampling_object(self.env_config.get(SAMPLING_KEY, {}))
        self._text = ""  # everything read and written so far
        self._logs: dict[str, float] = {}

    async def init(self, prompt: str) -> tuple[str, dict[str, Any]]:
        refuse_row_with_images(self.extras)
        self._text = prompt
        if self._agent_class is not None:
            self._instance = await new_instance(self._agent_class)
        if hasattr(self._instance, "reset"):
            states = {"observation": prompt, "prompt": prompt, "label": self._label}
            begun = await awaited(self._instance.reset(states))
            self._text = begun["observation"] if isinstance(begun, Mapping) else begun
        return self._text, {}

    async def step(self, action: str) -> dict[str, Any]:
        if self._instance is not None:
            states = {"observation_text": self._text, "action_text": action, "label": self._label}
            answer = await awaited(self._instance.step({**states, "sampling_params": self._sampling}))
        else:
            step = self._agent["step"]
            told = {"sampling_params": self._sampling} if takes_sampling(signature(step), self._file) else {}
            answer = await awaited(step(self._text, action, self._label, **told))
        said = _as_mapping(answer)
        refuse_images(said.get("environment_images"))
        read = self._text + action
        feedback = _feedback(said, read)
        self._text = read + feedback
        self._logs |= _numbers({"score": said.get("scores"), **(said.get("extra_logs") or {})})
        return {
            "observations": feedback,
            "reward": number(said["rewards"]),
            "done": bool(said["done"]),
            "metadata": {},
            "sampling_params": self._resampled(said.get("sampling_params")),
        }

    def _resampled(self, changes: Any) -> dict[str, Any]:
        """What the agent has changed of how it is sampled: a dictionary, or an object with vLLM's names."""
        if isinstance(changes, Mapping):
            return dict(changes)
        if changes is None or changes is self._sampling:  # which may have been changed where it is
            before = vars(sampling_object(self.env_config.get(SAMPLING_KEY, {})))
            return {name: value for name, value in vars(self._sampling).items()
                    if name in SAMPLING and value != before[name]}  # fmt: skip
        self._sampling = changes
        return {name: getattr(changes, name) for name in SAMPLING if getattr(changes, name, None) is not None}

    def get_metrics(self) -> dict[str, float]:
        return self._logs

    @property
    def _label(self) -> Any:
        return self.extras.get("label")


def settle_agent_file(cfg: Any) -> None:
    """Rows that name no environment are played by the file of ``generator.agent_func_path``, if there is one."""
    if not cfg.generator.agent_func_path:
        return
    file = agent_file(cfg.generator.agent_func_path)
    told = {PATH_KEY: str(file), SAMPLING_KEY: asdict(cfg.generator.sampling_params)}
    cfg.environment.env_config = {**cfg.environment.env_config, **told}
    if has_own_loop(file):
        cfg.generator.agent_program, cfg.environment.env_class = PROGRAM, ""
    else:
        cfg.environment.env_class = cfg.environment.env_class or "openrlhf"


def sampling_object(sampling: Mapping[str, Any]) -> SimpleNamespace:
    """Sampling parameters as agents know them: an object with vLLM's names, which may be changed and handed back."""
    known = {name: value for name, value in sampling.items() if name in SAMPLING}
    if "max_generate_length" in sampling:
        known["max_tokens"] = sampling["max_generate_length"]
    return SimpleNamespace(**{**asdict(SamplingParams()), **known}, n=1, logprobs=1)


def refuse_row_with_images(extras: Mapping[str, Any]) -> None:
    """Raises ``UserError`` for a row that brings images."""
    if name := image_column(extras):
        raise UserError(f"the row has {name}: {NO_IMAGES} (drop the column if it has no part in the task)")


def _as_mapping(answer: Any) -> Mapping[str, Any]:
    """A step's answer in its dictionary form."""
    if isinstance(answer, tuple) and len(answer) in (3, 4):
        reward, state, done, *extra = answer
        answer = {"rewards": reward, "next_state": state, "done": done, "extra_logs": extra[0] if extra else {}}
    if not isinstance(answer, Mapping):
        raise InvalidEnvOutputError(
            f"step must return (reward, next state, done, extra) or a dictionary; found {answer!r:.80}"
        )
    if missing := [name for name in ("rewards", "done") if name not in answer]:
        raise InvalidEnvOutputError(
            f"step's dictionary lacks {', '.join(missing)}; it has: {', '.join(map(str, answer))}"
        )
    return answer


def _feedback(said: Mapping[str, Any], read: str) -> str:
    """What the environment appends to what was read and written."""
    name = next((name for name in FEEDBACK if said.get(name) is not None), None)
    if name is None:
        if said["done"]:
            return ""
        raise InvalidEnvOutputError(f"step's dictionary has none of {', '.join(FEEDBACK)}, and the episode is not done")
    text = said[name]
    if not isinstance(text, str):
        raise InvalidEnvOutputError(f"step's {name} must be text; found {text!r:.80}")
    if name == "environment_feedback":
        return text
    if text.startswith(read):
        return text[len(read) :]
    if said["done"]:
        return ""  # nothing is read after it
    raise InvalidEnvOutputError(
        f"step's {name} must begin with the state and the action as they were: the model goes on from the tokens that "
        f"it has read and written"
    )


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Those of the logs that are numbers."""
    found = {str(name): number(value) for name, value in logs.items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
