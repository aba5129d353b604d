"""``assert`` tests, split so that the code under test never meets what is expected of it.

Invariant: what is sent to the code's process is calls of its own names with their arguments, and the statements that
make those. The rest, in which each such call has become a value, runs in a process that has never run the code.

Of ``assert sorted(f([2, 1])) == [1, 2]`` the first process gets ``f([2, 1])``, and the second ``assert
sorted(__values__[0]) == [1, 2]``.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection
from dataclasses import dataclass

from skyasync.errors import UserError
from skyasync.rewards.sandbox_program import VALUES

_OPERATIONS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.IfExp)
_DISPLAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred, ast.JoinedStr, ast.FormattedValue)
_THROUGH = (*_OPERATIONS, *_DISPLAYS, ast.keyword, ast.Slice)
_PLAIN_METHODS = {name for kind in (str, bytes, list, tuple, dict, set, int, float, complex) for name in dir(kind)}
_RUN_TEXT = {"eval", "exec", "compile", "open", "__import__"}  # what the code returns must not be run by the check
_NUMBERS = {"cmath", "decimal", "fractions", "math", "numpy", "random", "statistics"}
_CONTAINERS = {"bisect", "collections", "copy", "functools", "heapq", "itertools", "operator"}
_MODULES = _NUMBERS | _CONTAINERS | {"datetime", "json", "re", "string", "typing"}
_OF_FUNCTIONS = {"map", "filter", "reduce", "sorted", "max", "min", "isinstance", "issubclass", "callable", "hasattr"}


@dataclass(frozen=True)
class Split:
    """A test in two.

    Args:
        steps: for the code's process, ``("value", expression)`` or ``("do", statement)``.
        check: what is then run with the values.
        literal: what the only value must be equal to, which needs no ``check``; ``...`` for any other test.
    """

    steps: list[tuple[str, str]]
    check: str
    literal: object = ...

    @property
    def is_plain(self) -> bool:
        """Whether ``literal`` is compared without hashing: equal hashes, which a response can choose, take for ever."""
        parts = [self.literal]
        while parts:
            part = parts.pop()
            if isinstance(part, list | tuple):
                parts += part
            elif part is not None and not isinstance(part, str | bytes | int | float):
                return False
        return True


def split(test: str) -> Split:
    """A test of one or more ``assert`` statements, with imports, assignments and calls between them.

    Raises:
        UserError: for one that cannot be split.
    """
    shared: set[str] = set()  # the test's own constants that the code's process needs
    while True:
        splitter = _Splitter(test, shared)
        try:
            result = splitter.split()
        except RecursionError as error:
            raise splitter.refused("is nested too deeply") from error
        if splitter.needed <= shared:
            return result
        shared |= splitter.needed


class _Splitter(ast.NodeTransformer):
    """One pass over a test; ``needed``: the test's own constants that occur in what is sent."""

    def __init__(self, test: str, shared: set[str]) -> None:
        self.needed: set[str] = set()
        self._test, self._shared = test, shared
        self._constants: set[str] = set()
        self._variables: set[str] = set()
        self._known = set(dir(builtins)) - _RUN_TEXT  # names that mean the same in both processes
        self._imported: set[str] = set()  # other names of modules, which the code can replace
        self._steps: list[tuple[str, str]] = []
        self._values = 0
        self._check: list[ast.stmt] = []

    def split(self) -> Split:
        try:
            body = ast.parse(self._test).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self.refused(f"is no Python: {error}") from error
        for statement in body:
            self._take(statement)
        if not any(isinstance(statement, ast.Assert) for statement in body):
            raise self.refused("has no assert statement")
        check = ast.unparse(ast.fix_missing_locations(ast.Module(self._check, [])))
        match self._check:
            case [ast.Assert(ast.Compare(ast.Subscript(ast.Name(name)), [ast.Eq()], [literal]))] if name == VALUES:
                try:
                    return Split(self._steps, check, ast.literal_eval(literal))
                except (ValueError, TypeError, RecursionError, MemoryError):
                    pass
        return Split(self._steps, check)

    def _take(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import(names) | ast.ImportFrom(names=names):
                self._send("do", statement)
                modules = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else [n.name for n in names]
                imported = {(name.asname or name.name).partition(".")[0] for name in names}
                if all(module.partition(".")[0] in _MODULES for module in modules):
                    self._known |= imported
                    self._check.append(statement)
                else:
                    self._imported |= imported
            case ast.Assert(test):
                if not self._foreign(test):  # the code's function has a built-in one's name
                    calls = [node.func for node in ast.walk(test) if isinstance(node, ast.Call)]
                    self._known -= {function.id for function in calls if isinstance(function, ast.Name)}
                if isinstance(test, ast.Call) and any(map(self._foreign, test.args)):
                    root = test.func
                    while isinstance(root, ast.Attribute):
                        root = root.value
                    if _name(root) in self._imported:
                        raise self._undecided(test)
                expression = self.visit(test)
                assert isinstance(expression, ast.expr)
                self._check.append(ast.Assert(expression))
            case ast.Assign([ast.Name(name)], value) if not self._foreign(value) and name not in self._shared:
                self._constants.add(name)
                self._known.add(name)
                self._check.append(statement)
            case ast.Assign([ast.Name(name)]) | ast.AugAssign(ast.Name(name)) if name in self._shared or self._foreign(
                statement
            ):
                self._known.discard(name)  # the code may change it
                self._variables.add(name)
                self._send("do", statement)
            case ast.Expr(ast.Call(function) as value) if self._foreign(value) and _name(function).startswith("assert"):
                if self._foreign(function):
                    raise self._undecided(value)
                self._check.append(ast.Expr(self.generic_visit(value)))  # type: ignore[arg-type]
            case ast.Expr(value) if self._foreign(value):
                self._send("do", statement)
            case ast.Pass() | ast.Expr():
                self._check.append(statement)
            case _:
                raise self.refused(
                    f"has {_shown(ast.unparse(statement))}: besides assert statements it may have imports, "
                    "assignments to one name, and calls"
                )

    def visit(self, node: ast.AST) -> ast.AST:
        """The node with a value in the place of each expression that is sent."""
        if not self._foreign(node):
            return node
        match node:
            case ast.Call(function) if not self._foreign(function) and not self._is_given_a_function(node):
                return self.generic_visit(node)
            case ast.Call(ast.Attribute(ast.Call(function), name)) | ast.Attribute(ast.Call(function), name) if (
                name in _PLAIN_METHODS and not _name(function)[:1].isupper()
            ):  # a method of what the code returns, unless it is called like a class
                return self.generic_visit(node)
            case ast.Subscript(value) if not self._foreign(value):
                return self.generic_visit(node)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self._loop(node)
            case _ if isinstance(node, _THROUGH):
                return self.generic_visit(node)
            case ast.expr() if not isinstance(node, ast.Lambda):
                return self._value(node)
        raise self.refused(f"has {_shown(ast.unparse(node))}, which cannot be split")

    def _is_given_a_function(self, call: ast.Call) -> bool:
        """Whether the code's function itself is an argument, as of ``map``, or a function that calls it."""
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        return _name(call.func) in _OF_FUNCTIONS and any(
            (isinstance(each, ast.Name) and each.id not in self._known | self._variables)
            or (isinstance(each, ast.Lambda) and self._foreign(each))
            for each in arguments
        )

    def _loop(self, loop: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> ast.AST:
        """A loop over what the code returns, or over calls of the code that need nothing else."""
        first = loop.generators[0]
        outer, first.iter = first.iter, ast.Constant(None)
        inside = self._foreign(loop)
        first.iter = outer
        if not inside:
            first.iter = self.visit(outer)  # type: ignore[assignment]
            return loop
        calls = isinstance(loop.elt, ast.Call) and self._foreign(loop.elt.func) and not self._foreign(outer)
        if not calls or len(loop.generators) > 1 or first.ifs or not isinstance(first.target, ast.Name):
            raise self.refused(
                "compares in a loop, so expected and actual values cannot be separated: write an assert "
                "statement for each item"
            )
        return self._value(ast.ListComp(loop.elt, loop.generators))

    def _value(self, node: ast.expr) -> ast.Subscript:
        """Send an expression; its value in the check."""
        self._send("value", node)
        self._values += 1
        return ast.Subscript(ast.Name(VALUES, ast.Load()), ast.Constant(self._values - 1), ast.Load())

    def _send(self, kind: str, node: ast.AST) -> None:
        bound = _bound(node)
        for each in ast.walk(node):
            if isinstance(each, ast.Compare) and self._foreign(each, bound):
                raise self._undecided(each)
        self.needed |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & self._constants
        self._steps.append((kind, ast.unparse(node)))

    def _foreign(self, node: ast.AST, bound: Collection[str] = ()) -> bool:
        """Whether a name in it is the code's; ``bound``: names that what is around it binds."""
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return not names <= self._known and bool(names - self._known - _bound(node) - set(bound))

    def _undecided(self, node: ast.AST) -> UserError:
        return self.refused(
            f"leaves it to the code's process to decide {_shown(ast.unparse(node))}, and the code can change that: "
            "write an assert statement that compares what a call returns"
        )

    def refused(self, why: str) -> UserError:
        return UserError(f"reward function code_tests: the test {_shown(self._test)} {why}")


def _bound(node: ast.AST) -> set[str]:
    stored = {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return stored | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:77]!r}..."
