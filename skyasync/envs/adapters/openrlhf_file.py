"""Agent files of OpenRLHF: loading them, and telling who plays them.

Invariant: a file that defines classes is run once per process, as it is there; one that defines the function ``step``
is run anew for every episode, since its state is in its globals.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from skyasync.envs.adapters.openrlhf_names import Foreign, SingleTurnAgentExecutor, names
from skyasync.errors import UserError
from skyasync.rewards.openrlhf import stand_ins

PLAYED_BY_TURNS = {"MultiTurnAgentExecutor", "AgentExecutorBase"}
_LOADED: dict[str, dict[str, Any]] = {}
_LOADING = threading.RLock()


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
    """Whether its ``AgentExecutor`` plays episodes itself, in tokens; told from the source, without running it.

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
        if set(bases) & PLAYED_BY_TURNS:
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
    with stand_ins(**names()), _importable(module, path):
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
