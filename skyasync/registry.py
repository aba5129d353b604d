"""Named parts that a configuration key selects.

A registry is a plain dictionary with a ``register`` decorator. ``about`` describes every part:
built in, registered, or named by ``module:attribute``. The description has the part's parameters
and capabilities. It comes from the signature, ``configured``, and the arguments of ``register`` or
class attributes. Parts whose modules import torch or an engine may be described in a table instead,
so that a wrong name or setting is rejected without importing them.

Invariant: a part that a user registers in the program exists in every process of the run. A process
that looks parts up is sent ``user_parts()`` at its start, and begins with ``add_user_parts``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from skyasync.errors import UserError, nearest, unknown

T = TypeVar("T")

#: The registries that the processes of a run read (presets are read by the program alone).
REGISTRIES = (
    "skyasync.algorithms:ADVANTAGE_ESTIMATORS",
    "skyasync.algorithms:CORRECTIONS",
    "skyasync.algorithms:KL_CONTROLLERS",
    "skyasync.algorithms:KL_ESTIMATORS",
    "skyasync.algorithms:LOSS_REDUCTIONS",
    "skyasync.algorithms:POLICY_LOSSES",
    "skyasync.agents.parsers:REASONING_PARSERS",
    "skyasync.agents.parsers:TOOL_PARSERS",
    "skyasync.data.samplers:SAMPLERS",
    "skyasync.inference.interface:ENGINES",
    "skyasync.envs:ENVS",
    "skyasync.models:BACKENDS",
    "skyasync.observability:TRACKERS",
    "skyasync.trainer.plans:PLANS",
    "skyasync.rewards:REWARDS",
    "skyasync.weight_sync.transfers:TRANSFERS",
    "skyasync.workers.roles:ROLES",
)
UserParts = dict[str, dict[str, Any]]
_FILE_MODULES: dict[Path, ModuleType] = {}
_LOADING = threading.RLock()  # reentrant: a file may refer to another one while it loads


@dataclass(frozen=True)
class About:
    """The description of a part.

    Args:
        inputs: names of its positional parameters, in order; none for a class.
        settings: its keyword-only parameters; ``required``: those of them without a default.
        keys: setting -> the key under ``trainer.algorithm`` with its value.
        can: its capabilities, those of its registry.
        selector: the function that chooses tokens before it, if there is one (``prepared_by``).
        unnamed: parameters that cannot be passed by name: positional-only ones, ``*args`` and
            ``**kwargs``.
    """

    inputs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    can: Mapping[str, Any] = field(default_factory=dict)
    selector: About | None = None
    unnamed: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[About]:
        """The description, and that of the selector."""
        yield self
        if self.selector is not None:
            yield self.selector


class Registry(dict[str, Any]):
    """Parts by name: ``REGISTRY["name"]`` or ``REGISTRY["file.py:name"]``.

    ``@REGISTRY.register("name")`` adds one.

    Args:
        kind: the type of the parts, in the singular, for error messages ("policy loss").
        homes: modules that register the built-in parts when they are imported. Either with the
            names that each registers, separated by spaces; it is then imported when one of these is
            looked up. Or modules alone, all of which are imported when any part is looked up.
        capabilities: attributes that parts may have, with the defaults: keyword arguments of
            ``register``, or class attributes.
        inputs: names that the parts' positional parameters may have; none leaves them free.
        needs: the inputs that every part must have.

    Raises:
        UserError: for a name that is neither built in nor registered, listing the nearest ones.
    """

    def __init__(
        self,
        kind: str,
        homes: Sequence[str] | Mapping[str, str] = (),
        *,
        capabilities: Mapping[str, Any] | None = None,
        inputs: str = "",
        needs: str = "",
    ) -> None:
        super().__init__()
        self.kind = kind
        self.homes = homes
        self._capabilities = dict(capabilities or {})
        self._inputs = frozenset(inputs.split())
        self._needs = frozenset(needs.split())

    def register(self, name: str, **capabilities: Any) -> Callable[[T], T]:
        """Add the decorated part; ``capabilities`` are among those of the registry."""
        for capability in capabilities:
            if capability not in self._capabilities:
                raise UserError(
                    f"{self.kind} {name!r}: {unknown('capability', capability, self._capabilities)}"
                )

        def add(part: T) -> T:
            for capability, value in capabilities.items():
                setattr(part, capability, value)
            # A user may have replaced a built-in part before its module is imported.
            is_replaced = name in self and not _is_ours(self[name])
            if not _is_ours(part) or not is_replaced:
                self[name] = part
            return part

        return add

    def names(self) -> list[str]:
        """All names, built-in and registered, sorted."""
        return sorted({*self._builtins, *self})

    def find(self, name: str) -> Any:
        """The part of this name, or behind ``module:attribute``.

        Raises:
            UserError: if there is none.
        """
        return self[name]

    def about(self, name: str) -> About:
        """The description of a part by name.

        Raises:
            UserError: if there is no such part.
        """
        if name not in self and name in self._builtins:
            _, description = self._builtins[name]
            if description is not None:
                return description
        return self.describe(self[name])

    def describe(self, part: object) -> About:
        """The description of a part, registered or not."""
        can = {name: declared(part, name, default) for name, default in self._capabilities.items()}
        if inspect.isclass(part) or not callable(part):
            return About(can=can)
        inputs: list[str] = []
        settings: list[str] = []
        required: list[str] = []
        unnamed: list[str] = []
        for parameter in inspect.signature(part).parameters.values():
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
                inputs.append(parameter.name)
            elif parameter.kind is parameter.KEYWORD_ONLY:
                settings.append(parameter.name)
                if parameter.default is parameter.empty:
                    required.append(parameter.name)
            else:
                unnamed.append(parameter.name)
        select = declared(part, "select")
        return About(
            inputs=tuple(inputs),
            settings=tuple(settings),
            required=tuple(required),
            keys=dict(declared(part, "configuration_keys", {})),
            can=can,
            selector=self.describe(select) if select else None,
            unnamed=tuple(unnamed),
        )

    def problem(self, name: str) -> str:
        """The problem of a user's part's parameters; "" if there is none."""
        if not self._inputs or (name in self._builtins and name not in self.user_parts()):
            return ""
        if not callable(self[name]):
            return f"{self.kind} {name!r} cannot be called"
        description = self.about(name)
        subject = f"{self.kind} {name!r}"
        for function in description:  # the part, and the selector that runs before it
            if function.unnamed:
                return f"{subject} takes {', '.join(function.unnamed)} without a name of its own: name what it takes"
            wrong = [name for name in function.inputs if name not in self._inputs]
            if wrong:
                return f"{subject}: {unknown('parameter', wrong[0], self._inputs)} (settings stand behind a *)"
            missing = [name for name in function.required if name not in function.keys]
            if missing:
                return (
                    f"{subject}: its setting {missing[0]!r} has no default and no key (@configured)"
                )
        missing = sorted(self._needs - set(description.inputs))
        if missing:
            return f"{subject} has no parameter {missing[0]!r}; it may take: {', '.join(sorted(self._inputs))}"
        return ""

    def builtins(self) -> Mapping[str, About]:
        """The descriptions of the built-in parts, by name."""
        abouts = {}
        for name, (_, description) in self._builtins.items():
            abouts[name] = description or self.about(name)
        return abouts

    def user_parts(self) -> dict[str, Any]:
        """The parts of the user: new names, and built-in names that were replaced."""
        builtins = self._builtins  # before the loop: it may import modules, which register parts
        added = {}
        for name, part in list(self.items()):  # a copy: another thread may register a part
            if not _is_ours(part) or name not in builtins:
                added[name] = part
        return added

    @cached_property
    def _builtins(self) -> Mapping[str, tuple[str, About | None]]:
        """Name -> the module that registers the part, and its description in a table."""
        homes: dict[str, str] = {}
        if isinstance(self.homes, Mapping):
            for home, names in self.homes.items():
                homes |= dict.fromkeys(names.split(), home)
        else:
            for home in self.homes:
                importlib.import_module(home)
                for name, part in self.items():
                    if _module(part) == home:
                        homes[name] = home
        return {name: (home, None) for name, home in homes.items()}

    def __missing__(self, name: str) -> Any:
        if ":" in name:
            return resolve_reference(name, kind=self.kind)
        if name in self._builtins:
            home, _ = self._builtins[name]
            importlib.import_module(home)  # which registers the part
            if name in self:
                return self[name]
        raise UserError(unknown(self.kind, name, self.names()))


def declared(part: object, name: str, default: Any = None) -> Any:
    """An attribute that a decorator or a class gives a part; the user's parts may not have it."""
    return getattr(part, name, default)


def accepted(function: Callable[..., object], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments among these that the function takes by name."""
    parameters = inspect.signature(function).parameters
    for parameter in parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            return dict(offered)
    return {name: value for name, value in offered.items() if name in parameters}


def resolve_reference(reference: str, *, kind: str) -> Any:
    """The object behind ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``.

    Raises:
        UserError: if the module cannot be imported or has no such attribute.
    """
    module_name, _, attribute = reference.rpartition(":")
    subject = f"{kind} {reference!r}"
    if not module_name or module_name.startswith("."):
        raise UserError(f"{subject} must be module:attribute, with the module's full name")
    file = python_file(module_name, subject) if module_name.endswith(".py") else None
    try:
        if file is not None:
            module = _file_module(file)
        else:
            module = importlib.import_module(module_name)
    # Other errors of the user's code are raised with their traceback.
    except (ModuleNotFoundError, SyntaxError) as error:
        raise UserError(f"{subject} cannot be imported: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public: list[str] = []
        defined: list[str] = []  # in the module itself, not imported by it
        for name, value in vars(module).items():
            if not name.startswith("__"):
                public.append(name)
                if _module(value) == module.__name__:
                    defined.append(name)
        allowed = defined or public
        raise UserError(f"{subject}: {unknown('attribute', attribute, allowed)}") from None


def absolute_reference(reference: str) -> str:
    """``path/to/file.py:attribute`` with the absolute path, for processes in other folders."""
    file, colon, attribute = reference.rpartition(":")
    if colon and file.endswith(".py"):
        return f"{Path(file).expanduser().resolve()}:{attribute}"
    return reference


def user_parts() -> UserParts:
    """Registry -> name -> part, for all parts of the user; it is sent to other processes."""
    registered: UserParts = {}
    for reference in REGISTRIES:
        registered[reference] = resolve_reference(reference, kind="registry").user_parts()
    return registered


def add_user_parts(registered: UserParts) -> None:
    """Register the ``user_parts`` of another process in this one."""
    for reference, parts_by_name in registered.items():
        resolve_reference(reference, kind="registry").update(parts_by_name)


def python_file(file: str, subject: str) -> Path:
    """The file's absolute path.

    Raises:
        UserError: if there is no such file.
    """
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        stems = [sibling.stem for sibling in path.parent.glob("*.py")]
        close = nearest(path.stem, stems, count=1)
        hint = f"; did you mean {close[0]}.py?" if close else ""
        raise UserError(f"{subject}: {file} does not exist{hint}")
    return path


def _file_module(path: Path) -> ModuleType:
    """The module of a file, loaded once per process.

    Like a program it can import files in its folder. It stays out of ``sys.modules``: its functions
    and classes are then sent to other processes with their code, not by a module's name.
    """
    with _LOADING:
        if path in _FILE_MODULES:
            return _FILE_MODULES[path]
        name = f"{path.stem}@{path}"  # unique: files of one name may be in several folders
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look for it there while it loads
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))  # at the end: installed packages come first
        try:
            spec.loader.exec_module(module)
        finally:
            del sys.modules[name]
        _FILE_MODULES[path] = module
        return module


def _module(part: object) -> str:
    return str(declared(part, "__module__", ""))


def _is_ours(part: object) -> bool:
    return _module(part).partition(".")[0] == __name__.partition(".")[0]
