"""A shell script as the words of its commands.

Invariant: nothing is run. Variables and arrays that the script sets, and those of the environment, take effect;
``$(command)`` and what is not set stay as they are written. Conditions are not evaluated: their branches only set
what has no value before.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Iterator, Mapping

_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_DEFAULT = re.compile(rf"\$\{{({_NAME}):?=(.*)\}}", re.DOTALL)
_ARRAY = re.compile(rf"\$\{{({_NAME})\[[@*]\]\}}")
#: What is quoted, a variable with all that its braces hold, or plain text.
_PARTS = re.compile(
    r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\$\{(?:[^{}]|\$\{[^{}]*\})*\}|(?:\\.|\$(?!\{)|[^'\"\\$])+|.", re.DOTALL
)
_SUM = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_OPENING, _CLOSING = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
_LEADING = ("then", "else", "elif", "do")
_PREFIXES = ("export", "declare", "local", "readonly")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


def commands(text: str, environment: Mapping[str, str] | None = None) -> list[list[str]]:
    """The words of each command, assignments left out, in the script's order."""
    variables: dict[str, str | list[str]] = dict(os.environ if environment is None else environment)
    found, nested = [], 0
    for statement in _statements(text):
        if statement[0] in _OPENING:
            nested += 1
            continue
        if statement[0] in _CLOSING:
            nested = max(nested - 1, 0)
            continue
        words = _assign(statement[statement[0] in _LEADING :], variables, tentative=nested > 0)
        if words:
            found.append([word for raw in words for word in _expanded(raw, variables)])
    return found


def _assign(statement: list[str], variables: dict[str, str | list[str]], tentative: bool) -> list[str]:
    """Carry out the assignments that a statement begins with; returns its other words."""
    words = statement[1:] if statement[:1] and statement[0] in _PREFIXES else list(statement)
    if len(words) == 2 and words[0] == ":" and (match := _DEFAULT.fullmatch(words[1].strip('"'))):
        variables.setdefault(match[1], " ".join(_expanded(match[2], variables)))
        return []
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        name, plus, value = match.groups()
        words.pop(0)
        if tentative and variables.get(name):
            continue
        if value.startswith("(") and value.endswith(")"):
            entries = [word for raw in _words(value[1:-1]) for word in _expanded(raw, variables)]
            before = variables.get(name, [])
            variables[name] = [*before, *entries] if plus and isinstance(before, list) else entries
        else:
            variables[name] = " ".join(_expanded(value, variables))
    return words


def _statements(text: str) -> Iterator[list[str]]:
    """Raw words, quotes still on, statement by statement."""
    text = text.replace("\\\n", " ")
    for words in _split(text, ends="\n;|&"):
        if words:
            yield words


def _words(text: str) -> list[str]:
    return [word for words in _split(text, ends="") for word in words]


def _split(text: str, ends: str) -> Iterator[list[str]]:
    """Words, statement by statement: quotes and brackets hold together, comments go."""
    words: list[str] = []
    word, quote, depth, at = "", "", 0, 0
    while at < len(text):
        char = text[at]
        if char == "\\" and quote != "'":
            word += text[at : at + 2]
            at += 2
            continue
        if char == "#" and not quote and (not word if not depth else word[-1:] in " \n("):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        stray = char == ")" and not depth and not quote  # of a case's pattern
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "({":
            depth += 1
        elif char in ")}":
            depth = max(depth - 1, 0)
        if not quote and not depth and (char.isspace() or char in ends or stray):
            words, word = [*words, *([word] if word else [])], ""
            if char in ends or stray:
                yield words
                words = []
        else:
            word += char
        at += 1
    yield [*words, *([word] if word else [])]


def _expanded(raw: str, variables: Mapping[str, str | list[str]]) -> list[str]:
    """A raw word as words: an array's entries, nothing for ``$@``, or the word with its variables put in."""
    bare = raw.strip('"')
    if bare in ("$@", "$*", "${@}", "${@:1}", "${@:2}"):
        return []
    if match := _ARRAY.fullmatch(bare):
        value = variables.get(match[1], [])
        return list(value) if isinstance(value, list) else [value]
    return [_unquoted(raw, variables)]


def _unquoted(raw: str, variables: Mapping[str, str | list[str]]) -> str:
    """Quotes off, variables put in wherever single quotes do not forbid it."""
    parts = _PARTS.findall(raw)
    result = ""
    for part in parts:
        if len(part) > 1 and part[0] == part[-1] == "'":
            result += part[1:-1]
        elif len(part) > 1 and part[0] == part[-1] == '"':
            result += re.sub(r"\\([\"\\$`])", r"\1", _put_in(part[1:-1], variables))
        else:
            result += re.sub(r"\\(.)", r"\1", _put_in(part, variables))
    return result


def _put_in(text: str, variables: Mapping[str, str | list[str]]) -> str:
    def value(match: re.Match[str]) -> str:
        name, fallback = match[1] or match[4], match[3]
        found = variables.get(name)
        if found is None or (not found and match[2]):  # ${a:-b} is b where a is empty, ${a-b} is not
            return _put_in(fallback.strip('"'), variables) if fallback is not None else match[0]
        return " ".join(found) if isinstance(found, list) else found

    text = re.sub(rf"\$\{{({_NAME})(?:(:?)-((?:[^{{}}]|\$\{{[^{{}}]*\}})*))?\}}|\$({_NAME})", value, text)
    return re.sub(
        r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)", lambda match: _arithmetic(match[1], variables) or match[0], text
    )


def _arithmetic(text: str, variables: Mapping[str, str | list[str]]) -> str:
    """Whole numbers added, taken away, multiplied and divided; "" for anything else."""
    names = re.sub(rf"\$?({_NAME})", lambda match: str(variables.get(match[1], match[1])), text)
    try:
        return str(_evaluate(ast.parse(names.replace("/", "//").strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return ""


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result: int = _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
        return result
    raise ValueError(node)
