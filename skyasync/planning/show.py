"""A plan as a table for people, or as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from skyasync.config.values import written
from skyasync.planning.place import Place
from skyasync.planning.plan import MemoryPlan

_PLAIN_WIDTH = 100


def print_plan(plan: MemoryPlan, advice: Mapping[str, Any], console: Console | None = None) -> None:
    """A table per place; plain text where the output is no terminal."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, file=console.file, width=_PLAIN_WIDTH, no_color=True)
    for line in _summary(plan):
        console.print(line)
    for place in plan.places:
        console.print(_table(place, plain=not console.is_terminal))
    console.print()
    console.print(verdict(plan, advice), style="bold green" if plan.fits else "bold red", soft_wrap=True)


def as_json(plan: MemoryPlan, advice: Mapping[str, Any]) -> str:
    """Everything in bytes."""
    return json.dumps(
        {
            "model": {"path": plan.model.name, "parameters": plan.model.parameters},
            "machine": vars(plan.machine),
            "processes": plan.processes,
            "bundles": list(plan.slots.bundles),
            "gpus_asked": plan.gpus_asked,
            "micro_batch": vars(plan.rank.work) | {"count": plan.rank.micro_batches},
            "gradient_checkpointing": plan.rank.checkpointing,
            "cache_tokens_per_engine": plan.engine.tokens,
            "places": [vars(place) | {"total": place.total, "fits": place.fits} for place in plan.places],
            "fits": plan.fits,
            "advice": dict(advice),
        },
        indent=2,
    )


def verdict(plan: MemoryPlan, advice: Mapping[str, Any]) -> str:
    """ "fits", or what does not, and the keys that make it fit."""
    if plan.fits:
        return "fits"
    wrong = [f"{p.name} (in its phase {p.when!r}) lacks {_size(p.total - p.room)}" for p in plan.places if not p.fits]
    if plan.gpus_asked > plan.machine.gpus:
        wrong.insert(0, f"{plan.gpus_asked} GPUs are asked for and there are {plan.machine.gpus}")
    keys = " ".join(f"{key}={written(value)}" for key, value in advice.items())
    way_out = f"it fits with {keys}" if keys else "no key tried makes it fit: take more or larger devices"
    return f"does not fit: {'; '.join(wrong)}: {way_out}"


def _summary(plan: MemoryPlan) -> Iterator[str]:
    model, rank, machine = plan.model, plan.rank, plan.machine
    devices = f"{machine.gpus} GPUs of {_size(machine.gpu_memory)}" if machine.gpus else "no GPU"
    yield f"model        {model.name}: {model.parameters / 1e9:.3g}B parameters, {model.layers} layers"
    yield f"machine      {devices}, host {_size(machine.host_memory)}"
    yield "processes    " + ", ".join(f"{count} {role}" for role, count in plan.processes.items())
    yield "bundles      " + ", ".join(f"{count} x {bundle}" for bundle, count in _counted(plan))
    checkpointing = "on" if rank.checkpointing else "off"
    yield (
        f"update       {rank.micro_batches} micro-batches of {rank.work.tokens:,} tokens per rank at most, "
        f"gradient checkpointing {checkpointing}"
    )
    yield f"cache        {plan.engine.tokens:,} tokens per engine"


def _counted(plan: MemoryPlan) -> list[tuple[str, int]]:
    texts = [" + ".join(f"{n:g} {kind}" for kind, n in bundle.items()) for bundle in plan.slots.bundles]
    return [(text, texts.count(text)) for text in dict.fromkeys(texts)]


def _table(place: Place, *, plain: bool) -> Table:
    each = f"{place.count} x " if place.count > 1 else ""
    title = f"\n{each}{place.name}: fullest in {place.when}"
    look = box.ASCII if plain else box.ROUNDED
    table = Table(title=title, title_justify="left", show_footer=True, min_width=len(title), box=look)
    table.add_column("of each", footer=f"in all, of {_size(place.room)}")
    table.add_column("memory", justify="right", footer=_size(place.total))
    for what, size in place.lines.items():
        table.add_row(what, _size(size))
    return table


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.0f} MiB"
