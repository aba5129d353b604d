"""A shell script as the words of its commands.

Invariant: nothing is run. Variables and arrays that the script sets, and those of the environment, take effect;
``$(command)`` and what is not set stay as they are written. A condition that compares what is known is evaluated;
branches of any other only set what has no value before.
"""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_DEFAULT = re.compile(rf"\$\{{({_NAME}):?=(.*)\}}", re.DOTALL)
#: What stands in braces: the length sign, a name, an index, an operator and its word.
_PARAMETER = re.compile(rf"(#?)({_NAME}|\d+|[@*])(?:\[([^\]]*)\])?(?:(:?[-=+?]|##?|%%?|//?|,,|\^\^|:)(.*))?", re.DOTALL)
_HERE_DOCUMENT = re.compile(r"(?<!<)<<-?\s*(['\"]?)(\w+)\1([^\n]*)\n.*?^\s*\2\s*$", re.DOTALL | re.MULTILINE)
_SEPARATORS = ("&&", "||", ";;")
_LOOPS = ("for", "while", "until", "select")
_PREFIXES = ("export", "declare", "local", "readonly", "env", "typeset")
_SHELLS = ("bash", "sh", "zsh")
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_COMPARISONS = {
    "-eq": operator.eq, "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip

Variables = dict[str, "str | list[str]"]


@dataclass
class Script:
    """``commands``: the words of each. ``branches``: some condition was not evaluated."""

    commands: list[list[str]] = field(default_factory=list)
    variables: Variables = field(default_factory=dict)
    branches: bool = False


def commands(text: str, environment: Mapping[str, str] | None = None) -> list[list[str]]:
    """The words of each command, assignments left out, in the script's order."""
    return read(text, environment).commands


def read(text: str, environment: Mapping[str, str] | None = None, folder: Path | None = None) -> Script:
    """The whole script; scripts that it starts or sources are read with it where they stand in ``folder``."""
    script = Script(variables={**(os.environ if environment is None else environment), "@": []})
    reader = _Reader(script, folder)
    reader.run(list(_statements(text)))
    while reader.functions:  # never called by name
        reader.run(reader.functions.pop(next(iter(reader.functions))))
    return script


@dataclass
class _Frame:
    """An ``if``, ``case`` or loop: ``active`` is whether its current branch runs, None if that is not known.

    ``pending`` is what the test before a ``then`` says, ``taken`` whether an earlier branch ran; of a case, ``word``
    is what its patterns are compared with ("$" if it is not known), ``pattern`` whether one comes next.
    """

    word: str = ""
    pattern: bool = False
    active: bool | None = None
    pending: bool | None = None
    taken: bool | None = False


@dataclass
class _Reader:
    script: Script
    folder: Path | None
    functions: dict[str, list[list[str]]] = field(default_factory=dict)
    frames: list[_Frame] = field(default_factory=list)
    depth: int = 0

    @property
    def variables(self) -> Variables:
        return self.script.variables

    def run(self, statements: list[list[str]]) -> None:
        """All statements, in order; the bodies of functions where they are called."""
        rest = list(statements)
        chained: bool | None = True
        while rest:
            statement = rest.pop(0)
            if name := _function(statement):
                body, rest = _body(statement, rest)
                self.functions[name] = body
                continue
            if statement[0] in ("&&", "||", "|"):
                chained = self._chained(statement[0])
                continue
            if not self._control(statement) and chained is not False:
                self._one(statement, chained)
            chained = True

    #: What the test before said, and whether the pattern before fitted.
    _result: bool | None = None
    _matched: bool | None = None

    def _chained(self, sign: str) -> bool | None:
        """Whether what follows ``&&``, ``||`` or ``|`` runs."""
        frame = self.frames[-1] if self.frames else _Frame()
        if sign == "|":
            frame.pattern = frame.word != "" and self._matched is False
            return not self._matched
        frame.pending = None  # one test of several
        return None if self._result is None else self._result is (sign == "&&")

    def _control(self, statement: list[str]) -> bool:
        """Carry out what begins, divides or ends a branch; whether nothing is left to run."""
        first, frame = statement[0], self.frames[-1] if self.frames else None
        self._matched = None
        if first == "if":
            self.frames.append(_Frame(active=True, pending=_holds(statement[1:], self.variables)))
        elif first == "case":
            words = [word for raw in statement[1:-1] for word in _expanded(raw, self.variables)]
            known = len(words) == 1 and "$" not in words[0]
            self.frames.append(_Frame(word=words[0] if known else "$", pattern=True))
        elif first in _LOOPS:
            self.frames.append(_Frame())
            if first == "for" and len(statement) > 3 and statement[2] == "in":
                self.variables.setdefault(statement[1], _joined(statement[3], self.variables))
        elif first in ("fi", "esac", "done") and frame:
            self.frames.pop()
        elif first == "elif" and frame:
            frame.active, frame.pending = True, _holds(statement[1:], self.variables)
        elif first in ("then", "else") and frame:
            holds = frame.pending if first == "then" else True
            frame.active = False if frame.taken is True else holds if frame.taken is False else None
            frame.taken = True if frame.active or frame.taken is True else None if frame.active is None else False
            self._rest(statement)
        elif first == "do" and frame:
            self._rest(statement)
        elif first == ";;" and frame:
            frame.active, frame.pattern = False, True
        elif frame and frame.pattern:
            frame.pattern = False
            self._matched = fnmatchcase(frame.word, _joined(statement[-1], self.variables))
            frame.active = None if frame.word == "$" else self._matched and not frame.taken
            frame.taken = frame.taken or self._matched
        else:
            return False
        return True

    def _rest(self, statement: list[str]) -> None:
        if statement[1:]:
            self.run([statement[1:]])

    def _one(self, statement: list[str], chained: bool | None) -> None:
        """An assignment, a call of a function, another script, or a command."""
        states = [frame.active for frame in self.frames] + [chained]
        if False in states:
            return
        self._result = _holds(statement, self.variables)
        if statement[0] in ("[", "[[", "test", "{", "}"):
            return
        self.script.branches |= None in [frame.active for frame in self.frames]
        raw = _assign(statement, self.variables, tentative=None in states)
        words = [word for part in raw for word in _expanded(part, self.variables)]
        if words and self.depth < 8:
            self.depth += 1
            if not self._other(words):
                self.script.commands.append(words)
            self.depth -= 1

    def _other(self, words: list[str]) -> bool:
        """Whether it starts statements that are read in its place: a function, another script, ``eval``, ``-c``."""
        name, arguments = words[0], words[1:]
        if name in self.functions:
            return self._with(arguments, self.functions.pop(name))
        if name == "eval":
            return self._with(self._arguments(), list(_statements(" ".join(arguments))))
        for at, word in enumerate(words[:-1]):
            if word in _SHELLS and words[at + 1].startswith("-") and words[at + 1].endswith("c") and words[at + 2 :]:
                return self._with(self._arguments(), list(_statements(words[at + 2])))
        if name in (*_SHELLS, "source", ".") and arguments and self.folder:
            file = self.folder / arguments[0].rpartition("/")[2]
            if file.is_file() and "\0" not in (text := file.read_text(encoding="utf-8", errors="replace")):
                return self._with(arguments[1:], list(_statements(text)))
        return False

    def _arguments(self) -> list[str]:
        found = self.variables.get("@", [])
        return found if isinstance(found, list) else [found]

    def _with(self, arguments: list[str], statements: list[list[str]]) -> bool:
        before, frames, count = self._arguments(), self.frames, len(self.script.commands)
        self.variables["@"], self.frames = arguments, []
        self.run(statements)
        self.variables["@"], self.frames = before, frames
        return len(self.script.commands) > count or not arguments


def _function(statement: list[str]) -> str:
    """The name of the function that a statement begins to define."""
    if statement[0] == "function" and len(statement) > 1:
        return statement[1].removesuffix("()")
    return statement[0].removesuffix("()") if re.fullmatch(r"[\w-]+\(\)", statement[0]) else ""


def _body(statement: list[str], rest: list[list[str]]) -> tuple[list[list[str]], list[list[str]]]:
    """The statements of a function, and those after it."""
    head = statement[statement.index("{") + 1 :] if "{" in statement else []
    body, depth = [head] if head else [], int("{" in statement)
    for at, entry in enumerate(rest):
        depth += entry.count("{") - entry.count("}")
        if depth <= 0 and "}" in entry:
            return body, rest[at + 1 :]
        if entry != ["{"]:
            body.append(entry)
    return body, []


def _holds(words: Sequence[str], variables: Variables) -> bool | None:
    """Whether a test holds; None if it is no test, or needs what is not known."""
    if words[:1] == ["!"]:
        found = _holds(words[1:], variables)
        return None if found is None else not found
    if not words or words[0] not in ("[", "[[", "test"):
        return None
    body = list(words[1:] if words[0] == "test" else words[1:-1])
    if body[:1] == ["!"]:
        found = _holds(["test", *body[1:]], variables)
        return None if found is None else not found
    bare = body[-1].strip('"') if body else ""
    if len(body) == 2 and body[0] in ("-z", "-n"):
        value = "" if re.fullmatch(rf"\$\{{?({_NAME}|\d+)\}}?", bare) and "$" in _joined(bare, variables) else None
        value = _joined(bare, variables) if value is None else value
        return None if "$" in value else (not value) is (body[0] == "-z")
    values = [_joined(raw, variables) for raw in body]
    if any("$" in value for value in values) or len(values) != 3:
        return None
    left, sign, right = values
    if sign in ("=", "==", "!="):
        same = fnmatchcase(left, right) if words[0] == "[[" else left == right
        return same is (sign != "!=")
    try:
        return bool(_COMPARISONS[sign](int(left), int(right)))
    except (KeyError, ValueError):
        return None


def _assign(statement: list[str], variables: Variables, tentative: bool) -> list[str]:
    """Carry out the assignments that a statement begins with; returns its other words."""
    words = list(statement)
    while words and (words[0] in _PREFIXES or (words is not statement and re.fullmatch(r"-[aAgirx]+", words[0]))):
        words.pop(0)
    if len(words) == 2 and words[0] == ":" and (match := _DEFAULT.fullmatch(words[1].strip('"'))):
        variables.setdefault(match[1], _joined(match[2], variables))
        return []
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        name, plus, value = match.groups()
        words.pop(0)
        if tentative and variables.get(name) and not plus:
            continue
        if value.startswith("(") and value.endswith(")"):
            entries = [word for raw in _words(value[1:-1]) for word in _expanded(raw, variables)]
            before = variables.get(name, [])
            variables[name] = [*before, *entries] if plus and isinstance(before, list) else entries
        else:
            before = variables.get(name, "") if plus else ""
            variables[name] = (before if isinstance(before, str) else "") + _joined(value, variables)
    return words


def _statements(text: str) -> Iterator[list[str]]:
    """Raw words, quotes still on, statement by statement; ``&&``, ``||``, ``|`` and ``;;`` are statements."""
    text = _HERE_DOCUMENT.sub(r"\3\n", text.replace("\r\n", "\n"))
    yield from _split(re.sub(r"\\[ \t]*\n", " ", text), ends="\n;|&")


def _words(text: str) -> list[str]:
    return [word for words in _split(text, ends="") for word in words]


def _split(text: str, ends: str) -> Iterator[list[str]]:
    """Words, statement by statement: quotes and brackets hold together, comments go."""
    words: list[str] = []
    word, quote, depth, at = "", "", 0, 0
    while at < len(text):
        char, before = text[at], text[at - 1 : at]
        if char == "\\" and quote != "'":
            word += text[at : at + 2]
            at += 2
            continue
        if char == "#" and not quote and (not word if not depth else word[-1:] in " \n\t("):
            end = text.find("\n", at)
            at = len(text) if end < 0 else end
            continue
        plain = not quote and not depth
        # Of a subshell, of a case's pattern; not of an array, a substitution or a function's name.
        stray = plain and ends and (char == ")" or (char == "(" and not word))
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif (char == "(" and not stray) or (char == "{" and (before == "$" or depth)):
            depth += 1
        elif char in ")}":
            depth = max(depth - 1, 0)
        ending = plain and (stray or (char in ends and not (char == "&" and ">" in text[at - 1 : at + 2])))
        if (not quote and not depth and char.isspace()) or ending:
            words, word = [*words, *([word] if word else [])], ""
            if ending:
                if words:
                    yield words
                words = []
                if text[at : at + 2] in _SEPARATORS:
                    yield [text[at : at + 2]]
                    at += 1
                elif char == "|":
                    yield ["|"]
        else:
            word += char
        at += 1
    if word or words:
        yield [*words, *([word] if word else [])]


def _joined(raw: str, variables: Variables) -> str:
    """A raw word as one text."""
    return " ".join(_expanded(raw, variables))


def _expanded(raw: str, variables: Variables) -> list[str]:
    """A raw word as words: quotes off, variables put in, split where they are not quoted."""
    fields, at, quoted = [""], 0, False
    solid = False  # an empty word that is quoted counts
    while at < len(raw):
        char = raw[at]
        if char == '"':
            quoted, solid, at = not quoted, True, at + 1
        elif char == "'" and not quoted:
            end = raw.find("'", at + 1)
            end = len(raw) if end < 0 else end
            fields[-1] += raw[at + 1 : end]
            solid, at = True, end + 1
        elif char == "\\" and at + 1 < len(raw):
            escaped = not quoted or raw[at + 1] in '"\\$`'
            fields[-1] += raw[at + 1] if escaped else raw[at : at + 2]
            at += 2
        elif char == "$":
            value, at = _dollar(raw, at, variables)
            if isinstance(value, list):
                solid = solid and raw.strip('"') != raw[:at].strip('"')  # "$@" of nothing is nothing
                parts = value if quoted else [part for entry in value for part in _words(entry)]
            else:
                parts = [value] if quoted or value.startswith("$") else _parts(value)
            fields[-1] += parts[0] if parts else ""
            fields += parts[1:]
        else:
            fields[-1] += char
            at += 1
    return [word for word in fields if word or solid]


def _parts(value: str) -> list[str]:
    """An unquoted value, split at its blanks; those in front and behind part words as well."""
    if not value or not value.strip():
        return ["", ""] if value else []
    return [*([""] if value[0].isspace() else []), *_words(value), *([""] if value[-1].isspace() else [])]


def _dollar(text: str, at: int, variables: Variables) -> tuple[str | list[str], int]:
    """What a ``$`` at ``at`` stands for, and where the text goes on; as it is written if that is not known."""
    opening = text[at + 1 : at + 2]
    if opening in ("(", "{") and opening:
        end = _closing(text, at + 1)
        body, whole = text[at + 2 : end - 1], text[at:end]
        if opening == "(":
            is_sum = body.startswith("(") and body.endswith(")")
            return (_arithmetic(body[1:-1], variables) if is_sum else "") or whole, end
        found = _parameter(body, variables)
        return whole if found is None else found, end
    match = re.compile(rf"{_NAME}|[\d@*#]").match(text, at + 1)
    if not match:
        return "$", at + 1
    found = _parameter(match[0], variables)
    return text[at : match.end()] if found is None else found, match.end()


def _closing(text: str, at: int) -> int:
    """Behind the bracket that closes the one at ``at``."""
    opening, depth = text[at], 0
    closing = {"(": ")", "{": "}"}[opening]
    for place in range(at, len(text)):
        depth += (text[place] == opening) - (text[place] == closing)
        if not depth:
            return place + 1
    return len(text)


def _parameter(body: str, variables: Variables) -> str | list[str] | None:
    """``name``, ``name:-word`` and the like; None if there is no value."""
    match = _PARAMETER.fullmatch(body)
    if body == "#":
        return str(len(variables.get("@", [])))
    if not match:
        return None
    length, name, index, sign, word = match.groups()
    value = _value(name, index, variables)
    if length:
        return None if value is None else str(len(value))
    empty = not value and (sign or "").startswith(":")
    kind = (sign or "")[-1:]
    if sign and kind in "-=" and sign not in ("##", "%%"):
        if value is not None and not empty:
            return value
        return _joined(f'"{word}"' if '"' not in word else word, variables)
    if sign and kind == "+":
        return "" if value is None or empty else _joined(word, variables)
    if value is None or not sign or kind == "?":
        return value
    if isinstance(value, list):
        return value[int(word.partition(":")[0]) - (name == "@") :] if sign == ":" and word.isdigit() else value
    return _changed(value, sign, _joined(word, variables))


def _value(name: str, index: str | None, variables: Variables) -> str | list[str] | None:
    if name in "@*":
        return variables.get("@", [])
    if name.isdigit():
        arguments = variables.get("@", [])
        return arguments[int(name) - 1] if 0 < int(name) <= len(arguments) else None
    value = variables.get(name)
    if index is None or value is None:
        return " ".join(value) if isinstance(value, list) and index is None else value
    entries = value if isinstance(value, list) else [value]
    if index in ("@", "*"):
        return entries
    return entries[int(index)] if index.isdigit() and int(index) < len(entries) else None


def _changed(value: str, sign: str, word: str) -> str | None:
    """A value without the part that a pattern names, with one text for another, or in other letters."""
    if sign in ("#", "##", "%", "%%"):
        cuts = range(len(value) + 1) if sign in ("#", "%%") else range(len(value), -1, -1)
        for cut in cuts:
            part, rest = (value[:cut], value[cut:]) if "#" in sign else (value[cut:], value[:cut])
            if fnmatchcase(part, word):
                return rest
        return value
    if sign in ("/", "//"):
        old, _, new = word.partition("/")
        return value.replace(old, new, -1 if sign == "//" else 1)
    return {",,": value.lower(), "^^": value.upper()}.get(sign)


def _arithmetic(text: str, variables: Variables) -> str:
    """Whole numbers added, taken away, multiplied and divided; "" for anything else."""
    put = _joined(re.sub(r"\s+", "", text), variables)
    names = re.sub(_NAME, lambda match: str(variables.get(match[0], match[0])), put)
    try:
        return str(_evaluate(ast.parse(names.replace("/", "//").strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return ""


def _evaluate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Pow) and not 0 <= right <= 64:
            raise ValueError(node)
        result: int = _OPERATORS[type(node.op)](left, right)
        return result
    raise ValueError(node)
