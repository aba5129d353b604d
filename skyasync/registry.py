"""Named parts that a configuration key selects.

A registry is a plain dictionary with a ``register`` decorator, and a catalogue: ``about`` says of every part, built in,
registered or named by ``module:attribute``, what it takes and what it can do. Nothing else lists names. Of built-in
parts that are not loaded it is read off their modules' sources (``skyasync.catalogue``), so that a wrong name or
setting is refused without importing torch.

Invariant: a part that a user registers in the program exists in every process of the run. Whoever starts a
process that looks parts up sends ``user_parts()``, and that process begins with ``add_user_parts``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from skyasync.catalogue import About, complaint, describe, registered_in
from skyasync.errors import UserError, nearest, unknown

T = TypeVar("T")

#: The registries that the processes of a run read (presets are read by the program alone).
REGISTRIES = (
    "skyasync.algorithms:ADVANTAGE_ESTIMATORS",
    "skyasync.algorithms:CORRECTIONS",
    "skyasync.algorithms:KL_ESTIMATORS",
    "skyasync.algorithms:LOSS_REDUCTIONS",
    "skyasync.algorithms:POLICY_LOSSES",
    "skyasync.endpoint.parsers:REASONING_PARSERS",
    "skyasync.endpoint.parsers:TOOL_PARSERS",
    "skyasync.engines.protocol:ENGINES",
    "skyasync.envs:ENVS",
    "skyasync.observe:TRACKERS",
    "skyasync.trainer.plans:PLANS",
    "skyasync.rewards:REWARDS",
    "skyasync.workers.roles:ROLES",
)
UserParts = dict[str, dict[str, Any]]
_FILE_MODULES: dict[Path, ModuleType] = {}
_LOADING = threading.RLock()  # one file at a time, but a file may ask for another while it loads


class Registry(dict[str, Any]):
    """``REGISTRY["name"]`` (or ``["file.py:name"]``) gives the part; ``@REGISTRY.register("name")`` adds one.

    Args:
        kind: what the parts are, in the singular, for error messages ("policy loss").
        homes: modules that register the built-in ones when they are imported, and nothing in another registry.
        capabilities: what parts may say of themselves, with the defaults: keyword arguments of ``register``, or class
            attributes.
        inputs: names that the parts' positional parameters may have; none leaves them free.
        needs: those of them that every part must have.

    Raises:
        UserError: for a name that is neither built in nor registered, listing the nearest ones.
    """

    def __init__(
        self,
        kind: str,
        homes: Sequence[str] = (),
        *,
        capabilities: Mapping[str, Any] | None = None,
        inputs: str = "",
        needs: str = "",
    ) -> None:
        super().__init__()
        self.kind, self.homes = kind, tuple(homes)
        self._capabilities = dict(capabilities or {})
        self._inputs, self._needs = frozenset(inputs.split()), frozenset(needs.split())

    def register(self, name: str, **capabilities: Any) -> Callable[[T], T]:
        """Add the decorated part; ``capabilities`` are its own among those that the registry knows."""
        for capability in capabilities:
            if capability not in self._capabilities:
                raise UserError(f"{self.kind} {name!r}: {unknown('capability', capability, self._capabilities)}")

        def add(part: T) -> T:
            for capability, value in capabilities.items():
                setattr(part, capability, value)
            self[name] = part
            return part

        return add

    def names(self) -> list[str]:
        """All names, built-in and registered, sorted; imports nothing."""
        return sorted({*self._builtins, *self})

    def find(self, name: str) -> Any:
        """The part of this name, or behind ``module:attribute``.

        Raises:
            UserError: if there is none.
        """
        return self[name]

    def about(self, name: str) -> About:
        """What is known of a part. Imports a user's module, and none of ours that it can read.

        Raises:
            UserError: if there is no such part.
        """
        if ":" not in name and name not in self and name in self._builtins:
            return self._builtins[name][1]
        return self.describe(self.find(name))

    def describe(self, part: object) -> About:
        """What a part says of itself, whoever holds it."""
        return describe(part, self._capabilities)

    def problem(self, name: str) -> str:
        """What is wrong with the parameters of a user's part, "" if nothing is."""
        if not self._inputs or (name in self._builtins and name not in self.user_parts()):
            return ""
        if not callable(self.find(name)):
            return f"{self.kind} {name!r} cannot be called"
        return complaint(self.about(name), f"{self.kind} {name!r}", self._inputs, self._needs, unknown)

    def builtins(self) -> Mapping[str, About]:
        """The built-in parts; imports nothing."""
        return {name: about for name, (_, about) in self._builtins.items()}

    def user_parts(self) -> dict[str, Any]:
        """What stands here that the library did not bring: new names, and built-in ones that were replaced."""
        return {name: part for name, part in self.items() if not _is_ours(part) or name not in self._builtins}

    @cached_property
    def _builtins(self) -> dict[str, tuple[str, About]]:
        """Name -> the module that registers it, and what is known of it."""
        read = {home: registered_in(home, self._capabilities) for home in self.homes}
        return {name: (home, about) for home, parts in read.items() for name, about in parts.items()}

    def __missing__(self, name: str) -> Any:
        if ":" in name:
            return resolve_reference(name, kind=self.kind)
        if name in self._builtins:
            importlib.import_module(self._builtins[name][0])
            if name in self:
                return self[name]
        raise UserError(unknown(self.kind, name, self.names()))


def resolve_reference(reference: str, *, kind: str) -> Any:
    """The object behind ``"package.module:attribute"`` or ``"path/to/file.py:attribute"``.

    Raises:
        UserError: if the module cannot be imported or has no such attribute.
    """
    module_name, _, attribute = reference.rpartition(":")
    if module_name.endswith(".py"):
        return _attribute(_file_module(module_name, f"{kind} {reference!r}"), attribute, f"{kind} {reference!r}")
    if not module_name or module_name.startswith("."):
        raise UserError(f"{kind} {reference!r} must be module:attribute, with the module's full name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UserError(f"{kind} {reference!r}: {error}") from error
    return _attribute(module, attribute, f"{kind} {reference!r}")


def absolute_reference(reference: str) -> str:
    """``path/to/file.py:attribute`` with the file's absolute path, for processes that work in another folder."""
    file, colon, attribute = reference.rpartition(":")
    return f"{Path(file).expanduser().resolve()}:{attribute}" if colon and file.endswith(".py") else reference


def user_parts() -> UserParts:
    """Registry -> name -> part, for everything that the library did not bring; it travels to other processes."""
    return {reference: resolve_reference(reference, kind="registry").user_parts() for reference in REGISTRIES}


def add_user_parts(parts: UserParts) -> None:
    """Register here what ``user_parts`` found in another process."""
    for reference, added in parts.items():
        resolve_reference(reference, kind="registry").update(added)


def _attribute(module: ModuleType, name: str, what: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        public = {other: value for other, value in vars(module).items() if not other.startswith("__")}
        own = [other for other, value in public.items() if getattr(value, "__module__", "") == module.__name__]
        allowed = own or public  # of what it defines, else of what it imports as well
        raise UserError(f"{what}: {unknown('attribute', name, allowed)}") from None


def _file_module(file: str, what: str) -> ModuleType:
    """The module that a file makes, once per process; it finds the files beside it, as a program does.

    It stays out of ``sys.modules``: what it defines then travels to other processes as it is, not by a module's name.
    """
    path = python_file(file, what)
    with _LOADING:
        if path not in _FILE_MODULES:
            _FILE_MODULES[path] = _loaded(path)
        return _FILE_MODULES[path]


def python_file(file: str, what: str) -> Path:
    """The file's absolute path.

    Raises:
        UserError: if there is no such file.
    """
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        close = nearest(path.stem, [beside.stem for beside in path.parent.glob("*.py")], count=1)
        raise UserError(f"{what}: {file} does not exist{f'; did you mean {close[0]}.py?' if close else ''}")
    return path


def _loaded(path: Path) -> ModuleType:
    name = f"{path.stem}@{path}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look for it while it loads
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


def _is_ours(part: object) -> bool:
    return getattr(part, "__module__", "").partition(".")[0] == __name__.partition(".")[0]
