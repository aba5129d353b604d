"""``skyasync translate``: a recipe of another framework as our YAML.

Invariant: the YAML has been loaded. A key without a counterpart, and a setting that contradicts
another one, is left out with a comment.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from skyasync.config.values import Value, escape, written
from skyasync.errors import UserError, unknown
from skyasync.interop.conversion import BATCH, as_list
from skyasync.interop.draft import (
    CORRECTION,
    ENGINE_SIZE,
    MINI,
    PLAN,
    RESPONSE_LENGTH,
    Draft,
    DraftSetting,
    begin,
)
from skyasync.interop.recipe import SourceRecipe, detect, read_recipe
from skyasync.interop.system import TableRow, systems

HELP = f"""\
usage: skyasync translate [--from SYSTEM] FILE ... [FLAGS]

Prints the recipe of another system as our configuration, with a comment for each key that has no counterpart.
FILE is a shell script, a YAML file or (TRL) a Python program; FLAGS are theirs: --flag value, key=value. Nothing of
it is run. SYSTEM is one of {", ".join(systems())}; without it the keys decide.

    skyasync translate run.sh > ours.yaml
    skyasync plan --config ours.yaml
"""
_LOGGER = "trainer.logger"
#: Settings that change no result: if they are left out, no remark is needed.
_CHANGE_NO_RESULT = ("generator.weight_sync_backend", "trainer.resume_mode")
#: Keys whose values are secrets, and are not printed.
_SECRET = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)
_LONGEST_VALUE = 80  # characters of a value in a comment, which stays on one line


def translate(argv: Sequence[str]) -> None:
    """The subcommand: print the translation.

    Raises:
        UserError: for an unreadable or too deeply nested recipe, or an unknown system.
    """
    arguments = list(argv)
    if not arguments or arguments[0] in ("--help", "-h"):
        print(HELP, end="")
        return
    system = _pop_system(arguments)
    try:
        recipe = read_recipe(arguments)
        result = translated(recipe, system or detect(recipe))
        print(result, end="")
    except RecursionError:
        raise UserError("the recipe is nested too deeply") from None


def _pop_system(arguments: list[str]) -> str:
    """Take ``--from SYSTEM`` or ``--from=SYSTEM`` out of the arguments; "" if there is none."""
    flags = [argument.partition("=")[0] for argument in arguments]
    if "--from" not in flags:
        return ""
    position = flags.index("--from")
    _, equals, name = arguments.pop(position).partition("=")
    if not equals and position < len(arguments):
        name = arguments.pop(position)
    if not name:
        raise UserError(f"--from needs a system: {', '.join(systems())}")
    if name.lower() not in systems():
        raise UserError(unknown("system", name, systems()))
    return name.lower()


def translated(recipe: SourceRecipe, system: str) -> str:
    """The recipe of a system (one of ``systems()``) as our YAML, with comments."""
    draft = begin(systems()[system], recipe)
    draft.system.translation.finish(draft)
    _finish(draft)
    # Settings are dropped until the loader accepts the rest.
    while problems := _problems(draft):
        if not _allow_uncorrected(draft, problems):
            _drop_rejected(draft, problems)
    return "\n".join(_lines(draft)) + "\n"


def _drop_rejected(draft: Draft, problems: Sequence[str]) -> None:
    """Drop all settings without effect, or else the first one that the loader rejects.

    Only the first, because the other problems may follow from it.

    Raises:
        UserError: if no problem names a setting of the draft.
    """
    rejected = []
    for problem in problems:
        path = _rejected_path(problem, draft)
        if path:
            rejected.append((problem, path))
    if not rejected:
        raise UserError("\n".join(problems))
    without_effect = [entry for entry in rejected if " has no effect with " in entry[0]]
    for problem, path in without_effect or rejected[:1]:
        _remark_default(draft, path, problem)
        draft.drop(path, problem)


def _remark_default(draft: Draft, path: str, problem: str) -> None:
    """Note that a default of the framework is left out.

    A key of the recipe needs no remark: its own comment says so.
    """
    setting = draft.settings[path]
    is_default = setting.sources and not draft.present_names(*setting.sources)
    if is_default and path not in _CHANGE_NO_RESULT and " has no effect" not in problem:
        draft.remarks.append(
            f"{path}={written(setting.value)}, {draft.system.title}'s default, is left out: {problem}"
        )


def _allow_uncorrected(draft: Draft, problems: Sequence[str]) -> bool:
    """Allow stale samples without a correction, as the framework does; whether that was needed."""
    allow = "trainer.allow_uncorrected"
    if CORRECTION not in draft.settings or allow in draft.settings:
        return False
    for problem in problems:
        if problem.startswith(f"{CORRECTION}=none") and allow in problem:
            draft.put(allow, True, *draft.origin(CORRECTION))
            return True
    return False


def _finish(draft: Draft) -> None:
    """Apply the rules that hold for every framework."""
    _finish_placement(draft)
    buffer = "trainer.algorithm.overlong_buffer.len"
    limit = "trainer.algorithm.overlong_buffer.max_len"
    if draft.number(buffer) and limit not in draft.settings:
        # All frameworks reach the full penalty at the longest response.
        longest = int(draft.number(RESPONSE_LENGTH))
        draft.put(limit, longest, *draft.origin(buffer))
    # A cosine schedule that ends above 0 has a name of its own here.
    for section in ("policy", "critic"):
        name = f"trainer.{section}.optimizer_config.scheduler"
        options = f"{name}_kwargs"
        if options in draft.settings and draft.value(name) == "cosine":
            draft.change(name, "cosine_with_min_lr", *draft.origin(options))
    _keep_metrics_file(draft)
    if draft.number(MINI) >= draft.number(BATCH):
        draft.put(MINI, 0, *draft.settings[MINI].sources)  # one update with the full batch
    for path, setting in list(draft.settings.items()):
        key = draft.keys.holder(path)
        if key is None:
            continue
        if key.path == path and not setting.explicit and setting.value == key.default:
            draft.settings.pop(path)
        elif key.type == list[str] and isinstance(setting.value, str):
            draft.settings[path] = DraftSetting([setting.value], setting.sources, setting.explicit)


def _finish_placement(draft: Draft) -> None:
    """Choose the engine, and remove settings that colocation decides."""
    # The engine is the recipe's, not the one that is installed on this machine.
    if draft.value("generator.engines"):
        draft.drop("generator.backend", "generator.engines names servers")
    elif draft.value("generator.backend") == "auto":
        draft.put("generator.backend", "vllm")
    for model in ("ref", "critic", "teacher"):
        colocate = f"trainer.placement.colocate_policy_{model}"
        if not draft.value(colocate):
            continue
        for path in (
            f"trainer.placement.{model}_num_nodes",
            f"trainer.placement.{model}_num_gpus_per_node",
        ):
            for name in draft.origin(path):
                draft.not_needed[name] = f"it shares the policy's devices: {colocate}"
            draft.settings.pop(path, None)
    colocate_all = "trainer.placement.colocate_all"
    if not draft.value(colocate_all):
        return
    plan = draft.value(PLAN)
    size = ENGINE_SIZE
    engines = "generator.num_inference_engines"
    if plan != "sync":
        draft.drop(colocate_all, f"plan {plan}: engines and policy work at once")
    elif draft.number(size) > 1:
        # A colocated engine shares one GPU with one rank of the policy.
        count = int(draft.number(engines) * draft.number(size))
        draft.change(engines, count)
        draft.drop(size, f"with {colocate_all} each engine has one GPU: {engines}={count}")


def _keep_metrics_file(draft: Draft) -> None:
    """Add ``jsonl``, which the report reads, to the recipe's loggers; drop unsupported loggers."""
    loggers = draft.value(_LOGGER)
    if _LOGGER not in draft.settings or loggers is None:
        return
    trackers = draft.keys[_LOGGER].options() or ()
    supported: list[Value] = ["jsonl"]
    missing = []
    for name in map(str, as_list(loggers)):
        if name not in trackers and ":" not in name:  # module:Class is a user's tracker
            missing.append(name)
        elif name != "jsonl":
            supported.append(name)
    origin = draft.origin(_LOGGER)
    if missing:
        for key in draft.present_names(*origin):
            draft.no_counterpart[key] = f"there is no tracker {', '.join(missing)}: see {_LOGGER}"
    draft.put(_LOGGER, supported, *origin)


def _problems(draft: Draft) -> list[str]:
    """The errors of the loader for the draft's YAML."""
    from skyasync.config.check import check_config
    from skyasync.config.load import load_config

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "translated.yaml"
        text = "\n".join(_tree(draft))
        file.write_text(f"{text}\n", encoding="utf-8")
        try:
            return check_config(load_config(["--config", str(file)]), given={*draft.settings})
        except UserError as error:
            problems = []
            for line in str(error).splitlines():
                # A line is "file:line: message".
                _, _, location = line.partition("translated.yaml:")
                _, _, message = location.partition(": ")
                problems.append(message or line)
            return problems


def _rejected_path(problem: str, draft: Draft) -> str:
    """The setting that a problem names, "" if it names none of the draft.

    Of several: a default of the framework before a setting of the recipe, then the first one. An
    entry of a mapping may be named by its mapping, a setting by its quoted value.
    """
    positions: dict[str, int] = {}
    for path in draft.settings:
        position = problem.find(path)
        key = draft.keys.holder(path)
        if position < 0 and key and key.path != path:
            position = problem.find(f"{key.path}={{")
        if position >= 0:
            positions[path] = position
    if not positions:
        quoted = problem.split("'")
        for path, setting in draft.settings.items():
            if written(setting.value) in quoted:
                positions[path] = 0

    def rank(path: str) -> tuple[bool, bool, int, int]:
        # Parallelism of the trainer changes no result: it is dropped rather than another setting.
        changes_result = not path.startswith("trainer.parallel.")
        # Where one path is the beginning of another, the longer one is meant.
        return draft.settings[path].explicit, changes_result, positions[path], -len(path)

    return min(positions, key=rank, default="")


def _lines(draft: Draft) -> Iterator[str]:
    """The lines of the result: settings, then keys by what became of them, then remarks."""
    title = draft.system.title
    yield f"# Made from a recipe of {title} by skyasync translate."
    if draft.recipe.branches:
        yield "# The script's conditions were not evaluated: its first branches count. Check what they set."
    yield from _tree(draft)
    used: set[str] = set()
    unfilled: list[str] = []
    for setting in draft.settings.values():
        used.update(setting.sources)
        if "$" in str(setting.value):
            unfilled += setting.sources
    decided = {}
    for name, path in draft.first_targets.items():
        decided[name] = f"other keys decide about {path}"
    decided |= draft.not_needed
    no_loss = {}
    for name in draft.source_keys:
        if name in decided and name not in used and name not in draft.no_counterpart:
            no_loss[name] = decided[name]
    sections = {
        f"Keys of {title} without a counterpart here:": draft.no_counterpart,
        f"Keys of {title} that need no setting here:": no_loss,
        "Values that a shell fills in, to be written by hand:": dict.fromkeys(unfilled, ""),
        f"Not known as keys of {title}:": dict.fromkeys(draft.unknown_keys, ""),
        "What the program does to rows, to be done by hand:": draft.recipe.remarks,
    }
    for heading, entries in sections.items():
        if entries:
            yield ""
            yield f"# {heading}"
        for name, why in entries.items():
            line = f"#   {name}{_source_text(draft, name)}"
            yield f"{line}: {why}" if why else line
    if draft.remarks:
        yield ""
        yield f"# What differs from {title}:"
    for remark in draft.remarks:
        yield f"#   {remark}"


def _source_text(draft: Draft, name: str) -> str:
    """``=value`` of a source key on one line; "" for a default of the framework and a secret."""
    if name not in draft.source_keys or _SECRET.search(name):
        return ""
    words = written(draft.source_keys[name]).split()
    value = " ".join(words)
    if len(value) > _LONGEST_VALUE:
        value = f"{value[: _LONGEST_VALUE - 3]}..."
    return f"={value}"


def _difference(row: TableRow, value: Value) -> str:
    """The row's note if it is about this value, or about a difference of the framework."""
    if row.note.startswith((written(value), "there ")):
        return row.note
    return ""


def _prefixes(path: str) -> list[str]:
    """``a.b.c`` as ``a``, ``a.b`` and ``a.b.c``."""
    return list(itertools.accumulate(path.split("."), "{}.{}".format))


def _tree(draft: Draft) -> Iterator[str]:
    """The settings as nested YAML in the schema's order, each with its source keys in a comment."""
    order: dict[str, int] = {}  # a group has the position of its first key
    for position, key in enumerate(draft.keys):
        for prefix in _prefixes(key.path):
            order.setdefault(prefix, position)

    def rank(path: str) -> tuple[list[int], str]:
        # A user's own entries of a mapping are not in the schema: they come last.
        return [order.get(prefix, len(order)) for prefix in _prefixes(path)], path

    open_groups: list[str] = []
    for path in sorted(draft.settings, key=rank):
        *groups, name = path.split(".")
        shared = 0
        for group, open_group in zip(groups, open_groups, strict=False):
            if group != open_group:
                break
            shared += 1
        for depth in range(shared, len(groups)):
            yield f"{'  ' * depth}{groups[depth]}:"
        open_groups = groups
        setting = draft.settings[path]
        # In a list of one, because YAML ends a bare text with "...".
        value = yaml.safe_dump(
            [_literal(setting.value)], default_flow_style=True, width=10**6, sort_keys=False
        )
        value = value.strip()[1:-1]
        indent = "  " * len(groups)
        origin = _origin(draft, setting, path)
        yield f"{indent}{name}: {value}  # {origin}"


def _literal(value: Value) -> Value:
    """The value with its ``$`` escaped: a shell's variable is no reference of our loader."""
    if isinstance(value, list):
        return [_literal(entry) for entry in value]
    if isinstance(value, str):
        return escape(value)
    return value


def _origin(draft: Draft, setting: DraftSetting, path: str) -> str:
    """The comment after a setting: its source keys, and what differs from the framework."""
    names = draft.present_names(*setting.sources)
    note = setting.note
    if names:
        origin = ", ".join(names)
        row = draft.system.table.find(names[0])
        if not note and row and row.targets and path == row.targets[0].path:
            note = _difference(row, draft.source_keys[names[0]])
    elif setting.sources:
        origin = f"{draft.system.title}'s default"
    else:
        origin = "follows from the others"
    if note:
        return f"{origin}: {note}"
    return origin
