"""A shell script as the words of its commands.

Invariant: nothing is run, and the work is bounded (``limits.py``). Variables and arrays that the
script sets take effect, of the environment only ``ENVIRONMENT``; ``$(command)`` and names without a
value stay as they are written. A condition that compares known values is evaluated; the branches of
any other condition set only variables that have no value yet.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from skyasync.interop.limits import LARGEST_FILE, STATEMENT, Budget, read_limited

#: The variables that a script may read from the environment. Others may be secrets, and would be printed.
ENVIRONMENT = ("HOME", "PWD", "USER", "LOGNAME")
_NAME = r"[A-Za-z_]\w*"
#: What stands in braces: the length sign, a name, an index, an operator and its word.
_PARAMETER = re.compile(
    rf"(#?)({_NAME}|\d+|[@*])(?:\[([^\]]*)\])?(?:(:?[-=+?]|##?|%%?|//?|,,|\^\^|:)(.*))?", re.DOTALL
)
_PLACEHOLDER = re.compile(
    r"(?<!<)<([A-Za-z][\w./-]*)>"
)  # which a shell would take for two redirections
_PARSER = Parser(Language(tree_sitter_bash.language()))
_EXPANSIONS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion")
_LOOPS = ("for_statement", "while_statement", "c_style_for_statement")
_SHELLS = ("bash", "sh", "zsh")
_OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_LARGEST_NUMBER = 2**63  # as of a shell's
_COMPARISONS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}

Known = bool | None
"""Whether a condition holds or a branch runs; None if that is not known."""


@dataclass
class Script:
    """``commands``: the words of each. ``branches``: some condition was not evaluated."""

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    branches: bool = False


def read(
    text: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Script:
    """The whole script; scripts that it starts or sources are read with it if they are in
    ``folder``.

    Args:
        environment: variables that the script may read; by default ``ENVIRONMENT`` of this process.

    Raises:
        UserError: if the script expands to too much.
    """
    if environment is None:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    reader = _Reader(Script(variables={**environment}), folder)
    reader.run(_parse(text), True)
    while reader.functions:  # never called by name
        reader.run(reader.functions.pop(next(iter(reader.functions))), True)
    return reader.script


def _parse(text: str) -> Node:
    joined = re.sub(r"\\[ \t]*\n", " ", text.replace("\r\n", "\n"))
    return _PARSER.parse(_PLACEHOLDER.sub("\ue000\\1\ue001", joined).encode()).root_node


def _text(source: Node | bytes) -> str:
    if isinstance(source, bytes):
        encoded = source
    else:
        encoded = source.text or b""
    return encoded.decode().replace("\ue000", "<").replace("\ue001", ">")


def _parts(node: Node) -> list[Node]:
    return [child for child in node.named_children if child.type != "comment"]


def _and(left: Known, right: Known) -> Known:
    if False in (left, right):
        return False
    if None in (left, right):
        return None
    return True


def _not(known: Known) -> Known:
    if known is None:
        return None
    return not known


@dataclass
class _Reader:
    script: Script
    folder: Path | None
    functions: dict[str, Node] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    depth: int = 0
    sources: list[Path] = field(
        default_factory=list
    )  # the scripts that are being read, the innermost last
    alternative: bool = (
        False  # it is not known whether this branch runs or an earlier one of its condition
    )
    budget: Budget = field(default_factory=lambda: Budget("the script"))

    # Statements: ``runs`` is whether the branch that they stand in is taken. Each returns whether
    # it succeeds.

    def run(self, node: Node, runs: Known) -> Known:
        kind = node.type
        children = _parts(node)
        if runs is False:
            return None
        self.budget.spend(STATEMENT)
        if kind == "function_definition":
            self.functions[_text(children[0])] = children[-1]
        elif kind == "list":
            sign = _text(node.children[1])
            left = self.run(children[0], runs)
            # Where it is not known whether the first succeeds, the second is no branch of the
            # script's: it counts.
            right = self.run(children[1], _and(runs, left if sign == "&&" else _not(left)))
            if sign == "&&":
                return _and(left, right)
            return _not(_and(_not(left), _not(right)))
        elif kind == "if_statement":
            self._if(node, runs)
        elif kind == "case_statement":
            self._case(node, runs)
        elif kind in _LOOPS:
            name = node.child_by_field_name("variable")
            if name is not None and (value := node.child_by_field_name("value")) is not None:
                self.script.variables.setdefault(_text(name), self.joined(value))
            self.run(children[-1], None)
        elif kind in ("test_command", "negated_command"):
            return self.holds(node)
        elif kind in ("variable_assignment", "declaration_command", "variable_assignments"):
            for assignment in [node] if kind == "variable_assignment" else children:
                self._assign(assignment, runs)
        elif kind == "command":
            return self._command(node, runs)
        elif kind == "redirected_statement":
            return self.run(children[0], runs)
        else:  # a sequence, a pipeline, or what was not understood
            for child in children:
                self.run(child, runs)
        return None

    def _if(self, node: Node, runs: Known) -> None:
        taken: Known = False
        for branch in [
            node,
            *(child for child in node.children if child.type in ("elif_clause", "else_clause")),
        ]:
            parts = branch.children
            then = next((at for at, child in enumerate(parts) if child.type in ("then", "else")), 0)
            condition = [child for child in parts[:then] if child.is_named]
            if len(condition) == 1:
                known = self.holds(condition[-1])
            elif condition:
                known = None
            else:
                known = True
            active = _and(_not(taken), known)
            before = self.alternative
            self.alternative = before or (active is None and taken is None)
            taken = _not(_and(_not(taken), _not(active)))
            for child in parts[then:]:
                if child.is_named and child.type not in ("elif_clause", "else_clause"):
                    self.run(child, _and(runs, active))
            self.alternative = before

    def _case(self, node: Node, runs: Known) -> None:
        [word, *items] = node.named_children
        value = self.joined(word)
        taken = False
        outer = self.alternative
        first = True
        for item in items:
            if item.type != "case_item":
                continue
            patterns = item.children_by_field_name("value")
            matched = any(fnmatchcase(value, self.joined(pattern)) for pattern in patterns)
            active = None if "$" in value else matched and not taken
            taken = taken or matched
            self.alternative = outer or (active is None and not first)
            for child in item.named_children[len(patterns) :]:
                self.run(child, _and(runs, active))
                first = False
        self.alternative = outer

    def _assign(self, node: Node, runs: Known) -> None:
        if node.type != "variable_assignment" or node.named_children[0].type != "variable_name":
            return
        name = _text(node.named_children[0])
        plus = node.children[1].type == "+="
        variables = self.script.variables
        value = node.child_by_field_name("value")
        if runs is None:
            self.script.branches = True
            if variables.get(name) and (self.alternative or not plus):
                return
        before = variables.get(name, "") if plus else ""
        if value is not None and value.type == "array":
            entries = list(before) if isinstance(before, list) else []
            for child in _parts(value):
                entries += self.expanded(child)
            self._set(name, entries)
        else:
            text = self.joined(value) if value else ""
            self._set(name, before + text if isinstance(before, str) else text)

    def _set(self, name: str, value: str | list[str]) -> None:
        self.budget.check_length(_characters(value))
        self.budget.spend(_characters(value))
        self.script.variables[name] = value

    def _command(self, node: Node, runs: Known) -> Known:
        """A call of a function, another script, or a command, and the assignments in front of
        it."""
        self.script.branches |= runs is None
        children = [child for child in _parts(node) if not child.type.endswith("_redirect")]
        for child in children:
            self._assign(child, runs)
        raw = [child for child in children if child.type != "variable_assignment"]
        words = [word for child in raw for word in self.expanded(child)]
        if words[:1] == ["test"]:
            return self.holds(self._parse(f"[ {' '.join(map(_text, raw[1:]))} ]").named_children[0])
        while words and re.match(rf"env$|{_NAME}=", words[0]):
            words.pop(0)
        if words and words[0] != ":" and self.depth < 8:
            self.depth += 1
            if not self._runs_statements(words):
                self.script.commands.append(words)
            self.depth -= 1
        return None

    def _runs_statements(self, words: list[str]) -> bool:
        """Whether it starts statements that are read in its place: a function, another script,
        ``eval``, ``-c``."""
        name = words[0]
        arguments = words[1:]
        file: Path | None = None
        if name in self.functions:
            statements = self.functions.pop(name)
        elif name == "eval":
            statements = self._parse(" ".join(arguments))
            arguments = self.arguments
        elif inline := [
            words[at + 2]
            for at, word in enumerate(words[:-2])
            if word in _SHELLS and re.fullmatch(r"-\w*c", words[at + 1])
        ]:
            statements = self._parse(inline[0])
            arguments = self.arguments
        else:
            if name not in (*_SHELLS, "source", ".") or not arguments or not self.folder:
                return False
            file = self.folder / arguments[0].rpartition("/")[2]
            if file in self.sources:  # it starts itself again
                return False
            text = self._script(file)
            if text is None:
                return False
            statements = self._parse(text)
            arguments = arguments[1:]
        before = self.arguments
        count = len(self.script.commands)
        self.arguments = arguments
        if file is not None:
            self.sources.append(file)
        self.run(statements, True)
        if file is not None:
            self.sources.pop()
        self.arguments = before
        return len(self.script.commands) > count or not arguments

    def _script(self, file: Path) -> str | None:
        """The text of another script; None if there is none of this name, or it is a binary
        file."""
        if not file.is_file():
            return None
        with file.open("rb") as opened:
            if b"\0" in opened.read(LARGEST_FILE):
                return None
        return read_limited(file, errors="replace")

    def _parse(self, text: str) -> Node:
        self.budget.spend(len(text))
        return _parse(text)

    # Conditions.

    def holds(self, node: Node, patterns: bool = False) -> Known:
        """Whether a condition holds. ``patterns``: it stands in ``[[``, where the right side of
        ``==`` is one."""
        parts = node.named_children
        if node.type == "test_command":
            if len(parts) == 1:
                return self.holds(parts[0], node.children[0].type == "[[")
            return None
        if node.type in ("parenthesized_expression", "negated_command"):
            known = self.holds(parts[-1], patterns)
            if node.type == "negated_command":
                return _not(known)
            return known
        if node.type == "command":
            if _text(parts[0]) == "test":
                return self._command(node, True)
            return None
        sign = next(
            (
                _text(child)
                for child in node.children
                if child not in parts or "operator" in child.type
            ),
            "",
        )
        if node.type == "unary_expression":
            if sign == "!":
                return _not(self.holds(parts[-1], patterns))
            value = self.joined(parts[-1])
            if "$" in value and re.fullmatch(rf'"?\$\{{?({_NAME}|\d+)\}}?"?', _text(parts[-1])):
                value = ""  # a variable that has no value is empty
            if sign not in ("-z", "-n") or "$" in value:
                return None
            return (not value) is (sign == "-z")
        if node.type not in ("binary_expression", "list"):
            return None
        left = parts[0]
        right = parts[-1]
        if sign in ("&&", "||"):
            first = self.holds(left, patterns)
            second = self.holds(right, patterns)
            if sign == "&&":
                return _and(first, second)
            return _not(_and(_not(first), _not(second)))
        one = self.joined(left)
        other = self.joined(right)
        if "$" in one + other:
            return None
        if sign in ("=", "==", "!="):
            return (fnmatchcase(one, other) if patterns else one == other) is (sign != "!=")
        try:
            return bool(_COMPARISONS[sign](int(one), int(other)))
        except (KeyError, ValueError):
            return None

    # Words.

    def joined(self, node: Node) -> str:
        """A word as one text."""
        return " ".join(self.expanded(node))

    def expanded(self, node: Node) -> list[str]:
        """A word as words: quotes off, variables put in, split where they are not quoted."""
        # an empty word that is quoted counts
        fields = [""]
        solid = False
        length = 0
        for value, quoted in self._fragments(node):
            characters = _characters(value)
            self.budget.spend(characters)
            length += characters
            self.budget.check_length(length)
            if isinstance(value, list):
                if quoted:
                    parts = value
                else:
                    parts = [part for entry in value for part in _split(entry)]
            else:
                if quoted or value.startswith("$"):
                    parts = [value]
                else:
                    parts = _split(value)
            solid = solid or (quoted and bool(parts))
            fields[-1] += parts[0] if parts else ""
            fields += parts[1:]
        return [word for word in fields if word or solid]

    def _fragments(self, node: Node) -> Iterator[tuple[str | list[str], bool]]:
        """The fragments of a word, and whether each is quoted or written out, so that it is not
        split."""
        text = _text(node)
        if node.type in ("concatenation", "command_name"):
            for child in node.children:
                yield from self._fragments(child)
        elif node.type == "string":
            source = node.text or b""
            begin = 1
            expansions = [child for child in node.children if child.type in _EXPANSIONS]
            for child in expansions:
                before = source[begin : child.start_byte - node.start_byte]
                if before:
                    yield re.sub(r'\\(["\\$`])', r"\1", _text(before)), True
                yield self._value(child), True
                begin = child.end_byte - node.start_byte
            if source[begin:-1] or not expansions:
                yield re.sub(r'\\(["\\$`])', r"\1", _text(source[begin:-1])), True
        elif node.type == "raw_string":
            yield text[1:-1], True
        elif node.type in _EXPANSIONS:
            yield self._value(node), False
        else:
            yield re.sub(r"\\(.)", r"\1", text), True

    def _value(self, node: Node) -> str | list[str]:
        """The value that a ``$`` stands for; the text itself if it is not known."""
        text = _text(node)
        if node.type == "command_substitution":
            return text
        if node.type == "arithmetic_expansion":
            if node.named_child_count == 1:
                number = self._number(node.named_children[0])
            else:
                number = None
            if number is None:
                return text
            return str(number)
        value = self._parameter(text[2:-1] if text.startswith("${") else text[1:])
        if value is None:
            return text
        return value

    def _number(self, node: Node) -> int | None:
        """Whole numbers added, subtracted, multiplied and divided; None for anything else."""
        parts = node.named_children
        if node.type == "parenthesized_expression":
            return self._number(parts[0])
        if node.type == "binary_expression" and _text(node.children[1]) in _OPERATORS:
            left = self._number(parts[0])
            sign = _text(node.children[1])
            right = self._number(parts[1])
            if (
                left is None
                or right is None
                or (sign in "/%" and not right)
                or (sign == "**" and not 0 <= right < 65)
            ):
                return None
            result = int(_OPERATORS[sign](left, right))
            if abs(result) < _LARGEST_NUMBER:
                return result
            return None
        if node.type == "unary_expression" and _text(node).startswith("-"):
            negated = self._number(parts[-1])
            if negated is None:
                return None
            return -negated
        if node.type == "variable_name":
            value = self.script.variables.get(_text(node))
        else:
            value = self.joined(node)
        if isinstance(value, str) and re.fullmatch(r"-?\d{1,18}", value):
            return int(value)
        return None

    def _parameter(self, body: str) -> str | list[str] | None:
        """``name``, ``name:-word`` and the like; None if there is no value."""
        if body == "#":
            return str(len(self.arguments))
        match = _PARAMETER.fullmatch(body)
        if not match:
            return None
        length, name, index, sign, word = match.groups()
        sign = sign or ""
        value: str | list[str] | None = self.script.variables.get(name)
        if name in "@*":
            value = self.arguments
        elif name.isdigit():
            value = dict(enumerate(self.arguments, start=1)).get(int(name))
        elif index is None:
            if isinstance(value, list):
                value = " ".join(value)
            else:
                value = value
        elif value is not None:
            entries = value if isinstance(value, list) else [value]
            at = int(index) if index.isdigit() else len(entries)
            if index in ("@", "*"):
                value = entries
            elif at < len(entries):
                value = entries[at]
            else:
                value = None
        if length:
            if value is None:
                return None
            return str(len(value))
        missing = value is None or (not value and sign.startswith(":"))
        if sign in (":-", "-", ":=", "="):
            if not missing:
                return value
            value = self._word(word)
            if sign.endswith("="):
                self.script.variables[name] = value
            return value
        if sign in (":+", "+"):
            if missing:
                return ""
            return self._word(word)
        if value is None or not sign or sign in (":?", "?"):
            return value
        if isinstance(value, list):
            if sign == ":" and word.isdigit():
                return value[int(word.partition(":")[0]) - (name == "@") :]
            return value
        return self._changed(value, sign, self._word(word))

    def _changed(self, value: str, sign: str, word: str) -> str | None:
        """A value without the part that a pattern matches, with one text replaced, or in upper or
        lower case."""
        if sign in ("#", "##", "%", "%%"):
            self.budget.spend(len(value) ** 2 // 64)  # the pattern is tried at every character
            return _cut(value, sign, word)
        if sign in ("/", "//"):
            old, _, new = word.partition("/")
            count = value.count(old) if old else 0
            self.budget.check_length(len(value) + count * len(new))
            if old:
                return value.replace(old, new, -1 if sign == "//" else 1)
            return value
        return {",,": value.lower(), "^^": value.upper()}.get(sign)

    def _word(self, word: str) -> str:
        command = self._parse(f": {word}" if '"' in word else f': "{word}"').named_children
        if command:
            return " ".join(self.joined(child) for child in command[0].named_children[1:])
        return word


def _split(value: str) -> list[str]:
    """An unquoted value, split at its blanks, also those at its ends; quotes and commands hold
    together."""
    words = re.findall(r"""(?:"[^"]*"|'[^']*'|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\S)+""", value)
    return [*([""] if value[:1].isspace() else []), *words, *([""] if value[-1:].isspace() else [])]


def _characters(value: str | list[str]) -> int:
    """How long a value is; an entry of a list counts for one more character."""
    if isinstance(value, str):
        return len(value)
    return sum(map(len, value)) + len(value)


def _cut(value: str, sign: str, word: str) -> str:
    """A value without the shortest or longest beginning (``#``, ``##``) or end (``%``, ``%%``) that
    matches."""
    cuts: Sequence[int] = (
        range(len(value) + 1) if sign in ("#", "%%") else range(len(value), -1, -1)
    )
    for cut in cuts:
        part, rest = (value[:cut], value[cut:]) if "#" in sign else (value[cut:], value[:cut])
        if fnmatchcase(part, word):
            return rest
    return value
