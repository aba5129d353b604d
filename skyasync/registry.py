"""Named parts that a configuration key selects.

A registry is a plain dictionary with a ``register`` decorator. ``about`` says of every part, built
in, registered or named by ``module:attribute``, what it takes and what it can do: its signature,
``configured``, what it hands to ``register`` or has as class attributes. Modules that import torch
or an engine are described in tables instead, so that a wrong name or setting is refused without
importing them.

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
_LOADING = threading.RLock()  # one file at a time, but a file may ask for another while it loads


@dataclass(frozen=True)
class About:
    """One part.

    Args:
        inputs: names of its positional parameters, in order; none for a class.
        settings: its keyword-only parameters; ``required``: those of them without a default.
        keys: setting -> the key under ``trainer.algorithm`` that feeds it.
        can: its capabilities, those of its registry.
        selector: what it chooses tokens by beforehand, if it does (``prepared_by``).
        unnamed: parameters that have no name to be fed by: positional-only ones, ``*args`` and
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
        """This and its selector."""
        yield self
        if self.selector is not None:
            yield self.selector


class Registry(dict[str, Any]):
    """``REGISTRY["name"]`` (or ``["file.py:name"]``) gives the part; ``@REGISTRY.register("name")``
    adds one.

    Args:
        kind: what the parts are, in the singular, for error messages ("policy loss").
        homes: modules that register the built-in ones when they are imported. Either with the names
            that each registers, separated by spaces; it is then imported when one of these is
            looked up. Or modules alone, all of which are imported with the first look.
        capabilities: what parts may say of themselves, with the defaults: keyword arguments of
            ``register``, or class attributes.
        inputs: names that the parts' positional parameters may have; none leaves them free.
        needs: those of them that every part must have.

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
        """Add the decorated part; ``capabilities`` are its own among those that the registry
        knows."""
        for capability in capabilities:
            if capability not in self._capabilities:
                raise UserError(
                    f"{self.kind} {name!r}: {unknown('capability', capability, self._capabilities)}"
                )

        def add(part: T) -> T:
            for capability, value in capabilities.items():
                setattr(part, capability, value)
            if (
                not _is_ours(part) or name not in self or _is_ours(self[name])
            ):  # a user's part of the name stays
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
            description = self._builtins[name][1]
        else:
            description = None
        return description or self.describe(self[name])

    def describe(self, part: object) -> About:
        """The description of a part, registered or not."""
        can = {name: declared(part, name, default) for name, default in self._capabilities.items()}
        if inspect.isclass(part) or not callable(part):
            return About(can=can)
        parameters = inspect.signature(part).parameters.values()
        settings = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        select = declared(part, "select")
        return About(
            inputs=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
            settings=tuple(p.name for p in settings),
            required=tuple(p.name for p in settings if p.default is p.empty),
            keys=dict(declared(part, "configuration_keys", {})),
            can=can,
            selector=self.describe(select) if select else None,
            unnamed=tuple(
                p.name
                for p in parameters
                if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL, p.VAR_KEYWORD)
            ),
        )

    def problem(self, name: str) -> str:
        """The problem of a user's part's parameters; "" if there is none."""
        if not self._inputs or (name in self._builtins and name not in self.user_parts()):
            return ""
        if not callable(self[name]):
            return f"{self.kind} {name!r} cannot be called"
        description = self.about(name)
        subject = f"{self.kind} {name!r}"
        for function in description:
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
        """The built-in parts."""
        return {
            name: description or self.about(name)
            for name, (_, description) in self._builtins.items()
        }

    def user_parts(self) -> dict[str, Any]:
        """The parts that are not the library's: new names, and built-in names that were
        replaced."""
        builtins = self._builtins  # which imports modules that may register more
        return {
            name: part
            for name, part in list(self.items())
            if not _is_ours(part) or name not in builtins
        }

    @cached_property
    def _builtins(self) -> Mapping[str, tuple[str, About | None]]:
        """Name -> the module that registers it, and what is known of it without importing that."""
        if isinstance(self.homes, Mapping):
            homes = {name: home for home, names in self.homes.items() for name in names.split()}
        else:
            homes = {}
            for home in self.homes:
                importlib.import_module(home)
                homes |= {name: home for name, part in self.items() if _module(part) == home}
        return {name: (home, None) for name, home in homes.items()}

    def __missing__(self, name: str) -> Any:
        if ":" in name:
            return resolve_reference(name, kind=self.kind)
        if name in self._builtins:
            importlib.import_module(self._builtins[name][0])
            if name in self:
                return self[name]
        raise UserError(unknown(self.kind, name, self.names()))


def declared(part: object, name: str, default: Any = None) -> Any:
    """What a decorator or a class says of a part by an attribute. The user's functions and classes
    may not have it."""
    return getattr(part, name, default)


def accepted(function: Callable[..., object], offered: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments among these that the function takes by name."""
    parameters = inspect.signature(function).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in offered.items() if takes_all or name in parameters}


def resolve_reference(reference: str, *, kind: str) -> Any:
    """The object behind ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``.

    Raises:
        UserError: if the module cannot be imported or has no such attribute.
    """
    module_name, _, attribute = reference.rpartition(":")
    subject = f"{kind} {reference!r}"
    if not module_name or module_name.startswith("."):
        raise UserError(f"{subject} must be module:attribute, with the module's full name")
    if module_name.endswith(".py"):
        file = python_file(module_name, subject)
    else:
        file = None
    try:
        if file:
            module = _file_module(file)
        else:
            module = importlib.import_module(module_name)
    except (
        ModuleNotFoundError,
        SyntaxError,
    ) as error:  # other errors of the user's code keep their traceback
        raise UserError(f"{subject} cannot be imported: {error}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = {name: value for name, value in vars(module).items() if not name.startswith("__")}
        defined = [name for name, value in public.items() if _module(value) == module.__name__]
        allowed = defined or public  # of what it defines, else of what it imports as well
        raise UserError(f"{subject}: {unknown('attribute', attribute, allowed)}") from None


def absolute_reference(reference: str) -> str:
    """``path/to/file.py:attribute`` with the file's absolute path, for processes that work in
    another folder."""
    file, colon, attribute = reference.rpartition(":")
    if colon and file.endswith(".py"):
        return f"{Path(file).expanduser().resolve()}:{attribute}"
    return reference


def user_parts() -> UserParts:
    """Registry -> name -> part, for everything that the library did not bring; it travels to other
    processes."""
    return {
        reference: resolve_reference(reference, kind="registry").user_parts()
        for reference in REGISTRIES
    }


def add_user_parts(registered: UserParts) -> None:
    """Register here the ``user_parts`` of another process."""
    for reference, added in registered.items():
        resolve_reference(reference, kind="registry").update(added)


def python_file(file: str, subject: str) -> Path:
    """The file's absolute path.

    Raises:
        UserError: if there is no such file.
    """
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        close = nearest(path.stem, [sibling.stem for sibling in path.parent.glob("*.py")], count=1)
        raise UserError(
            f"{subject}: {file} does not exist{f'; did you mean {close[0]}.py?' if close else ''}"
        )
    return path


def _file_module(path: Path) -> ModuleType:
    """The module that a file makes, once per process; it finds the files in its folder, as a
    program does.

    It stays out of ``sys.modules``: what it defines then travels to other processes as it is, not
    by a module's name.
    """
    with _LOADING:
        if path in _FILE_MODULES:
            return _FILE_MODULES[path]
        name = f"{path.stem}@{path}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(
            spec
        )  # dataclasses look for it while it loads
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
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
