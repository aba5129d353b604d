"""``python -m skyasync plan [options] key=value ...``, and ``--dry-run`` of any run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from skyasync.config.paths import model_path
from skyasync.config.reward_models import reward_models
from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.planning.advice import advise
from skyasync.planning.machine import Machine, parse_size, this_machine
from skyasync.planning.plan import MemoryPlan, make_plan
from skyasync.planning.shape import ModelShape, read_shape
from skyasync.planning.show import as_json, print_plan
from skyasync.workers.roles import POLICY, REWARD_ROLE, wanted_roles

SIZES = {"--gpu-memory": "gpu_memory", "--host-memory": "host_memory"}
HELP = """\
usage: python -m skyasync plan [--gpus N] [--gpu-memory SIZE] [--host-memory SIZE] [--json] [key=value ...]

Says which processes a run would start, what each device and the host must hold, and whether it fits. It reads the
model's config.json alone. The machine is the one here, unless options describe another: sizes are 80GiB or 80GB, of
each GPU and of each host. The same as --dry-run of a run. Ends with status 0 if the run fits, 1 if it does not.
"""


@dataclass(frozen=True)
class Options:
    """What the command line says besides settings; None is what the machine here has."""

    gpus: int | None = None
    gpu_memory: int | None = None
    host_memory: int | None = None
    json: bool = False


def split_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The options, and the arguments that are left.

    Raises:
        UserError: for an option without its value, or with a wrong one.
    """
    options, rest, arguments = Options(), [], list(argv)
    while arguments:
        name, equals, value = arguments.pop(0).partition("=")
        if name == "--json" and not equals:
            options = replace(options, json=True)
        elif name in ("--gpus", *SIZES):
            if not equals:
                if not arguments:
                    raise UserError(f"{name} needs a value: {name} {8 if name == '--gpus' else '80GiB'}")
                value = arguments.pop(0)
            options = _with(options, name, value)
        else:
            rest.append(name + equals + value)
    return options, rest


def show_plan(cfg: Config, options: Options) -> bool:
    """Print the plan of a run; whether it fits."""
    machine = _machine(options)
    shape = read_shape(model_path(cfg.trainer.policy.model.path))
    shapes = {}
    for role in wanted_roles(cfg):
        own = role.own_model(cfg)
        if role.name == REWARD_ROLE:
            shapes[role.name] = _together(cfg)
        elif role.name != POLICY and own and own.path:
            shapes[role.name] = read_shape(model_path(own.path, f"{role.section}.model.path"))

    def planned(settings: Config) -> MemoryPlan:
        return make_plan(settings, shape, machine, shapes=shapes)

    plan = planned(cfg)
    advice = {} if plan.fits else advise(cfg, plan, planned)
    if options.json:
        print(as_json(plan, advice))
    else:
        print_plan(plan, advice)
    return plan.fits


def _together(cfg: Config) -> ModelShape:
    """All reward models, which are held side by side, as one with the activations of the largest."""
    models = reward_models(cfg.trainer.reward).values()
    *rest, largest = sorted((read_shape(model_path(m.path, "trainer.reward")) for m in models), key=_size)
    return replace(largest, root=largest.root + sum(map(_size, rest)))


def _size(shape: ModelShape) -> int:
    return shape.parameters


def _with(options: Options, name: str, value: str) -> Options:
    if name in SIZES:
        sizes: dict[str, Any] = {SIZES[name]: parse_size(value, name)}
        return replace(options, **sizes)
    if not value.isdecimal():
        raise UserError(f"{name} {value}: not a number of GPUs; 0 plans for a machine without")
    return replace(options, gpus=int(value))


def _machine(options: Options) -> Machine:
    here = this_machine()
    gpus = here.gpus if options.gpus is None else options.gpus
    if options.gpu_memory is not None and options.gpus is None and not here.gpus:
        raise UserError("--gpu-memory needs --gpus N beside it: there is no GPU here")
    memory = options.gpu_memory or here.gpu_memory
    if gpus and not memory:
        raise UserError(f"--gpus {gpus} needs --gpu-memory beside it, for example 80GiB: there is no GPU here")
    return Machine(gpus, memory if gpus else 0, options.host_memory or here.host_memory)
