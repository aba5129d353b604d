"""``skyasync plan [options] key=value ...``, and ``--dry-run`` of any run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from skyasync.config.schema import Config
from skyasync.config.values import written
from skyasync.errors import UserError
from skyasync.inference.settings import engine_config
from skyasync.planning import estimate
from skyasync.planning.memory import GIB, Lengths
from skyasync.planning.plan import MemoryPlan, MemoryUse, parse_size
from skyasync.run.placement import ENGINES
from skyasync.utils.machine import Machine, this_machine
from skyasync.workers.roles import POLICY

SIZES = {"--gpu-memory": "gpu_memory", "--host-memory": "host_memory"}
EXAMPLES = {"--gpus": "8", "--card": "H100"} | dict.fromkeys(SIZES, "80GiB")
HELP = """\
usage: skyasync plan [--gpus N] [--card NAME] [--gpu-memory SIZE] [--host-memory SIZE] [--json] [key=value ...]

Says which processes a run would start, what each device and the host must hold, and whether it fits. What ranks need
is measured: the workers' own code computes on tensors without memory, for which the model's config.json is enough. The
machine is the one here, unless options describe another: sizes are 80GiB or 80GB, of each GPU and of each host. A card
(--card H100) also says how fast a run can be at most. The same as --dry-run of a run. Ends with status 0 if the run
fits, 1 if it does not, 2 for settings with which it would not start.
"""


@dataclass(frozen=True)
class Options:
    """What the command line says besides settings; None is what the machine here has."""

    gpus: int | None = None
    card: str = ""
    gpu_memory: int | None = None
    host_memory: int | None = None
    json: bool = False


def split_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The options, and the arguments that are left.

    Raises:
        UserError: for an option without its value, or with a wrong one.
    """
    options = Options()
    rest = []
    arguments = list(argv)
    while arguments:
        name, equals, value = arguments.pop(0).partition("=")
        if name == "--json" and not equals:
            options = replace(options, json=True)
        elif name in EXAMPLES:
            if not equals:
                if not arguments:
                    raise UserError(f"{name} needs a value: {name} {EXAMPLES[name]}")
                value = arguments.pop(0)
            options = _with(options, name, value)
        else:
            rest.append(name + equals + value)
    return options, rest


def show_plan(cfg: Config, options: Options) -> bool:
    """Print the plan of a run; whether it fits."""
    report = estimate(cfg, _machine(options))
    card = card_of(report.plan.machine.card)
    speed = roofline(cfg, report.plan, card) if card else None
    if options.json:
        print(as_json(report.plan, report.advice, speed))
    else:
        print_plan(report.plan, report.advice, speed)
    return report.plan.fits and not report.plan.vllm.problem


def _with(options: Options, name: str, value: str) -> Options:
    if name in SIZES:
        sizes: dict[str, Any] = {SIZES[name]: parse_size(value, name)}
        return replace(options, **sizes)
    if name == "--card":
        if value not in CARDS:
            raise UserError(
                f"{name} {value}: no card that is known, which are {', '.join(CARDS)}: or give --gpu-memory"
            )
        return replace(options, card=value)
    if not value.isdecimal() or len(value) > 9:
        raise UserError(f"{name} {value[:40]}: not a number of GPUs; 0 plans for a machine without")
    return replace(options, gpus=int(value))


def _machine(options: Options) -> Machine:
    here = this_machine()
    gpus = here.gpus if options.gpus is None else options.gpus
    named = int(CARDS[options.card].memory * GIB) if options.card else 0
    if (options.gpu_memory or named) and options.gpus is None and not here.gpus:
        raise UserError(
            f"--{'gpu-memory' if options.gpu_memory else 'card'} also needs --gpus N: there is no GPU here"
        )
    memory = options.gpu_memory or named or here.gpu_memory
    if gpus and not memory:
        raise UserError(
            f"--gpus {gpus} also needs --gpu-memory, for example 80GiB, or --card: there is no GPU here"
        )
    card = options.card or ("" if options.gpu_memory else here.card)
    return Machine(
        gpus, memory if gpus else 0, options.host_memory or here.host_memory, card if gpus else ""
    )


_PLAIN_WIDTH = 100


def print_plan(
    plan: MemoryPlan,
    advice: Mapping[str, Any],
    speed: Speed | None = None,
    console: Console | None = None,
) -> None:
    """A table per place; plain text where the output is no terminal."""
    console = console or Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(
            highlight=False, markup=False, file=console.file, width=_PLAIN_WIDTH, no_color=True
        )
    for line in _summary(plan, speed):
        console.print(line, soft_wrap=True)
    for place in plan.devices:
        console.print(_table(place, plain=not console.is_terminal))
        if len(place.phases) > 1:
            console.print(
                "phases: "
                + ", ".join(f"{phase} {_size(size)}" for phase, size in place.phases.items())
            )
    console.print()
    if plan.fits and not plan.vllm.problem:
        style = "bold green"
    else:
        style = "bold red"
    console.print(conclusion(plan, advice), style=style, soft_wrap=True)


def as_json(plan: MemoryPlan, advice: Mapping[str, Any], speed: Speed | None = None) -> str:
    """Everything in bytes."""
    return json.dumps(
        {
            "model": {"path": plan.model.name, "parameters": plan.model.parameters},
            "machine": vars(plan.machine),
            "processes": plan.processes,
            "bundles": list(plan.slots.bundles),
            "gpus_requested": plan.gpus_requested,
            "micro_batch": {"tokens": plan.rank.tokens, "count": plan.rank.micro_batches},
            "flops_per_update": plan.rank.flops,
            "sent_per_update": plan.rank.sent,
            "gradient_checkpointing": plan.rank.checkpointing,
            "estimate_by_published_peaks": vars(speed) if speed else None,
            "cache_tokens_per_engine": plan.engine.tokens,
            "vllm": vars(plan.vllm),
            "places": [
                vars(place) | {"total": place.total, "fits": place.fits} for place in plan.devices
            ],
            "fits": plan.fits,
            "advice": dict(advice),
        },
        indent=2,
    )


def conclusion(plan: MemoryPlan, advice: Mapping[str, Any]) -> str:
    """ "fits", or what does not, and the keys that make it fit."""
    if plan.fits:
        if plan.vllm.problem:
            return f"fits, but weights do not arrive: {plan.vllm.problem}"
        return "fits"
    wrong = [
        f"{p.name} (in its phase {p.when!r}) lacks {_size(p.total - p.capacity)}"
        for p in plan.devices
        if not p.fits
    ]
    if plan.gpus_requested > plan.machine.gpus:
        wrong.insert(
            0, f"{plan.gpus_requested} GPUs are asked for and there are {plan.machine.gpus}"
        )
    keys = " ".join(f"{key}={written(value)}" for key, value in advice.items())
    if keys:
        way_out = f"it fits with {keys}"
    else:
        way_out = "no key tried makes it fit: take more or larger devices"
    return f"does not fit: {'; '.join(wrong)}: {way_out}"


def _summary(plan: MemoryPlan, speed: Speed | None) -> Iterator[str]:
    model = plan.model
    rank = plan.rank
    machine = plan.machine
    if machine.gpus:
        devices = f"{machine.gpus} GPUs of {_size(machine.gpu_memory)}"
    else:
        devices = "no GPU"
    yield f"model        {model.name}: {model.parameters / 1e9:.3g}B parameters, {model.layers} layers"
    yield f"machine      {devices}, host {_size(machine.host_memory)}"
    yield "processes    " + ", ".join(f"{count} {role}" for role, count in plan.processes.items())
    bundles = Counter(
        " + ".join(f"{n:g} {kind}" for kind, n in bundle.items()) for bundle in plan.slots.bundles
    )
    if machine.gpus > plan.gpus_requested > 0:
        yield f"unused       {machine.gpus - plan.gpus_requested} of {machine.gpus} GPUs{_larger_run(plan)}"
    yield "bundles      " + ", ".join(f"{count} x {bundle}" for bundle, count in bundles.items())
    checkpointing = "on" if rank.checkpointing else "off"
    yield (
        f"update       {rank.micro_batches} micro-batches of {rank.tokens:,} tokens per rank at most, "
        f"gradient checkpointing {checkpointing}"
    )
    yield f"             {rank.flops / 1e15:,.3g} PFLOP per rank"
    sent = [f"{kind} {_size(size)}" for kind, size in rank.sent.items() if size >= 1 << 20]
    yield "sent         " + (", ".join(sent) + " per rank and update" if sent else "nothing")
    yield f"cache        {plan.engine.tokens:,} tokens per engine"
    if plan.vllm.unknown:
        yield f"vllm         names are not checked, engines are planned by formulas: {plan.vllm.unknown}"
    elif plan.vllm.weights:
        if machine.gpus:
            workspace = "; its workspace is estimated, without a GPU"
        else:
            workspace = ""
        yield f"             {plan.vllm.sequences:,.1f} sequences of full length, by vLLM's accounting{workspace}"
        if plan.vllm.problem:
            taken = "not all of them taken"
        else:
            taken = "all of them taken"
        yield f"names        {plan.vllm.tensors:,} tensors of the trainer's weights, {taken} by vLLM"
    if speed:
        yield f"estimate     by the published peak and bandwidths of {machine.card}:"
        yield f"             an update is {speed.update:,.3g} s of arithmetic, and {speed.collectives:,.3g} s of links"
        slowest = speed.update / USUAL_FRACTIONS[0]
        fastest = speed.update / USUAL_FRACTIONS[1]
        percent = " to ".join(f"{fraction:.0%}" for fraction in USUAL_FRACTIONS)
        yield f"             training reaches {percent} of the peak: {fastest:,.3g} to {slowest:,.3g} s an update"
        yield f"             an engine makes {speed.tokens:,.0f} tokens/s, and a batch takes {speed.generation:,.3g} s"


def _larger_run(plan: MemoryPlan) -> str:
    """Settings with which the same run would use more of the machine's GPUs; "" if no multiple
    fits."""
    factor = plan.machine.gpus // plan.gpus_requested
    if factor < 2:
        return ""
    ranks = plan.processes[POLICY] * factor
    engines = plan.processes[ENGINES] * factor
    return f": for example trainer.placement.policy_num_gpus_per_node={ranks} generator.num_inference_engines={engines}"


def _table(place: MemoryUse, *, plain: bool) -> Table:
    each = f"{place.count} x " if place.count > 1 else ""
    title = f"\n{each}{place.name}: fullest in {place.when}"
    look = box.ASCII if plain else box.ROUNDED
    table = Table(
        title=title, title_justify="left", show_footer=True, min_width=len(title), box=look
    )
    table.add_column("of each", footer=f"in all, of {_size(place.capacity)}")
    table.add_column("memory", justify="right", footer=_size(place.total))
    for what, size in place.lines.items():
        table.add_row(what, _size(size))
    return table


def _size(count: int) -> str:
    if count >= 1 << 30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB"


# ---------------------------------------------------------------- how fast a run can be at most

# A roofline by a card's published peak and bandwidths. No prediction: real runs reach a part of it.

#: Fractions of the peak that training usually reaches: small models without and large models with compiled layers. One
#: H100 trained models of 0.6B and 1.7B at 0.14 and 0.22 (docs/benchmarks.md).
USUAL_FRACTIONS = (0.15, 0.45)


@dataclass(frozen=True)
class Card:
    """By the maker's data sheet.

    Args:
        memory: GiB, as NVIDIA's tool says it.
        flops: floating-point operations per second, of dense bfloat16.
        bandwidth: bytes per second of its memory.
        links: bytes per second that it sends to others of its host.
    """

    memory: float
    flops: float
    bandwidth: float
    links: float


CARDS = {
    "A100": Card(80.0, 312e12, 2.04e12, 300e9),
    "H100": Card(79.6, 989e12, 3.35e12, 450e9),
    "H200": Card(140.4, 989e12, 4.8e12, 450e9),
    "B200": Card(179.1, 2250e12, 8.0e12, 900e9),
    "L40S": Card(45.0, 362e12, 0.864e12, 32e9),
    "L4": Card(22.5, 121e12, 0.3e12, 32e9),
}


def card_of(name: str) -> Card | None:
    """Of what NVIDIA's tool calls it, ``NVIDIA H100 80GB HBM3``; None if it is not known."""
    return next((card for key, card in CARDS.items() if re.search(rf"\b{key}\b", name)), None)


@dataclass(frozen=True)
class Speed:
    """Seconds at least, and tokens per second at most.

    Args:
        update: of an optimizer step's arithmetic, with the time in which stages of a pipeline have
            none.
        collectives: of what it sends, if all of it goes over the links within a host.
        tokens: per second and engine, with as many sequences as its cache holds.
        generation: of a training batch whose responses are as long as they may be.
    """

    update: float
    collectives: float
    tokens: float
    generation: float


def roofline(cfg: Config, plan: MemoryPlan, card: Card) -> Speed:
    engine = plan.engine
    shape = plan.model
    lengths = Lengths.of(cfg)
    devices = cfg.generator.devices_per_engine
    count = plan.processes[ENGINES]
    settings = engine_config(cfg, gpus=True)
    sequences = max(1, min(settings.max_num_seqs, engine.tokens // lengths.total))
    cached = (
        sequences
        * (lengths.prompt + lengths.response / 2)
        * engine.least_cache
        / settings.max_model_len
    )
    idle = (
        shape.expert_parameters * (shape.experts - shape.experts_per_token) // max(1, shape.experts)
    )
    operations = 2 * (shape.parameters - idle) * sequences / devices
    tokens = sequences / max((engine.weights + cached) / card.bandwidth, operations / card.flops)
    batch = cfg.trainer.train_batch_size * lengths.samples * lengths.response
    # of 1F1B, in micro-batches
    empty = (cfg.trainer.parallel.pipeline - 1) / max(1, plan.rank.micro_batches)
    return Speed(
        update=plan.rank.flops / card.flops * (1 + empty),
        collectives=sum(plan.rank.sent.values()) / card.links,
        tokens=tokens,
        generation=batch / (tokens * count) if count else 0.0,
    )
