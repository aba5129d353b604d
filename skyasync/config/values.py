"""From written text to typed values, strictly.

Invariant: the key's type decides how a text is read (``run_name=001`` is the string "001", ``lr=1e-6`` a
float, ``seed=1.5`` an error), the same for the command line and for YAML files, which both arrive here as
YAML nodes.
"""

from __future__ import annotations

import enum
import re
import types
import typing
from typing import Any, TypeAlias

import yaml

#: What a YAML text can hold.
Value: TypeAlias = "bool | int | float | str | list[Value] | dict[str, Value] | None"

_INT = re.compile(r"[-+]?\d+(_\d+)*")
_FLOAT = re.compile(r"[-+]?((\d+(_\d+)*)(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_NULL = {"null", "Null", "NULL", "~", ""}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


class WrongTypeError(Exception):
    """The message says what was expected and what was found."""


def parse(text: str) -> yaml.Node:
    """A command line value as a YAML node: quoted, ``[list]``, ``{mapping}``, or plain text taken as it is.

    Raises:
        yaml.YAMLError: for brackets or quotes that do not close.
    """
    text = text.strip()
    if text[:1] in tuple("\"'[{"):
        node = yaml.compose(text, Loader=yaml.SafeLoader)
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


def convert(node: yaml.Node, expected: object) -> object:
    """The node's value as ``expected``, an annotation: a primitive, ``X | None``, list, dict, Literal, Enum, Any.

    A string where a list of strings is expected becomes a list of one.

    Raises:
        WrongTypeError: if it is something else.
    """
    if isinstance(node, yaml.ScalarNode) and "${" in node.value:  # ${other.key}, which OmegaConf resolves later
        return node.value
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return _union(node, expected)
    if origin is typing.Literal:
        return _literal(node, expected)
    if (origin or expected) in (list, tuple):
        return _list(node, expected, arguments[0] if arguments else Any)
    if (origin or expected) is dict:
        return _mapping(node, expected, *(arguments or (Any, Any)))
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        return _enum(node, expected)
    return _scalar(node, expected)


def _scalar(node: yaml.Node, expected: object) -> object:
    if expected not in (str, int, float, bool, type(None)):
        return free(node)
    if isinstance(node, yaml.ScalarNode):
        text, plain = node.value, node.style is None
        if expected is str and not (plain and text in _NULL - {"~"}):
            return text
        if plain and expected is int and _INT.fullmatch(text):
            return int(text)
        if plain and expected is float and _FLOAT.fullmatch(text):
            return float(text)
        if plain and expected is float and text.lstrip("+-").lower() in ("inf", ".inf", "nan", ".nan"):
            return float(text.replace(".", ""))
        if plain and expected is bool and text in _BOOL:
            return _BOOL[text]
        if plain and expected is type(None) and text in _NULL:
            return None
    raise _wrong(node, expected)


def _union(node: yaml.Node, expected: object) -> object:
    # str takes anything, so it is asked last.
    for arm in sorted(typing.get_args(expected), key=lambda arm: arm is str):
        try:
            return convert(node, arm)
        except WrongTypeError:
            continue
    raise _wrong(node, expected)


def _literal(node: yaml.Node, expected: object) -> object:
    for option in typing.get_args(expected):
        try:
            if convert(node, type(option)) == option:
                return option
        except WrongTypeError:
            continue
    raise _wrong(node, expected)


def _enum(node: yaml.Node, expected: type[enum.Enum]) -> object:
    if isinstance(node, yaml.ScalarNode) and node.value in expected.__members__:
        return expected[node.value]
    raise _wrong(node, expected)


def _list(node: yaml.Node, expected: object, element: object) -> list[Any]:
    if isinstance(node, yaml.SequenceNode):
        return [convert(item, element) for item in node.value]
    if element is str and isinstance(node, yaml.ScalarNode) and not (node.style is None and node.value in _NULL):
        return [node.value]
    raise _wrong(node, expected)


def _mapping(node: yaml.Node, expected: object, name_type: object, element: object) -> dict[Any, Any]:
    if not isinstance(node, yaml.MappingNode):
        raise _wrong(node, expected)
    as_text = name_type is str  # a name that looks like a number is a name
    return {name.value if as_text else free(name): convert(value, element) for name, value in node.value}


def free(node: yaml.Node) -> Value:
    """The value that the text itself suggests, for keys of any type."""
    if isinstance(node, yaml.SequenceNode):
        return [free(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return typing.cast(dict[str, Value], {free(name): free(value) for name, value in node.value})
    text = node.value
    if node.style is not None:
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
    """What a text says by itself, for keys of any type.

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
    return str(value) if value != "" else "''"


def type_name(expected: object) -> str:
    """An annotation in words: "int", "list of str", "float or null"."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(arm) for arm in arguments)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, arguments))
    if (origin or expected) in (list, tuple):
        return f"list of {type_name(arguments[0])}" if arguments else "list"
    if (origin or expected) is dict:
        return "mapping"
    if expected is type(None):
        return "null"
    if isinstance(expected, type) and issubclass(expected, enum.Enum):
        return "one of " + ", ".join(expected.__members__)
    return "bool (true or false)" if expected is bool else getattr(expected, "__name__", str(expected))


def _wrong(node: yaml.Node, expected: object) -> WrongTypeError:
    return WrongTypeError(f"expected {type_name(expected)}, found {_found(node)}")


def _found(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    value = free(node)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the bool {node.value}"
    kind = {int: "int", float: "float"}.get(type(value), "string")
    return f"the {kind} {node.value}" if kind != "string" else f"the string {node.value!r}"
