"""SkyRL's names: code that was written for it changes its imports, to ``from skyasync.compat.skyrl import ...``.

What each name does is ours and documented there; what it is called and given is SkyRL's. See docs/bring_your_code.md.
"""

from skyasync.compat.skyrl.algorithms import (
    AdvantageEstimatorRegistry,
    PolicyLossRegistry,
    register_advantage_estimator,
    register_policy_loss,
    sync_registries,
)
from skyasync.compat.skyrl.batch import TrainingInputBatch
from skyasync.compat.skyrl.callbacks import CallbackInput, TrainingCallback, TrainingControl
from skyasync.compat.skyrl.experiment import (
    AlgorithmConfig,
    BasePPOExp,
    Config,
    GeneratorConfig,
    SkyRLTrainConfig,
    TrainerConfig,
    initialize_ray,
    make_config,
    validate_cfg,
)
from skyasync.compat.skyrl.generators import (
    BatchMetadata,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    InferenceEngineClient,
    InferenceEngineInput,
    InferenceEngineOutput,
    TrajectoryID,
    get_sampling_params_for_backend,
    prepare_generator_input,
)
from skyasync.compat.skyrl.gym import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    Env,
    ToolGroup,
    make,
    register,
    tool,
)
from skyasync.compat.skyrl.hooks import SkyRLNames
from skyasync.compat.skyrl.shims import ResumeMode, Timer
from skyasync.compat.skyrl.trainer import RayPPOTrainer

__all__ = [
    "AdvantageEstimatorRegistry",
    "AlgorithmConfig",
    "BasePPOExp",
    "BaseTextEnv",
    "BaseTextEnvStepOutput",
    "BatchMetadata",
    "CallbackInput",
    "Config",
    "ConversationType",
    "Env",
    "GeneratorConfig",
    "GeneratorInput",
    "GeneratorInterface",
    "GeneratorOutput",
    "InferenceEngineClient",
    "InferenceEngineInput",
    "InferenceEngineOutput",
    "PolicyLossRegistry",
    "RayPPOTrainer",
    "ResumeMode",
    "SkyRLNames",
    "SkyRLTrainConfig",
    "Timer",
    "ToolGroup",
    "TrainerConfig",
    "TrainingCallback",
    "TrainingControl",
    "TrainingInputBatch",
    "TrajectoryID",
    "get_sampling_params_for_backend",
    "initialize_ray",
    "make",
    "make_config",
    "prepare_generator_input",
    "register",
    "register_advantage_estimator",
    "register_policy_loss",
    "sync_registries",
    "tool",
    "validate_cfg",
]
