"""Arguments and YAML files as lists of assignments, the nearest key for a wrong one, and
``--help``.

Invariant: every argument ends either in the result or in exactly one problem, and every key named
in a problem exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher, get_close_matches
from itertools import groupby
from pathlib import Path

import yaml
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from skyasync.config.keys import MISSING, Key, Keys
from skyasync.config.values import Value, compose, parse, type_name, value_or_text, written
from skyasync.errors import UserError, nearest
from skyasync.other_frameworks import UNKNOWN, other_frameworks

#: Below this similarity a key is no help.
_CUTOFF = 0.6
#: Candidates this close to the best are worth naming too.
_MARGIN = 0.03


@dataclass(frozen=True)
class Assignment:
    """``path`` is set to ``node``; ``where`` is "" for the command line, "file.yaml:3: " for a
    file."""

    path: str
    node: yaml.Node
    where: str = ""


@dataclass
class CommandLine:
    """``help`` is the group that ``--help`` names ("" for everything), None without ``--help``.

    ``given`` has all that the arguments set, by keys of ours or of another library, for hints;
    ``notes`` are no problems, but worth a line each.
    """

    assignments: list[Assignment] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    help: str | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    given: dict[str, Value] = field(default_factory=dict)


def read_command_line(argv: Sequence[str], keys: Keys) -> CommandLine:
    """Sort the arguments: overrides, ``--config FILE``, ``--help [GROUP]``; problems are
    collected."""
    line = CommandLine()
    arguments = list(argv)
    overrides: dict[str, list[str]] = {}
    for argument, following in zip(argv, [*argv[1:], ""], strict=False):
        path, equals, text = argument.partition("=")
        if equals or argument.startswith("--"):
            line.given[path.lstrip("-+~")] = value_or_text(text if equals else following)

    def write(
        path: str, value: object = UNKNOWN, settings: Mapping[str, Value] | None = None
    ) -> str:
        if keys.holder(path):
            return f"write {path}=VALUE"
        return unknown_key(path, keys, value, settings)

    while arguments:
        argument = arguments.pop(0)
        path, equals, text = argument.partition("=")
        bare = path.lstrip("+~")
        takes_value = (
            argument.startswith("-") and not text and (path in ("--help", "-h") or not equals)
        )
        if takes_value and arguments and not arguments[0].startswith("-"):
            named, setting, _ = arguments[0].partition("=")
            # a file's path may have a =
            if not setting or (path == "--config" and keys.holder(named) is None):
                text = arguments.pop(0)  # also of an option that does not exist
        if path in ("--help", "-h"):
            line.help = text
        elif path == "--config":
            if text:
                line.files.append(Path(text))
            else:
                line.problems.append("--config needs a file: --config FILE.yaml")
        elif argument.startswith("-"):
            close = get_close_matches(path, ("--config", "--help"), cutoff=0.7)
            if close:
                line.problems.append(f"unknown option {path}: did you mean {close[0]}?")
            else:
                # without a value: a switch
                hint = write(path.lstrip("-"), value_or_text(text or "true"), line.given)
                line.problems.append(
                    f"unknown option {path}: settings are key=value without dashes; {hint}"
                )
        elif bare != path:
            line.problems.append(
                f"{argument}: Hydra's + and ~ do not exist here (all keys are known, none can be added); {write(bare)}"
            )
        elif not equals:
            if keys.holder(path):
                hint = write(path)
            else:
                hint = "overrides are key=value, see --help"
            line.problems.append(f"missing '=' in {argument!r}: {hint}")
        elif not path.strip() or path != path.strip():
            line.problems.append(f"{argument!r}: write key=value without spaces around the '='")
        elif not text.strip():
            line.problems.append(
                f"{path}: the value is empty; the empty string is written {path}='\"\"'"
            )
        else:
            overrides.setdefault(path, []).append(text)
            try:
                assignment = Assignment(path, parse(text))
            except yaml.constructor.ConstructorError as error:
                line.problems.append(f"{path}: cannot read {text!r}: {error.problem}")
            except yaml.YAMLError:
                line.problems.append(
                    f"{path}: cannot read {text!r}: a bracket or quote does not close, or text follows it"
                )
            else:
                line.assignments = [*(a for a in line.assignments if a.path != path), assignment]
    line.notes = [
        f"{path} is given several times, as {', '.join(values)}: the last one counts"
        for path, values in overrides.items()
        if len(set(values)) > 1
    ]
    return line


def read_file(file: Path, keys: Keys, problems: list[str]) -> list[Assignment]:
    """A YAML file's leaves as assignments; groups may be nested or written as dotted keys."""
    try:
        root = compose(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problems.append(
            f"cannot read {file}: {(isinstance(error, OSError) and error.strerror) or error}"
        )
        return []
    except yaml.MarkedYAMLError as error:
        if error.problem_mark:
            line = f":{error.problem_mark.line + 1}"
        else:
            line = ""
        if isinstance(error, yaml.constructor.ConstructorError):
            invalid = ""
        else:
            invalid = "not valid YAML: "
        problems.append(f"{file}{line}: {invalid}{error.problem or 'cannot be read'}")
        return []
    except yaml.YAMLError:
        problems.append(f"{file}: not valid YAML: cannot be read")
        return []
    if root is not None and not isinstance(root, yaml.MappingNode):
        problems.append(f"{file}: expected groups and keys (trainer: ...), found something else")
        return []

    def leaves(node: yaml.MappingNode, prefix: str) -> Iterator[Assignment]:
        for name, value in node.value:
            path = f"{prefix}{name.value}"
            if isinstance(value, yaml.MappingNode) and (
                path in keys.groups or keys.holder(path) is None
            ):
                yield from leaves(value, f"{path}.")
            else:
                yield Assignment(path, value, f"{file}:{name.start_mark.line + 1}: ")

    assignments = [] if root is None else list(leaves(root, ""))
    first_assignments: dict[str, Assignment] = {}
    for assignment in assignments:
        earlier = first_assignments.setdefault(assignment.path, assignment)
        if earlier is not assignment:
            line = earlier.node.start_mark.line + 1
            problems.append(
                f"{assignment.where}{assignment.path} is given twice, first in line {line}"
            )
    return assignments


def unknown_key(
    path: str, keys: Keys, value: object = UNKNOWN, settings: Mapping[str, Value] | None = None
) -> str:
    """What to answer to a key that the schema does not have.

    Args:
        value: what it was set to, if that is known.
        given: everything that was set, by keys of ours or of another library.
    """
    start = f"unknown key {path!r}"
    if settings is None:
        defaults = {}
    else:
        defaults = {key.path: key.default for key in keys}
    hint = other_frameworks().key_hint(path, value, settings or {}, defaults)
    if hint:
        same_ending = [key.path for key in keys if key.path.endswith(f".{path}")]
        # of the same name, with another meaning
        if same_ending and not any(name in hint for name in same_ending):
            hint += f"; {' and '.join(same_ending)} {'are other keys' if same_ending[1:] else 'is another key'}"
        return f"{start}: {hint}"
    segments = path.split(".")
    prefixes = [".".join(segments[:length]) for length in range(1, len(segments) + 1)]
    parent = next((prefix for prefix in prefixes[:-1] if prefix in keys), "")
    if parent:
        return f"{start}: {parent} is a value, not a group; write {parent}=VALUE"
    close = nearest_keys(path, keys)
    if close:
        return f"{start}: did you mean {' or '.join(close)}?"
    group = next((prefix for prefix in reversed(prefixes) if prefix in keys.groups), "")
    if group:
        return f"{start}: see --help {group}"
    return f"{start}: see --help for all keys"


#: Words that people try for a setting whose name does not resemble them.
USUAL_WORDS = {
    "batch_size": "trainer.train_batch_size",
    "clip": "trainer.algorithm.eps_clip_low",
    "context_length": "generator.max_model_len",
    "gpus": "trainer.placement.policy_num_gpus_per_node",
    "kl_coef": "trainer.algorithm.kl_loss_coef",
    "kl_coefficient": "trainer.algorithm.kl_loss_coef",
    "learning_rate": "trainer.policy.optimizer_config.lr",
    "max_new_tokens": "generator.sampling_params.max_generate_length",
    "max_steps": "trainer.max_training_steps",
    "max_tokens": "generator.sampling_params.max_generate_length",
    "model": "trainer.policy.model.path",
    "n": "generator.n_samples_per_prompt",
    "num_gpus": "trainer.placement.policy_num_gpus_per_node",
    "num_samples": "generator.n_samples_per_prompt",
    "num_steps": "trainer.max_training_steps",
    "output_dir": "trainer.runs_dir",
    "reward": "environment.reward_funcs",
    "reward_fn": "environment.reward_funcs",
    "staleness": "trainer.max_staleness",
    "steps": "trainer.max_training_steps",
    "tp": "generator.inference_engine_tensor_parallel_size",
    "training_steps": "trainer.max_training_steps",
    "warmup": "trainer.policy.optimizer_config.num_warmup_steps",
}


def nearest_keys(path: str, keys: Keys) -> list[str]:
    """Find the most similar keys, at most two, best first: by the whole path, or by its last part
    in any group.

    Keys that are read with another one alone are not named together with one that is always read.
    """
    last_segment = path.rpartition(".")[2]
    usual = USUAL_WORDS.get(last_segment)
    if usual is not None and usual in keys:
        return [usual]

    def similarity(candidate: str) -> float:
        path_similarity = SequenceMatcher(None, path, candidate).ratio()
        candidate_last = candidate.rpartition(".")[2]
        if last_segment == candidate_last:
            return 1.0 + path_similarity
        if set(last_segment.split("_")) < set(candidate_last.split("_")):
            return 0.7 + 0.2 * path_similarity
        # Mostly the last part: long common groups would make different keys look alike.
        return (
            0.75 * SequenceMatcher(None, last_segment, candidate_last).ratio()
            + 0.25 * path_similarity
        )

    scored = sorted(((similarity(key.path), key.path) for key in keys), key=lambda pair: -pair[0])
    best = scored[0][0] if scored else 0.0
    close = [candidate for score, candidate in scored[:2] if score >= max(_CUTOFF, best - _MARGIN)]
    always = [path for path in close if not keys[path].when]
    if always[:1] == close[:1]:
        return always
    return close


_USAGE = "usage: [--config FILE.yaml] [--help [GROUP]] [key=value ...]"
_RULES = (
    "Values are typed: 1e-6, true, null, [a,b]. Later --config files win over earlier ones, key=value over both. "
    "--help GROUP shows one group or key."
)


def print_help(keys: Keys, topic: str) -> None:
    """Print all keys (""), or those of the group (or the one key) that ``topic`` names.

    Raises:
        UserError: if there is no such group or key.
    """
    shown = [
        key for key in keys if not topic or key.path == topic or key.path.startswith(f"{topic}.")
    ]
    if not shown:
        close = nearest(topic, keys.groups, count=1) or nearest_keys(topic, keys)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        groups = ", ".join(group for group in keys.groups if "." not in group)
        raise UserError(f"--help {topic}: no such group or key: {hint}groups: {groups}")
    console = Console(highlight=False)
    if not topic:
        console.print(Text(_USAGE, style="bold"))
        console.print(Text(_RULES))
    for group, members in groupby(shown, key=lambda key: key.group):
        console.print()
        console.print(Text(group, style="bold underline"))
        for key in members:
            if key.default == MISSING:
                default = "required"
            else:
                default = f"= {written(key.default)}"
            head = [
                (key.path, "bold cyan"),
                (f"  {type_name(key.type)}", "green"),
                (f"  {default}", "yellow"),
            ]
            console.print(Padding(Text.assemble(*head), (0, 0, 0, 2), expand=False))
            console.print(Padding(Text(meaning(key)), (0, 0, 0, 6), expand=False))


def meaning(key: Key) -> str:
    """A key's sentences: what it is, which values are allowed beyond the type, and when it is
    read."""
    try:
        options = key.options()
    except UserError:  # help does not fail because a part is broken
        options = list(key.choices)
    allowed = ""
    if options:
        if key.registry and key.open_ended:
            open_end = ", or module:attribute"
        else:
            open_end = ""
        allowed = f"One of: {', '.join(map(written, options))}{open_end}."
    elif bounds := key.bounds():
        allowed = f"{bounds[0].upper()}{bounds[1:]}."
    when = str(key.when or "")
    if when.startswith("not ") and " or " not in when:
        when = f"Not used with {when.removeprefix('not ')}."
    elif when:
        when = f"Used only with {when}."
    return " ".join(filter(None, (key.doc, allowed, when)))
