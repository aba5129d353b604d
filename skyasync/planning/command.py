"""``skyasync plan [options] key=value ...``, and ``--dry-run`` of any run."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from skyasync.config.schema import Config
from skyasync.config.values import written
from skyasync.errors import UserError
from skyasync.planning import estimate
from skyasync.planning.memory import GIB
from skyasync.planning.plan import MemoryPlan
from skyasync.planning.speed import CARDS, USUAL_FRACTIONS, Speed, card_of, roofline
from skyasync.run.placement import ENGINES
from skyasync.utils.machine import Machine, this_machine
from skyasync.workers.roles import POLICY

SIZES = {"--gpu-memory": "gpu_memory", "--host-memory": "host_memory"}
EXAMPLES = {"--gpus": "8", "--card": "H100"} | dict.fromkeys(SIZES, "80GiB")
HELP = """\
usage: skyasync plan [--gpus N] [--card NAME] [--gpu-memory SIZE] [--host-memory SIZE] [--json] [key=value ...]

Says which processes a run would start, what each device and the host must hold, and whether it fits. What ranks need
is measured: a model of few layers computes on tensors without memory, for which the model's config.json is enough. The
machine is the one here, unless options describe another: sizes are 80GiB or 80GB, of each GPU and of each host. A card
(--card H100) also says how fast a run can be at most. The same as --dry-run of a run. Ends with status 0 if the run
fits, 1 if it does not, 2 for settings with which it would not start.
"""

NOT_RECKONED = (
    "compiled layers, images, replayed experts, exchanges of expert and pipeline dimensions, hosts without the "
    "policy, names of vLLM's weights"
)

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(i?)B?)?", re.IGNORECASE)


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
            options = replace(options, **_parsed(name, value))
        else:
            rest.append(name + equals + value)
    return options, rest


def _parsed(name: str, value: str) -> dict[str, Any]:
    if name in SIZES:
        return {SIZES[name]: parse_size(value, name)}
    if name == "--card":
        if value not in CARDS:
            raise UserError(
                f"{name} {value}: no card that is known, which are {', '.join(CARDS)}: or give --gpu-memory"
            )
        return {"card": value}
    # Python converts no text of thousands of digits.
    if not value.isdecimal() or len(value) > 9:
        raise UserError(f"{name} {value[:40]}: not a number of GPUs; 0 plans for a machine without")
    return {"gpus": int(value)}


def parse_size(text: str, flag: str) -> int:
    """Bytes of ``80GiB``, ``512G``, ``24000MB``.

    Raises:
        UserError: naming ``flag``.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match or not float(match[1]):
        raise UserError(
            f"{flag} {text}: not a size: write for example {flag} 80GiB, or 80GB for powers of ten"
        )
    unit = (match[2] or "").upper()
    scale = _UNITS[unit]
    if match[3]:
        scale = 1024 ** list(_UNITS).index(unit)
    return int(float(match[1]) * scale)


def show_plan(cfg: Config, options: Options) -> bool:
    """Print the plan of a run; whether it fits."""
    report = estimate(cfg, _machine(options))
    plan = report.plan
    card = card_of(plan.machine.card)
    speed = roofline(cfg, plan, card) if card else None
    if options.json:
        print(as_json(plan, report.advice, speed))
    else:
        print("\n".join(plan_lines(plan, report.advice, speed)))
    return plan.fits


def _machine(options: Options) -> Machine:
    local_machine = this_machine()
    gpus = local_machine.gpus if options.gpus is None else options.gpus
    card_memory = int(CARDS[options.card].memory * GIB) if options.card else 0
    memory = options.gpu_memory or card_memory
    if memory and options.gpus is None and not local_machine.gpus:
        option = "gpu-memory" if options.gpu_memory else "card"
        raise UserError(f"--{option} also needs --gpus N: there is no GPU here")
    memory = memory or local_machine.gpu_memory
    if gpus and not memory:
        raise UserError(
            f"--gpus {gpus} also needs --gpu-memory, for example 80GiB, or --card: there is no GPU here"
        )
    host_memory = options.host_memory or local_machine.host_memory
    if not gpus:
        return Machine(0, 0, host_memory)
    card = options.card
    # The size of a GPU says nothing about its speed.
    if not card and not options.gpu_memory:
        card = local_machine.card
    return Machine(gpus, memory, host_memory, card)


def plan_lines(
    plan: MemoryPlan, advice: Mapping[str, Any], speed: Speed | None = None
) -> Iterator[str]:
    """The summary, a table per place, and the conclusion."""
    yield from _summary(plan, speed)
    for place in plan.devices:
        count = f"{place.count} x " if place.count > 1 else ""
        yield ""
        yield f"{count}{place.name}: fullest in {place.when}"
        rows = [(line, _size(size)) for line, size in place.lines.items()]
        rows.append((f"in all, of {_size(place.capacity)}", _size(place.total)))
        width = max(len(line) for line, _ in rows)
        for line, size in rows:
            yield f"  {line:{width}}  {size:>10}"
        if len(place.phases) > 1:
            yield "phases: " + _sizes(place.phases)
    yield ""
    yield conclusion(plan, advice)


def as_json(plan: MemoryPlan, advice: Mapping[str, Any], speed: Speed | None = None) -> str:
    """Everything in bytes."""
    content = asdict(plan) | {
        "gpus_requested": plan.gpus_requested,
        "estimate_by_published_peaks": asdict(speed) if speed else None,
        "not_reckoned": NOT_RECKONED,
        "fits": plan.fits,
        "advice": dict(advice),
    }
    return json.dumps(content, indent=2)


def conclusion(plan: MemoryPlan, advice: Mapping[str, Any]) -> str:
    """ "fits", or what does not, and the keys that make it fit."""
    if plan.fits:
        return "fits"
    problems = []
    requested = plan.gpus_requested
    if requested > plan.machine.gpus:
        problems.append(f"{requested} GPUs are asked for and there are {plan.machine.gpus}")
    for place in plan.devices:
        if not place.fits:
            missing = _size(place.total - place.capacity)
            problems.append(f"{place.name} (in its phase {place.when!r}) lacks {missing}")
    way_out = "no key tried makes it fit: take more or larger devices"
    if advice:
        keys = " ".join(f"{key}={written(value)}" for key, value in advice.items())
        way_out = f"it fits with {keys}"
    return f"does not fit: {'; '.join(problems)}: {way_out}"


def _summary(plan: MemoryPlan, speed: Speed | None) -> Iterator[str]:
    model = plan.model
    rank = plan.rank
    machine = plan.machine
    devices = "no GPU"
    if machine.gpus:
        devices = f"{machine.gpus} GPUs of {_size(machine.gpu_memory)}"
    yield f"model        {model.name}: {model.parameters / 1e9:.3g}B parameters, {model.layers} layers"
    yield f"machine      {devices}, host {_size(machine.host_memory)}"
    yield "processes    " + ", ".join(f"{count} {role}" for role, count in plan.processes.items())
    if machine.gpus > plan.gpus_requested > 0:
        unused = machine.gpus - plan.gpus_requested
        yield f"unused       {unused} of {machine.gpus} GPUs{_larger_run(plan)}"
    bundles: Counter[str] = Counter()
    for bundle in plan.slots.bundles:
        gpus = bundle.get("GPU", 0)
        bundles["1 CPU" + (f" + {gpus:g} GPU" if gpus else "")] += 1
    yield "bundles      " + ", ".join(f"{count} x {bundle}" for bundle, count in bundles.items())
    yield (
        f"update       {rank.micro_batches} micro-batches of {rank.tokens:,} tokens per rank at most, "
        f"gradient checkpointing {'on' if rank.checkpointing else 'off'}"
    )
    yield f"             {rank.flops / 1e15:,.3g} PFLOP per rank"
    sent = f"{_sizes(rank.sent)} per rank and update" if rank.sent else "nothing"
    yield f"sent         {sent}"
    yield f"cache        {plan.engine.tokens:,} tokens per engine"
    if speed:
        yield f"estimate     by the published peak and bandwidths of {machine.card}:"
        yield f"             an update is {speed.update:,.3g} s of arithmetic, and {speed.collectives:,.3g} s of links"
        low, high = USUAL_FRACTIONS
        yield (
            f"             training reaches {low:.0%} to {high:.0%} of the peak: "
            f"{speed.update / high:,.3g} to {speed.update / low:,.3g} s an update"
        )
        yield f"             an engine makes {speed.tokens:,.0f} tokens/s, and a batch takes {speed.generation:,.3g} s"
    yield f"not reckoned {NOT_RECKONED}"


def _larger_run(plan: MemoryPlan) -> str:
    """Settings with which the same run would use more of the machine's GPUs; "" if no multiple
    fits."""
    # Roles on devices of their own do not grow, so this multiple fits in any case.
    factor = plan.machine.gpus // plan.gpus_requested
    if factor < 2:
        return ""
    ranks = plan.processes[POLICY] * factor
    engines = plan.processes[ENGINES] * factor
    return f": for example trainer.placement.policy_num_gpus_per_node={ranks} generator.num_inference_engines={engines}"


def _sizes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_size(size)}" for name, size in sizes.items())


def _size(count: int) -> str:
    if count >= 1 << 30:
        return f"{count / 2**30:.1f} GiB"
    return f"{count / 2**20:.0f} MiB"
