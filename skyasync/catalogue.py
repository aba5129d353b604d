"""What is known of a part before it is used: its inputs, its settings, and what it can do.

A part (a loss, a plan, an engine) says all of it in its own place: by its signature, by ``configured``, and by what it
hands to ``register`` or has as class attributes. For a part that is loaded ``describe`` reads that off the object; for
one of ours that is not, ``registered_in`` reads the same off its module's source, so that a wrong setting is refused
without importing torch. Invariant: both give equal answers (a test holds it).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parent


@dataclass(frozen=True)
class About:
    """One part.

    Args:
        inputs: names of its positional parameters, in order; none for a class.
        settings: its keyword-only parameters; ``required``: those of them without a default.
        keys: setting -> the key under ``trainer.algorithm`` that feeds it.
        can: its capabilities, those of its registry.
        selector: what it chooses tokens by beforehand, if it does (``prepared_by``).
        odd: parameters that have no name to be fed by: positional-only ones, ``*args`` and ``**kwargs``.
    """

    inputs: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    can: Mapping[str, Any] = field(default_factory=dict)
    selector: About | None = None
    odd: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[About]:
        """This and its selector."""
        yield self
        if self.selector is not None:
            yield self.selector


def describe(part: object, capabilities: Mapping[str, Any]) -> About:
    """A loaded part; ``capabilities``: names and defaults."""
    can = {name: getattr(part, name, default) for name, default in capabilities.items()}
    if inspect.isclass(part) or not callable(part):
        return About(can=can)
    parameters = inspect.signature(part).parameters.values()
    settings = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    select = getattr(part, "select", None)
    return About(
        inputs=tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD),
        settings=tuple(p.name for p in settings),
        required=tuple(p.name for p in settings if p.default is p.empty),
        keys=dict(getattr(part, "configuration_keys", {})),
        can=can,
        selector=describe(select, {}) if select else None,
        odd=tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL, p.VAR_KEYWORD)),
    )


def registered_in(module: str, capabilities: Mapping[str, Any]) -> dict[str, About]:
    """Name -> part, for all that a module of this library registers when it is imported."""
    body = _statements(module)
    functions = {node.name: node for node in body if isinstance(node, ast.FunctionDef)}
    found = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            for call in _calls(node, "register"):
                given = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
                found[ast.literal_eval(call.args[0])] = _about(node, functions, {**capabilities, **given})
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Call):
            found[ast.literal_eval(node.value.func.args[0])] = About(can=capabilities)  # of another module
    return found


@cache
def _statements(module: str) -> list[ast.stmt]:
    file = _PACKAGE.parent.joinpath(*module.split("."))
    return ast.parse((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_bytes()).body


def _about(
    node: ast.FunctionDef | ast.ClassDef, functions: Mapping[str, ast.FunctionDef], can: Mapping[str, Any]
) -> About:
    return _function(node, functions, can) if isinstance(node, ast.FunctionDef) else _class(node, can)


def _function(node: ast.FunctionDef, functions: Mapping[str, ast.FunctionDef], can: Mapping[str, Any]) -> About:
    arguments = node.args
    keys = [{k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg} for call in _calls(node, "configured")]
    selectors = [
        functions[call.args[0].id] for call in _calls(node, "prepared_by") if isinstance(call.args[0], ast.Name)
    ]
    odd = [*arguments.posonlyargs, *filter(None, (arguments.vararg, arguments.kwarg))]
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return About(
        inputs=tuple(a.arg for a in arguments.args),
        settings=tuple(a.arg for a in arguments.kwonlyargs),
        required=tuple(a.arg for a, default in defaults if default is None),
        keys={name: key for found in keys for name, key in found.items()},
        can=can,
        selector=_function(selectors[0], functions, {}) if selectors else None,
        odd=tuple(a.arg for a in odd),
    )


def _class(node: ast.ClassDef, can: Mapping[str, Any]) -> About:
    own = dict(can)
    for statement in node.body:
        if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            if isinstance(target, ast.Name) and target.id in can:
                own[target.id] = ast.literal_eval(statement.value)
    return About(can=own)


def _calls(node: ast.FunctionDef | ast.ClassDef, name: str) -> list[ast.Call]:
    """Decorators that are calls of ``name`` or ``something.name``."""

    def called(call: ast.Call) -> str:
        return getattr(call.func, "attr", getattr(call.func, "id", ""))

    return [d for d in node.decorator_list if isinstance(d, ast.Call) and called(d) == name]


def complaint(about: About, what: str, allowed: frozenset[str], needed: frozenset[str],
              unknown: Callable[[str, str, frozenset[str]], str]) -> str:  # fmt: skip
    """What is wrong with a part's parameters; "" if nothing is."""
    for piece in about:
        if piece.odd:
            return f"{what} takes {', '.join(piece.odd)} without a name of its own: name what it takes"
        if wrong := [name for name in piece.inputs if name not in allowed]:
            return f"{what}: {unknown('parameter', wrong[0], allowed)} (settings stand behind a *)"
        if missing := [name for name in piece.required if name not in piece.keys]:
            return f"{what}: its setting {missing[0]!r} has no default and no key (@configured)"
    if missing := sorted(needed - set(about.inputs)):
        return f"{what} has no parameter {missing[0]!r}; it may take: {', '.join(sorted(allowed))}"
    return ""
