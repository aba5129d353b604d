"""``assert`` tests, split so that the code under test never sees the expected values.

Invariant: the code's process gets only calls of its names with their arguments, and the statements
that make these arguments. The rest, in which each such call has become a value, runs in a process
that has never run the code.

Of ``assert sorted(f([2, 1])) == [1, 2]`` the first process gets ``f([2, 1])``, and the second
``assert __equal__(sorted(__values__[0]), [1, 2])``. A name of a module that the test forgot to
import (``math.isclose(f(1), 0.5)``) is imported by the second process. A test that needs a library
which that process does not import is rejected: the code could put another one in its place.

In this module a node or name is *foreign* if the second process cannot evaluate it: it belongs to
the code, or to a library that only the code's process imports.
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
#: Nodes that the check evaluates itself; only their operands may be sent.
_CONTAINERS_OF_VALUES = (*_OPERATIONS, *_DISPLAYS, ast.keyword, ast.Slice)
_PLAIN_TYPES = (str, bytes, list, tuple, dict, set, int, float, complex)
_PLAIN_METHODS = set[str]().union(*map(dir, _PLAIN_TYPES))
#: Built-in functions that the check does not call: it must not run what the code returns.
_RUN_TEXT = {"eval", "exec", "compile", "open", "__import__"}
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
#: Modules from which a test imports the code under test.
_CODE_MODULES = {"__main__", "answer", "candidate", "main", "solution", "submission"}
#: Names of functions that compare; the code may define such a function.
_COMPARING = re.compile("almost|approx|close|equal|identical|same", re.IGNORECASE)
#: Functions that take functions, or look at them.
_OF_FUNCTIONS = {"accumulate", "cmp_to_key", "groupby", "partial", "starmap", "vectorize"}
_OF_FUNCTIONS |= {"map", "filter", "reduce", "sorted", "max", "min"}
_OF_FUNCTIONS |= {"isinstance", "issubclass", "callable", "hasattr"}
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
        check: the program that is then run with the values.
        literal: the expected value of a test with one value, which needs no ``check``; ``...`` for
            any other test.
    """

    steps: list[tuple[str, str]]
    check: str
    literal: object = ...

    @property
    def is_plain(self) -> bool:
        """Whether ``literal`` is compared without hashing.

        A response can choose values with equal hashes, and comparing sets of these never ends.
        """
        pending = [self.literal]
        while pending:
            part = pending.pop()
            if isinstance(part, list | tuple):
                pending += part
            elif part is not None and not isinstance(part, str | bytes | int | float):
                return False
        return True


def split(test: str) -> Split:
    """Split a test of ``assert`` statements, with imports, assignments and calls between them.

    Raises:
        UserError: for one that cannot be split.
    """
    # That the code's process needs a constant may be found after its assignment was read as the
    # check's. So passes are repeated until they need no further constant.
    constants: set[str] = set()
    while True:
        splitter = _Splitter(test, constants)
        try:
            result = splitter.split()
        except RecursionError as error:
            raise splitter.refused("is nested too deeply") from error
        if splitter.needed <= constants:
            return result
        constants |= splitter.needed


class _Splitter(ast.NodeTransformer):
    """One pass over a test.

    Args:
        sent_constants: the test's constants that are assigned in the code's process too.

    Attributes:
        needed: the test's constants that occur in the steps.
    """

    def __init__(self, test: str, sent_constants: set[str]) -> None:
        self.needed: set[str] = set()
        self._test = test
        self._sent_constants = sent_constants
        self._constants: set[str] = set()  # variables of the check that hold no value of the code
        self._variables: set[str] = set()  # variables that hold a value of the code
        self._check_names = set(dir(builtins)) - _RUN_TEXT  # names that the check can evaluate
        self._imported: set[str] = set()  # other names of libraries, which the code can replace
        self._added_imports: dict[str, ast.stmt] = {}  # by name, for the check
        self._steps: list[tuple[str, str]] = []
        self._value_count = 0
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
        used = _all_names(self._check)
        imports = [statement for name, statement in self._added_imports.items() if name in used]
        module = ast.Module([*imports, *self._check], [])
        check = ast.unparse(ast.fix_missing_locations(module))
        literal: object = ...
        match self._check:  # the whole check is ``assert __equal__(__values__[0], LITERAL)``
            case [
                ast.Assert(ast.Call(ast.Name(call), [ast.Subscript(ast.Name(name)), target]))
            ] if call == EQUAL and name == VALUES:
                with contextlib.suppress(ValueError, TypeError, RecursionError, MemoryError):
                    literal = ast.literal_eval(target)
        return Split(self._steps, check, literal)

    def _find_imports(self, body: list[ast.stmt]) -> None:
        """Decide which names without an import are modules and libraries.

        None is if no other name is left for the code: a response may have to define a function
        ``gcd``, or a class ``Counter``.
        """
        attributes: list[ast.Attribute] = []
        resolved = set(dir(builtins))  # names that need no import
        for statement in body:
            resolved |= _bound(statement)
            for node in ast.walk(statement):
                if isinstance(node, ast.Attribute):
                    attributes.append(node)
                elif isinstance(node, ast.Import | ast.ImportFrom) and not _imports_code(node):
                    resolved |= _imported_names(node)
        names = _all_names(body) - resolved
        roots = {_name(node.value) for node in attributes if isinstance(node.value, ast.Name)}
        modules = names & _IMPORTS.keys()
        libraries = names & (_LIBRARIES | (roots & sys.stdlib_module_names)) - modules
        if not names - modules - libraries:
            return
        for name in sorted(modules):
            source = _IMPORTS[name].format(name)
            members = {node.attr for node in attributes if _name(node.value) == name}
            if name == "datetime" and not members & _IN_DATETIME:
                # The test means the class: it calls it, or uses attributes of the class.
                source = "from datetime import datetime"
            self._added_imports[name] = ast.parse(source).body[0]
        self._check_names |= modules
        self._imported |= libraries

    def _take(self, statement: ast.stmt) -> None:
        """Add one statement of the test to the steps, to the check, or to both."""
        match statement:
            case ast.Import() | ast.ImportFrom():
                self._import(statement)
            case ast.Assert(test):
                if not self._foreign(test):  # the code's function has the name of a built-in one
                    for node in ast.walk(test):
                        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                            self._check_names.discard(node.func.id)
                for decision in _decisions(test):
                    self._check_decision(decision)
                for comparison in _comparisons(test):
                    self._check_comparison(comparison)
                expression = self.visit(test)
                assert isinstance(expression, ast.expr)
                self._check.append(ast.Assert(_Strict().visit(expression)))
            case ast.Assign([ast.Name(name)], value) if (
                not self._foreign(value) and name not in self._sent_constants
            ):
                self._constants.add(name)
                self._check_names.add(name)
                self._check.append(statement)
            case ast.Assign([ast.Name(name)]) | ast.AugAssign(ast.Name(name)) if (
                name in self._sent_constants or self._foreign(statement)
            ):
                self._check_names.discard(name)  # the code may change it
                if self._foreign(statement.value) and not self._is_code(statement.value):
                    self._imported.add(name)
                else:
                    self._variables.add(name)
                self._send("do", statement)
            case ast.Expr(ast.Call(function) as value) if self._foreign(value) and _name(
                function
            ).startswith("assert"):
                if self._foreign(function):  # the code could replace what decides
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
            return  # its names are defined by the response
        self._send("do", statement)
        if isinstance(statement, ast.ImportFrom):
            modules = [statement.module or ""]
        else:
            modules = [alias.name for alias in statement.names]
        names = _imported_names(statement)
        is_safe = all(module.partition(".")[0] in _MODULES for module in modules)
        if "*" in names:
            if not is_safe or modules[0].startswith("numpy"):
                raise self.refused(f"has {ast.unparse(statement)!r}: import the names that it uses")
            names = set(dir(import_module(modules[0])))
        if is_safe:
            self._check_names |= names
            self._check.append(statement)
        else:
            self._imported |= names

    def _check_decision(self, decision: ast.expr) -> None:
        """Reject a call that decides the test in the code's process.

        That is a library's function, or a function of the code that compares its value with
        another one.
        """
        if not isinstance(decision, ast.Call):
            return
        function = decision.func
        arguments = _arguments(decision)
        if _root(function) in self._imported and any(map(self._foreign, arguments)):
            raise self._undecided(decision)
        if not self._foreign(function) or not _COMPARING.search(_name(function)):
            return
        compared = arguments
        if isinstance(function, ast.Attribute) and not _is_constructor(function.value):
            compared = [function.value, *arguments]  # a method of what the code returns
        if any(map(self._is_result, compared)) and not all(map(self._is_code, compared)):
            raise self._undecided(decision)

    def _is_code(self, node: ast.AST) -> bool:
        """Whether a name in it is the code's, and not a library's."""
        return bool(_names(node) - self._check_names - self._imported - _bound(node))

    def _is_result(self, node: ast.AST) -> bool:
        """Whether it has a value that a call of the code returned."""
        for child in ast.walk(node):
            if isinstance(child, ast.Call) and self._is_code(child.func):
                return True
        return not self._variables.isdisjoint(_names(node))

    def _check_comparison(self, comparison: ast.Compare) -> None:
        """Reject ``f(1) == Point(3)``: the expected value would be in the code's process."""
        operands = [comparison.left, *comparison.comparators]
        if not all(map(self._foreign, operands)):
            return
        for operand in operands:
            foreign_calls = []
            for node in ast.walk(operand):
                if isinstance(node, ast.Call) and self._foreign(node.func):
                    foreign_calls.append(node)
            if foreign_calls and all(map(self._makes_constant, foreign_calls)):
                raise self._undecided(operand)

    def _makes_constant(self, call: ast.Call) -> bool:
        """Whether it makes an object of the code's class from constants alone."""
        arguments = _arguments(call)
        if not arguments or any(map(self._foreign, arguments)):
            return False
        return isinstance(call.func, ast.Name) and _is_constructor(call)

    def visit(self, node: ast.AST) -> ast.AST:
        """The node with a value in the place of each expression that is sent."""
        if not self._foreign(node):
            return node
        is_chain = isinstance(node, ast.Call | ast.Attribute | ast.Subscript)
        if is_chain and self._belongs_to_check(node):
            return self.generic_visit(node)
        if self._is_plain_method(node):
            return self.generic_visit(node)
        match node:
            case ast.Call(ast.Attribute(value, name)) if (
                name in _DECIDING_METHODS and self._is_result(value)
            ):
                # The code's value may be of a class with its own __eq__: the check calls the
                # method of the plain value.
                method = ast.Attribute(self._value(value), name, ast.Load())
                arguments: list[Any] = [self.visit(argument) for argument in node.args]
                keywords: list[Any] = [self.visit(keyword) for keyword in node.keywords]
                return ast.Call(method, arguments, keywords)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self._loop(node)
            case _ if isinstance(node, _CONTAINERS_OF_VALUES):
                return self.generic_visit(node)
            case ast.expr() if not isinstance(node, ast.Lambda):
                return self._value(node)
        raise self.refused(f"has {_shown(ast.unparse(node))}, which cannot be split")

    def _is_plain_method(self, node: ast.AST) -> bool:
        """Whether it is a built-in type's method, or a call of one, of what the code returns.

        A result of a call by a capitalized name is an object of the code's class, whose methods
        are the code's too.
        """
        method = node.func if isinstance(node, ast.Call) else node
        match method:
            case ast.Attribute(ast.Call(function), name):
                return name in _PLAIN_METHODS and not _name(function)[:1].isupper()
        return False

    def _belongs_to_check(self, node: ast.AST) -> bool:
        """Whether a call, attribute or item begins with a name or an operation of the check."""
        while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Call):
                if self._takes_code_function(node):
                    return False
                node = node.func
            else:
                node = node.value
        if isinstance(node, ast.Name):
            return node.id in self._check_names
        return isinstance(node, (ast.Constant, *_OPERATIONS, *_DISPLAYS))

    def _takes_code_function(self, call: ast.Call) -> bool:
        """Whether an argument, as of ``map``, is a function of the code, or a lambda with one."""
        if _name(call.func) not in _OF_FUNCTIONS:
            return False
        for argument in _arguments(call):
            if isinstance(argument, ast.Name):
                if argument.id not in self._check_names | self._variables:
                    return True
            elif isinstance(argument, ast.Lambda) and self._foreign(argument):
                return True
        return False

    def _loop(self, loop: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> ast.AST:
        """A loop over what the code returns, or over calls of the code that need nothing else."""
        generator = loop.generators[0]
        iterable = generator.iter
        # Without its iterable: is anything else in the loop foreign?
        generator.iter = ast.Constant(None)
        has_foreign_body = self._foreign(loop)
        generator.iter = iterable
        if not has_foreign_body:
            generator.iter = self.visit(iterable)  # type: ignore[assignment]
            return loop
        # Only [f(x) for x in ...] over plain items can be sent: it compares nothing.
        is_call = isinstance(loop.elt, ast.Call) and self._foreign(loop.elt.func)
        has_plain_items = isinstance(generator.target, ast.Name) and not self._foreign(iterable)
        is_simple = len(loop.generators) == 1 and not generator.ifs
        if not (is_call and has_plain_items and is_simple):
            raise self.refused(
                "compares in a loop, so expected and actual values cannot be separated: write an assert "
                "statement for each item"
            )
        return self._value(ast.ListComp(loop.elt, loop.generators))

    def _value(self, node: ast.expr) -> ast.Subscript:
        """Send an expression; returns its value in the check, ``__values__[n]``."""
        if _root(node) in self._imported and not self._is_applied_to_code(node):
            raise self._undecided(node)
        self._send("value", node)
        index = ast.Constant(self._value_count)
        self._value_count += 1
        return ast.Subscript(ast.Name(VALUES, ast.Load()), index, ast.Load())

    def _is_applied_to_code(self, node: ast.expr) -> bool:
        """Whether a library's functions get what the code returns, and no constant.

        A constant may be an expected value, which the code's process must not see.
        """
        pending: list[ast.AST] = [node]
        is_applied = False
        while pending:
            part = pending.pop()
            if isinstance(part, ast.Constant):
                return False
            is_read = isinstance(getattr(part, "ctx", None), ast.Load)
            is_value = isinstance(part, ast.Call) or (isinstance(part, ast.Name) and is_read)
            is_library = _root(part) in self._imported | self._check_names
            if is_value and not is_library and self._foreign(part):
                is_applied = True
                continue  # arguments of the code's functions may be constants
            pending += ast.iter_child_nodes(part)
        return is_applied

    def _send(self, kind: str, node: ast.AST) -> None:
        """Add a step for the code's process, which must not compare."""
        bound = _bound(node)
        for child in ast.walk(node):
            if isinstance(child, ast.Compare) and self._foreign(child, bound):
                raise self._undecided(child)
        self.needed |= _names(node) & self._constants
        self._steps.append((kind, ast.unparse(node)))

    def _foreign(self, node: ast.AST, bound: Collection[str] = ()) -> bool:
        """Whether the check cannot evaluate a name in it.

        Args:
            bound: names that expressions around the node bind.
        """
        names = _names(node) - self._check_names
        # Most nodes have no such name: the second look at the tree is for the others.
        return bool(names) and bool(names - _bound(node) - set(bound))

    def _undecided(self, node: ast.AST) -> UserError:
        return self.refused(
            f"leaves it to the code's process to decide {_shown(ast.unparse(node))}, and the code can change that: "
            "write an assert statement that compares what a call returns with plain data"
        )

    def refused(self, why: str) -> UserError:
        return UserError(f"reward function code_tests: the test {_shown(self._test)} {why}")


class _Strict(ast.NodeTransformer):
    """Comparisons of the check as calls of ``sandbox_program.equal`` and ``contains``.

    These do not take a truth value for a number, as Python does.
    """

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        left = self.visit(node.left)
        comparisons = []
        for operation, comparator in zip(node.ops, node.comparators, strict=True):
            right = self.visit(comparator)
            comparisons.append(self._comparison(left, operation, right))
            left = right
        if len(comparisons) == 1:
            return comparisons[0]
        return ast.BoolOp(ast.And(), comparisons)  # a < b < c is a < b and b < c

    @staticmethod
    def _comparison(left: ast.expr, operation: ast.cmpop, right: ast.expr) -> ast.expr:
        if isinstance(operation, ast.Eq | ast.NotEq):
            function = EQUAL
        elif isinstance(operation, ast.In | ast.NotIn):
            function = CONTAINS
        else:
            return ast.Compare(left, [operation], [right])
        call = ast.Call(ast.Name(function, ast.Load()), [left, right], [])
        if isinstance(operation, ast.NotEq | ast.NotIn):
            return ast.UnaryOp(ast.Not(), call)
        return call


def _arguments(call: ast.Call) -> list[ast.expr]:
    """The values of all arguments, positional and by keyword."""
    return call.args + [keyword.value for keyword in call.keywords]


def _comparisons(test: ast.expr) -> Iterator[ast.Compare]:
    """The comparisons of a test, except in functions and loops.

    Variables of these have no value outside.
    """
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


def _imported_names(statement: ast.Import | ast.ImportFrom) -> set[str]:
    """The names that an import binds."""
    return {(alias.asname or alias.name).partition(".")[0] for alias in statement.names}


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _all_names(statements: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for statement in statements:
        names |= _names(statement)
    return names


def _bound(node: ast.AST) -> set[str]:
    """Names that are assigned in it, as loop variables are, and parameters of its lambdas."""
    bound = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            bound.add(child.id)
        elif isinstance(child, ast.arg):
            bound.add(child.arg)
    return bound


def _name(function: ast.expr) -> str:
    """The name of a function or method; "" for any other expression."""
    match function:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
    return ""


def _shown(text: str) -> str:
    if len(text) <= 80:
        return repr(text)
    return f"{text[:77]!r}..."
