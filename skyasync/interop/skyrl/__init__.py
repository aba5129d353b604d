"""SkyRL: settings, recipes, and the names that its users' code imports.

Code that was written for it changes its imports, to ``from skyasync.interop.skyrl import ...``. Names and parameters
are SkyRL's; what they do is ours. See docs/bring_your_code.md.
"""

from __future__ import annotations

from importlib import import_module

from skyasync.interop.system import System

SYSTEM = System("skyrl", "SkyRL", order=1, has_our_keys=True)

#: Module -> its public names, imported when they are first used.
_NAMES = {
    "algorithms": (
        "AdvantageEstimatorRegistry PolicyLossRegistry register_advantage_estimator register_policy_loss "
        "sync_registries"
    ),
    "batch": "TrainingInputBatch",
    "generators": (
        "BatchMetadata GeneratorInput GeneratorInterface GeneratorOutput InferenceEngineClient InferenceEngineInput "
        "InferenceEngineOutput TrajectoryID get_sampling_params_for_backend prepare_generator_input"
    ),
    "gym": "BaseTextEnv BaseTextEnvStepOutput ConversationType Env ToolGroup make register tool",
    "hooks": "CallbackInput SkyRLNames TrainingCallback TrainingControl",
    "shims": "ResumeMode Timer",
    "trainer": (
        "AlgorithmConfig BasePPOExp Config GeneratorConfig RayPPOTrainer SkyRLTrainConfig TrainerConfig initialize_ray "
        "make_config validate_cfg"
    ),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [*_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
