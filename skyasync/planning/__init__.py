"""What a run will need, said before anything of it starts: ``estimate``.

Invariant: an estimate follows from a model's ``config.json``, the settings and the machine. What
ranks need is measured on the workers' own code, without weights and other ranks. What a vLLM engine
holds, vLLM says itself if it is installed; all else is arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from skyasync.config.model_files import model_path
from skyasync.config.schema import Config
from skyasync.config.schema.sampling import backend
from skyasync.planning.advice import advise
from skyasync.planning.plan import MemoryPlan, make_plan
from skyasync.planning.shape import read_shape
from skyasync.planning.vllm_report import ask_vllm
from skyasync.utils.machine import Machine
from skyasync.workers.roles import roles_with_ranks


@dataclass(frozen=True)
class Report:
    """What each device and the host must hold, and the keys and values that make it fit, if it does
    not."""

    plan: MemoryPlan
    advice: Mapping[str, Any]


def estimate(cfg: Config, machine: Machine) -> Report:
    """What a run of ``cfg`` needs on a machine.

    Raises:
        UserError: for a model whose ``config.json`` cannot be read, or settings with which a run
            would not start.
    """
    cfg = copy.deepcopy(cfg)
    model = cfg.trainer.policy.model
    model.path = model_path(model.path)
    # of the hub, it is in the cache from here on
    shape = read_shape(model.path, config_kwargs=model.config_kwargs)
    from skyasync.planning.measure import measure, vllm_request
    from skyasync.preflight.prepare import settle_models

    settle_models(cfg, roles_with_ranks(cfg), own_tokenizer=True, weights=False)

    measured = partial(measure, gpus=machine.gpus > 0)
    plan = make_plan(cfg, shape, machine, measured)
    if backend(cfg) == "vllm" and cfg.generator.own_engines:
        request = vllm_request(cfg, plan.engine, shape, gpus=machine.gpus > 0)
        report = ask_vllm(request, cfg.generator.devices_per_engine)
        plan = make_plan(cfg, shape, machine, measured, report)
    return Report(plan, {} if plan.fits else advise(cfg, plan, measured))
