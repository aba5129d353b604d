"""Arguments and YAML files as lists of assignments, and the nearest key for a wrong one.

Invariant: every argument ends either in the result or in exactly one problem, and every key that this names exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path

import yaml

from skyasync.config.keys import Keys
from skyasync.config.values import Value, parse, value_or_text
from skyasync.other_frameworks import UNKNOWN, other_frameworks

#: Settings of earlier versions that did nothing. In files, such as a run's config.yaml, they are passed over.
REMOVED = {
    "trainer.parallel.data": "rows are divided among all ranks that trainer.parallel.context and tensor leave",
    "trainer.parallel.expert": "experts are divided among the ranks of trainer.parallel.tensor",
    "generator.run_engines_locally": "engines are the run's own unless generator.engines names servers",
    "generator.async_engine": "requests are always asynchronous",
    "generator.batched": "requests are always batched by the engine",
}
#: Settings of earlier versions by their names of today.
RENAMED = {"environment.reward_unjudged": "environment.reward_on_timeout"}
#: Below this similarity a key is no help.
_CUTOFF = 0.6
#: Candidates this close to the best are worth naming too.
_MARGIN = 0.03


@dataclass(frozen=True)
class Assignment:
    """``path`` shall be ``node``; ``where`` is "" for the command line, "file.yaml:3: " for a file."""

    path: str
    node: yaml.Node
    where: str = ""


@dataclass
class CommandLine:
    """``help`` is the group that ``--help`` names ("" for everything), None if help is not asked for.

    ``given`` is all that the arguments say, anyone's keys, for hints; ``notes`` are no problems, but worth a line each.
    """

    assignments: list[Assignment] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    help: str | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    given: dict[str, Value] | None = None


def read_command_line(argv: Sequence[str], keys: Keys) -> CommandLine:
    """Sort the arguments: overrides, ``--config FILE``, ``--help [GROUP]``; problems are collected."""
    line = CommandLine()
    given: dict[str, list[str]] = {}
    arguments = list(argv)
    line.given = said = _said(argv)
    while arguments:
        argument = arguments.pop(0)
        option, equals, text = argument.partition("=")
        if option in ("--help", "-h"):
            line.help = text or (arguments.pop(0) if _is_value(arguments) else "")
        elif option == "--config":
            if text or (not equals and _is_value(arguments)):
                line.files.append(Path(text or arguments.pop(0)))
            else:
                line.problems.append("--config needs a file: --config FILE.yaml")
        elif argument.startswith("-"):
            if not equals and _is_value(arguments):
                text = arguments.pop(0)  # the value of an option we do not have
            line.problems.append(_unknown_option(option, text, keys, said))
        else:
            problem = _override(argument, keys, given, line.assignments)
            if problem:
                line.problems.append(problem)
    line.notes = [
        f"{path} is given several times, as {', '.join(values)}: the last one counts"
        for path, values in given.items()
        if len(set(values)) > 1
    ]
    return line


def _is_value(arguments: list[str]) -> bool:
    return bool(arguments) and "=" not in arguments[0] and not arguments[0].startswith("-")


def _said(argv: Sequence[str]) -> dict[str, Value]:
    """All that the arguments say, whoever's keys they are: some units depend on other keys."""
    found: dict[str, Value] = {}
    for argument, following in zip(argv, [*argv[1:], ""], strict=False):
        path, equals, text = argument.partition("=")
        if equals or argument.startswith("--"):
            found[path.lstrip("-+~")] = value_or_text(text if equals else following)
    return found


def _unknown_option(option: str, text: str, keys: Keys, given: dict[str, Value]) -> str:
    if close := get_close_matches(option, ("--config", "--help"), cutoff=0.7):
        return f"unknown option {option}: did you mean {close[0]}?"
    path = option.lstrip("-")
    # A flag without a value is switched on.
    way_out = (
        f"write {path}=VALUE" if keys.holder(path) else unknown_key(path, keys, value_or_text(text or "true"), given)
    )
    return f"unknown option {option}: settings are key=value without dashes; {way_out}"


def _override(argument: str, keys: Keys, given: dict[str, list[str]], assignments: list[Assignment]) -> str:
    """Add one ``key=value``, in the place of an earlier one of that key; returns the problem, if any."""
    path, equals, text = argument.partition("=")
    bare = path.lstrip("+~")
    if bare != path:
        hint = f"write {bare}=VALUE" if keys.holder(bare) else unknown_key(bare, keys)
        return f"{argument}: Hydra's + and ~ do not exist here (all keys are known, none can be added); {hint}"
    if not equals:
        hint = f"write {path}=VALUE" if keys.holder(path) else "overrides are key=value, see --help"
        return f"missing '=' in {argument!r}: {hint}"
    if not path.strip() or path != path.strip():
        return f"{argument!r}: write key=value without spaces around the '='"
    if not text.strip():
        return f"{path}: the value is empty; the empty string is written {path}='\"\"'"
    given.setdefault(path, []).append(text)
    try:
        assignments[:] = [*(a for a in assignments if a.path != path), Assignment(path, parse(text))]
    except yaml.YAMLError:
        return f"{path}: cannot read {text!r}: a bracket or quote does not close, or the text goes on after it"
    return ""


def read_file(path: Path, keys: Keys, problems: list[str]) -> list[Assignment]:
    """A YAML file's leaves as assignments; groups may be nested or written as dotted keys."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")
        return []
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problems.append(f"{path}{line}: not valid YAML: {getattr(error, 'problem', None) or 'cannot be read'}")
        return []
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        problems.append(f"{path}: expected groups and keys (trainer: ...), found something else")
        return []
    assignments = [leaf for leaf in _leaves(root, "", path, keys) if leaf.path not in REMOVED or leaf.path in keys]
    first: dict[str, Assignment] = {}
    for assignment in assignments:
        if assignment.path in first:
            problems.append(f"{assignment.where}{assignment.path} is given twice, first in line "
                            f"{first[assignment.path].node.start_mark.line + 1}")  # fmt: skip
        first.setdefault(assignment.path, assignment)
    return assignments


def _leaves(node: yaml.MappingNode, prefix: str, file: Path, keys: Keys) -> Iterator[Assignment]:
    for name, value in node.value:
        path = f"{prefix}{name.value}"
        is_group = path in keys.groups or keys.holder(path) is None
        if is_group and isinstance(value, yaml.MappingNode):
            yield from _leaves(value, f"{path}.", file, keys)
        else:
            yield Assignment(path, value, f"{file}:{name.start_mark.line + 1}: ")


def unknown_key(path: str, keys: Keys, value: object = UNKNOWN, given: Mapping[str, Value] | None = None) -> str:
    """What to say about a key that the schema does not have.

    Args:
        value: what it was set to, if that is known.
        given: everything that was set, by anyone's keys.
    """
    start = f"unknown key {path!r}"
    if path in REMOVED:
        return f"{start}: it needs no setting here, {REMOVED[path]}: remove it"
    if path in RENAMED:
        return f"{start}: it is called {RENAMED[path]} now"
    defaults = {key.path: key.default for key in keys}
    hint = other_frameworks().key_hint(path, value, given or {}, defaults if given is not None else {})
    if hint:
        return f"{start}: {hint}{_our_own(path, hint, keys)}"
    parts = path.split(".")
    prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    if parent := next((prefix for prefix in prefixes[:-1] if prefix in keys), ""):
        return f"{start}: {parent} is a value, not a group; write {parent}=VALUE"
    close = nearest_keys(path, keys)
    if close:
        return f"{start}: did you mean {' or '.join(close)}?"
    group = next((prefix for prefix in reversed(prefixes) if prefix in keys.groups), "")
    return f"{start}: see --help {group}" if group else f"{start}: see --help for all keys"


def _our_own(path: str, hint: str, keys: Keys) -> str:
    """Keys of ours of the same name that mean something else."""
    own = [key.path for key in keys if key.path.endswith(f".{path}")]
    if not own or any(name in hint for name in own):
        return ""
    return f"; {' and '.join(own)} {'are other keys' if own[1:] else 'is another key'}"


def nearest_keys(path: str, keys: Keys, count: int = 2) -> list[str]:
    """The most similar keys, best first: by the whole path, or by its last part wherever that may live.

    Keys that take another to be read are not named beside one that is always read.
    """
    scored = sorted(((_similarity(path, key.path), key.path) for key in keys), key=lambda pair: -pair[0])
    best = scored[0][0] if scored else 0.0
    close = [candidate for score, candidate in scored[:count] if score >= max(_CUTOFF, best - _MARGIN)]
    always = [path for path in close if not keys[path].when]
    return always if always[:1] == close[:1] else close


def _similarity(path: str, candidate: str) -> float:
    whole = _ratio(path, candidate)
    last, candidate_last = path.rpartition(".")[2], candidate.rpartition(".")[2]
    if last == candidate_last:
        return 1.0 + whole
    if set(last.split("_")) < set(candidate_last.split("_")):
        return 0.7 + 0.2 * whole
    # Mostly the last part: long common groups would make strangers look alike.
    return 0.75 * _ratio(last, candidate_last) + 0.25 * whole


def _ratio(left: str, right: str) -> float:
    return SequenceMatcher(None, left, right).ratio()
