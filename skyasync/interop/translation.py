"""From a draft to YAML that loads, with a comment for what has no place in it.

Invariant: what is written has been loaded; a setting that contradicts another one is left out, and said.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from skyasync.config.values import Value, escape, written
from skyasync.errors import UserError
from skyasync.interop.conversion import BATCH
from skyasync.interop.draft import MINI, PLACEMENT, PLAN, Draft, DraftSetting, begin
from skyasync.interop.recipe import SourceRecipe
from skyasync.interop.system import systems

#: Keys whose values are not repeated.
_SECRET = re.compile(r"(key|token|secret|password)$", re.IGNORECASE)


def translated(recipe: SourceRecipe, system: str) -> str:
    """The recipe of a system (one of ``systems()``) as our YAML, with comments."""
    draft = begin(systems()[system], recipe)
    draft.system.translation.finish(draft)
    _engine(draft)
    _devices(draft)
    _schedules(draft)
    _tidy(draft)
    _settle(draft)
    return "\n".join(_lines(draft)) + "\n"


def _engine(draft: Draft) -> None:
    """The engine of the recipe, not the one that is installed where it is translated."""
    if draft.value("generator.engines"):
        draft.drop("generator.backend", "generator.engines names servers")
    elif draft.value("generator.backend") == "auto":
        draft.put("generator.backend", "vllm")


def _devices(draft: Draft) -> None:
    """Models beside the policy have its devices; an engine beside it has one of them."""
    for model in ("ref", "critic", "teacher"):
        if draft.value(f"{PLACEMENT}colocate_policy_{model}"):
            for path in (f"{PLACEMENT}{model}_num_nodes", f"{PLACEMENT}{model}_num_gpus_per_node"):
                why = f"it shares the policy's devices: {PLACEMENT}colocate_policy_{model}"
                draft.silent |= dict.fromkeys(draft.origin(path), why)
                draft.ours.pop(path, None)
    size, engines = "generator.inference_engine_tensor_parallel_size", "generator.num_inference_engines"
    if draft.value(f"{PLACEMENT}colocate_all") and draft.value(PLAN) == "sync" and draft.number(size) > 1:
        whole = int(draft.number(engines) * draft.number(size))
        draft.put(engines, whole, *draft.origin(engines))
        draft.drop(size, f"with {PLACEMENT}colocate_all each engine has one GPU: {engines}={whole}")


def _schedules(draft: Draft) -> None:
    """A cosine that ends at a share of its rate has a name of its own."""
    for section in ("policy", "critic"):
        name, options = (f"trainer.{section}.optimizer_config.scheduler{end}" for end in ("", "_kwargs"))
        if options in draft.ours and draft.value(name) == "cosine":
            draft.put(name, "cosine_with_min_lr", *draft.origin(name), *draft.origin(options))


def _tidy(draft: Draft) -> None:
    """Defaults there that are ours as well go; updates of the whole batch are written as 0."""
    if draft.value(PLAN) != "sync" and draft.value("trainer.placement.colocate_all"):
        draft.drop(
            "trainer.placement.colocate_all", f"plan {draft.value('trainer.plan')}: engines and policy work at once"
        )
    if draft.number(MINI) >= draft.number(BATCH):
        setting = draft.ours[MINI]
        draft.put(MINI, 0, *setting.theirs)
    for path, setting in list(draft.ours.items()):
        key = draft.keys.holder(path)
        if key and key.path == path and not setting.given and setting.value == key.default:
            draft.ours.pop(path)
        elif key and key.type == list[str] and isinstance(setting.value, str):
            draft.ours[path] = DraftSetting([setting.value], setting.theirs, setting.given)


def _settle(draft: Draft) -> None:
    """Leave out what the loader refuses, the first key of a problem until it loads; at once all that nothing reads."""
    while problems := _problems(draft):
        found = [(problem, path) for problem in problems if (path := _named(problem, draft))]
        if not found:
            raise UserError("\n".join(problems))
        unread = [entry for entry in found if " has no effect with " in entry[0]]
        for problem, path in unread or found[:1]:
            draft.drop(path, problem)


def _problems(draft: Draft) -> list[str]:
    from skyasync.config.check import check_config
    from skyasync.config.load import load_config

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "translated.yaml"
        file.write_text("\n".join(_tree(draft)) + "\n", encoding="utf-8")
        try:
            return check_config(load_config(["--config", str(file)]), given={*draft.ours})
        except UserError as error:
            return [
                problem.partition("translated.yaml:")[2].partition(": ")[2] or problem
                for problem in str(error).splitlines()
            ]


def _named(problem: str, draft: Draft) -> str:
    """The key of ours that a problem names first; one that they did not give rather than one that they did.

    An entry of a mapping is named by the mapping; a name that no part has may stand for its key.
    """
    places = {}
    for path in draft.ours:
        key = draft.keys.holder(path)
        names = [path, *([f"{key.path}=" + "{"] if key and key.path != path else [])]
        found = [problem.find(name) for name in names if name in problem]
        if found:
            places[path] = found[0]
    if not places:
        places = {path: 0 for path, setting in draft.ours.items() if written(setting.value) in problem.split("'")}
    first = sorted(places, key=lambda path: (draft.ours[path].given, places[path], -len(path)))
    return first[0] if first else ""


def _lines(draft: Draft) -> Iterator[str]:
    title = draft.system.title
    yield f"# Made from a recipe of {title} by python -m skyasync translate."
    if draft.recipe.branches:
        yield "# The script's conditions were not evaluated: its first branches count. Check what they set."
    yield from _tree(draft)
    yield from _comments(draft, f"Keys of {title} without a counterpart here:", draft.left)
    yield from _comments(draft, f"Keys of {title} that need no setting here:", _unset(draft))
    yield from _comments(draft, "Values that a shell fills in, to be written by hand:", _open(draft))
    yield from _comments(draft, f"Not known as keys of {title}:", dict.fromkeys(draft.unknown, ""))


def _unset(draft: Draft) -> dict[str, str]:
    """Keys that became no setting of ours and are no loss."""
    used = {name for setting in draft.ours.values() for name in setting.theirs} | {*draft.left}
    decided = {name: f"other keys decide about {path}" for name, path in draft.carried.items()}
    whys = decided | draft.silent
    return {name: whys[name] for name in draft.given if name in whys and name not in used}


def _open(draft: Draft) -> dict[str, str]:
    return {name: "" for setting in draft.ours.values() for name in setting.theirs if "$" in str(setting.value)}


def _comments(draft: Draft, heading: str, entries: dict[str, str]) -> Iterator[str]:
    if entries:
        yield from ("", f"# {heading}")
    for name, why in entries.items():
        shown = name in draft.given and not _SECRET.search(name)
        value = f"={_one_line(draft.given[name])}" if shown else ""
        yield f"#   {name}{value}{f': {why}' if why else ''}"


def _one_line(value: Value) -> str:
    text = " ".join(written(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _order(draft: Draft) -> dict[str, int]:
    """Where a key or a group stands in the schema: a group where its first key does."""
    order: dict[str, int] = {}
    for at, key in enumerate(draft.keys):
        parts = key.path.split(".")
        for depth in range(len(parts)):
            order.setdefault(".".join(parts[: depth + 1]), at)
    return order


def _tree(draft: Draft) -> Iterator[str]:
    """The settings as nested YAML in the schema's order, each with the keys that it came from."""
    order = _order(draft)

    def place(path: str) -> tuple[int, ...]:
        parts = path.split(".")
        return tuple(order.get(".".join(parts[: depth + 1]), len(order)) for depth in range(len(parts)))

    open_groups: list[str] = []
    for path in sorted(draft.ours, key=lambda path: (place(path), path)):
        *groups, name = path.split(".")
        shared = 0
        while shared < min(len(groups), len(open_groups)) and groups[shared] == open_groups[shared]:
            shared += 1
        for depth in range(shared, len(groups)):
            yield f"{'  ' * depth}{groups[depth]}:"
        open_groups = groups
        setting = draft.ours[path]
        yield f"{'  ' * len(groups)}{name}: {_yaml(setting.value)}{_origin(draft, setting, path)}"


def _yaml(value: Value) -> str:
    value = _literal(value)
    return yaml.safe_dump([value], default_flow_style=True, width=10**6, sort_keys=False).strip()[1:-1]


def _literal(value: Value) -> Value:
    """What a shell or their loader would have filled in stays text, not a reference of ours."""
    if isinstance(value, list):
        return [_literal(entry) for entry in value]
    return escape(value) if isinstance(value, str) else value


def _origin(draft: Draft, setting: DraftSetting, path: str) -> str:
    given = [name for name in setting.theirs if name in draft.given]
    if given:
        row = draft.system.table.find(given[0])
        differs = row and row.note.startswith(written(draft.given[given[0]])) and path == row.targets[0].path
        return f"  # {', '.join(given)}{f': {row.note}' if row and differs else ''}"
    return f"  # {draft.system.title}'s default" if setting.theirs else "  # follows from the others"
