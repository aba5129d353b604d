"""What a run will need, said before anything of it starts: ``estimate``.

Invariant: an estimate is a pure function of a model's ``config.json``, the settings and the machine. Nothing here
imports torch, Ray or an engine, but for models whose family ``shape.FAMILIES`` does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from skyasync.config.model_files import model_path
from skyasync.config.schema import Config
from skyasync.config.schema.reward_models import reward_models
from skyasync.planning.advice import advise
from skyasync.planning.plan import Machine, MemoryPlan, make_plan
from skyasync.planning.shape import read_shape
from skyasync.workers.roles import POLICY, REWARD_ROLE, roles_with_ranks


@dataclass(frozen=True)
class Report:
    """What each device and the host must hold, and the keys and values that make it fit, if it does not."""

    plan: MemoryPlan
    advice: Mapping[str, Any]


def estimate(cfg: Config, machine: Machine) -> Report:
    """What a run of ``cfg`` needs on a machine.

    Raises:
        UserError: for a model whose ``config.json`` cannot be read.
    """
    shape, shapes = read_shape(model_path(cfg.trainer.policy.model.path)), {}
    for role in roles_with_ranks(cfg):
        own = role.own_model(cfg)
        if role.name == REWARD_ROLE:  # held side by side: as one, with the activations of the largest
            paths = [model.path for model in reward_models(cfg.trainer.reward).values()]
            models = [read_shape(model_path(path, "trainer.reward")) for path in paths]
            *rest, largest = sorted(models, key=lambda model: model.parameters)
            shapes[role.name] = replace(largest, root=largest.root + sum(model.parameters for model in rest))
        elif role.name != POLICY and own and own.path:
            shapes[role.name] = read_shape(model_path(own.path, f"{role.section}.model.path"))

    def planned(settings: Config) -> MemoryPlan:
        return make_plan(settings, shape, machine, shapes=shapes)

    plan = planned(cfg)
    return Report(plan, {} if plan.fits else advise(cfg, plan, planned))
