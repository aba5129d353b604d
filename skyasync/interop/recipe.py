"""The keys and values of a recipe: a shell script, flags, overrides, YAML or a program.

Invariant: the recipe is read, never run.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from skyasync.config.values import Value, check_nodes, free, value_or_text
from skyasync.errors import UserError
from skyasync.interop import shell
from skyasync.interop.limits import (
    LARGEST_FILE,
    LARGEST_NOTEBOOK,
    MOST_KEYS,
    Budget,
    check_size,
    read_limited,
)
from skyasync.interop.system import systems


@dataclass
class SourceRecipe:
    """A recipe of another framework.

    Args:
        keys: source key -> value.
        command: the program that a script starts, "" if there is none.
        branches: the script has conditions that were not evaluated.
        system: the framework, if a program names it.
        remarks: source key -> changes of its value by a program, which are not carried out here.
    """

    keys: dict[str, Value] = field(default_factory=dict)
    command: str = ""
    branches: bool = False
    system: str = ""
    remarks: dict[str, str] = field(default_factory=dict)

    def with_(self, overrides: SourceRecipe) -> SourceRecipe:
        """Both recipes; for a key of both, that of ``overrides``."""
        return SourceRecipe(
            self.keys | overrides.keys,
            overrides.command or self.command,
            self.branches or overrides.branches,
            overrides.system or self.system,
            self.remarks | overrides.remarks,
        )


def read_recipe(arguments: Sequence[str]) -> SourceRecipe:
    """The recipe of a command line: files first, then flags and overrides, which have precedence.

    Raises:
        UserError: for a file that cannot be read, or if there is nothing to translate.
    """
    recipe = SourceRecipe()
    remaining = list(arguments)
    while remaining:
        word = remaining[0]
        is_override = "=" in word and not Path(word).is_file()
        if is_override or word.startswith("-"):
            break
        remaining.pop(0)
        recipe = recipe.with_(_file(Path(word)))
    command = "" if recipe.command else " ".join(remaining)
    recipe = recipe.with_(SourceRecipe(flags(remaining), command))
    if not recipe.keys and not recipe.system:
        raise UserError("there are no keys to translate: give a script, a YAML file, or flags")
    if len(recipe.keys) > MOST_KEYS:
        raise UserError(
            f"these are {len(recipe.keys):,} keys: at most {MOST_KEYS:,} are translated"
        )
    return recipe


def _file(path: Path) -> SourceRecipe:
    """The recipe of a YAML file, a program, a notebook or (any other suffix) a script."""
    text = read_limited(path, LARGEST_NOTEBOOK if path.suffix == ".ipynb" else LARGEST_FILE)
    if path.suffix in (".yaml", ".yml"):
        return _yaml(text, path)
    if path.suffix not in (".py", ".ipynb"):
        return _script(text, path.parent)
    if path.suffix == ".ipynb":
        text = _notebook_code(text, path)
    [system] = [system for system in systems().values() if "program" in system.adapters]
    program = system.adapter("program")(text, path)
    keys: dict[str, Value] = {}
    if program.example:
        keys = _script(program.example, path.parent).keys
    keys |= program.settings
    name = system.name if program.trainer else ""
    return SourceRecipe(keys, program.trainer, system=name, remarks=program.remarks)


def _notebook_code(text: str, path: Path) -> str:
    """The Python code of a notebook's cells."""
    cells = []
    try:
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "code":
                # Commands of IPython and its shell (%..., !...) are no Python. They may continue on
                # the next line.
                code = re.sub(
                    r"^[ \t]*[%!].*(\\\n.*)*$", "", "".join(cell["source"]), flags=re.MULTILINE
                )
                cells.append(code)
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is no notebook") from None
    return "\n".join(cells)


def _script(text: str, folder: Path) -> SourceRecipe:
    """The command with most keys, and the YAML file that it names."""
    script = shell.read(text, folder=folder)
    recipe = SourceRecipe()
    for words in script.commands:
        keys = _flags_of_command(words)
        if len(keys) > len(recipe.keys) or not recipe.command:
            recipe = SourceRecipe(keys, " ".join(words))
    variables: set[str] = set()
    for system in systems().values():
        variables.update(system.table.variables)
    for name, value in script.variables.items():
        if name in variables and isinstance(value, str):
            recipe.keys[name] = value_or_text(value)
    recipe.branches = script.branches
    file = _pop_config_file(recipe.keys, folder)
    if file:
        return _file(file).with_(recipe)
    return recipe


def _pop_config_file(keys: dict[str, Value], folder: Path) -> Path | None:
    """Take the YAML file out of the keys that name it; None if there is none.

    The keys are ``config``, or Hydra's ``config-path`` and ``config-name``. The file is searched
    next to the script and in the folders above.

    Raises:
        UserError: if there is no such file, and no other key is one of a framework.
    """
    names = [key for key in _CONFIG_KEYS if isinstance(keys.get(key), str)]
    for key in names:
        name = str(keys[key])
        path_key = key.replace("name", "path")
        parent = keys.get(path_key) if "name" in key else None
        if not name.endswith((".yaml", ".yml")):
            name = f"{name}.yaml"
        candidates = [name, name.rpartition("/")[2]]
        if isinstance(parent, str):
            candidates.insert(0, f"{parent}/{name}")
        for candidate in candidates:
            # A path often begins with the script's folder as a variable, ${DIR}/, or as a command,
            # $(dirname ...)/.
            _, _, relative = candidate.rpartition("}/")
            _, _, relative = relative.rpartition(")/")
            relative = relative.lstrip("/")
            if "$" in relative:
                continue
            for base in (folder, *folder.parents):
                if (base / relative).is_file():
                    keys.pop(key)
                    keys.pop(path_key, None)
                    return base / relative
    other_keys = [key for key in keys if key not in names]
    # A command with a key of a framework may have a config of another meaning.
    if names and not _has_table_key(other_keys):
        raise UserError(
            f"{names[0]}={keys[names[0]]} is not next to {folder}: give the YAML file itself"
        )
    return None


def _has_table_key(keys: Sequence[str]) -> bool:
    """Whether any framework has one of the keys."""
    tables = [system.table for system in systems().values()]
    return any(table.find(key) for table in tables for key in keys)


#: Keys that name the YAML file of a command.
_CONFIG_KEYS = ("config", "config_file", "config_name", "config-name")

#: Flags of ``accelerate launch`` and ``torchrun`` on which the batch size depends.
_LAUNCHER = {"num_processes", "num_machines", "nproc_per_node", "nnodes"}


def _flags_of_command(words: list[str]) -> dict[str, Value]:
    """The program's flags, and its launcher's numbers of processes and machines."""
    arguments = _program_arguments(words)
    launcher_words = words[: len(words) - len(arguments)]
    keys = flags(arguments)
    for flag, value in flags(launcher_words).items():
        name = flag.replace("-", "_")
        if name in _LAUNCHER:
            # After the last flag, the program's name is read as a second value.
            keys.setdefault(name, value[0] if isinstance(value, list) else value)
    return keys


def _program_arguments(words: list[str]) -> list[str]:
    """The words after the program: after its module, its file, or a framework's subcommand."""
    commands = {system.command for system in systems().values() if system.command}
    if "--" in words:
        words = words[words.index("--") + 1 :]
    for position, word in enumerate(words):
        if word == "-m" and position + 1 < len(words):
            # python -m torch.distributed.run is a launcher, not the program.
            if not words[position + 1].startswith("torch.distributed"):
                return words[position + 2 :]
        elif word.endswith(".py") and not word.startswith("-"):
            return words[position + 1 :]
        elif word in commands:
            return words[position + 2 :]
    return words


_FLAG = re.compile(r"--?[A-Za-z]|\+{1,2}[\w.]+=|\w+\.[\w.]+=")


def flags(words: Sequence[str]) -> dict[str, Value]:
    """The keys of a command line.

    They are ``--flag value ...``, ``--flag=value``, ``key=value`` and Hydra's ``+key=value``; a
    flag without a value is true.
    """
    keys: dict[str, Value] = {}
    remaining = deque(words)
    while remaining:
        word = remaining.popleft()
        name, equals, text = word.partition("=")
        if not word.startswith("--"):
            if equals and re.fullmatch(r"\+{0,2}[\w.@/-]+", name):
                keys[name.lstrip("+")] = value_or_text(text)
            continue
        values = [text] if equals else _pop_values(remaining)
        value: Value
        if len(values) > 1:
            value = [value_or_text(entry.removesuffix(",")) for entry in values]
        elif values:
            value = value_or_text(values[0])
        else:
            value = True
        keys[name.lstrip("-")] = value
    return keys


def _pop_values(words: deque[str]) -> list[str]:
    """Take the values of a flag from the words after it."""
    values: list[str] = []
    while words and not _FLAG.match(words[0]):
        # After a value, name=text is an override of its own; right after the flag it is its value.
        if values and re.match(r"\w+=", words[0]):
            break
        values.append(words.popleft())
    return values


def _yaml(text: str, path: Path) -> SourceRecipe:
    """The recipe of a YAML file; a launcher's file has the script under ``run``."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error.problem or error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path} holds no keys")
    try:
        check_nodes(root)
    except yaml.MarkedYAMLError as error:
        raise UserError(f"{path}: {error.problem}") from None
    # These values are mappings, not groups of keys.
    mappings: set[str] = set()
    for system in systems().values():
        for row in system.table.rows:
            if row.function == "proportions":
                mappings.update(row.names)
    keys: dict[str, Value] = {}

    def add(node: yaml.MappingNode, prefix: str) -> None:
        for name, value in node.value:
            key = f"{prefix}{name.value}"
            if isinstance(value, yaml.MappingNode) and value.value and key not in mappings:
                add(value, f"{key}.")
            elif not key.endswith("_target_"):  # the class that Hydra makes of a group
                keys[key] = free(value)

    add(root, "")
    script = keys.get("run")
    if isinstance(script, str) and "\n" in script:
        return _script(script, path.parent)
    _expand_groups(keys)
    references = _References(keys)
    return SourceRecipe({key: references.resolved(value) for key, value in keys.items()})


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def _expand_groups(keys: dict[str, Value]) -> None:
    """Replace a key that refers to a group, as ``critic.optimizer: ${actor.optimizer}``.

    It becomes a copy of that group's keys.

    Raises:
        UserError: for references to groups that stand for too many keys.
    """
    for key, value in list(keys.items()):
        match = _REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match[1] in keys:
            continue
        prefix = f"{match[1]}."
        if f"{key}.".startswith(prefix):  # a group that would contain itself
            continue
        members = [name for name in keys if name.startswith(prefix)]
        for name in members:
            keys.setdefault(f"{key}.{name.removeprefix(prefix)}", keys[name])
        if members:
            del keys[key]
        if len(keys) > MOST_KEYS:
            raise UserError(
                f"references to groups stand for too many keys: at most {MOST_KEYS:,} are translated"
            )


class _References:
    """Replaces ``${other.key}`` by its value; a reference to a key outside the file stays."""

    def __init__(self, keys: Mapping[str, Value]) -> None:
        self._keys = keys
        # Keys whose values are being resolved: a reference of a key to itself stays.
        self._open: list[str] = []
        self._budget = Budget("the file")

    def resolved(self, value: Value) -> Value:
        """The value with its references replaced.

        Raises:
            UserError: if values refer to others so often that they become too large.
        """
        if isinstance(value, list):
            return [self.resolved(entry) for entry in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        match = _REFERENCE.fullmatch(value)
        if match:
            return self._value(match[1], value)
        length = 0
        texts = []
        for position, text in enumerate(_REFERENCE.split(value)):
            if position % 2:  # split() alternates between texts and the key of a reference
                text = str(self._value(text, f"${{{text}}}"))
            length += len(text)
            self._budget.check_length(length)
            texts.append(text)
        return "".join(texts)

    def _value(self, key: str, reference: str) -> Value:
        if key not in self._keys or key in self._open:
            return reference
        self._open.append(key)
        value = self.resolved(self._keys[key])
        self._open.pop()
        check_size(value, self._budget)
        return value


def detect(recipe: SourceRecipe) -> str:
    """The framework that a program names, or whose table has most of the keys.

    Of two with as many keys, the one that has more of them by exact names.

    Raises:
        UserError: if no framework has any of the keys, or two have equally many.
    """
    if recipe.system:
        return recipe.system
    scores = {}
    for name, system in systems().items():
        matching = [key for key in recipe.keys if system.table.find(key)]
        exact = [key for key in matching if key in system.table.exact]
        scores[name] = (len(matching), len(exact))
    best = max(scores.values())
    if not best[0]:
        titles = [system.title for system in systems().values()]
        raise UserError(f"these are no keys of {', '.join(titles)}: name the system with --from")
    names = [name for name, score in scores.items() if score == best]
    if len(names) > 1:
        titles = [systems()[name].title for name in names]
        raise UserError(
            f"these keys are of {' and of '.join(titles)}: add --from {'|'.join(names)}"
        )
    return names[0]
