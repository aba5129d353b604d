"""skyasync: reinforcement learning of language models with a swappable execution plan.

The public names, nothing else. They are imported when first used, so that a wrong setting on the
command line is refused before torch is loaded.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyasync.api import TrainResult, evaluate, rollouts, train
    from skyasync.callbacks import TrainerCallback
    from skyasync.cli.train import main
    from skyasync.config import Config, load_config
    from skyasync.envs import BaseTextEnv, BaseTextEnvStepOutput
    from skyasync.errors import TransientError, UserError
    from skyasync.run.experiment import BasePPOExp
    from skyasync.trainer import RayPPOTrainer
    from skyasync.trainer.extensions.early_stopping import EarlyStopping
    from skyasync.trainer.plans import PLANS
    from skyasync.trainer.plans.fully_async import (
        ColocatedAsyncRayPPOTrainer,
        FullyAsyncRayPPOTrainer,
        HybridAsyncRayPPOTrainer,
    )
    from skyasync.trainer.plans.one_step_off import AsyncRayPPOTrainer
    from skyasync.trainer.plans.streamed import StreamedRayPPOTrainer

# Under `uv run` Ray would start every worker through uv again, in a new environment, which may lack
# what this one has. Ray reads the variable when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# The processes of a run share the cores, and a thread that waits for work by spinning takes them
# from the others (with more threads than cores that is most of the time). OpenMP reads the variable
# when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_HOMES = {
    "AsyncRayPPOTrainer": "skyasync.trainer.plans.one_step_off",
    "BasePPOExp": "skyasync.run.experiment",
    "BaseTextEnv": "skyasync.envs",
    "BaseTextEnvStepOutput": "skyasync.envs",
    "ColocatedAsyncRayPPOTrainer": "skyasync.trainer.plans.fully_async",
    "Config": "skyasync.config",
    "EarlyStopping": "skyasync.trainer.extensions.early_stopping",
    "FullyAsyncRayPPOTrainer": "skyasync.trainer.plans.fully_async",
    "HybridAsyncRayPPOTrainer": "skyasync.trainer.plans.fully_async",
    "PLANS": "skyasync.trainer.plans",
    "RayPPOTrainer": "skyasync.trainer",
    "StreamedRayPPOTrainer": "skyasync.trainer.plans.streamed",
    "TrainResult": "skyasync.api",
    "TrainerCallback": "skyasync.callbacks",
    "TransientError": "skyasync.errors",
    "UserError": "skyasync.errors",
    "evaluate": "skyasync.api",
    "load_config": "skyasync.config",
    "main": "skyasync.cli.train",
    "rollouts": "skyasync.api",
    "train": "skyasync.api",
}

__all__ = [
    "PLANS",
    "AsyncRayPPOTrainer",
    "BasePPOExp",
    "BaseTextEnv",
    "BaseTextEnvStepOutput",
    "ColocatedAsyncRayPPOTrainer",
    "Config",
    "EarlyStopping",
    "FullyAsyncRayPPOTrainer",
    "HybridAsyncRayPPOTrainer",
    "RayPPOTrainer",
    "StreamedRayPPOTrainer",
    "TrainResult",
    "TrainerCallback",
    "TransientError",
    "UserError",
    "evaluate",
    "load_config",
    "main",
    "rollouts",
    "train",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'skyasync' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
