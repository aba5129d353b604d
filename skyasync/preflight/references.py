"""Whether what ``module:attribute`` or ``file.py:attribute`` names is there, without running it.

Programs and environments run in processes of their own, some of which hide the secrets of this one: they are not
imported here. A module that is loaded already is asked itself.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from skyasync.errors import UserError, unknown
from skyasync.registry import python_file


def check_reference(reference: str, kind: str) -> None:
    """Raises ``UserError`` if the file, the module or the attribute is missing, or the file is no Python."""
    what = f"{kind} {reference!r}"
    module, _, attribute = reference.rpartition(":")
    if module in sys.modules:
        names: set[str] | None = set(dir(sys.modules[module]))
    else:
        names = _names(_source(module, what), what)
    if names is not None and attribute not in names:
        raise UserError(f"{what}: {unknown('attribute', attribute, {n for n in names if not n.startswith('__')})}")


def lacks(reference: str, base: type, method: str) -> bool:
    """Whether a class that is only a ``base`` does not define one of its methods; false if only running tells."""
    module, _, name = reference.rpartition(":")
    if module in sys.modules:
        found = getattr(sys.modules[module], name, None)
        return isinstance(found, type) and issubclass(found, base) and getattr(found, method) is getattr(base, method)
    source = _source(module, reference)
    for node in ast.parse(source.read_bytes()).body if source else ():
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _bases(node) == [base.__name__] and method not in set(_defined(node.body))
    return False


def returns_tuples(reference: str, base: type, method: str) -> bool:
    """Whether every ``return`` of a method is written as a tuple, in a class that is only a ``base``; false if only
    running tells."""
    module, _, name = reference.rpartition(":")
    try:
        source = _source(module, reference)
    except (UserError, ValueError):  # a module without a file, such as a program's own
        return False
    for owner in ast.parse(source.read_bytes()).body if source else ():
        if isinstance(owner, ast.ClassDef) and owner.name == name and _bases(owner) == [base.__name__]:
            methods = (node for node in owner.body if getattr(node, "name", "") == method)
            returned = [node.value for found in methods for node in ast.walk(found) if isinstance(node, ast.Return)]
            return bool(returned) and all(isinstance(value, ast.Tuple) for value in returned)
    return False


def _bases(owner: ast.ClassDef) -> list[str]:
    return [ast.unparse(parent).rpartition(".")[2] for parent in owner.bases]


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


def _names(source: Path | None, what: str) -> set[str] | None:
    """What the file defines at its top; None where only running it would tell."""
    if source is None:
        return None
    try:
        body = ast.parse(source.read_bytes(), str(source)).body
    except SyntaxError as error:
        raise UserError(f"{what}: {source}:{error.lineno}: {error.msg}") from error
    names = set(_defined(body))
    return None if {"*", "__getattr__"} & names else names


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        else:  # assignments, also in branches
            yield from (n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
            inner = [n for n in ast.walk(node) if isinstance(n, ast.stmt) and n is not node]
            yield from _defined([n for n in inner if hasattr(n, "name") or hasattr(n, "names")])
