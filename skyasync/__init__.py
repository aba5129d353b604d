"""skyasync: reinforcement learning of language models with a swappable execution plan.

The public names, nothing else. They are imported when first used, so that a wrong setting on the command
line is refused before torch is loaded.
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
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

# Under `uv run` Ray would start every worker through uv again, in a new environment, which may lack what this one
# has. Ray reads the variable when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# The processes of a run share the cores, and a thread that waits for work by spinning takes them from the others
# (with more threads than cores that is most of the time). OpenMP reads the variable when torch is loaded.
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


#: Modules of this package, or packages in it, as programs of earlier versions import them.
_MOVED = {
    "algorithms.filters": "algorithms.shaping",
    "algorithms.normalization": "algorithms.advantages",
    "algorithms.losses.sequence": "algorithms.losses.clipped",
    "algorithms.registries": "algorithms",
    "compat": "interop",
    "engines.protocol": "inference.interface",
    "engines": "inference",
    "envs.gsm8k": "envs.reward",
    "envs.registry": "envs",
    "experiment": "run.experiment",
    "observe": "observability",
    "plans": "trainer.plans",
    "rewards.registry": "rewards",
    "rewards.score": "rewards.signature",
    "rollout.contract": "rollout.generator_api",
    "together": "utils.task_group",
    "trainer.plans.colocated_async": "trainer.plans.fully_async",
    "trainer.plans.hybrid_async": "trainer.plans.fully_async",
    "workers.batch": "models.batch",
}


class _Moved:
    """Finds a module by its former name: it is the module that has the new one. A warning gives that."""

    @staticmethod
    def find_spec(name: str, *where: object) -> ModuleSpec | None:
        for former, new in _MOVED.items():
            if f"{name}.".startswith(f"{__name__}.{former}."):
                origin = name.replace(former, new, 1)
                return spec_from_loader(name, _Moved(), origin=origin)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} is called {spec.origin} now", FutureWarning, stacklevel=2)
        module = import_module(spec.origin or "")
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own


sys.meta_path.insert(0, _Moved)  # before the finder of files: a package that has moved knows its own folder
