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
    """``keys``: theirs -> value. ``command`` is the program that a script starts, "" if there is
    none.

    ``branches``: the script has conditions that were not evaluated. ``system``: whose it is, if a
    program names it. ``remarks``: key -> what a program does to its value that is not carried out
    here.
    """

    keys: dict[str, Value] = field(default_factory=dict)
    command: str = ""
    branches: bool = False
    system: str = ""
    remarks: dict[str, str] = field(default_factory=dict)

    def with_(self, other: SourceRecipe) -> SourceRecipe:
        """Both, the other's keys over these."""
        keys = self.keys | other.keys
        command = other.command or self.command
        branches = self.branches or other.branches
        return SourceRecipe(
            keys, command, branches, other.system or self.system, self.remarks | other.remarks
        )


def read_recipe(arguments: Sequence[str]) -> SourceRecipe:
    """The recipe that the arguments are, or name: files first, then flags and overrides, which win.

    Raises:
        UserError: for a file that cannot be read, or if there is nothing to translate.
    """
    recipe = SourceRecipe()
    rest = list(arguments)
    while rest and not rest[0].startswith("-") and (Path(rest[0]).is_file() or "=" not in rest[0]):
        recipe = recipe.with_(_file(Path(rest.pop(0))))
    recipe = recipe.with_(SourceRecipe(flags(rest), "" if recipe.command else " ".join(rest)))
    if not recipe.keys and not recipe.system:
        raise UserError("there are no keys to translate: give a script, a YAML file, or flags")
    if len(recipe.keys) > MOST_KEYS:
        raise UserError(
            f"these are {len(recipe.keys):,} keys: at most {MOST_KEYS:,} are translated"
        )
    return recipe


def _file(path: Path) -> SourceRecipe:
    text = read_limited(path, LARGEST_NOTEBOOK if path.suffix == ".ipynb" else LARGEST_FILE)
    if path.suffix in (".yaml", ".yml"):
        return _yaml(text, path)
    if path.suffix not in (".py", ".ipynb"):
        return _script(text, path.parent)
    if path.suffix == ".ipynb":
        try:
            cells = [
                "".join(cell["source"])
                for cell in json.loads(text)["cells"]
                if cell["cell_type"] == "code"
            ]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path} is no notebook") from None
        # without the commands of its shell
        text = "\n".join(
            re.sub(r"^[ \t]*[%!].*(\\\n.*)*$", "", cell, flags=re.MULTILINE) for cell in cells
        )
    [system] = [system for system in systems().values() if "program" in system.adapters]
    program = system.adapter("program")(text, path)
    if program.example:
        example = _script(program.example, path.parent).keys
    else:
        example = {}
    name = system.name if program.trainer else ""
    return SourceRecipe(
        example | program.settings, program.trainer, system=name, remarks=program.remarks
    )


def _script(text: str, folder: Path) -> SourceRecipe:
    """The command with most keys; a YAML file that it names is read with it."""
    script = shell.read(text, folder=folder)
    recipes = [SourceRecipe(_flags_of_command(words), " ".join(words)) for words in script.commands]
    best = max(recipes, key=lambda recipe: len(recipe.keys), default=SourceRecipe())
    known = {name for system in systems().values() for name in system.table.variables}
    best.keys |= {
        n: value_or_text(v)
        for n, v in script.variables.items()
        if n in known and isinstance(v, str)
    }
    best.branches = script.branches
    file = _config(best.keys, folder)
    if file:
        return _file(file).with_(best)
    return best


def _config(keys: dict[str, Value], folder: Path) -> Path | None:
    """Takes out of the keys the YAML file that they name: ``config``, or Hydra's ``config-path``
    and ``config-name``.

    The file is searched as it is written, next to the script and in the folders above.
    """
    names = [
        key
        for key in ("config", "config_file", "config_name", "config-name")
        if isinstance(keys.get(key), str)
    ]
    for key in names:
        name = str(keys[key])
        path_key = key.replace("name", "path")
        parent = keys.get(path_key) if "name" in key else None
        if name.endswith((".yaml", ".yml")):
            name = name
        else:
            name = f"{name}.yaml"
        # What a shell would fill in is most often the script's own folder.
        for written in (
            f"{parent}/{name}" if isinstance(parent, str) else name,
            name,
            name.rpartition("/")[2],
        ):
            relative = written.rpartition("}/")[2].rpartition(")/")[2].lstrip("/")
            for base in (folder, *folder.parents):
                if "$" not in relative and (base / relative).is_file():
                    keys.pop(key)
                    keys.pop(path_key, None)
                    return base / relative
    others = [key for key in keys if key not in names]
    if names and not any(system.table.find(key) for system in systems().values() for key in others):
        raise UserError(
            f"{names[0]}={keys[names[0]]} is not next to {folder}: give the YAML file itself"
        )
    return None


#: Flags of ``accelerate launch`` and ``torchrun`` that a batch depends on.
_LAUNCHER = {"num_processes", "num_machines", "nproc_per_node", "nnodes"}


def _flags_of_command(words: list[str]) -> dict[str, Value]:
    """The program's flags, and its launcher's numbers of processes and machines."""
    arguments = _program_arguments(words)
    keys = flags(arguments)
    for written, value in flags(words[: len(words) - len(arguments)]).items():
        name = written.replace("-", "_")
        if name in _LAUNCHER:  # a program's name may follow its value
            keys.setdefault(name, value[0] if isinstance(value, list) else value)
    return keys


def _program_arguments(words: list[str]) -> list[str]:
    """What follows the program that is started: its module, its file, or a system's command and
    subcommand."""
    commands = {system.command for system in systems().values()} - {""}
    if "--" in words:
        words = words[words.index("--") + 1 :]
    for at, word in enumerate(words):
        if (
            word == "-m"
            and at + 1 < len(words)
            and not words[at + 1].startswith("torch.distributed")
        ):
            return words[at + 2 :]
        if word.endswith(".py") and not word.startswith("-"):
            return words[at + 1 :]
        if word in commands:
            return words[at + 2 :]
    return words


_FLAG = re.compile(r"--?[A-Za-z]|\+{1,2}[\w.]+=|\w+\.[\w.]+=")


def flags(words: Sequence[str]) -> dict[str, Value]:
    """``--flag value ...``, ``--flag=value``, ``key=value`` and Hydra's ``+key=value``; a bare flag
    is true."""
    keys: dict[str, Value] = {}
    rest = deque(words)
    while rest:
        word = rest.popleft()
        name, equals, text = word.partition("=")
        if word.startswith("--"):
            values = [text] if equals else []
            while (
                not equals
                and rest
                and not _FLAG.match(rest[0])
                and not (values and re.match(r"\w+=", rest[0]))
            ):
                values.append(rest.popleft())
            if len(values) > 1:
                keys[name.lstrip("-")] = [
                    value_or_text(value.removesuffix(",")) for value in values
                ]
            else:
                if values:
                    keys[name.lstrip("-")] = value_or_text(values[0])
                else:
                    keys[name.lstrip("-")] = True
        elif equals and re.fullmatch(r"\+{0,2}[\w.@/-]+", name):
            keys[name.lstrip("+")] = value_or_text(text)
    return keys


def _yaml(text: str, path: Path) -> SourceRecipe:
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
    rows = [row for system in systems().values() for row in system.table.rows]
    mappings = {name for row in rows if row.function == "proportions" for name in row.names}
    keys: dict[str, Value] = {}

    def add(node: yaml.MappingNode, prefix: str) -> None:
        for name, value in node.value:
            key = f"{prefix}{name.value}"
            if isinstance(value, yaml.MappingNode) and value.value and key not in mappings:
                add(value, f"{key}.")
            elif not key.endswith("_target_"):
                keys[key] = free(value)

    add(root, "")
    if (
        isinstance(job := keys.get("run"), str) and "\n" in job
    ):  # a launcher's, with the script in it
        return _script(job, path.parent)
    _expand_groups(keys)
    references = _References(keys)
    return SourceRecipe({key: references.resolved(value) for key, value in keys.items()})


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def _expand_groups(keys: dict[str, Value]) -> None:
    """Give a key that refers to a group, as ``critic.optimizer: ${actor.optimizer}``, that group's
    keys.

    Raises:
        UserError: for references to groups that stand for too many keys.
    """
    for key, value in list(keys.items()):
        if isinstance(value, str):
            match = _REFERENCE.fullmatch(value)
        else:
            match = None
        prefix = f"{match[1]}." if match else ""
        if not match or match[1] in keys or f"{key}.".startswith(prefix):
            continue
        members = {
            name.removeprefix(prefix): entry
            for name, entry in keys.items()
            if name.startswith(prefix)
        }
        for name, entry in members.items():
            keys.setdefault(f"{key}.{name}", entry)
        if members:
            del keys[key]
        if len(keys) > MOST_KEYS:
            raise UserError(
                f"references to groups stand for too many keys: at most {MOST_KEYS:,} are translated"
            )


class _References:
    """``${other.key}`` replaced by its value; a key that is not in the file stays as it is
    written."""

    def __init__(self, keys: Mapping[str, Value]) -> None:
        self._keys = keys
        self._open: list[
            str
        ] = []  # keys whose values are being resolved: one that names itself stays
        self._budget = Budget("the file")

    def resolved(self, value: Value) -> Value:
        """Raises UserError if values refer to others so often that they become too large."""
        if isinstance(value, list):
            return [self.resolved(entry) for entry in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        match = _REFERENCE.fullmatch(value)
        if match:
            return self._value(match[1], value)
        length = 0
        texts = []
        for at, text in enumerate(_REFERENCE.split(value)):
            if at % 2:
                replaced = str(self._value(text, f"${{{text}}}"))
            else:
                replaced = text
            length += len(replaced)
            self._budget.check_length(length)
            texts.append(replaced)
        return "".join(texts)

    def _value(self, key: str, written: str) -> Value:
        if key not in self._keys or key in self._open:
            return written
        self._open.append(key)
        value = self.resolved(self._keys[key])
        self._open.pop()
        check_size(value, self._budget)
        return value


def detect(recipe: SourceRecipe) -> str:
    """The system that a program names, or whose tables know most keys; of two, the one that names
    more exactly.

    Raises:
        UserError: if no system knows any, or two know as many.
    """
    if recipe.system:
        return recipe.system
    scores = {}
    for name, system in systems().items():
        known = [key for key in recipe.keys if system.table.find(key)]
        scores[name] = (len(known), sum(key in system.table.exact for key in known))
    best = max(scores.values())
    names = [name for name, score in scores.items() if score == best]
    titles = [system.title for system in systems().values() if not best[0] or system.name in names]
    if not best[0]:
        raise UserError(f"these are no keys of {', '.join(titles)}: name the system with --from")
    if names[1:]:
        raise UserError(
            f"these keys are of {' and of '.join(titles)}: add --from {'|'.join(names)}"
        )
    return names[0]
