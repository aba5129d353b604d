"""Named parts that a configuration key selects.

A registry is a plain dictionary with a ``register`` decorator. It also knows where the built-in parts
live, so that a wrong name is refused without importing torch: ``builtins`` maps a module to the names
that importing it registers (a test holds the two equal).

Invariant: a part that a user registers in the program exists in every process of the run. Whoever starts a
process that looks parts up sends ``user_parts()``, and that process begins with ``add_user_parts``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from skyasync.errors import UserError, nearest, unknown

T = TypeVar("T")

#: The registries that the processes of a run read (presets are read by the program alone).
REGISTRIES = (
    "skyasync.algorithms:ADVANTAGE_ESTIMATORS",
    "skyasync.algorithms:CORRECTIONS",
    "skyasync.algorithms:KL_ESTIMATORS",
    "skyasync.algorithms:LOSS_REDUCTIONS",
    "skyasync.algorithms:POLICY_LOSSES",
    "skyasync.engines.protocol:ENGINES",
    "skyasync.envs:ENVS",
    "skyasync.observe:TRACKERS",
    "skyasync.plans:PLANS",
    "skyasync.rewards:REWARDS",
)
UserParts = dict[str, dict[str, Any]]
_FILE_MODULES: dict[Path, ModuleType] = {}
_LOADING = threading.RLock()  # one file at a time, but a file may ask for another while it loads


class Registry(dict[str, Any]):
    """``REGISTRY["name"]`` gives the part; ``@REGISTRY.register("name")`` adds one.

    Args:
        kind: what the parts are, in the singular, for error messages ("policy loss").
        builtins: module -> names (separated by spaces) that it registers when imported.

    Raises:
        UserError: for a name that is neither built in nor registered, listing the nearest ones.
    """

    def __init__(self, kind: str, builtins: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.kind = kind
        self._homes = {name: module for module, names in (builtins or {}).items() for name in names.split()}

    def register(self, name: str) -> Callable[[T], T]:
        def add(part: T) -> T:
            self[name] = part
            return part

        return add

    def names(self) -> list[str]:
        """All names, built-in and registered, sorted; imports nothing."""
        return sorted({*self._homes, *self})

    def user_parts(self) -> dict[str, Any]:
        """What stands here that the library did not bring: new names, and built-in ones that were replaced."""
        return {name: part for name, part in self.items() if name not in self._homes or not _is_ours(part)}

    def __missing__(self, name: str) -> Any:
        if name in self._homes:
            importlib.import_module(self._homes[name])
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
        allowed = [other for other in vars(module) if not other.startswith("__")]
        raise UserError(f"{what}: {unknown('attribute', name, allowed)}") from None


def _file_module(file: str, what: str) -> ModuleType:
    """The module that a file makes, once per process; it finds the files beside it, as a program does.

    It stays out of ``sys.modules``: what it defines then travels to other processes as it is, not by a module's name.
    """
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        close = nearest(path.name, [beside.name for beside in path.parent.glob("*.py")], count=1)
        raise UserError(f"{what}: {file} does not exist{f'; did you mean {close[0]!r}?' if close else ''}")
    with _LOADING:
        if path not in _FILE_MODULES:
            _FILE_MODULES[path] = _loaded(path)
        return _FILE_MODULES[path]


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


def _is_ours(part: Any) -> bool:
    return getattr(part, "__module__", "").partition(".")[0] == __name__.partition(".")[0]
