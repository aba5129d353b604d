"""Reading a recipe: a shell script, flags, overrides, YAML or a TRL program, as keys and values.

Invariant: the recipe is read, never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from skyasync.config.peers import SYSTEMS, tables
from skyasync.config.translate import program, shell
from skyasync.config.values import Value, free, value_or_text
from skyasync.errors import UserError, unknown


@dataclass
class Recipe:
    """``keys``: theirs -> value. ``command`` is the program that a script starts, "" where there is none.

    ``branches``: the script has conditions, which were not evaluated.
    """

    keys: dict[str, Value] = field(default_factory=dict)
    command: str = ""
    branches: bool = False


def read_recipe(arguments: Sequence[str]) -> Recipe:
    """The recipe that the arguments are, or name: files first, then flags and overrides, which win.

    Raises:
        UserError: for a file that cannot be read, or if there is nothing to translate.
    """
    recipe = Recipe()
    rest = list(arguments)
    while rest and not rest[0].startswith("-") and (Path(rest[0]).is_file() or "=" not in rest[0]):
        found = _file(Path(rest.pop(0)))
        branches = recipe.branches or found.branches
        recipe = Recipe(recipe.keys | found.keys, found.command or recipe.command, branches)
    recipe.keys |= flags(rest)
    if not recipe.keys:
        raise UserError("there are no keys to translate: give a script, a YAML file, or flags")
    return recipe


def _file(path: Path) -> Recipe:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if path.suffix in (".yaml", ".yml"):
        return Recipe(_yaml(text, path))
    if path.suffix == ".py":
        return Recipe(program.arguments(text, path))
    return _script(text, path.parent)


def _script(text: str, folder: Path) -> Recipe:
    """The command with most keys; a YAML file that it names with ``--config`` is read with it."""
    found = [Recipe(flags(_behind_program(words)), " ".join(words)) for words in shell.commands(text)]
    best = max(found, key=lambda recipe: len(recipe.keys), default=Recipe())
    config = best.keys.get("config")
    if isinstance(config, str) and (folder / config).is_file():
        inner = _file(folder / config).keys
        best = Recipe(inner | {key: value for key, value in best.keys.items() if key != "config"}, best.command)
    best.branches = bool(re.search(r"^\s*(if|case)\b", text, re.MULTILINE))
    return best


def _behind_program(words: list[str]) -> list[str]:
    """What follows the program that is started: its module, its file, or ``trl grpo``."""
    if "--" in words:
        words = words[words.index("--") + 1 :]
    for at, word in enumerate(words):
        if word == "-m" and at + 1 < len(words):
            return words[at + 2 :]
        if word.endswith(".py") and not word.startswith("-"):
            return words[at + 1 :]
        if word == "trl":
            return words[at + 2 :]
    return words


def flags(words: Sequence[str]) -> dict[str, Value]:
    """``--flag value ...``, ``--flag=value``, ``key=value`` and Hydra's ``+key=value``; a bare flag is true."""
    keys: dict[str, Value] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.partition("=")
        if word.startswith("--"):
            values = [text] if equals else []
            while not equals and rest and not _is_flag(rest[0]):
                values.append(rest.pop(0))
            read = [value_or_text(said) for said in values]
            value: Value = True if not read else read if read[1:] else read[0]
            keys[name.lstrip("-")] = value
        elif equals and re.fullmatch(r"\+{0,2}[\w.@/-]+", name):
            keys[name.lstrip("+")] = value_or_text(text)
    return keys


def _is_flag(word: str) -> bool:
    return bool(re.match(r"--?[A-Za-z]|\+{1,2}[\w.]+=", word))


def _yaml(text: str, path: Path) -> dict[str, Value]:
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {getattr(error, 'problem', None) or error}") from None
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"{path} holds no keys")
    keys = dict(_leaves(root, ""))
    return {key: _resolved(value, keys) for key, value in keys.items()}


def _leaves(node: yaml.MappingNode, prefix: str) -> Iterator[tuple[str, Value]]:
    for name, value in node.value:
        path = f"{prefix}{name.value}"
        if isinstance(value, yaml.MappingNode) and value.value and not _whole(path):
            yield from _leaves(value, f"{path}.")
        elif not path.endswith("_target_"):
            yield path, free(value)


def _whole(path: str) -> bool:
    """Whether a table has the mapping itself as a key, without keys in it."""
    exact = [table for table in tables().values() if path in table.exact]
    return any(table.exact[path].function == "proportions" for table in exact)


def _resolved(value: Value, keys: Mapping[str, Value], depth: int = 0) -> Value:
    """``${other.key}`` replaced by its value; what the file does not say stays as it is written."""
    if isinstance(value, list):
        return [_resolved(entry, keys, depth) for entry in value]
    if not isinstance(value, str) or "${" not in value or depth > 8:
        return value
    if match := re.fullmatch(r"\$\{([\w.]+)\}", value):
        return _resolved(keys[match[1]], keys, depth + 1) if match[1] in keys else value
    return re.sub(r"\$\{([\w.]+)\}", lambda match: str(_resolved(keys.get(match[1], match[0]), keys, depth + 1)), value)


def detect(recipe: Recipe) -> str:
    """The system whose tables know most of the keys; where two know as many, the one that names more exactly.

    Raises:
        UserError: if no system knows any, or two know as many.
    """
    scores = {}
    for name, table in tables().items():
        known = [key for key in recipe.keys if table.find(key)]
        scores[name] = (len(known), sum(key in table.exact for key in known))
    best = max(scores.values())
    names = [name for name, score in scores.items() if score == best]
    if not best[0]:
        raise UserError(f"these are no keys of {', '.join(SYSTEMS.values())}: name the system with --from")
    if len(names) > 1:
        raise UserError(f"these keys are of {' and of '.join(SYSTEMS[n] for n in names)}: add --from {'|'.join(names)}")
    return names[0]


def system(name: str) -> str:
    """A system by its name, in any case.

    Raises:
        UserError: for one that there is no table of.
    """
    if name.lower() not in SYSTEMS:
        raise UserError(unknown("system", name, SYSTEMS))
    return name.lower()
