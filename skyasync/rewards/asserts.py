"""``assert`` tests, split so that the code under test never meets what is expected of it.

Invariant: what is sent to the code's process is calls of its own names with their arguments, and
the statements that make those. The rest, in which each such call has become a value, runs in a
process that has never run the code.

Of ``assert sorted(f([2, 1])) == [1, 2]`` the first process gets ``f([2, 1])``, and the second
``assert __equal__(sorted(__values__[0]), [1, 2])``. A name of a module that the test forgot to
import (``math.isclose(f(1), 0.5)``) is imported by the second process. A test that needs a library
which that process does not import is rejected: the code could put another one in its place.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import re
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from skyasync.errors import UserError
from skyasync.rewards.sandbox_program import CONTAINS, EQUAL, VALUES

_OPERATIONS = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.IfExp)
_DISPLAYS = (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred, ast.JoinedStr, ast.FormattedValue)
_THROUGH = (*_OPERATIONS, *_DISPLAYS, ast.keyword, ast.Slice)
_PLAIN_METHODS = {
    name for kind in (str, bytes, list, tuple, dict, set, int, float, complex) for name in dir(kind)
}
_RUN_TEXT = {
    "eval",
    "exec",
    "compile",
    "open",
    "__import__",
}  # what the code returns must not be run by the check
_NUMBERS = {"cmath", "decimal", "fractions", "math", "numpy", "random", "statistics"}
_CONTAINERS = {"bisect", "collections", "copy", "functools", "heapq", "itertools", "operator"}
_BYTES = {"array", "base64", "binascii", "hashlib", "struct", "zlib"}
_TEXT = {"difflib", "html", "json", "re", "string", "textwrap", "unicodedata"}
_DATES = {"calendar", "datetime", "zoneinfo"}
#: What the check may import.
_MODULES = _NUMBERS | _CONTAINERS | _BYTES | _TEXT | _DATES | {"ipaddress", "typing", "uuid"}
#: What the check imports for names that a test uses and does not import.
_IMPORTS = {
    **{module: f"import {module}" for module in _MODULES},
    "np": "import numpy as np",
    **dict.fromkeys(
        ("Counter", "OrderedDict", "defaultdict", "deque"), "from collections import {}"
    ),
    "Decimal": "from decimal import {}",
    "Fraction": "from fractions import {}",
    **dict.fromkeys(("date", "timedelta"), "from datetime import {}"),
    **dict.fromkeys(
        ("ceil", "comb", "factorial", "floor", "gcd", "inf", "isclose", "nan", "pi", "sqrt"),
        "from math import {}",
    ),
    **dict.fromkeys(("allclose", "array", "array_equal"), "from numpy import {}"),
}
_IN_DATETIME = {
    "MAXYEAR",
    "MINYEAR",
    "UTC",
    "date",
    "datetime",
    "time",
    "timedelta",
    "timezone",
    "tzinfo",
}
#: Names of libraries, and of what tests use of them, that the check does not import.
_LIBRARIES = {
    "jax",
    "jnp",
    "networkx",
    "nx",
    "pandas",
    "pd",
    "pl",
    "polars",
    "pytest",
    "scipy",
    "sklearn",
    "sympy",
}
_LIBRARIES |= {"tensorflow", "tf", "torch", "DataFrame", "Series", "approx", "tensor"}
_CODE_MODULES = {
    "__main__",
    "answer",
    "candidate",
    "main",
    "solution",
    "submission",
}  # that stand for the code
_COMPARING = re.compile(
    "almost|approx|close|equal|identical|same", re.IGNORECASE
)  # names of functions
_OF_FUNCTIONS = {"accumulate", "cmp_to_key", "groupby", "partial", "starmap", "vectorize"}
_OF_FUNCTIONS |= {
    "map",
    "filter",
    "reduce",
    "sorted",
    "max",
    "min",
    "isinstance",
    "issubclass",
    "callable",
    "hasattr",
}
#: Methods of text and sets that decide a test.
_DECIDING_METHODS = {
    "__contains__",
    "__eq__",
    "__ne__",
    "endswith",
    "isdisjoint",
    "issubset",
    "issuperset",
    "startswith",
}


@dataclass(frozen=True)
class Split:
    """A test in two.

    Args:
        steps: for the code's process, ``("value", expression)`` or ``("do", statement)``.
        check: what is then run with the values.
        literal: what the only value must be equal to, which needs no ``check``; ``...`` for any
            other test.
    """

    steps: list[tuple[str, str]]
    check: str
    literal: object = ...

    @property
    def is_plain(self) -> bool:
        """Whether ``literal`` is compared without hashing: equal hashes, which a response can
        choose, take for ever."""
        parts = [self.literal]
        while parts:
            part = parts.pop()
            if isinstance(part, list | tuple):
                parts += part
            elif part is not None and not isinstance(part, str | bytes | int | float):
                return False
        return True


def split(test: str) -> Split:
    """A test of one or more ``assert`` statements, with imports, assignments and calls between
    them.

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
        self._test = test
        self._shared = shared
        self._constants: set[str] = set()
        self._variables: set[str] = set()
        self._known = set(dir(builtins)) - _RUN_TEXT  # names that mean the same in both processes
        self._imported: set[str] = set()  # other names of libraries, which the code can replace
        self._added_imports: dict[str, ast.stmt] = {}  # by name, for the check
        self._steps: list[tuple[str, str]] = []
        self._values = 0
        self._check: list[ast.stmt] = []

    def split(self) -> Split:
        try:
            body = ast.parse(self._test).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise self.refused(f"is no Python: {error}") from error
        self._find_imports(body)
        for statement in body:
            self._take(statement)
        if not any(isinstance(statement, ast.Assert) for statement in body):
            raise self.refused("has no assert statement")
        used = set[str]().union(*map(_names, self._check))
        imports = [statement for name, statement in self._added_imports.items() if name in used]
        check = ast.unparse(ast.fix_missing_locations(ast.Module([*imports, *self._check], [])))
        literal: object = ...
        match self._check:
            case [
                ast.Assert(ast.Call(ast.Name(call), [ast.Subscript(ast.Name(name)), target]))
            ] if call == EQUAL and name == VALUES:
                with contextlib.suppress(ValueError, TypeError, RecursionError, MemoryError):
                    literal = ast.literal_eval(target)
        return Split(self._steps, check, literal)

    def _find_imports(self, body: list[ast.stmt]) -> None:
        """Decide which names without an import are modules' and libraries': none if no other name
        is left for the code.

        (Code may be asked for a function ``gcd``, or a class ``Counter``.)
        """
        nodes = [node for statement in body for node in ast.walk(statement)]
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        aliases = [alias for node in imports if not _imports_code(node) for alias in node.names]
        imported = {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
        bound = set[str]().union(*map(_bound, body))
        names = set[str]().union(*map(_names, body)) - set(dir(builtins)) - bound - imported
        roots = {_name(node.value) for node in attributes if isinstance(node.value, ast.Name)}
        modules = names & _IMPORTS.keys()
        libraries = names & (_LIBRARIES | (roots & sys.stdlib_module_names)) - modules
        if not names - modules - libraries:
            return
        for name in sorted(modules):
            source = _IMPORTS[name].format(name)
            members = {node.attr for node in attributes if _name(node.value) == name}
            if name == "datetime" and not members & _IN_DATETIME:
                # the class, which is called or has other attributes
                source = "from datetime import datetime"
            self._added_imports[name] = ast.parse(source).body[0]
        self._known |= modules
        self._imported |= libraries

    def _take(self, statement: ast.stmt) -> None:
        match statement:
            case ast.Import() | ast.ImportFrom():
                self._import(statement)
            case ast.Assert(test):
                if not self._foreign(test):  # the code's function has a built-in one's name
                    calls = [node.func for node in ast.walk(test) if isinstance(node, ast.Call)]
                    self._known -= {
                        function.id for function in calls if isinstance(function, ast.Name)
                    }
                for decision in _decisions(test):
                    self._check_decision(decision)
                for comparison in _comparisons(test):
                    self._check_comparison(comparison)
                expression = self.visit(test)
                assert isinstance(expression, ast.expr)
                self._check.append(ast.Assert(_Strict().visit(expression)))
            case ast.Assign([ast.Name(name)], value) if (
                not self._foreign(value) and name not in self._shared
            ):
                self._constants.add(name)
                self._known.add(name)
                self._check.append(statement)
            case ast.Assign([ast.Name(name)]) | ast.AugAssign(ast.Name(name)) if (
                name in self._shared or self._foreign(statement)
            ):
                self._known.discard(name)  # the code may change it
                is_library = self._foreign(statement.value) and not self._is_code(statement.value)
                (self._imported if is_library else self._variables).add(name)
                self._send("do", statement)
            case ast.Expr(ast.Call(function) as value) if self._foreign(value) and _name(
                function
            ).startswith("assert"):
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

    def _import(self, statement: ast.Import | ast.ImportFrom) -> None:
        if _imports_code(statement):
            return
        self._send("do", statement)
        modules = [alias.name for alias in statement.names]
        if isinstance(statement, ast.ImportFrom):
            modules = [statement.module or ""]
        names = {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}
        is_safe = all(module.partition(".")[0] in _MODULES for module in modules)
        if "*" in names:
            if not is_safe or modules[0].startswith("numpy"):
                raise self.refused(f"has {ast.unparse(statement)!r}: import the names that it uses")
            names = set(dir(import_module(modules[0])))
        if is_safe:
            self._known |= names
            self._check.append(statement)
        else:
            self._imported |= names

    def _check_decision(self, decision: ast.expr) -> None:
        """Reject a call whose result is the test's if it is a library's, or compares the code's
        value with another."""
        if not isinstance(decision, ast.Call):
            return
        function = decision.func
        arguments = [*decision.args, *(keyword.value for keyword in decision.keywords)]
        compared = arguments
        if isinstance(function, ast.Attribute) and not _is_constructor(function.value):
            compared = [function.value, *arguments]  # a method of what the code returns
        if _root(function) in self._imported and any(map(self._foreign, arguments)):
            raise self._undecided(decision)
        is_comparing = self._foreign(function) and _COMPARING.search(_name(function))
        if (
            is_comparing
            and any(map(self._is_result, compared))
            and not all(map(self._is_code, compared))
        ):
            raise self._undecided(decision)

    def _is_code(self, node: ast.AST) -> bool:
        """Whether a name in it is the code's and no library's."""
        return bool(_names(node) - self._known - self._imported - _bound(node))

    def _is_result(self, node: ast.AST) -> bool:
        """Whether it holds what a call of the code returned."""
        calls = any(
            isinstance(each, ast.Call) and self._is_code(each.func) for each in ast.walk(node)
        )
        return calls or not self._variables.isdisjoint(_names(node))

    def _check_comparison(self, comparison: ast.Compare) -> None:
        """Reject ``f(1) == Point(3)``: the expected value would be in the code's process."""
        operands = [comparison.left, *comparison.comparators]
        if not all(map(self._foreign, operands)):
            return
        for operand in operands:
            calls = [
                node
                for node in ast.walk(operand)
                if isinstance(node, ast.Call) and self._foreign(node.func)
            ]
            if calls and all(self._makes_constant(call) for call in calls):
                raise self._undecided(operand)

    def _makes_constant(self, call: ast.Call) -> bool:
        """Whether it makes an object of the code's class from constants alone."""
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        has_arguments = bool(arguments) and not any(map(self._foreign, arguments))
        return has_arguments and isinstance(call.func, ast.Name) and _is_constructor(call)

    def visit(self, node: ast.AST) -> ast.AST:
        """The node with a value in the place of each expression that is sent."""
        if not self._foreign(node):
            return node
        if isinstance(node, ast.Call | ast.Attribute | ast.Subscript) and self._belongs_to_check(
            node
        ):
            return self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(ast.Call(function), name)) | ast.Attribute(
                ast.Call(function), name
            ) if (
                name in _PLAIN_METHODS and not _name(function)[:1].isupper()
            ):  # a method of what the code returns, unless it is called like a class
                return self.generic_visit(node)
            case ast.Call(ast.Attribute(value, name)) if (
                name in _DECIDING_METHODS and self._is_result(value)
            ):
                return ast.Call(
                    ast.Attribute(self._value(value), name, ast.Load()),
                    *self._visit_arguments(node),
                )
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self._loop(node)
            case _ if isinstance(node, _THROUGH):
                return self.generic_visit(node)
            case ast.expr() if not isinstance(node, ast.Lambda):
                return self._value(node)
        raise self.refused(f"has {_shown(ast.unparse(node))}, which cannot be split")

    def _visit_arguments(self, call: ast.Call) -> tuple[list[ast.expr], list[ast.keyword]]:
        arguments: list[Any] = [self.visit(argument) for argument in call.args]
        keywords: list[Any] = [self.visit(keyword) for keyword in call.keywords]
        return arguments, keywords

    def _belongs_to_check(self, node: ast.expr) -> bool:
        """Whether a call, attribute or item begins with a known name or an operation, so that the
        check finds it."""
        while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Call) and self._is_given_a_function(node):
                return False
            if isinstance(node, ast.Call):
                node = node.func
            else:
                node = node.value
        if isinstance(node, ast.Name):
            return node.id in self._known
        return isinstance(node, (ast.Constant, *_OPERATIONS, *_DISPLAYS))

    def _is_given_a_function(self, call: ast.Call) -> bool:
        """Whether the code's function itself is an argument, as of ``map``, or a function that
        calls it."""
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        return _name(call.func) in _OF_FUNCTIONS and any(
            (isinstance(each, ast.Name) and each.id not in self._known | self._variables)
            or (isinstance(each, ast.Lambda) and self._foreign(each))
            for each in arguments
        )

    def _loop(self, loop: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> ast.AST:
        """A loop over what the code returns, or over calls of the code that need nothing else."""
        first = loop.generators[0]
        outer = first.iter
        first.iter = ast.Constant(None)
        inside = self._foreign(loop)
        first.iter = outer
        if not inside:
            first.iter = self.visit(outer)  # type: ignore[assignment]
            return loop
        calls = (
            isinstance(loop.elt, ast.Call)
            and self._foreign(loop.elt.func)
            and not self._foreign(outer)
        )
        if (
            not calls
            or len(loop.generators) > 1
            or first.ifs
            or not isinstance(first.target, ast.Name)
        ):
            raise self.refused(
                "compares in a loop, so expected and actual values cannot be separated: write an assert "
                "statement for each item"
            )
        return self._value(ast.ListComp(loop.elt, loop.generators))

    def _value(self, node: ast.expr) -> ast.Subscript:
        """Send an expression; its value in the check."""
        if _root(node) in self._imported and not self._is_applied_to_code(node):
            raise self._undecided(node)
        self._send("value", node)
        self._values += 1
        return ast.Subscript(
            ast.Name(VALUES, ast.Load()), ast.Constant(self._values - 1), ast.Load()
        )

    def _is_applied_to_code(self, node: ast.expr) -> bool:
        """Whether a library's functions get what the code returns, and nothing that may be expected
        of it."""
        pending: list[ast.AST] = [node]
        is_applied = False
        while pending:
            part = pending.pop()
            if isinstance(part, ast.Constant):
                return False
            is_call = isinstance(part, ast.Call | ast.Name) and isinstance(
                getattr(part, "ctx", ast.Load()), ast.Load
            )
            if is_call and self._foreign(part) and _root(part) not in self._imported | self._known:
                is_applied = True
                continue
            pending += ast.iter_child_nodes(part)
        return is_applied

    def _send(self, kind: str, node: ast.AST) -> None:
        bound = _bound(node)
        for each in ast.walk(node):
            if isinstance(each, ast.Compare) and self._foreign(each, bound):
                raise self._undecided(each)
        self.needed |= {
            each.id for each in ast.walk(node) if isinstance(each, ast.Name)
        } & self._constants
        self._steps.append((kind, ast.unparse(node)))

    def _foreign(self, node: ast.AST, bound: Collection[str] = ()) -> bool:
        """Whether a name in it is the code's; ``bound``: names that what is around it binds."""
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        return not names <= self._known and bool(names - self._known - _bound(node) - set(bound))

    def _undecided(self, node: ast.AST) -> UserError:
        return self.refused(
            f"leaves it to the code's process to decide {_shown(ast.unparse(node))}, and the code can change that: "
            "write an assert statement that compares what a call returns with plain data"
        )

    def refused(self, why: str) -> UserError:
        return UserError(f"reward function code_tests: the test {_shown(self._test)} {why}")


class _Strict(ast.NodeTransformer):
    """Comparisons of the check as calls of ``sandbox_program.equal`` and ``contains``: a truth
    value is no number."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        operands = [self.visit(operand) for operand in (node.left, *node.comparators)]
        pairs = zip(operands, node.ops, operands[1:], strict=False)
        comparisons = [self._comparison(left, operation, right) for left, operation, right in pairs]
        if len(comparisons) == 1:
            return comparisons[0]
        return ast.BoolOp(ast.And(), comparisons)

    @staticmethod
    def _comparison(left: ast.expr, operation: ast.cmpop, right: ast.expr) -> ast.expr:
        calls: dict[type[ast.cmpop], str] = {
            ast.Eq: EQUAL, ast.NotEq: EQUAL, ast.In: CONTAINS, ast.NotIn: CONTAINS
        }  # fmt: skip
        if type(operation) not in calls:
            return ast.Compare(left, [operation], [right])
        call = ast.Call(ast.Name(calls[type(operation)], ast.Load()), [left, right], [])
        if isinstance(operation, ast.NotEq | ast.NotIn):
            return ast.UnaryOp(ast.Not(), call)
        return call


def _comparisons(test: ast.expr) -> Iterator[ast.Compare]:
    """The comparisons of a test, but for those in functions and loops, whose variables have no
    value outside."""
    pending: list[ast.AST] = [test]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Compare):
            yield node
        if not isinstance(
            node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
        ):
            pending += ast.iter_child_nodes(node)


def _decisions(test: ast.expr) -> Iterator[ast.expr]:
    """The expressions whose truth decides a test."""
    match test:
        case ast.BoolOp(values=values):
            for value in values:
                yield from _decisions(value)
        case ast.UnaryOp(ast.Not(), operand):
            yield from _decisions(operand)
        case ast.IfExp(condition, body, alternative):
            for value in (condition, body, alternative):
                yield from _decisions(value)
        case _:
            yield test


def _root(node: ast.AST) -> str:
    """The name that an expression of calls, attributes and items begins with."""
    while True:
        match node:
            case ast.Call(func=inner) | ast.Attribute(value=inner) | ast.Subscript(value=inner):
                node = inner
            case ast.Name(name):
                return name
            case _:
                return ""


def _is_constructor(node: ast.AST) -> bool:
    """Whether it is a call by a capitalized name."""
    return isinstance(node, ast.Call) and _name(node.func)[:1].isupper()


def _imports_code(statement: ast.Import | ast.ImportFrom) -> bool:
    """Whether the imported names are those of the code under test."""
    return isinstance(statement, ast.ImportFrom) and statement.module in _CODE_MODULES


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _bound(node: ast.AST) -> set[str]:
    stored = {
        each.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    return stored | {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


def _shown(text: str) -> str:
    if len(text) <= 80:
        return repr(text)
    return f"{text[:77]!r}..."
