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
    new_instance,
    refuse_images,
    result_of,
    stand_ins,
)
from skyasync.rewards.signature import single_value

PATH_KEY = "agent_func_path"  # the file's path in the environment's env_config
SAMPLING_KEY = "agent_sampling"  # the run's sampling parameters there
#: Path -> the globals of a file that defines classes, which is run once per process.
_LOADED_FILES: dict[str, dict[str, Any]] = {}
_LOAD_LOCK = threading.RLock()
FEEDBACK = ("environment_feedback", "next_state", "next_observation")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@ENVS.register("openrlhf")
class OpenRLHFAgent(BaseTextEnv):
    """One episode of an agent file.

    The rewards of the steps are the rewards of the turns. ``scores`` and ``extra_logs`` are
    metrics, with their values from the last step that has them;
    ``trainer.algorithm.dynamic_sampling.metric=score`` filters groups by the score.

    Args:
        env_config: the file's path under ``agent_func_path``.
        extras: the row's columns; the agent gets ``label``.

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
        self._agent = load_agent(self._file)  # globals; a function step has new ones per episode
        self._agent_class = instance_class(self._file)
        self._instance: Any = None
        self._label = self.extras.get("label")
        self._sampling = sampling_object(self.env_config.get(SAMPLING_KEY, {}))
        self._text = ""  # all that the model has read and written
        self._logs: dict[str, float] = {}

    async def init(self, prompt: str) -> tuple[str, dict[str, Any]]:
        refuse_row_with_images(self.extras)
        self._text = prompt
        if self._agent_class is not None:
            self._instance = await new_instance(self._agent_class)
        if hasattr(self._instance, "reset"):
            states = {"observation": prompt, "prompt": prompt, "label": self._label}
            start = await result_of(self._instance.reset(states))
            # Older agents return the text itself.
            self._text = start["observation"] if isinstance(start, Mapping) else start
        return self._text, {}

    async def step(self, action: str) -> dict[str, Any]:
        if self._instance is not None:
            states = {
                "observation_text": self._text,
                "action_text": action,
                "label": self._label,
                "sampling_params": self._sampling,
            }
            answer = await result_of(self._instance.step(states))
        else:
            step = self._agent["step"]
            options: dict[str, object] = {}
            if takes_sampling(inspect.signature(step), self._file):
                options["sampling_params"] = self._sampling
            answer = await result_of(step(self._text, action, self._label, **options))
        result, feedback = _read_answer(answer, self._text + action)
        refuse_images(result.get("environment_images"))
        self._text += action + feedback
        logs = {"score": result.get("scores"), **(result.get("extra_logs") or {})}
        for name, log in logs.items():
            value = single_value(log)
            if isinstance(value, int | float):
                self._logs[str(name)] = float(value)
        return {
            "observations": feedback,
            "reward": single_value(result["rewards"]),
            "done": bool(result["done"]),
            "metadata": {},
            "sampling_params": self._sampling_changes(result.get("sampling_params")),
        }

    def _sampling_changes(self, sampling: Any) -> dict[str, Any]:
        """The sampling parameters that the next turn changes.

        Args:
            sampling: what a step returned: a mapping, an object with vLLM's names, or None.
        """
        if isinstance(sampling, Mapping):
            return dict(sampling)
        changes = {}
        if sampling is None or sampling is self._sampling:
            # The agent may have changed the object in place.
            original = sampling_object(self.env_config.get(SAMPLING_KEY, {}))
            for name, value in vars(self._sampling).items():
                if name in SAMPLING and value != getattr(original, name):
                    changes[name] = value
            return changes
        self._sampling = sampling
        for name in SAMPLING:
            value = getattr(sampling, name, None)
            if value is not None:
                changes[name] = value
        return changes

    def get_metrics(self) -> dict[str, float]:
        return self._logs


def settle_agent_file(cfg: Any) -> None:
    """Let ``generator.agent_func_path``, if it is set, play the rows that name no environment."""
    if not cfg.generator.agent_func_path:
        return
    file = agent_file(cfg.generator.agent_func_path)
    settings = {PATH_KEY: str(file), SAMPLING_KEY: asdict(cfg.generator.sampling_params)}
    # Environments get it with their arguments, in all processes.
    cfg.environment.env_config = {**cfg.environment.env_config, **settings}
    if has_own_loop(file):
        cfg.generator.agent_program = SYSTEM.agent_program
        cfg.environment.env_class = ""
    else:
        cfg.environment.env_class = cfg.environment.env_class or "openrlhf"


def sampling_object(sampling: Mapping[str, Any]) -> SimpleNamespace:
    """Sampling parameters as an object with vLLM's names, which an agent may change and return."""
    values = asdict(SamplingParams())
    for name, value in sampling.items():
        if name in SAMPLING:
            values[name] = value
    if "max_generate_length" in sampling:
        values["max_tokens"] = sampling["max_generate_length"]
    return SimpleNamespace(**values, n=1, logprobs=1)


def refuse_row_with_images(extras: Mapping[str, Any]) -> None:
    """Raises ``UserError`` for a row with images."""
    name = image_column(extras)
    if name:
        raise UserError(
            f"the row has {name}: {NO_IMAGES} (remove the column if the task does not need it)"
        )


def _read_answer(answer: Any, text: str) -> tuple[Mapping[str, Any], str]:
    """A step's answer as a dictionary, and the text that it appends.

    Args:
        text: the state and the action.

    Raises:
        InvalidEnvOutputError: for an answer of another form, or one that changes ``text``.
    """
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
        present = ", ".join(map(str, answer))
        raise InvalidEnvOutputError(
            f"step's dictionary lacks {', '.join(missing)}; it has: {present}"
        )
    name = next((name for name in FEEDBACK if answer.get(name) is not None), None)
    if name is None:
        if answer["done"]:
            return answer, ""
        raise InvalidEnvOutputError(
            f"step's dictionary has none of {', '.join(FEEDBACK)}, and the episode is not done"
        )
    feedback = answer[name]
    if not isinstance(feedback, str):
        raise InvalidEnvOutputError(f"step's {name} must be text; found {feedback!r:.80}")
    if name == "environment_feedback":
        return answer, feedback
    if feedback.startswith(text):
        return answer, feedback[len(text) :]
    if answer["done"]:
        return answer, ""  # the model does not read it
    raise InvalidEnvOutputError(
        f"step's {name} must begin with the state and the action as they were: the model goes on from the tokens that "
        f"it has read and written"
    )


def agent_file(path: str) -> Path:
    """The file of ``generator.agent_func_path``.

    Raises:
        UserError: if there is none, or it is not a Python file.
    """
    file = Path(path).expanduser().resolve()
    if not file.exists():
        raise UserError(f"generator.agent_func_path={path} is not there: {file} does not exist")
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"generator.agent_func_path={path} is not a Python file")
    return file


def has_own_loop(path: Path) -> bool:
    """Whether the file's ``AgentExecutor`` plays episodes by itself, in tokens.

    The source is parsed, not run: this is part of the checks before a run.

    Raises:
        UserError: if the file is not Python, or has only a function ``step`` with the wrong
            parameters.
    """
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise UserError(f"generator.agent_func_path={path}:{error.lineno}: {error.msg}") from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if "AgentExecutor" not in classes and "AgentInstance" not in classes:
        for node in tree.body:
            if isinstance(node, _FUNCTIONS) and node.name == "step":
                _check_step(node, str(path))
    executor = classes.get("AgentExecutor")
    while executor is not None:
        for node in executor.body:
            if isinstance(node, _FUNCTIONS) and node.name == "execute":
                return True
        bases = [ast.unparse(base).rpartition(".")[2] for base in executor.bases]
        if "MultiTurnAgentExecutor" in bases or "AgentExecutorBase" in bases:
            return False
        base = next((name for name in bases if name in classes), None)  # a class of this file
        if base is None:
            return True  # a class of another file, or SingleTurnAgentExecutor
        executor = classes[base]
    return False


def _check_step(step: ast.FunctionDef | ast.AsyncFunctionDef, path: str) -> None:
    """Raises ``UserError`` if ``step`` cannot be called. The function is not run."""
    if step.decorator_list:  # a decorator may change its parameters
        return
    # A lambda with the same parameters, without their defaults and types, which may need imports.
    arguments = deepcopy(step.args)
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    placeholder = ast.Constant(None)
    arguments.defaults = [placeholder for _ in arguments.defaults]
    arguments.kw_defaults = [default and placeholder for default in arguments.kw_defaults]
    expression = ast.Expression(ast.Lambda(arguments, placeholder))
    ast.fix_missing_locations(expression)
    function = eval(compile(expression, "step", "eval"))
    takes_sampling(inspect.signature(function), path)


def takes_sampling(step: inspect.Signature, path: str) -> bool:
    """Whether a function ``step`` takes ``sampling_params`` after state, action and label.

    Raises:
        UserError: if it cannot be called with these.
    """
    try:
        step.bind("", "", None, sampling_params=None)
        return True
    except TypeError:
        pass  # without sampling_params, then
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
    with _LOAD_LOCK:
        if path in _LOADED_FILES:
            return _LOADED_FILES[path]
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
        classes = (agent.get("AgentExecutor"), agent.get("AgentInstance"))
        if any(isinstance(value, type) for value in classes):
            _LOADED_FILES[path] = agent
        elif not callable(agent.get("step")):
            raise UserError(
                f"generator.agent_func_path={path} defines neither AgentInstance nor step(state, action, label), "
                f"nor an AgentExecutor"
            )
        return agent


@cache
def instance_class(path: str) -> Foreign:
    """The class whose instances are played turn by turn; None for a file with a function ``step``.

    Raises:
        UserError: if its executor has a loop of its own.
    """
    agent = load_agent(path)
    executor_class = agent.get("AgentExecutor")
    if executor_class is None:
        return agent.get("AgentInstance")
    executor = new_executor(executor_class, {})
    package, _, _ = type(executor).execute.__module__.partition(".")
    has_loop = package not in ("skyasync", "openrlhf")
    has_loop = has_loop or isinstance(executor, SingleTurnAgentExecutor)
    if has_loop or executor.agent_instance_cls is None:
        raise UserError(
            f"generator.agent_func_path={path}: its AgentExecutor has an execute of its own, which plays as an agent "
            f"program (generator.agent_program) and not in environment.env_class=openrlhf: name no env_class, and "
            f"define class AgentExecutor in the file itself"
        )
    return executor.agent_instance_cls


def new_executor(executor_class: Foreign, optional: Mapping[str, object]) -> Foreign:
    """An executor; the constructors of older files take ``optional`` arguments by name.

    A required argument that is not among them is None.
    """
    arguments = {}
    for parameter in inspect.signature(executor_class).parameters.values():
        name = parameter.name
        has_default = parameter.default is not parameter.empty
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and not has_default:
            arguments[name] = optional.get(name)
        elif name in optional and parameter.kind is not parameter.VAR_KEYWORD:
            arguments[name] = optional[name]
    return executor_class(**arguments)


@cache
def _code(path: str) -> CodeType:
    source = agent_file(path).read_text()
    return compile(source, path, "exec")
