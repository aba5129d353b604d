"""OpenRLHF's agent files, unchanged: ``generator.agent_func_path=FILE.py``.

The file defines a class ``AgentExecutor`` that names an agent, a class ``AgentInstance`` with
``step(states)`` (and optionally ``reset(states)``), or a function
``async def step(state, action, label)``. The function is given ``sampling_params`` too if it takes
them. A step returns one of two forms:

    a tuple       (reward, next state, done[, extra])
    a dictionary  ``rewards``, ``scores``, ``done``, ``sampling_params``, ``extra_logs``, and the new text:
                  ``environment_feedback`` (what is appended) or ``next_state`` /
                  ``next_observation`` (the whole text, which must begin with the state and the
                  action)

Source: OpenRLHF's documentation and ``examples/python/agent_func.py`` over its history. An executor
with an ``execute`` of its own is played by ``skyasync.interop.openrlhf.agent_program``.

Invariant: text is appended unchanged, and the tokens that the model wrote are never made again from
it. A file that defines classes is run once per process. A file that defines the function ``step``
is run again for every episode, since its state is in its globals.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

from skyasync.envs import ENVS
from skyasync.envs.base import SAMPLING, BaseTextEnv, InvalidEnvOutputError
from skyasync.envs.images import NO_IMAGES, image_column
from skyasync.errors import UserError
from skyasync.inference.interface import SamplingParams
from skyasync.interop.openrlhf import SYSTEM
from skyasync.interop.openrlhf.user_modules import (
    Foreign,
    SingleTurnAgentExecutor,
    awaited,
    new_instance,
    refuse_images,
    stand_ins,
)
from skyasync.rewards.signature import single_value

PATH_KEY = "agent_func_path"  # the file's path in the environment's env_config
SAMPLING_KEY = "agent_sampling"  # the run's sampling parameters there
_LOADED: dict[str, dict[str, Any]] = {}
_LOADING = threading.RLock()
FEEDBACK = ("environment_feedback", "next_state", "next_observation")


@ENVS.register("openrlhf")
class OpenRLHFAgent(BaseTextEnv):
    """One episode of an agent file.

    The rewards of the steps are the rewards of the turns; ``scores`` and ``extra_logs`` of the last
    step that gave them are metrics; ``trainer.algorithm.dynamic_sampling.metric=score`` filters
    groups by the score.

    Args:
        env_config: the file's path under ``agent_func_path``.
        extras: the row's columns; ``label`` is given to the agent.

    Raises:
        UserError: if the file is missing or defines no agent.
        InvalidEnvOutputError: for a step that returns neither form.
    """

    raw_text: ClassVar[bool] = True

    @classmethod
    def load(cls, env_config: dict[str, Any]) -> None:
        """Run the file, so that its imports are loaded before the first episode."""
        instance_class(env_config.get(PATH_KEY, ""))

    def __init__(
        self, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None
    ) -> None:
        super().__init__(env_config, extras)
        self._file = self.env_config.get(PATH_KEY, "")
        self._agent = load_agent(self._file)  # a function step has these globals to itself
        self._agent_class = instance_class(self._file)
        self._instance: Any = None
        self._label = self.extras.get("label")
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
            first = await awaited(self._instance.reset(states))
            if isinstance(first, Mapping):
                self._text = first["observation"]
            else:
                self._text = first
        return self._text, {}

    async def step(self, action: str) -> dict[str, Any]:
        if self._instance is not None:
            states = {"observation_text": self._text, "action_text": action, "label": self._label}
            answer = await awaited(
                self._instance.step({**states, "sampling_params": self._sampling})
            )
        else:
            step = self._agent["step"]
            if takes_sampling(inspect.signature(step), self._file):
                more = {"sampling_params": self._sampling}
            else:
                more = {}
            answer = await awaited(step(self._text, action, self._label, **more))
        result, feedback = _read_answer(answer, self._text + action)
        refuse_images(result.get("environment_images"))
        self._text += action + feedback
        logs = {"score": result.get("scores"), **(result.get("extra_logs") or {})}
        values = {str(name): single_value(log) for name, log in logs.items()}
        self._logs |= {
            name: float(value) for name, value in values.items() if isinstance(value, int | float)
        }
        sampling = result.get("sampling_params")
        if isinstance(sampling, Mapping):
            changes = dict(sampling)
        elif (
            sampling is None or sampling is self._sampling
        ):  # which the agent may have changed in place
            before = vars(sampling_object(self.env_config.get(SAMPLING_KEY, {})))
            known = {
                name: value for name, value in vars(self._sampling).items() if name in SAMPLING
            }
            changes = {name: value for name, value in known.items() if value != before[name]}
        else:  # an object with vLLM's names
            self._sampling = sampling
            known = {name: getattr(sampling, name, None) for name in SAMPLING}
            changes = {name: value for name, value in known.items() if value is not None}
        return {
            "observations": feedback,
            "reward": single_value(result["rewards"]),
            "done": bool(result["done"]),
            "metadata": {},
            "sampling_params": changes,
        }

    def get_metrics(self) -> dict[str, float]:
        return self._logs


def settle_agent_file(cfg: Any) -> None:
    """If ``generator.agent_func_path`` names a file, it plays the rows that name no environment."""
    if not cfg.generator.agent_func_path:
        return
    file = agent_file(cfg.generator.agent_func_path)
    settings = {PATH_KEY: str(file), SAMPLING_KEY: asdict(cfg.generator.sampling_params)}
    cfg.environment.env_config = {**cfg.environment.env_config, **settings}
    if has_own_loop(file):
        cfg.generator.agent_program = SYSTEM.agent_program
        cfg.environment.env_class = ""
    else:
        cfg.environment.env_class = cfg.environment.env_class or "openrlhf"


def sampling_object(sampling: Mapping[str, Any]) -> SimpleNamespace:
    """Sampling parameters as agents know them: an object with vLLM's names, which may be changed
    and handed back."""
    known = {name: value for name, value in sampling.items() if name in SAMPLING}
    if "max_generate_length" in sampling:
        known["max_tokens"] = sampling["max_generate_length"]
    return SimpleNamespace(**{**asdict(SamplingParams()), **known}, n=1, logprobs=1)


def refuse_row_with_images(extras: Mapping[str, Any]) -> None:
    """Raises ``UserError`` for a row that brings images."""
    name = image_column(extras)
    if name:
        raise UserError(
            f"the row has {name}: {NO_IMAGES} (remove the column if the task does not need it)"
        )


def _read_answer(answer: Any, text: str) -> tuple[Mapping[str, Any], str]:
    """A step's answer in its dictionary form, and what it appends to ``text``, the state and the
    action."""
    if isinstance(answer, tuple) and len(answer) in (3, 4):
        reward, state, done, *extra = answer
        answer = {
            "rewards": reward,
            "next_state": state,
            "done": done,
            "extra_logs": extra[0] if extra else {},
        }
    if not isinstance(answer, Mapping):
        raise InvalidEnvOutputError(
            f"step must return (reward, next state, done, extra) or a dictionary; found {answer!r:.80}"
        )
    missing = [name for name in ("rewards", "done") if name not in answer]
    if missing:
        raise InvalidEnvOutputError(
            f"step's dictionary lacks {', '.join(missing)}; it has: {', '.join(map(str, answer))}"
        )
    name = next((name for name in FEEDBACK if answer.get(name) is not None), None)
    if name is None:
        if answer["done"]:
            return answer, ""
        raise InvalidEnvOutputError(
            f"step's dictionary has none of {', '.join(FEEDBACK)}, and the episode is not done"
        )
    new = answer[name]
    if not isinstance(new, str):
        raise InvalidEnvOutputError(f"step's {name} must be text; found {new!r:.80}")
    if name == "environment_feedback":
        return answer, new
    if new.startswith(text):
        return answer, new[len(text) :]
    if answer["done"]:
        return answer, ""  # the model does not read it
    raise InvalidEnvOutputError(
        f"step's {name} must begin with the state and the action as they were: the model goes on from the tokens that "
        f"it has read and written"
    )


def agent_file(path: str) -> Path:
    """The file behind ``generator.agent_func_path``.

    Raises:
        UserError: if there is none.
    """
    file = Path(path).expanduser().resolve()
    if not file.exists():
        raise UserError(f"generator.agent_func_path={path} is not there: {file} does not exist")
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"generator.agent_func_path={path} is not a Python file")
    return file


def has_own_loop(path: Path) -> bool:
    """Whether its ``AgentExecutor`` plays episodes itself, in tokens; read from the source, without
    running it.

    Raises:
        UserError: if the file is not Python, or has only a function ``step`` with the wrong
            parameters.
    """
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise UserError(f"generator.agent_func_path={path}:{error.lineno}: {error.msg}") from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if not classes.keys() & {"AgentExecutor", "AgentInstance"}:
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name != "step":
                continue
            if node.decorator_list:  # which may change its parameters
                continue
            # a function with its parameters, whatever their defaults and types
            arguments = deepcopy(node.args)
            for argument in ast.walk(arguments):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
            arguments.kw_defaults = [
                default and ast.Constant(None) for default in arguments.kw_defaults
            ]
            function = ast.fix_missing_locations(
                ast.Expression(ast.Lambda(arguments, ast.Constant(None)))
            )
            takes_sampling(inspect.signature(eval(compile(function, "step", "eval"))), str(path))
    executor = classes.get("AgentExecutor")
    while executor is not None:
        if any(
            isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == "execute"
            for n in executor.body
        ):
            return True
        bases = [ast.unparse(base).rpartition(".")[2] for base in executor.bases]
        if {"MultiTurnAgentExecutor", "AgentExecutorBase"} & {*bases}:
            return False
        base = next((name for name in bases if name in classes), None)
        if base is None:
            return True  # one of another file, or the one for a single turn
        executor = classes[base]
    return False


def takes_sampling(step: inspect.Signature, path: str) -> bool:
    """Whether a function ``step`` takes ``sampling_params`` in addition to state, action and label.

    Raises:
        UserError: if it cannot be called at all.
    """
    try:
        step.bind("", "", None, sampling_params=None)
        return True
    except TypeError:
        pass
    try:
        step.bind("", "", None)
        return False
    except TypeError as error:
        problem = f"step{step} cannot be called as step(state, action, label[, sampling_params=...]): {error}"
        raise UserError(f"generator.agent_func_path={path}: {problem}") from None


def load_agent(path: str) -> dict[str, Any]:
    """The file's globals.

    Raises:
        UserError: if it defines no agent.
    """
    with _LOADING:
        if path in _LOADED:
            return _LOADED[path]
        module = ModuleType(f"agent_func@{path}")
        module.__file__ = path
        folder = str(Path(path).parent)
        if folder not in sys.path:
            sys.path.append(folder)  # the file may import its neighbours, also later
        sys.modules[module.__name__] = module  # dataclasses look their module up
        try:
            with stand_ins():
                exec(_code(path), module.__dict__)
        finally:
            sys.modules.pop(module.__name__, None)
        agent = module.__dict__
        if any(isinstance(agent.get(name), type) for name in ("AgentExecutor", "AgentInstance")):
            _LOADED[path] = agent
        elif not callable(agent.get("step")):
            raise UserError(
                f"generator.agent_func_path={path} defines neither AgentInstance nor step(state, action, label), "
                f"nor an AgentExecutor"
            )
        return agent


@cache
def instance_class(path: str) -> Foreign:
    """The class whose instances are played turn by turn; None if the file has only the function
    ``step``.

    Raises:
        UserError: if its executor wants to play them itself.
    """
    agent = load_agent(path)
    executor_class = agent.get("AgentExecutor")
    if executor_class is None:
        return agent.get("AgentInstance")
    executor = made(executor_class, {})
    own = type(executor).execute.__module__.partition(".")[0] not in ("skyasync", "openrlhf")
    if own or isinstance(executor, SingleTurnAgentExecutor) or executor.agent_instance_cls is None:
        raise UserError(
            f"generator.agent_func_path={path}: its AgentExecutor has an execute of its own, which plays as an agent "
            f"program (generator.agent_program) and not in environment.env_class=openrlhf: name no env_class, and "
            f"define class AgentExecutor in the file itself"
        )
    return executor.agent_instance_cls


def made(executor_class: Foreign, parts: Mapping[str, object]) -> Foreign:
    """An executor; executors of older files take parts by name in ``__init__``."""
    parameters = list(inspect.signature(executor_class).parameters.values())
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    given = {name: parts.get(name) for name in required}
    given |= {
        p.name: parts[p.name] for p in parameters if p.name in parts and p.kind is not p.VAR_KEYWORD
    }
    return executor_class(**given)


@cache
def _code(path: str) -> CodeType:
    return compile(agent_file(path).read_text(), path, "exec")
