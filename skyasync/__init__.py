"""skyasync: reinforcement learning of language models with a swappable execution plan.

The public names, nothing else. They are imported when first used, so that a wrong setting on the command
line is refused before torch is loaded.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyasync.callbacks import TrainerCallback
    from skyasync.cli.train import main
    from skyasync.config import Config, load_config
    from skyasync.envs import BaseTextEnv, BaseTextEnvStepOutput
    from skyasync.errors import TransientError, UserError
    from skyasync.plans import PLANS
    from skyasync.plans.fully_async import FullyAsyncRayPPOTrainer
    from skyasync.plans.one_step_off import AsyncRayPPOTrainer
    from skyasync.plans.streamed import StreamedRayPPOTrainer
    from skyasync.run.experiment import BasePPOExp
    from skyasync.trainer import RayPPOTrainer

# Under `uv run` Ray would start every worker through uv again, in an environment that uv makes anew and that may lack
# what this one has. Ray reads the variable when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# The processes of a run share the cores, and a thread that waits for work by spinning takes them from the others
# (with more threads than cores that is most of the time). OpenMP reads the variable when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_HOMES = {
    "AsyncRayPPOTrainer": "skyasync.plans.one_step_off",
    "BasePPOExp": "skyasync.run.experiment",
    "BaseTextEnv": "skyasync.envs",
    "BaseTextEnvStepOutput": "skyasync.envs",
    "Config": "skyasync.config",
    "FullyAsyncRayPPOTrainer": "skyasync.plans.fully_async",
    "PLANS": "skyasync.plans",
    "RayPPOTrainer": "skyasync.trainer",
    "StreamedRayPPOTrainer": "skyasync.plans.streamed",
    "TrainerCallback": "skyasync.callbacks",
    "TransientError": "skyasync.errors",
    "UserError": "skyasync.errors",
    "load_config": "skyasync.config",
    "main": "skyasync.cli.train",
}

__all__ = [
    "PLANS",
    "AsyncRayPPOTrainer",
    "BasePPOExp",
    "BaseTextEnv",
    "BaseTextEnvStepOutput",
    "Config",
    "FullyAsyncRayPPOTrainer",
    "RayPPOTrainer",
    "StreamedRayPPOTrainer",
    "TrainerCallback",
    "TransientError",
    "UserError",
    "load_config",
    "main",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'skyasync' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
