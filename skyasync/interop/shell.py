"""A shell script as the words of its commands.

Invariant: nothing is run, and the work is bounded (``limits.py``). Variables and arrays that the
script sets take effect, of the environment only ``ENVIRONMENT``; ``$(command)`` and names without a
value stay as they are written. A condition that compares known values is evaluated; the branches of
any other condition set only variables that have no value yet.
"""

from __future__ import annotations

import itertools
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
#: The text in braces: the length sign, a name, an index, an operator and its word.
_PARAMETER = re.compile(
    rf"(#?)({_NAME}|\d+|[@*])(?:\[([^\]]*)\])?(?:(:?[-=+?]|##?|%%?|//?|,,|\^\^|:)(.*))?", re.DOTALL
)
#: ``<path>`` in documentation, which a shell would parse as two redirections.
_PLACEHOLDER = re.compile(r"(?<!<)<([A-Za-z][\w./-]*)>")
_PARSER = Parser(Language(tree_sitter_bash.language()))
_EXPANSIONS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion")
_LOOPS = ("for_statement", "while_statement", "c_style_for_statement")
_CLAUSES = ("elif_clause", "else_clause")
_SHELLS = ("bash", "sh", "zsh")
_OPERATORS = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "**": operator.pow,
}
_LARGEST_NUMBER = 2**63  # a shell computes in 64 bits
_MOST_NESTED = 8  # functions and scripts that call each other
_COMPARISONS = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}

#: Whether a condition holds or a branch runs; None if that is not known.
Known = bool | None


@dataclass
class Script:
    """The result of reading a script.

    Args:
        commands: the words of each command.
        variables: the values after the script's end.
        branches: a condition was not evaluated.
    """

    commands: list[list[str]] = field(default_factory=list)
    variables: dict[str, str | list[str]] = field(default_factory=dict)
    branches: bool = False


def read(
    text: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Script:
    """The commands and variables of a script.

    Args:
        environment: variables that the script may read; by default ``ENVIRONMENT`` of this process.
        folder: the folder of scripts that it starts or sources; they are read as well.

    Raises:
        UserError: if the script expands to too much.
    """
    if environment is None:
        environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    reader = _Reader(Script(variables={**environment}), folder)
    reader.run(_parse(text), True)
    # Functions that are never called by name may be called in a way that was not understood.
    while reader.functions:
        name = next(iter(reader.functions))
        reader.run(reader.functions.pop(name), True)
    return reader.script


def _parse(text: str) -> Node:
    """The syntax tree; placeholders are marked with characters for private use."""
    joined = re.sub(r"\\[ \t]*\n", " ", text.replace("\r\n", "\n"))
    marked = _PLACEHOLDER.sub("\ue000\\1\ue001", joined)
    return _PARSER.parse(marked.encode()).root_node


def _text(source: Node | bytes) -> str:
    """The source text, with its placeholders."""
    encoded = source if isinstance(source, bytes) else source.text or b""
    return encoded.decode().replace("\ue000", "<").replace("\ue001", ">")


def _statements(node: Node) -> list[Node]:
    """The children of a node without its comments."""
    return [child for child in node.named_children if child.type != "comment"]


def _and(left: Known, right: Known) -> Known:
    if False in (left, right):
        return False
    if None in (left, right):
        return None
    return True


def _or(left: Known, right: Known) -> Known:
    return _not(_and(_not(left), _not(right)))


def _not(condition: Known) -> Known:
    if condition is None:
        return None
    return not condition


@dataclass
class _Reader:
    """Reads statements in their order.

    Args:
        functions: those that were defined and not called.
        arguments: the positional parameters ``$1``, ``$2``, ...
        sources: the scripts that are being read, the innermost last.
        alternative: this branch or an earlier one of its condition runs, it is not known which.
    """

    script: Script
    folder: Path | None
    functions: dict[str, Node] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    depth: int = 0
    sources: list[Path] = field(default_factory=list)
    alternative: bool = False
    budget: Budget = field(default_factory=lambda: Budget("the script"))

    # Statements: ``runs`` is whether the branch around them is taken. The result is whether they
    # succeed.

    def run(self, node: Node, runs: Known) -> Known:
        kind = node.type
        children = _statements(node)
        if runs is False:
            return None
        self.budget.spend(STATEMENT)
        if kind == "function_definition":
            self.functions[_text(children[0])] = children[-1]
        elif kind == "list":
            return self._list(node, runs)
        elif kind == "if_statement":
            self._if(node, runs)
        elif kind == "case_statement":
            self._case(node, runs)
        elif kind in _LOOPS:
            # A loop counts once, with the first value of its variable.
            name = node.child_by_field_name("variable")
            value = node.child_by_field_name("value")
            if name is not None and value is not None:
                self.script.variables.setdefault(_text(name), self.joined(value))
            self.run(children[-1], None)
        elif kind in ("test_command", "negated_command"):
            return self.holds(node)
        elif kind == "variable_assignment":
            self._assign(node, runs)
        elif kind in ("declaration_command", "variable_assignments"):
            for assignment in children:
                self._assign(assignment, runs)
        elif kind == "command":
            return self._command(node, runs)
        elif kind == "redirected_statement":
            return self.run(children[0], runs)
        else:  # a sequence, a pipeline, or a statement that was not understood
            for child in children:
                self.run(child, runs)
        return None

    def _list(self, node: Node, runs: Known) -> Known:
        """``left && right`` or ``left || right``."""
        commands = _statements(node)
        is_and = _text(node.children[1]) == "&&"
        left = self.run(commands[0], runs)
        # If it is not known whether the left one succeeds, the right one counts.
        condition = left if is_and else _not(left)
        right = self.run(commands[1], _and(runs, condition))
        if is_and:
            return _and(left, right)
        return _or(left, right)

    def _if(self, node: Node, runs: Known) -> None:
        clauses = [child for child in node.children if child.type in _CLAUSES]
        taken: Known = False  # an earlier branch was taken
        for branch in (node, *clauses):
            children = branch.children
            begin = 0  # of the statements
            for position, child in enumerate(children):
                if child.type in ("then", "else"):
                    begin = position
                    break
            condition = [child for child in children[:begin] if child.is_named]
            holds: Known = True  # else has no condition
            if condition:
                holds = self.holds(condition[0]) if len(condition) == 1 else None
            active = _and(_not(taken), holds)
            outer_alternative = self.alternative
            self.alternative = outer_alternative or (active is None and taken is None)
            taken = _or(taken, active)
            for child in children[begin:]:
                if child.is_named and child.type not in _CLAUSES:
                    self.run(child, _and(runs, active))
            self.alternative = outer_alternative

    def _case(self, node: Node, runs: Known) -> None:
        [word, *items] = node.named_children
        value = self.joined(word)
        taken = False
        outer_alternative = self.alternative
        has_earlier_branch = False
        for item in items:
            if item.type != "case_item":
                continue
            patterns = item.children_by_field_name("value")
            matches = False
            for pattern in patterns:
                matches = matches or fnmatchcase(value, self.joined(pattern))
            active = None if "$" in value else matches and not taken
            taken = taken or matches
            self.alternative = outer_alternative or (active is None and has_earlier_branch)
            for child in item.named_children[len(patterns) :]:
                self.run(child, _and(runs, active))
                has_earlier_branch = True
        self.alternative = outer_alternative

    def _assign(self, node: Node, runs: Known) -> None:
        """Assign to a variable; any other node is ignored."""
        if node.type != "variable_assignment":
            return
        target = node.named_children[0]
        if target.type != "variable_name":  # an entry of an array, NAME[0]=value
            return
        name = _text(target)
        appends = node.children[1].type == "+="
        variables = self.script.variables
        value = node.child_by_field_name("value")
        if runs is None:
            self.script.branches = True
            # A branch that may not run is not to overwrite a value.
            if variables.get(name) and (self.alternative or not appends):
                return
        current = variables.get(name, "") if appends else ""
        if value is not None and value.type == "array":
            entries = list(current) if isinstance(current, list) else []
            for child in _statements(value):
                entries += self.expanded(child)
            self._set(name, entries)
        else:
            text = self.joined(value) if value else ""
            self._set(name, current + text if isinstance(current, str) else text)

    def _set(self, name: str, value: str | list[str]) -> None:
        self.budget.check_length(_characters(value))
        self.budget.spend(_characters(value))
        self.script.variables[name] = value

    def _command(self, node: Node, runs: Known) -> Known:
        """A call of a function, another script or a command, after its assignments."""
        if runs is None:
            self.script.branches = True
        word_nodes = []
        for child in _statements(node):
            if child.type == "variable_assignment":
                self._assign(child, runs)
            elif not child.type.endswith("_redirect"):
                word_nodes.append(child)
        words = []
        for child in word_nodes:
            words += self.expanded(child)
        if words and words[0] == "test":
            condition = " ".join(map(_text, word_nodes[1:]))
            return self.holds(self._parse(f"[ {condition} ]").named_children[0])
        while words and re.match(rf"env$|{_NAME}=", words[0]):  # env NAME=value command
            words.pop(0)
        # ":" does nothing, and its arguments are read for their assignments, ${NAME:=value}.
        if words and words[0] != ":" and self.depth < _MOST_NESTED:
            self.depth += 1
            if not self._runs_statements(words):
                self.script.commands.append(words)
            self.depth -= 1
        return None

    def _runs_statements(self, words: list[str]) -> bool:
        """Read the statements that a command starts; whether they replace the command.

        They are those of a function, another script, ``eval`` or ``-c``.
        """
        name = words[0]
        arguments = words[1:]
        file: Path | None = None
        inline = _inline_script(words)
        if name in self.functions:
            statements = self.functions.pop(name)
        elif name == "eval":
            statements = self._parse(" ".join(arguments))
            arguments = self.arguments
        elif inline is not None:
            statements = self._parse(inline)
            arguments = self.arguments
        else:
            reads_file = name in _SHELLS or name in ("source", ".")
            if not reads_file or not arguments or not self.folder:
                return False
            _, _, file_name = arguments[0].rpartition("/")
            file = self.folder / file_name
            if file in self.sources:  # it starts itself again
                return False
            text = self._script(file)
            if text is None:
                return False
            statements = self._parse(text)
            arguments = arguments[1:]
        outer_arguments = self.arguments
        count = len(self.script.commands)
        self.arguments = arguments
        if file is not None:
            self.sources.append(file)
        self.run(statements, True)
        if file is not None:
            self.sources.pop()
        self.arguments = outer_arguments
        # If they start no command, the recipe may be in the arguments: the command counts.
        return len(self.script.commands) > count or not arguments

    def _script(self, file: Path) -> str | None:
        """The text of another script; None if there is none of this name, or it is binary."""
        if not file.is_file():
            return None
        with file.open("rb") as binary:
            if b"\0" in binary.read(LARGEST_FILE):
                return None
        return read_limited(file, errors="replace")

    def _parse(self, text: str) -> Node:
        self.budget.spend(len(text))
        return _parse(text)

    # Conditions.

    def holds(self, node: Node, patterns: bool = False) -> Known:
        """Whether a condition holds.

        Args:
            patterns: it is in ``[[``, where the right side of ``==`` is a pattern.
        """
        children = node.named_children
        if node.type == "test_command":
            if len(children) != 1:
                return None
            return self.holds(children[0], node.children[0].type == "[[")
        if node.type == "parenthesized_expression":
            return self.holds(children[-1], patterns)
        if node.type == "negated_command":
            return _not(self.holds(children[-1], patterns))
        if node.type == "command":
            return self._command(node, True) if _text(children[0]) == "test" else None
        sign = ""
        for child in node.children:
            if child not in children or "operator" in child.type:
                sign = _text(child)
                break
        if node.type == "unary_expression":
            return self._unary(sign, children[-1], patterns)
        if node.type not in ("binary_expression", "list"):
            return None
        if sign in ("&&", "||"):
            left_holds = self.holds(children[0], patterns)
            right_holds = self.holds(children[-1], patterns)
            if sign == "&&":
                return _and(left_holds, right_holds)
            return _or(left_holds, right_holds)
        left = self.joined(children[0])
        right = self.joined(children[-1])
        if "$" in left or "$" in right:
            return None
        if sign in ("=", "==", "!="):
            equal = fnmatchcase(left, right) if patterns else left == right
            return equal is (sign != "!=")
        try:
            return bool(_COMPARISONS[sign](int(left), int(right)))
        except (KeyError, ValueError):
            return None  # -nt and the like, or no whole number

    def _unary(self, sign: str, operand: Node, patterns: bool) -> Known:
        """``! condition``, or ``-z`` and ``-n`` of a text; others ask the file system."""
        if sign == "!":
            return _not(self.holds(operand, patterns))
        value = self.joined(operand)
        is_variable = re.fullmatch(rf'"?\$\{{?({_NAME}|\d+)\}}?"?', _text(operand))
        if "$" in value and is_variable:
            value = ""  # a variable without a value is empty
        if sign not in ("-z", "-n") or "$" in value:
            return None
        return (not value) is (sign == "-z")

    # Words.

    def joined(self, node: Node) -> str:
        """A word as one text."""
        return " ".join(self.expanded(node))

    def expanded(self, node: Node) -> list[str]:
        """A word as words: without quotes, with its variables, split where it is not quoted."""
        fields = [""]
        has_quotes = False  # an empty word that is quoted counts
        length = 0
        for value, quoted in self._fragments(node):
            characters = _characters(value)
            self.budget.spend(characters)
            length += characters
            self.budget.check_length(length)
            values = value if isinstance(value, list) else [value]
            # An expansion that was not understood is one word.
            is_unknown = isinstance(value, str) and value.startswith("$")
            if not quoted and not is_unknown:
                words = map(_split, values)
                values = list(itertools.chain.from_iterable(words))
            if values:
                has_quotes = has_quotes or quoted
                fields[-1] += values[0]  # it continues the previous fragment
                fields += values[1:]
        return [word for word in fields if word or has_quotes]

    def _fragments(self, node: Node) -> Iterator[tuple[str | list[str], bool]]:
        """The fragments of a word. Those that are quoted or written out are not to be split."""
        text = _text(node)
        if node.type in ("concatenation", "command_name"):
            for child in node.children:
                yield from self._fragments(child)
        elif node.type == "string":
            # Between the expansions, tree-sitter has no nodes for blanks: the text is cut by bytes.
            source = node.text or b""
            begin = 1
            expansions = [child for child in node.children if child.type in _EXPANSIONS]
            for child in expansions:
                literal = source[begin : child.start_byte - node.start_byte]
                if literal:
                    yield _unescaped(literal), True
                yield self._value(child), True
                begin = child.end_byte - node.start_byte
            literal = source[begin:-1]
            if literal or not expansions:
                yield _unescaped(literal), True
        elif node.type == "raw_string":
            yield text[1:-1], True
        elif node.type in _EXPANSIONS:
            yield self._value(node), False
        else:
            yield re.sub(r"\\(.)", r"\1", text), True

    def _value(self, node: Node) -> str | list[str]:
        """The value of an expansion; its source text if the value is not known."""
        text = _text(node)
        value: str | list[str] | None = None
        if node.type == "arithmetic_expansion":
            if node.named_child_count == 1:
                number = self._number(node.named_children[0])
                value = None if number is None else str(number)
        elif node.type != "command_substitution":
            body = text[2:-1] if text.startswith("${") else text[1:]
            value = self._parameter(body)
        return text if value is None else value

    def _number(self, node: Node) -> int | None:
        """Whole numbers added, subtracted, multiplied and divided; None for anything else."""
        children = node.named_children
        if node.type == "parenthesized_expression":
            return self._number(children[0])
        if node.type == "binary_expression":
            sign = _text(node.children[1])
            if sign in _OPERATORS:
                return _computed(sign, self._number(children[0]), self._number(children[1]))
        if node.type == "unary_expression" and _text(node).startswith("-"):
            operand = self._number(children[-1])
            return None if operand is None else -operand
        value: str | list[str] | None
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
        value = self._variable(name, index)
        if length:
            return None if value is None else str(len(value))
        sign = sign or ""
        # With a colon, an empty value counts as a missing one.
        missing = value is None or (not value and sign.startswith(":"))
        if sign in (":-", "-", ":=", "="):
            if not missing:
                return value
            value = self._word(word)
            if sign.endswith("="):
                self.script.variables[name] = value
            return value
        if sign in (":+", "+"):
            return "" if missing else self._word(word)
        if value is None or sign in ("", ":?", "?"):
            return value
        if isinstance(value, list):
            if sign == ":" and word.isdigit():
                # ${@:2} counts from 1, ${array[@]:2} from 0.
                return value[int(word) - (name == "@") :]
            return value
        return self._changed(value, sign, self._word(word))

    def _variable(self, name: str, index: str | None) -> str | list[str] | None:
        """The value of a variable, a positional parameter, or an entry of an array."""
        if name in "@*":
            return self.arguments
        if name.isdigit():
            position = int(name)
            if 1 <= position <= len(self.arguments):
                return self.arguments[position - 1]
            return None
        value = self.script.variables.get(name)
        if index is None:
            return " ".join(value) if isinstance(value, list) else value
        if value is None:
            return None
        entries = value if isinstance(value, list) else [value]
        if index in ("@", "*"):
            return entries
        if index.isdigit() and int(index) < len(entries):
            return entries[int(index)]
        return None

    def _changed(self, value: str, sign: str, word: str) -> str | None:
        """A value after ``#``, ``%``, ``/``, ``,,`` or ``^^``; None for another operator."""
        if sign in ("#", "##", "%", "%%"):
            self.budget.spend(len(value) ** 2 // 64)  # the pattern is tried at every character
            return _cut(value, sign, word)
        if sign in ("/", "//"):
            old, _, new = word.partition("/")
            if not old:
                return value
            growth = value.count(old) * len(new)
            self.budget.check_length(len(value) + growth)
            return value.replace(old, new, -1 if sign == "//" else 1)
        if sign == ",,":
            return value.lower()
        if sign == "^^":
            return value.upper()
        return None

    def _word(self, word: str) -> str:
        """The word of an operator, expanded as the argument of a command."""
        quoted = word if '"' in word else f'"{word}"'
        commands = self._parse(f": {quoted}").named_children
        if not commands:
            return word
        return " ".join(map(self.joined, commands[0].named_children[1:]))


def _inline_script(words: list[str]) -> str | None:
    """The script of ``bash -c script``, which another program may start; None if there is none."""
    for position, word in enumerate(words[:-2]):
        if word in _SHELLS and re.fullmatch(r"-\w*c", words[position + 1]):
            return words[position + 2]
    return None


def _computed(sign: str, left: int | None, right: int | None) -> int | None:
    """The result of an operator; None if it is not known or would be too large."""
    if left is None or right is None:
        return None
    if sign in "/%" and right == 0:
        return None
    if sign == "**" and not 0 <= right < 65:  # a power of 2 has 64 bits at most
        return None
    result = int(_OPERATORS[sign](left, right))
    return result if abs(result) < _LARGEST_NUMBER else None


def _unescaped(literal: bytes) -> str:
    """Text in double quotes without its backslashes."""
    return re.sub(r'\\(["\\$`])', r"\1", _text(literal))


def _split(value: str) -> list[str]:
    """An unquoted value, split at its blanks; quotes and commands hold together.

    A blank at its begin or end separates it from the fragment next to it: it gives an empty word.
    """
    words = re.findall(r"""(?:"[^"]*"|'[^']*'|\$\((?:[^()]|\([^()]*\))*\)|`[^`]*`|\S)+""", value)
    if value[:1].isspace():
        words.insert(0, "")
    if value[-1:].isspace():
        words.append("")
    return words


def _characters(value: str | list[str]) -> int:
    """The length of a value; an entry of a list counts for one more character."""
    if isinstance(value, str):
        return len(value)
    return sum(map(len, value)) + len(value)


def _cut(value: str, sign: str, word: str) -> str:
    """A value without a beginning (``#``, ``##``) or an end (``%``, ``%%``) that matches.

    A doubled sign cuts the longest one, a single sign the shortest one.
    """
    cuts: Sequence[int] = range(len(value) + 1)
    if sign in ("##", "%"):
        cuts = range(len(value), -1, -1)
    for cut in cuts:
        beginning = value[:cut]
        end = value[cut:]
        if "#" in sign:
            if fnmatchcase(beginning, word):
                return end
        elif fnmatchcase(end, word):
            return beginning
    return value
