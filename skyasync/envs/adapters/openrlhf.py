"""OpenRLHF's agent files, as they are: ``generator.agent_func_path=FILE.py``.

The file defines either a function ``async def step(state, action, label, **kwargs)`` or a class ``AgentInstance`` with
``reset(states)`` and ``step(states)``. A step gives a tuple (reward, next state, done[, extra]) or a dictionary with
``rewards``, ``scores``, ``environment_feedback`` (what is appended) or ``next_state`` / ``next_observation`` (the whole
text, which must begin with the state and the action), ``done``, ``sampling_params`` and ``extra_logs``. Source of these
forms: OpenRLHF's documentation and ``examples/python/agent_func.py`` over its history.

Invariant: every episode has the file's globals to itself, as an agent has there. Text is appended as it is, and the
tokens that the model wrote are never made again from it.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, ClassVar

from skyasync.envs.base import BaseTextEnv
from skyasync.envs.check import SAMPLING, NonsenseError
from skyasync.envs.registry import ENVS
from skyasync.errors import UserError

PATH_KEY = "agent_func_path"  # where the environment finds the file in its env_config
FEEDBACK = ("environment_feedback", "next_state", "next_observation")
_BASES_AT = "openrlhf.utils.agent"
_BASES = ("AgentInstanceBase", "AgentExecutorBase", "SingleTurnAgentExecutor", "MultiTurnAgentExecutor")


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
        NonsenseError: for a step that returns neither form.
    """

    raw_text: ClassVar[bool] = True

    @classmethod
    def load(cls, env_config: dict[str, Any]) -> None:
        """Run the file once: what it imports is there when the first episode runs it anew."""
        _load(env_config.get(PATH_KEY, ""))

    def __init__(self, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None) -> None:
        super().__init__(env_config, extras)
        self._file = self.env_config.get(PATH_KEY, "")
        self._agent = _load(self._file)
        self._instance: Any = None
        self._text = ""  # everything read and written so far
        self._logs: dict[str, float] = {}

    async def init(self, prompt: str) -> tuple[str, dict[str, Any]]:
        self._text = prompt
        if "AgentInstance" in self._agent:
            self._instance = await _new(self._agent["AgentInstance"])
            states = {"observation": prompt, "prompt": prompt, "label": self._label}
            begun = await _awaited(self._instance.reset(states))
            self._text = begun["observation"] if isinstance(begun, Mapping) else begun
        return self._text, {}

    async def step(self, action: str) -> dict[str, Any]:
        if self._instance is not None:
            states = {"observation_text": self._text, "action_text": action, "label": self._label}
            answer = await _awaited(self._instance.step({**states, "sampling_params": None}))
        else:
            answer = await _awaited(self._agent["step"](self._text, action, self._label))
        said = _as_mapping(answer)
        read = self._text + action
        feedback = _feedback(said, read)
        self._text = read + feedback
        self._logs |= _numbers({"score": said.get("scores"), **(said.get("extra_logs") or {})})
        return {
            "observations": feedback,
            "reward": _number(said["rewards"]),
            "done": bool(said["done"]),
            "metadata": {},
            "sampling_params": _sampling(said.get("sampling_params")),
        }

    def get_metrics(self) -> dict[str, float]:
        return self._logs

    @property
    def _label(self) -> Any:
        return self.extras.get("label")


def agent_file(path: str) -> Path:
    """The file behind ``generator.agent_func_path``.

    Raises:
        UserError: if there is none.
    """
    found = Path(path).expanduser().resolve()
    if found.suffix != ".py" or not found.is_file():
        raise UserError(f"generator.agent_func_path={path} is no Python file")
    return found


def settle_agent_file(cfg: Any) -> None:
    """Rows that name no environment are played by the file of ``generator.agent_func_path``, if there is one."""
    if path := cfg.generator.agent_func_path:
        cfg.environment.env_class = cfg.environment.env_class or "openrlhf"
        cfg.environment.env_config = {**cfg.environment.env_config, PATH_KEY: str(agent_file(path))}


def _load(path: str) -> dict[str, Any]:
    """The globals of the file, run anew."""
    name = f"agent_func@{path}"
    module = ModuleType(name)
    module.__file__ = path
    _provide_bases()
    with _importable(module, path):
        exec(_code(path), module.__dict__)
    agent = module.__dict__
    if "execute" in vars(agent.get("AgentExecutor", object)):
        raise UserError(
            f"generator.agent_func_path={path}: its AgentExecutor overrides execute, which is not called here: an "
            f"agent with a loop of its own is a program that takes a base URL (generator.agent_program)"
        )
    if not callable(agent.get("AgentInstance")) and not callable(agent.get("step")):
        raise UserError(
            f"generator.agent_func_path={path} defines neither AgentInstance nor step(state, action, label)"
        )
    return agent


@cache
def _code(path: str) -> CodeType:
    return compile(agent_file(path).read_text(), path, "exec")


@contextmanager
def _importable(module: ModuleType, path: str) -> Iterator[None]:
    """While the file runs it finds the files beside it, and its dataclasses find it."""
    folder = str(Path(path).parent)
    if folder not in sys.path:
        sys.path.append(folder)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        sys.modules.pop(module.__name__, None)


def _provide_bases() -> None:
    """Where OpenRLHF is not installed, empty stand-ins for the classes that agent files inherit from."""
    if "openrlhf" in sys.modules or importlib.util.find_spec("openrlhf") is not None:
        return
    for name in ("openrlhf", "openrlhf.utils", _BASES_AT):
        sys.modules[name] = ModuleType(name)
    for base in _BASES:
        setattr(sys.modules[_BASES_AT], base, type(base, (), {}))


async def _new(agent_class: Any) -> Any:
    """An instance; its ``__init__`` may be ``async def``, as Ray allows."""
    instance = agent_class.__new__(agent_class)
    await _awaited(instance.__init__())
    return instance


async def _awaited(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


def _as_mapping(answer: Any) -> Mapping[str, Any]:
    """A step's answer in its dictionary form."""
    if isinstance(answer, tuple) and len(answer) in (3, 4):
        reward, state, done, *extra = answer
        answer = {"rewards": reward, "next_state": state, "done": done, "extra_logs": extra[0] if extra else {}}
    if not isinstance(answer, Mapping):
        raise NonsenseError(f"step must return (reward, next state, done, extra) or a dictionary; found {answer!r:.80}")
    if missing := [name for name in ("rewards", "done") if name not in answer]:
        raise NonsenseError(f"step's dictionary lacks {', '.join(missing)}; it has: {', '.join(map(str, answer))}")
    return answer


def _feedback(said: Mapping[str, Any], read: str) -> str:
    """What the environment appends to what was read and written."""
    name = next((name for name in FEEDBACK if said.get(name) is not None), None)
    if name is None:
        if said["done"]:
            return ""
        raise NonsenseError(f"step's dictionary has none of {', '.join(FEEDBACK)}, and the episode is not done")
    text = said[name]
    if not isinstance(text, str):
        raise NonsenseError(f"step's {name} must be text; found {text!r:.80}")
    if name == "environment_feedback":
        return text
    if text.startswith(read):
        return text[len(read) :]
    if said["done"]:
        return ""  # nothing is read after it
    raise NonsenseError(
        f"step's {name} must begin with the state and the action as they were: the model goes on from the tokens that "
        f"it has read and written"
    )


def _number(value: Any) -> Any:
    """A tensor or array of one element as a number; anything else as it is, to be judged where all rewards are."""
    return value.item() if hasattr(value, "item") and getattr(value, "size", None) is not None else value


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Those of the logs that are numbers."""
    found = {str(name): _number(value) for name, value in logs.items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, int | float)}


def _sampling(changes: Any) -> dict[str, Any]:
    """A dictionary, or an object with vLLM's names, of which those that are known here count."""
    if changes is None or isinstance(changes, Mapping):
        return dict(changes or {})
    return {name: getattr(changes, name) for name in SAMPLING if getattr(changes, name, None) is not None}
