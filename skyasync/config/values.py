"""From written text to typed values, strictly.

Invariant: the key's type decides how a text is read. ``run_name=001`` is the string "001",
``lr=1e-6`` a float, ``seed=1.5`` an error. Texts of the command line and of YAML files both arrive
here as YAML nodes.
"""

from __future__ import annotations

import contextlib
import enum
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import yaml

#: What a YAML text can hold.
Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"

_INT = re.compile(r"[-+]?\d+(_\d+)*")
_FLOAT = re.compile(r"[-+]?((\d+(_\d+)*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULL = {"null", "Null", "NULL", "~", ""}
MOST_NODES = 100_000  # values of a YAML text, whose aliases may stand for exponentially many
_LONGEST_NUMBER = 4000  # characters: Python reads integers of up to 4,300 digits
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class WrongTypeError(Exception):
    """The message says what was expected and what was found."""


def compose(text: str) -> yaml.Node | None:
    """A YAML text as nodes, None for an empty one.

    Raises:
        yaml.YAMLError: if it is not valid, or nested too deeply to be read.
        yaml.constructor.ConstructorError: for nodes that are no ``Value``.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="it is nested too deeply") from None
    if root is not None:
        check_nodes(root)
    return root


def check_nodes(root: yaml.Node) -> None:
    """Check that nodes can be read as a ``Value``.

    Raises:
        yaml.constructor.ConstructorError: for a key that is a list or a mapping, for a node that
            contains itself, and for more than ``MOST_NODES`` nodes where each alias is replaced by
            what it stands for.
    """
    _count_nodes(root, set(), {})


def _count_nodes(node: yaml.Node, above: set[yaml.Node], counts: dict[yaml.Node, int]) -> int:
    """How many nodes there are at and below a node, once for each path that leads to it."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if node in counts:
        return counts[node]
    if node in above:
        raise yaml.constructor.ConstructorError(
            problem="an anchor contains itself", problem_mark=node.start_mark
        )
    children = node.value
    if isinstance(node, yaml.MappingNode):
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                problem = "a key is a list or a mapping, and must be a text"
                raise yaml.constructor.ConstructorError(
                    problem=problem, problem_mark=name.start_mark
                )
        children = [value for _, value in node.value]
    count = 1
    above.add(node)
    for child in children:
        count += _count_nodes(child, above, counts)
        if count > MOST_NODES:
            problem = f"its aliases stand for too much: at most {MOST_NODES:,} values are read"
            raise yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)
    above.discard(node)
    counts[node] = count
    return count


def parse(text: str) -> yaml.Node:
    """A command line value as a YAML node: quoted, ``[list]``, ``{mapping}``, or plain text taken
    as it is.

    Raises:
        yaml.YAMLError: for brackets or quotes that do not close.
    """
    text = text.strip()
    if text[:1] in tuple("\"'[{"):
        node = compose(text)
        assert node is not None
        return node
    return yaml.ScalarNode("", text, style=None)


def from_python(value: object) -> yaml.Node:
    """A Python value (of the kinds that YAML knows) as the node it would be written as."""
    node = yaml.compose(yaml.safe_dump(value), Loader=yaml.SafeLoader)
    assert node is not None
    return node


def escape(text: str) -> str:
    """Text that OmegaConf, which takes ``${`` for the start of a reference, reads as ``text``."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


def convert(node: yaml.Node, expected: Any) -> object:  # noqa: ANN401  (an annotation)
    """The node's value as ``expected``, an annotation: a primitive, ``X | None``, list, dict,
    Literal, Enum, Any.

    A string where a list of strings is expected becomes a list of one.

    Raises:
        WrongTypeError: if it is something else.
    """
    text = node.value if isinstance(node, yaml.ScalarNode) else None
    if text is not None and "${" in text:  # ${other.key}, which OmegaConf resolves later
        return text
    plain = text is not None and node.style is None
    origin = typing.get_origin(expected) or expected
    arguments = typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        # str takes anything, so it comes last
        for arm in sorted(arguments, key=lambda arm: arm is str):
            with contextlib.suppress(WrongTypeError):
                return convert(node, arm)
    elif origin is typing.Literal:
        for option in arguments:
            with contextlib.suppress(WrongTypeError):
                if convert(node, type(option)) == option:
                    return option
    elif origin in (list, tuple):
        element = arguments[0] if arguments else Any
        if isinstance(node, yaml.SequenceNode):
            return [convert(item, element) for item in node.value]
        if element is str and text is not None and not (plain and text in _NULL):
            return [text]
    elif origin is dict:
        if isinstance(node, yaml.MappingNode):
            # of str, a name that looks like a number is a name
            names, element = arguments or (
                Any,
                Any,
            )
            return {
                n.value if names is str else free(n): convert(value, element)
                for n, value in node.value
            }
    elif isinstance(expected, type) and issubclass(expected, enum.Enum):
        if text is not None and text in expected.__members__:
            return expected[text]
    elif expected not in (str, int, float, bool, type(None)):
        return free(node)
    elif expected is str and text is not None and not (plain and text in _NULL - {"~"}):
        return text
    elif text is not None and plain and len(text) <= _LONGEST_NUMBER:
        if expected is int and _INT.fullmatch(text):
            return int(text)
        if expected is float and _FLOAT.fullmatch(text):
            return float(text)
        if expected is float and text.lstrip("+-").lower() in ("inf", ".inf", "nan", ".nan"):
            return float(text.replace(".", ""))
        if expected is bool and text in _BOOL:
            return _BOOL[text]
        if expected is type(None) and text in _NULL:
            return None
    raise WrongTypeError(f"expected {type_name(expected)}, found {_described(node)}")


def free(node: yaml.Node) -> Value:
    """The value that the text itself suggests, for keys of any type."""
    if isinstance(node, yaml.SequenceNode):
        return [free(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return typing.cast(
            dict[str, Value], {free(name): free(value) for name, value in node.value}
        )
    text = node.value
    if node.style is not None or len(text) > _LONGEST_NUMBER:
        return text
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) or _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))
    return text


def value_of(text: str) -> Value:
    """The value that a text stands for if its key may have any type.

    Raises:
        yaml.YAMLError: for brackets or quotes that do not close.
    """
    return free(parse(text))


def value_or_text(text: str) -> Value:
    """As ``value_of``; a text that is none is taken as it is."""
    try:
        return value_of(text)
    except yaml.YAMLError:
        return text


def written(value: object) -> str:
    """A value in the command line's spelling."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(written, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {written(entry)}" for name, entry in value.items()) + "}"
    if value != "":
        return str(value)
    return "''"


def dotted(
    group: Mapping[str, Any], enter: Callable[[str, Mapping[str, Any]], bool], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Dotted keys and their values. A mapping is entered if ``enter(path, mapping)`` says so; else
    it is a value."""
    for name, value in group.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and enter(path, value):
            yield from dotted(value, enter, f"{path}.")
        else:
            yield path, value


def type_name(expected: object) -> str:
    """An annotation in words: "int", "list of str", "float or null"."""
    origin = typing.get_origin(expected)
    arguments = typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(arm) for arm in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if (origin or expected) in (list, tuple):
        if arguments:
            return f"list of {type_name(arguments[0])}"
        return "list"
    if (origin or expected) is dict:
        return "mapping"
    if expected is type(None):
        return "null"
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        return "one of " + ", ".join(expected.__members__)
    if expected is bool:
        return "bool (true or false)"
    if isinstance(expected, type):
        return expected.__name__
    return str(expected).rpartition(".")[2]


def _described(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if len(node.value) > _LONGEST_NUMBER:
        return f"a text of {len(node.value)} characters"
    value = free(node)
    if value is None:
        return "null"
    if isinstance(value, str):
        return f"the string {node.value!r}"
    return f"the {type(value).__name__} {node.value}"
