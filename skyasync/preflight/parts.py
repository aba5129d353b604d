"""The user's own parts: they are there, what they need is installed, their methods take what they are called with.

Agent programs and environments run in processes of their own, some of which hide the secrets of this one: their files
are read, and not imported here. A module that is loaded already is asked itself.
"""

from __future__ import annotations

import ast
import dis
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from skyasync.agents.parsers import VLLM, check_parsers
from skyasync.callbacks import RunExtension, TrainerCallback
from skyasync.config.schema import Config
from skyasync.config.schema.environment import judges
from skyasync.config.schema.generator import ONLINE
from skyasync.config.schema.sampling import backend
from skyasync.data.samplers import SAMPLERS, PromptSampler
from skyasync.envs import ENVS, SERVED
from skyasync.envs.base import STEP_FORM, BaseTextEnv
from skyasync.errors import MissingExtraError, UserError, unknown
from skyasync.inference.interface import ENGINES, REQUIRED, InferenceEngine
from skyasync.observability import TRACKERS
from skyasync.registry import Registry, python_file
from skyasync.rewards import REWARDS
from skyasync.rewards.signature import wrong_return
from skyasync.rollout.evaluation import answer_reader
from skyasync.rollout.trajectory_files import need_pyarrow
from skyasync.trainer import RayPPOTrainer


def check_parts(cfg: Config, plans: Sequence[type]) -> None:
    """Raises ``UserError`` for the first thing that is wrong.

    Args:
        plans: the classes that the run may train with, as far as they are known.
    """
    for plan in plans:
        check_plan_class(plan)
    check_callbacks(subclasses(RunExtension))
    if ":" in (engine := backend(cfg)):
        members, defaults = dict(inspect.getmembers_static(ENGINES.find(engine))), vars(InferenceEngine)
        if missing := [name for name in REQUIRED if members.get(name, defaults[name]) is defaults[name]]:
            raise UserError(
                f"engine {engine!r} lacks {', '.join(missing)} (skyasync.inference.interface.InferenceEngine)"
            )
    else:
        check_installed(ENGINES, engine)
    if ":" in cfg.trainer.strategy:
        check_reference(cfg.trainer.strategy, "trainer.strategy")
    check_sampler(cfg.data.sampler)
    for name in cfg.trainer.logger:
        check_installed(TRACKERS, name)
        if not _takes(TRACKERS[name], [None]):
            raise UserError(f"tracker {name!r} must be made from a context: def __init__(self, context)")
        if name == "wandb":
            _check_wandb()
    for name in judges(cfg.environment):
        if ":" not in name:
            check_installed(REWARDS, name)
    if cfg.environment.env_class:
        check_environment(cfg.environment.env_class)
    if cfg.trainer.policy.lora.rank and find_spec("peft") is None:
        raise MissingExtraError("peft", "lora")
    if cfg.trainer.policy.lora.base_dtype == "nf4" and find_spec("bitsandbytes") is None:
        raise MissingExtraError("bitsandbytes", "quant")
    if cfg.trainer.dump_trajectories:
        need_pyarrow()
    if cfg.trainer.eval_answer:
        answer_reader(cfg.trainer.eval_answer)
    generator = cfg.generator
    if generator.agent_program:
        if generator.agent_program != ONLINE:
            check_reference(generator.agent_program, "generator.agent_program")
        parsers = {"tool_parser": generator.tool_parser, "reasoning_parser": generator.reasoning_parser}
        for key, name in parsers.items():
            if ":" in name and not name.startswith(VLLM):
                check_reference(name, f"generator.{key}")
        check_parsers(*(name if name.startswith(VLLM) else "" for name in parsers.values()))


def check_sampler(name: str) -> None:
    """Raises ``UserError`` unless it is a ``PromptSampler``, and its methods take what the original's take."""
    sampler = SAMPLERS.find(name)
    if not isinstance(sampler, type) or not issubclass(sampler, PromptSampler):
        raise UserError(f"sampler {name!r} must be a subclass of skyasync.data.samplers.PromptSampler")
    for method, original in inspect.getmembers(PromptSampler, inspect.isfunction):
        own = inspect.getattr_static(sampler, method)
        if not _takes(own, inspect.signature(original).parameters):
            raise UserError(f"sampler {name!r}: {method}{_parameters(own)} must take {_parameters(original)}")
    if wrong_return(sampler.chance) == "nothing":
        raise UserError(f"sampler {name!r}: chance returns nothing; it must return a number from 0 to 1")


def _check_wandb() -> None:
    """There is a login where W&B looks for one, or it is set to do without; its other settings it checks itself."""
    given = [os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE")]
    folders = (os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb"), "wandb")
    if any(given) or any(Path(folder, "settings").expanduser().is_file() for folder in folders):
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname or ""
    for name in [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]:
        file = Path(name).expanduser()
        if file.is_file() and host in file.read_text(errors="replace"):
            return
    raise UserError(
        f"trainer.logger has wandb, and there is no login for {host}: run wandb login, set WANDB_API_KEY, or set "
        f"WANDB_MODE=offline"
    )


def check_environment(name: str) -> None:
    """An ``env_class`` of the configuration or of a row."""
    kind, _, url = name.partition(":")
    if kind in SERVED:
        ENVS[kind].at(url).check_server()
    elif ":" in name:
        check_reference(name, "environment")
        _check_step(name)
    elif name not in ENVS.names():
        raise UserError(unknown("environment", name, ENVS.names()))
    else:
        check_installed(ENVS, name)
        env = ENVS.get(name)  # not imported for this
        if isinstance(env, type) and issubclass(env, BaseTextEnv) and env.step is BaseTextEnv.step:
            raise UserError(f"environment {name!r} does not define step(action)")


def check_installed(registry: Registry, name: str) -> None:
    """Raises ``UserError`` if a package that a part needs is not installed."""
    extra = registry.about(name).can["extra"]
    if extra and find_spec(extra.replace("-", "_")) is None:
        raise MissingExtraError(extra, extra)
    package = registry.about(name).can.get("package", "")
    if package and find_spec(package) is None:
        raise UserError(f"{package} is not installed; add it with: uv pip install {package}")


def plans_named_by(get_trainer: Callable[..., object]) -> list[type]:
    """The plans that the code of an experiment's own factory names; none where it gets them otherwise."""
    if not inspect.isfunction(get_trainer):
        return []
    named = [get_trainer.__globals__.get(name) for name in get_trainer.__code__.co_names]
    return [plan for plan in named if isinstance(plan, type) and issubclass(plan, RayPPOTrainer)]


def check_plan_class(plan: object) -> None:
    """Raises ``UserError`` unless it can be made, and its public methods take what the originals take."""
    if not hasattr(plan, "get_trainer"):
        raise UserError(f"a plan must be a subclass of RayPPOTrainer; found {plan!r}")
    if not isinstance(plan, type):
        return
    attributes = {step.argval for step in dis.get_instructions(RayPPOTrainer.__init__) if step.opname == "STORE_ATTR"}
    originals = dict(inspect.getmembers(RayPPOTrainer))
    for holder in plan.__mro__:
        for name, method in vars(holder).items() if holder.__module__.partition(".")[0] != "skyasync" else ():
            original, what = originals.get(name), f"{holder.__name__}.{name}"
            if name in attributes or isinstance(original, property) > isinstance(method, property):
                raise UserError(
                    f"{what} has the name of an attribute of RayPPOTrainer, which the steps read: rename it"
                )
            if inspect.isroutine(original) and not callable(getattr(holder, name)) and not name.startswith("__"):
                raise UserError(f"{what} has the name of a method of RayPPOTrainer: rename it, or make it a method")
            if name.startswith("_") or not inspect.isfunction(method) or not inspect.isfunction(original):
                continue
            if inspect.iscoroutinefunction(method) != inspect.iscoroutinefunction(original):
                right = "async def" if inspect.iscoroutinefunction(original) else "def, not async def"
                raise UserError(f"{what} must be {right}, as RayPPOTrainer's is")
            signature = inspect.signature(original)
            yields = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
            if not yields and "None" not in str(signature.return_annotation) and wrong_return(method) == "nothing":
                raise UserError(f"{what} returns nothing, and must return: {signature.return_annotation}")
            parameters = signature.parameters.values()
            if not _takes(method, [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]):
                raise UserError(
                    f"{what}{_parameters(method)} must take what RayPPOTrainer's does: {name}{_parameters(original)}"
                )


def _takes(function: Callable[..., object], arguments: Iterable[object]) -> bool:
    """Whether a function can be called with these, by position."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def _parameters(function: Callable[..., object]) -> str:
    return f"({', '.join(str(p).partition(':')[0] for p in inspect.signature(function).parameters.values())})"


def checked_callbacks(callbacks: object) -> list[RunExtension]:
    """The callbacks that a program passes, or an experiment returns.

    Raises:
        UserError: for what is no sequence of objects, and as ``check_callbacks``.
    """
    if not isinstance(callbacks, Sequence):
        raise UserError(f"callbacks must be a list of skyasync.TrainerCallback objects; found {callbacks!r}")
    for callback in callbacks:
        if isinstance(callback, type):
            raise UserError(f"callback {callback.__name__} is a class: pass an object, {callback.__name__}()")
    check_callbacks([type(callback) for callback in callbacks])
    return list(callbacks)


def check_callbacks(classes: Iterable[type]) -> None:
    """Methods called ``on_...`` are hooks that exist, and take what they are called with."""
    hooks = {name: hook for name, hook in inspect.getmembers(TrainerCallback) if name.startswith("on_")}
    for callback in classes:
        if not issubclass(callback, RunExtension):
            raise UserError(f"callback {callback.__name__} must be a subclass of skyasync.TrainerCallback")
        for name, method in inspect.getmembers(callback):
            if name.startswith("on_") and name not in hooks:
                raise UserError(f"callback {callback.__name__}: {unknown('hook', name, hooks)}")
            if name.startswith("on_") and inspect.isfunction(method):
                hook = hooks[name]
                if not _takes(method, inspect.signature(hook).parameters):
                    what = f"callback {callback.__name__}.{name}{_parameters(method)}"
                    raise UserError(f"{what} must take {_parameters(hook)}")


def subclasses(base: type) -> Iterator[type]:
    """All subclasses that the program has defined, at any depth, without the library's own."""
    derived: type
    for derived in base.__subclasses__():
        if derived.__module__.partition(".")[0] != "skyasync":
            yield derived
        yield from subclasses(derived)


# ---------------------------------------------------------------- references, read and not run


def check_reference(reference: str, kind: str) -> None:
    """Raises ``UserError`` if the file, the module or the attribute is missing, or the file is no Python."""
    what = f"{kind} {reference!r}"
    module, _, attribute = reference.rpartition(":")
    if module in sys.modules:
        names = set(dir(sys.modules[module]))
    elif source := _source(module, what):
        try:
            names = set(_defined(ast.parse(source.read_bytes(), str(source)).body))
        except SyntaxError as error:
            raise UserError(f"{what}: {source}:{error.lineno}: {error.msg}") from error
    else:
        return
    if not {attribute, "*", "__getattr__"} & names:  # with the last two only running the file would tell
        raise UserError(f"{what}: {unknown('attribute', attribute, {n for n in names if not n.startswith('__')})}")


def _check_step(reference: str) -> None:
    """Raises ``UserError`` for an environment without ``step``, or whose ``step`` returns tuples alone; only of classes
    that are nothing but a ``BaseTextEnv``."""
    module, _, name = reference.rpartition(":")
    loaded = vars(sys.modules[module]).get(name) if module in sys.modules else None
    lacks = isinstance(loaded, type) and issubclass(loaded, BaseTextEnv) and loaded.step is BaseTextEnv.step
    try:
        source = _source(module, reference)
    except (UserError, ValueError):  # a module without a file, such as a program's own
        source = None
    for owner in ast.parse(source.read_bytes()).body if source else ():
        if not isinstance(owner, ast.ClassDef) or owner.name != name:
            continue
        if [ast.unparse(parent).rpartition(".")[2] for parent in owner.bases] != [BaseTextEnv.__name__]:
            continue
        lacks = lacks or "step" not in set(_defined(owner.body))
        methods = (n for n in owner.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) and n.name == "step")
        returned = [n.value for step in methods for n in ast.walk(step) if isinstance(n, ast.Return)]
        if returned and all(isinstance(value, ast.Tuple) for value in returned):
            raise UserError(f"environment {reference!r}: step returns a tuple: {STEP_FORM}")
    if lacks:
        raise UserError(f"environment {reference!r} does not define step(action)")


def _source(module: str, what: str) -> Path | None:
    if module.endswith(".py"):
        return python_file(module, what)
    if not module or module.startswith("."):
        raise UserError(f"{what} must be module:attribute, with the module's full name")
    try:
        spec = find_spec(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{what}: {error}") from error
    if spec is None:
        raise UserError(f"{what}: No module named {module!r}")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        else:  # assignments, also in branches
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
            yield from _defined([n for n in ast.walk(node) if isinstance(n, named)])
