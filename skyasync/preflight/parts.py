"""Checks of components: they exist, their packages are installed, their methods take the arguments.

Programs of agents run in processes that hide the secrets of this one: their modules are searched
for, and not imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec

from skyasync.agents.parsers import VLLM, check_parsers
from skyasync.algorithms import KL_CONTROLLERS
from skyasync.callbacks import RunExtension, TrainerCallback
from skyasync.config.schema import Config
from skyasync.config.schema.environment import judges
from skyasync.config.schema.generator import ONLINE
from skyasync.config.schema.sampling import backend
from skyasync.data.samplers import SAMPLERS, PromptSampler
from skyasync.envs import ENVS, SERVED
from skyasync.envs.base import BaseTextEnv
from skyasync.errors import MissingExtraError, UserError, unknown
from skyasync.inference.interface import ENGINES, REQUIRED, InferenceEngine
from skyasync.observability import TRACKERS
from skyasync.registry import Registry, python_file, resolve_reference
from skyasync.rewards import REWARDS
from skyasync.rollout.evaluation import answer_reader
from skyasync.rollout.trajectory_files import need_pyarrow
from skyasync.trainer import RayPPOTrainer


def check_parts(cfg: Config, plans: Sequence[type]) -> None:
    """Check the components that the configuration names.

    Args:
        plans: the classes that the run may train with, as far as they are known.

    Raises:
        UserError: for the first problem.
    """
    for plan in plans:
        check_plan_class(plan)
    check_callbacks(subclasses(RunExtension))
    engine = backend(cfg)
    if ":" in engine:  # a class of the user's
        members = dict(inspect.getmembers_static(ENGINES.find(engine)))
        defaults = vars(InferenceEngine)
        missing_methods = []
        for name in REQUIRED:
            if members.get(name, defaults[name]) is defaults[name]:
                missing_methods.append(name)
        if missing_methods:
            raise UserError(
                f"engine {engine!r} lacks {', '.join(missing_methods)} (skyasync.inference.interface.InferenceEngine)"
            )
    else:
        check_installed(ENGINES, engine)
    if ":" in cfg.trainer.strategy:
        resolve_reference(cfg.trainer.strategy, kind="trainer.strategy")
    check_sampler(cfg.data.sampler)
    if cfg.trainer.algorithm.use_kl_in_reward:
        check_kl_controller(cfg.trainer.algorithm.kl_ctrl.type)
    for name in cfg.trainer.logger:
        check_installed(TRACKERS, name)
        if not _takes(TRACKERS[name], [None]):
            raise UserError(
                f"tracker {name!r} must be made from a context: def __init__(self, context)"
            )
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
            check_module(generator.agent_program, "generator.agent_program")
        parsers = {
            "tool_parser": generator.tool_parser,
            "reasoning_parser": generator.reasoning_parser,
        }
        for key, name in parsers.items():
            if ":" in name and not name.startswith(VLLM):
                resolve_reference(name, kind=f"generator.{key}")
        # A parser of the user's is none of vLLM's.
        vllm_parsers = [name if name.startswith(VLLM) else "" for name in parsers.values()]
        check_parsers(*vllm_parsers)


def check_sampler(name: str) -> None:
    """Raises ``UserError`` unless it is a ``PromptSampler``, with methods of the same arguments."""
    sampler = SAMPLERS.find(name)
    if not isinstance(sampler, type) or not issubclass(sampler, PromptSampler):
        raise UserError(
            f"sampler {name!r} must be a subclass of skyasync.data.samplers.PromptSampler"
        )
    for method, original in inspect.getmembers(PromptSampler, inspect.isfunction):
        override = inspect.getattr_static(sampler, method)
        if not _takes(override, inspect.signature(original).parameters):
            raise UserError(
                f"sampler {name!r}: {method}{_parameters(override)} must take {_parameters(original)}"
            )


def check_kl_controller(name: str) -> None:
    """Raises ``UserError`` unless it is a ``KLController`` that is made with a coefficient."""
    from skyasync.algorithms.kl import KLController

    controller = KL_CONTROLLERS.find(name)
    if not isinstance(controller, type) or not issubclass(controller, KLController):
        raise UserError(
            f"KL controller {name!r} must be a subclass of skyasync.algorithms.kl.KLController"
        )
    if not _takes(controller, [None]):
        raise UserError(
            f"KL controller {name!r} must be made with a coefficient: def __init__(self, value)"
        )
    update = inspect.getattr_static(controller, "update")
    if update is KLController.update:
        raise UserError(f"KL controller {name!r} has no method update(self, kl, samples)")
    if not _takes(update, [None, "kl", "samples"]):
        raise UserError(
            f"KL controller {name!r}: update{_parameters(update)} must take (self, kl, samples)"
        )


def check_environment(name: str) -> None:
    """Raises ``UserError`` for an unusable ``env_class`` of the configuration or of a row."""
    kind, _, url = name.partition(":")
    if kind in SERVED:
        ENVS[kind].at(url).check_server()
        return
    if ":" in name:
        env = ENVS.find(name)
    elif name not in ENVS.names():
        raise UserError(unknown("environment", name, ENVS.names()))
    else:
        check_installed(ENVS, name)
        env = ENVS.get(name)  # not imported for this
    if not isinstance(env, type):
        return
    inherits_step = issubclass(env, BaseTextEnv) and env.step is BaseTextEnv.step
    if inherits_step or not callable(getattr(env, "step", None)):
        raise UserError(
            f"environment {name!r} does not define step(action): make {env.__name__} a subclass of "
            f"skyasync.BaseTextEnv with a method step"
        )


def check_installed(registry: Registry, name: str) -> None:
    """Raises ``UserError`` if a package that a component needs is not installed."""
    extra = registry.about(name).can["extra"]
    if extra and find_spec(extra.replace("-", "_")) is None:
        raise MissingExtraError(extra, extra)
    package = registry.about(name).can.get("package", "")
    if package and find_spec(package) is None:
        raise UserError(f"{package} is not installed; add it with: uv pip install {package}")


def check_plan_class(plan: object) -> None:
    """Raises ``UserError`` unless it is a plan whose methods take the originals' arguments."""
    if not hasattr(plan, "get_trainer"):
        raise UserError(f"a plan must be a subclass of RayPPOTrainer; found {plan!r}")
    if not isinstance(plan, type):
        return
    originals = dict(inspect.getmembers(RayPPOTrainer))
    for holder in plan.__mro__:
        if _is_ours(holder):
            continue
        for name, method in vars(holder).items():
            original = originals.get(name)
            qualified_name = f"{holder.__name__}.{name}"
            if isinstance(original, property) and not isinstance(method, property):
                raise UserError(
                    f"{qualified_name} has the name of an attribute of RayPPOTrainer, which the steps read: rename it"
                )
            if inspect.isroutine(original) and not callable(getattr(holder, name)):
                if name.startswith("__"):  # ``__hash__ = None``, for example
                    continue
                raise UserError(
                    f"{qualified_name} has the name of a method of RayPPOTrainer: rename it, or make it a method"
                )
            if name.startswith("_"):
                continue
            if not inspect.isfunction(method) or not inspect.isfunction(original):
                continue
            is_async = inspect.iscoroutinefunction(original)
            if inspect.iscoroutinefunction(method) != is_async:
                definition = "async def" if is_async else "def, not async def"
                raise UserError(f"{qualified_name} must be {definition}, as RayPPOTrainer's is")
            arguments = []
            for parameter in inspect.signature(original).parameters.values():
                if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                    arguments.append(parameter.name)
            if not _takes(method, arguments):
                raise UserError(
                    f"{qualified_name}{_parameters(method)} must take what RayPPOTrainer's does: "
                    f"{name}{_parameters(original)}"
                )


def _is_ours(holder: type) -> bool:
    return holder.__module__.partition(".")[0] == "skyasync"


def _takes(function: Callable[..., object], arguments: Iterable[object]) -> bool:
    """Whether a function can be called with these, by position."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    return True


def _parameters(function: Callable[..., object]) -> str:
    """A function's parameters without their annotations, for messages."""
    parameters = inspect.signature(function).parameters.values()
    names = [str(parameter).partition(":")[0] for parameter in parameters]
    return f"({', '.join(names)})"


def checked_callbacks(callbacks: object) -> list[RunExtension]:
    """The callbacks that a program passes, or an experiment returns.

    Raises:
        UserError: if they are no sequence of objects, or for a hook (``check_callbacks``).
    """
    if not isinstance(callbacks, Sequence):
        raise UserError(
            f"callbacks must be a list of skyasync.TrainerCallback objects; found {callbacks!r}"
        )
    for callback in callbacks:
        if isinstance(callback, type):
            raise UserError(
                f"callback {callback.__name__} is a class: pass an object, {callback.__name__}()"
            )
    check_callbacks([type(callback) for callback in callbacks])
    return list(callbacks)


def check_callbacks(classes: Iterable[type]) -> None:
    """Raises ``UserError`` for methods ``on_...`` that are no hooks, or have other arguments."""
    hooks: dict[str, Callable[..., object]] = {}
    for name, hook in inspect.getmembers(TrainerCallback):
        if name.startswith("on_"):
            hooks[name] = hook
    for callback in classes:
        if not issubclass(callback, RunExtension):
            raise UserError(
                f"callback {callback.__name__} must be a subclass of skyasync.TrainerCallback"
            )
        for name, method in inspect.getmembers(callback):
            if not name.startswith("on_"):
                continue
            if name not in hooks:  # a misspelled hook would never be called
                raise UserError(f"callback {callback.__name__}: {unknown('hook', name, hooks)}")
            hook = hooks[name]
            if not inspect.isfunction(method):
                continue
            if not _takes(method, inspect.signature(hook).parameters):
                signature = f"{callback.__name__}.{name}{_parameters(method)}"
                raise UserError(f"callback {signature} must take {_parameters(hook)}")


def subclasses(base: type) -> Iterator[type]:
    """All subclasses that the program has defined, at any depth, without the library's own."""
    subclass: type
    for subclass in base.__subclasses__():
        if not _is_ours(subclass):
            yield subclass
        yield from subclasses(subclass)


def check_module(reference: str, kind: str) -> None:
    """Raises ``UserError`` if there is no such file or module. It is not imported."""
    subject = f"{kind} {reference!r}"
    module = reference.rpartition(":")[0]
    if not module or module.startswith("."):
        raise UserError(f"{subject} must be module:attribute, with the module's full name")
    if module.endswith(".py"):
        python_file(module, subject)
        return
    try:
        spec = find_spec(module)
    except ModuleNotFoundError as error:
        raise UserError(f"{subject}: {error}") from error
    if spec is None:
        raise UserError(f"{subject}: No module named {module!r}")
