"""``skyasync translate``: another system's recipe as YAML that loads, with a comment for each key
left out.

Invariant: the YAML has been loaded; a setting that contradicts another one is left out, with a
comment.
"""

from __future__ import annotations

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
    MINI,
    PLACEMENT,
    PLAN,
    SAMPLING,
    A,
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
_CHANGE_NO_RESULT = ("generator.weight_sync_backend", "trainer.resume_mode")
_SECRET = re.compile(
    r"(key|token|secret|password)$", re.IGNORECASE
)  # keys whose values are not repeated


def translate(argv: Sequence[str]) -> None:
    """The subcommand: print the translation.

    Raises:
        UserError: for an unreadable or too deeply nested recipe, or an unknown system.
    """
    arguments = list(argv)
    name = ""
    if not arguments or arguments[0] in ("--help", "-h"):
        print(HELP, end="")
        return
    at = next(
        (at for at, argument in enumerate(arguments) if argument.partition("=")[0] == "--from"),
        None,
    )
    if at is not None:
        _, equals, name = arguments.pop(at).partition("=")
        if not equals and at < len(arguments):
            name = arguments.pop(at)
        if not name:
            raise UserError(f"--from needs a system: {', '.join(systems())}")
        if name.lower() not in systems():
            raise UserError(unknown("system", name, systems()))
    try:
        recipe = read_recipe(arguments)
        print(translated(recipe, name.lower() or detect(recipe)), end="")
    except RecursionError:
        raise UserError("the recipe is nested too deeply") from None


def translated(recipe: SourceRecipe, system: str) -> str:
    """The recipe of a system (one of ``systems()``) as our YAML, with comments."""
    draft = begin(systems()[system], recipe)
    draft.system.translation.finish(draft)
    _finish(draft)
    while problems := _problems(draft):
        if _allow_uncorrected(draft, problems):
            continue
        # Left out is the first key of a problem until the rest loads, and at once every key that
        # has no effect.
        named = [(problem, path) for problem in problems if (path := _named(problem, draft))]
        if not named:
            raise UserError("\n".join(problems))
        unread = [entry for entry in named if " has no effect with " in entry[0]]
        for problem, path in unread or named[:1]:
            _remark_default(draft, path, problem)
            draft.drop(path, problem)
    return "\n".join(_lines(draft)) + "\n"


def _remark_default(draft: Draft, path: str, problem: str) -> None:
    """Say that one of their defaults is left out; of keys that were given this is said at the
    key."""
    setting = draft.ours[path]
    default = setting.theirs and not draft.named(*setting.theirs)
    if default and path not in _CHANGE_NO_RESULT and " has no effect" not in problem:
        draft.remarks.append(
            f"{path}={written(setting.value)}, {draft.system.title}'s default, is left out: {problem}"
        )


def _allow_uncorrected(draft: Draft, problems: Sequence[str]) -> bool:
    """Let stale samples go uncorrected as they do there, if the loader asks for it; whether it
    did."""
    allowed = "trainer.allow_uncorrected"
    refused = any(
        problem.startswith(f"{CORRECTION}=none") and allowed in problem for problem in problems
    )
    if not refused or CORRECTION not in draft.ours or allowed in draft.ours:
        return False
    draft.put(allowed, True, *draft.origin(CORRECTION))
    return True


def _finish(draft: Draft) -> None:
    """What holds for every system."""
    # The engine is the recipe's, not the one that is installed where it is translated.
    if draft.value("generator.engines"):
        draft.drop("generator.backend", "generator.engines names servers")
    elif draft.value("generator.backend") == "auto":
        draft.put("generator.backend", "vllm")
    # Models that are colocated with the policy have its devices; a colocated engine has one of
    # them.
    for model in ("ref", "critic", "teacher"):
        if draft.value(f"{PLACEMENT}colocate_policy_{model}"):
            for path in (f"{PLACEMENT}{model}_num_nodes", f"{PLACEMENT}{model}_num_gpus_per_node"):
                why = f"it shares the policy's devices: {PLACEMENT}colocate_policy_{model}"
                draft.silent |= dict.fromkeys(draft.origin(path), why)
                draft.ours.pop(path, None)
    size = "generator.inference_engine_tensor_parallel_size"
    engines = "generator.num_inference_engines"
    if (
        draft.value(f"{PLACEMENT}colocate_all")
        and draft.value(PLAN) == "sync"
        and draft.number(size) > 1
    ):
        whole = int(draft.number(engines) * draft.number(size))
        draft.put(engines, whole, *draft.origin(engines))
        draft.drop(size, f"with {PLACEMENT}colocate_all each engine has one GPU: {engines}={whole}")
    if draft.value(PLAN) != "sync" and draft.value(f"{PLACEMENT}colocate_all"):
        draft.drop(
            f"{PLACEMENT}colocate_all", f"plan {draft.value(PLAN)}: engines and policy work at once"
        )
    length, end = (f"{A}overlong_buffer.{name}" for name in ("len", "max_len"))
    if (
        draft.number(length) and end not in draft.ours
    ):  # complete at the longest response, as in all of them
        draft.put(end, int(draft.number(f"{SAMPLING}.max_generate_length")), *draft.origin(length))
    # A cosine that ends at a share of its rate has a name of its own.
    for section in ("policy", "critic"):
        name, options = (
            f"trainer.{section}.optimizer_config.scheduler{end}" for end in ("", "_kwargs")
        )
        if options in draft.ours and draft.value(name) == "cosine":
            draft.put(name, "cosine_with_min_lr", *draft.origin(name), *draft.origin(options))
    _keep_metrics_file(draft)
    if draft.number(MINI) >= draft.number(BATCH):  # one update of the whole batch
        draft.put(MINI, 0, *draft.ours[MINI].theirs)
    for path, setting in list(draft.ours.items()):
        key = draft.keys.holder(path)
        if key and key.path == path and not setting.given and setting.value == key.default:
            draft.ours.pop(path)
        elif key and key.type == list[str] and isinstance(setting.value, str):
            draft.ours[path] = DraftSetting([setting.value], setting.theirs, setting.given)


def _keep_metrics_file(draft: Draft) -> None:
    """Add ``jsonl``, which the report reads, to the recipe's loggers, and leave out those that
    there are not."""
    loggers = draft.value(_LOGGER)
    if _LOGGER not in draft.ours or loggers is None:
        return
    names = [str(name) for name in as_list(loggers)]
    trackers = draft.keys[_LOGGER].options() or ()
    missing = [name for name in names if name not in trackers and ":" not in name]
    for key in draft.named(*draft.origin(_LOGGER)) if missing else ():
        draft.left[key] = f"there is no tracker {', '.join(missing)}: see {_LOGGER}"
    rest: list[Value] = [name for name in names if name not in ("jsonl", *missing)]
    draft.put(_LOGGER, ["jsonl", *rest], *draft.origin(_LOGGER))


def _problems(draft: Draft) -> list[str]:
    """What the loader rejects in the draft's YAML."""
    from skyasync.config.check import check_config
    from skyasync.config.load import load_config

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "translated.yaml"
        file.write_text("\n".join(_tree(draft)) + "\n", encoding="utf-8")
        try:
            return check_config(load_config(["--config", str(file)]), given={*draft.ours})
        except UserError as error:
            lines = str(error).splitlines()
            return [
                line.partition("translated.yaml:")[2].partition(": ")[2] or line for line in lines
            ]


def _named(problem: str, draft: Draft) -> str:
    """The key of ours that a problem names first; one that they did not give rather than one that
    they did.

    An entry of a mapping is named by the mapping; a name that no part has may stand for its key.
    """
    positions = {}
    for path in draft.ours:
        key = draft.keys.holder(path)
        names = [path, *([f"{key.path}=" + "{"] if key and key.path != path else [])]
        inside = [problem.find(name) for name in names if name in problem]
        if inside:
            positions[path] = inside[0]
    if not positions:
        quoted = problem.split("'")
        positions = {
            path: 0 for path, setting in draft.ours.items() if written(setting.value) in quoted
        }
    # How ranks divide the work changes no result, so it goes before what does.
    order = {
        path: (draft.ours[path].given, not path.startswith("trainer.parallel."), at, -len(path))
        for path, at in positions.items()
    }
    return min(order, key=lambda path: order[path], default="")


def _lines(draft: Draft) -> Iterator[str]:
    title = draft.system.title
    given = draft.given
    yield f"# Made from a recipe of {title} by skyasync translate."
    if draft.recipe.branches:
        yield "# The script's conditions were not evaluated: its first branches count. Check what they set."
    yield from _tree(draft)
    used = {name for setting in draft.ours.values() for name in setting.theirs}
    decided = {
        name: f"other keys decide about {path}" for name, path in draft.carried.items()
    } | draft.silent
    no_loss = {
        name: decided[name]
        for name in given
        if name in decided and name not in used | {*draft.left}
    }
    unfilled = [
        name
        for setting in draft.ours.values()
        for name in setting.theirs
        if "$" in str(setting.value)
    ]
    for heading, entries in (
        (f"Keys of {title} without a counterpart here:", draft.left),
        (f"Keys of {title} that need no setting here:", no_loss),
        ("Values that a shell fills in, to be written by hand:", dict.fromkeys(unfilled, "")),
        (f"Not known as keys of {title}:", dict.fromkeys(draft.unknown, "")),
        ("What the program does to rows, to be done by hand:", draft.recipe.remarks),
    ):
        if entries:
            yield from ("", f"# {heading}")
        for name, why in entries.items():
            value = ""
            if name in given and not _SECRET.search(name):
                value = " ".join(written(given[name]).split())
                value = f"={value if len(value) <= 80 else f'{value[:77]}...'}"
            yield f"#   {name}{value}{f': {why}' if why else ''}"
    if draft.remarks:
        yield from ("", f"# What differs from {title}:")
    for remark in draft.remarks:
        yield f"#   {remark}"


def _difference(row: TableRow, value: Value) -> str:
    """The row's note if it is about this value, or about what is different there."""
    if row.note.startswith((written(value), "there ")):
        return row.note
    return ""


def _tree(draft: Draft) -> Iterator[str]:
    """The settings as nested YAML in the schema's order, each with the keys that it came from."""
    order: dict[str, int] = {}  # of keys and groups; a group stands where its first key does
    for at, key in enumerate(draft.keys):
        parts = key.path.split(".")
        for depth in range(len(parts)):
            order.setdefault(".".join(parts[: depth + 1]), at)

    def position(path: str) -> tuple[int, ...]:
        parts = path.split(".")
        return tuple(
            order.get(".".join(parts[: depth + 1]), len(order)) for depth in range(len(parts))
        )

    open_groups: list[str] = []
    for path in sorted(draft.ours, key=lambda path: (position(path), path)):
        *groups, name = path.split(".")
        shared = 0
        while shared < min(len(groups), len(open_groups)) and groups[shared] == open_groups[shared]:
            shared += 1
        for depth in range(shared, len(groups)):
            yield f"{'  ' * depth}{groups[depth]}:"
        open_groups = groups
        setting = draft.ours[path]
        value = yaml.safe_dump(
            [_literal(setting.value)], default_flow_style=True, width=10**6, sort_keys=False
        )
        yield f"{'  ' * len(groups)}{name}: {value.strip()[1:-1]}  # {_origin(draft, setting, path)}"


def _literal(value: Value) -> Value:
    """What a shell or their loader would have filled in stays text, not a reference of ours."""
    if isinstance(value, list):
        return [_literal(entry) for entry in value]
    if isinstance(value, str):
        return escape(value)
    return value


def _origin(draft: Draft, setting: DraftSetting, path: str) -> str:
    given = draft.named(*setting.theirs)
    if given:
        origin = ", ".join(given)
    else:
        if setting.theirs:
            origin = f"{draft.system.title}'s default"
        else:
            origin = "follows from the others"
    note = setting.note
    row = draft.system.table.find(given[0]) if given else None
    if not note and row and row.targets and path == row.targets[0].path:
        note = _difference(row, draft.given[given[0]])
    if note:
        return f"{origin}: {note}"
    return origin
