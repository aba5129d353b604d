"""OpenRLHF's agent files, as they are: ``generator.agent_func_path=FILE.py``.

The file defines a class ``AgentExecutor`` that names an agent, a class ``AgentInstance`` with ``step(states)`` (and
``reset(states)`` if it likes), or a function ``async def step(state, action, label)``, which is given
``sampling_params`` too if it takes them. A step gives a tuple
(reward, next state, done[, extra]) or a dictionary with ``rewards``, ``scores``, ``environment_feedback`` (what is
appended) or ``next_state`` / ``next_observation`` (the whole text, which must begin with the state and the action),
``done``, ``sampling_params`` and ``extra_logs``. Source of these forms: OpenRLHF's documentation and
``examples/python/agent_func.py`` over its history. An executor with an ``execute`` of its own is played by
``skyasync.interop.openrlhf.agent_program``.

Invariant: text is appended as it is, and the tokens that the model wrote are never made again from it. A file that
defines classes is run once per process, as it is there; one that defines the function ``step`` is run again for every
episode, since its state is in its globals.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

from skyasync.envs.base import SAMPLING, BaseTextEnv, InvalidEnvOutputError
from skyasync.envs.images import NO_IMAGES, image_column
from skyasync.envs.registry import ENVS
from skyasync.errors import UserError
from skyasync.inference.interface import SamplingParams
from skyasync.interop.openrlhf import SYSTEM
from skyasync.interop.openrlhf.user_modules import (
    Foreign,
    SingleTurnAgentExecutor,
    awaited,
    new_instance,
    number,
    refuse_images,
    stand_ins,
)

PATH_KEY = "agent_func_path"  # where the environment finds the file in its env_config
SAMPLING_KEY = "agent_sampling"  # and how the run samples
_LOADED: dict[str, dict[str, Any]] = {}
_LOADING = threading.RLock()
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
            more = {"sampling_params": self._sampling} if takes_sampling(inspect.signature(step), self._file) else {}
            answer = await awaited(step(self._text, action, self._label, **more))
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
    settings = {PATH_KEY: str(file), SAMPLING_KEY: asdict(cfg.generator.sampling_params)}
    cfg.environment.env_config = {**cfg.environment.env_config, **settings}
    if has_own_loop(file):
        cfg.generator.agent_program, cfg.environment.env_class = SYSTEM.agent_programs[0], ""
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


def agent_file(path: str) -> Path:
    """The file behind ``generator.agent_func_path``.

    Raises:
        UserError: if there is none.
    """
    found = Path(path).expanduser().resolve()
    if not found.exists():
        raise UserError(f"generator.agent_func_path={path} is not there: {found} does not exist")
    if found.suffix != ".py" or not found.is_file():
        raise UserError(f"generator.agent_func_path={path} is no Python file")
    return found


def has_own_loop(path: Path) -> bool:
    """Whether its ``AgentExecutor`` plays episodes itself, in tokens; read from the source, without running it.

    Raises:
        UserError: if the file is no Python, or has the function ``step`` alone and it cannot be called as such.
    """
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        raise UserError(f"generator.agent_func_path={path}:{error.lineno}: {error.msg}") from error
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if not classes.keys() & {"AgentExecutor", "AgentInstance"}:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == "step":
                takes_sampling(_signature(node), str(path))
    found: ast.ClassDef | None = classes.get("AgentExecutor")
    while found is not None:
        if any(getattr(node, "name", "") == "execute" for node in found.body):
            return True
        bases = [ast.unparse(base).rpartition(".")[2] for base in found.bases]
        if {"MultiTurnAgentExecutor", "AgentExecutorBase"} & {*bases}:
            return False
        following = next((classes[base] for base in bases if base in classes), None)
        if following is None:
            return True  # one of another file, or the one for a single turn
        found = following
    return False


def takes_sampling(step: inspect.Signature, path: str) -> bool:
    """Whether a function ``step`` takes ``sampling_params`` beside state, action and label.

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


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> inspect.Signature:
    """Of a function that is not run: its parameters, whatever their defaults and types are."""
    if node.decorator_list:  # which may give it others
        return inspect.signature(lambda *arguments, **named: None)
    arguments = deepcopy(node.args)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    function = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, ast.Constant(None))))
    return inspect.signature(eval(compile(function, "step", "eval")))


def load_agent(path: str) -> dict[str, Any]:
    """The file's globals.

    Raises:
        UserError: if it defines no agent.
    """
    with _LOADING:
        if path in _LOADED:
            return _LOADED[path]
        agent = _run(path)
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
    """The class whose instances are played turn by turn; None where the file has the function ``step`` alone.

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
    """An executor; older files' ask for parts by name when they are made."""
    wanted = list(inspect.signature(executor_class).parameters.values())
    required = [p.name for p in wanted if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    given = {name: parts.get(name) for name in required}
    given |= {p.name: parts[p.name] for p in wanted if p.name in parts and p.kind is not p.VAR_KEYWORD}
    return executor_class(**given)


def _run(path: str) -> dict[str, Any]:
    name = f"agent_func@{path}"
    module = ModuleType(name)
    module.__file__ = path
    with stand_ins(), _importable(module, path):
        exec(_code(path), module.__dict__)
    return module.__dict__


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
