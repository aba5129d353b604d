"""What a run will need, printed before anything of it starts: ``estimate``.

Invariant: an estimate follows from a model's ``config.json``, the settings and the machine.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from skyasync.config.model_files import model_path
from skyasync.config.schema import Config
from skyasync.planning.advice import advise
from skyasync.planning.plan import MemoryPlan, make_plan
from skyasync.planning.shape import read_shape
from skyasync.utils.machine import Machine
from skyasync.workers.roles import roles_with_ranks


@dataclass(frozen=True)
class Report:
    """A plan, and the keys and values that make it fit, if it does not."""

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
    # A file of the hub is in the cache from here on.
    shape = read_shape(model.path, config_kwargs=model.config_kwargs)
    # These import torch.
    from skyasync.planning.measure import measure
    from skyasync.preflight.prepare import settle_models

    settle_models(cfg, roles_with_ranks(cfg), own_tokenizer=True, weights=False)
    measured = partial(measure, gpus=machine.gpus > 0)
    plan = make_plan(cfg, shape, machine, measured)
    return Report(plan, {} if plan.fits else advise(cfg, plan, measured))
