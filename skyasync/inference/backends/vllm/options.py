"""vLLM's own engine arguments, as ``generator.engine_kwargs`` gives them.

Invariant: an argument that a run has a key of its own for is rejected before anything starts,
without vLLM. All others are checked where vLLM is imported anyway: by its own classes, when an
engine starts, before its model loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from skyasync.config.model_files import config_file, read_shape
from skyasync.config.schema import Config
from skyasync.config.schema.sampling import sampling_groups
from skyasync.errors import UserError, nearest
from skyasync.models.config import EXPERTS

KEY = "generator.engine_kwargs"
CPU_BLOCK = 32  # tokens of a cache block in which vLLM's attention on a CPU computes

#: Argument -> the key to use instead, or why it is not supported.
RESERVED = {
    "model": "use trainer.policy.model.path",
    "dtype": "use generator.dtype",
    "seed": "use trainer.seed",
    "max_model_len": "use generator.max_model_len",
    "max_num_seqs": "use generator.max_num_seqs",
    "max_num_batched_tokens": "use generator.max_num_batched_tokens",
    "gpu_memory_utilization": "use generator.gpu_memory_utilization",
    "kv_cache_memory_bytes": "use generator.kv_cache_gb on a CPU, generator.gpu_memory_utilization on a GPU",
    "tensor_parallel_size": "use generator.inference_engine_tensor_parallel_size",
    "data_parallel_size": "use generator.num_inference_engines, which are that many replicas",
    "hf_overrides": "use trainer.policy.model.config_kwargs, which the trained model follows too",
    "enable_sleep_mode": "use trainer.placement.colocate_all",
    "weight_transfer_config": "use generator.weight_sync_backend",
    "logprobs_mode": "training needs the log-probabilities of what was sampled from",
    "worker_extension_cls": "the weight sync has its own",
    "distributed_executor_backend": "an engine's workers are children of its process",
    "enable_return_routed_experts": "use trainer.policy.router_replay",
    "trust_remote_code": "no code of a model's folder is run",
}

_RANDOM = "the engine would compute with random weights until the first weight sync"
#: Values that vLLM takes and a run cannot use.
REJECTED: dict[tuple[str, str], str] = {("load_format", "dummy"): _RANDOM}


def reserved_options(options: Mapping[str, object]) -> Iterator[str]:
    """Yield a line for each argument that is not supported."""
    for name, value in options.items():
        reason = RESERVED.get(name)
        if reason:
            yield f"{KEY}.{name} is not taken: {reason}"
        elif isinstance(value, str) and (name, value) in REJECTED:
            yield f"{KEY}.{name}={value!r} is not taken: {REJECTED[name, value]}"


def cpu_limits(cfg: Config) -> Iterator[str]:
    """Yield a line for each setting that vLLM's CPU engine does not support, or ends at."""
    options = cfg.generator.engine_kwargs
    model = cfg.trainer.policy.model
    replay = cfg.trainer.policy.router_replay
    if replay != "none":
        yield (
            f"trainer.policy.router_replay={replay} with generator.backend=vllm needs GPUs: on a CPU vLLM does not "
            f"report the experts that it chose; set generator.backend=transformers"
        )
    stages = options.get("pipeline_parallel_size", 1)
    if isinstance(stages, int) and stages > 1:
        yield (
            f"{KEY}.pipeline_parallel_size={stages} needs GPUs: on a CPU vLLM has no pipelines; "
            f"generator.inference_engine_tensor_parallel_size={stages} divides an engine there"
        )
    if options.get("enable_chunked_prefill"):
        yield (
            f"{KEY}.enable_chunked_prefill=true needs GPUs: vLLM's CPU engine ends at the first "
            f"request with a seed whose prompt is computed in chunks; remove it"
        )
    size = options.get("block_size")
    if isinstance(size, int) and size % CPU_BLOCK:
        yield (
            f"{KEY}.block_size={size} needs GPUs: vLLM's attention on a CPU takes multiples of {CPU_BLOCK}: set "
            f"{KEY}.block_size={-(-size // CPU_BLOCK) * CPU_BLOCK}, or remove the setting"
        )
    lora = cfg.trainer.policy.lora
    if lora.sync != "adapter" or not lora.rank:
        return
    file = config_file(model.path)
    if file is None:
        return
    shape = read_shape(file, f"trainer.policy.model.path={model.path}") | model.config_kwargs
    for name in EXPERTS:
        count = shape.get(name)
        if isinstance(count, int) and count > 0:
            reason = f"vLLM's CPU kernels have no adapters in a model with experts ({name}={count})"
            yield no_adapters(model.path, reason)


# The most entries of a request's lists on a GPU: constants of vLLM 0.32's
# ``v1/worker/gpu/sample/logit_bias.py``. A longer list raises in the worker, which ends the engine.
GPU_LIST_LIMITS = {"allowed_token_ids": 1024, "logit_bias": 1024}
GPU_STOP_TOKENS = 128  # with min_tokens


def gpu_limits(cfg: Config) -> Iterator[str]:
    """Yield a line for each list of the sampling settings that is too long for vLLM on a GPU."""
    for group, sampling in sampling_groups(cfg.generator).items():
        for name, limit in GPU_LIST_LIMITS.items():
            size = len(getattr(sampling, name))
            if size > limit:
                yield f"generator.{group}.{name} has {size} tokens: on a GPU vLLM takes at most {limit}"
        size = len(sampling.stop_token_ids)
        if sampling.min_tokens and size > GPU_STOP_TOKENS:
            yield (
                f"generator.{group}.stop_token_ids has {size} tokens: with min_tokens vLLM takes at most "
                f"{GPU_STOP_TOKENS} on a GPU"
            )


def no_adapters(model: str, reason: str) -> str:
    return (
        f"trainer.policy.lora.sync=adapter cannot be had with generator.backend=vllm and {model}: {reason}; "
        f"set trainer.policy.lora.sync=merged"
    )


def check_options(options: Mapping[str, object]) -> None:
    """Check the engine's arguments. Imports vLLM.

    Raises:
        UserError: for the first wrong name, type or choice, with the nearest right one.
    """
    if not options:
        return
    from vllm.engine.arg_utils import AsyncEngineArgs

    arguments = _fields(AsyncEngineArgs)
    for name, value in options.items():
        if name not in arguments or name.startswith("_"):
            public = [argument for argument in arguments if not argument.startswith("_")]
            hint = _did_you_mean(name, set(public) - set(RESERVED))
            raise UserError(f"{KEY}.{name} is not an argument of vLLM's AsyncEngineArgs{hint}")
        _check_value(f"{KEY}.{name}", name, value, arguments[name])


def _check_value(path: str, name: str, value: object, kind: Any) -> None:  # noqa: ANN401  (a type)
    """Raises ``UserError`` for a value that is not of the argument's type.

    Args:
        path: of the setting, for messages.
        kind: the annotation, possibly a union.
    """
    is_union = get_origin(kind) in (Union, UnionType)
    members = get_args(kind) if is_union else (kind,)
    groups: list[Any] = [member for member in members if is_dataclass(member)]
    choices: list[Any] = []
    plain = []
    for member in members:
        if get_origin(member) is Literal:
            choices += get_args(member)
        else:
            plain.append(member)
    # These are annotated as a plain dictionary or text, although vLLM has a class, or choices.
    if name == "speculative_config":
        from vllm.config import SpeculativeConfig

        groups.append(SpeculativeConfig)
    elif name == "quantization":
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

        choices += QUANTIZATION_METHODS
    if isinstance(value, dict) and groups:
        settings = _fields(groups[0])
        for key, item in value.items():
            if key not in settings:
                raise UserError(
                    f"{path}.{key} is not a setting of vLLM{_did_you_mean(str(key), settings)}"
                )
            _check_value(f"{path}.{key}", str(key), item, settings[key])
        return
    if set(plain) <= {str, NoneType} and isinstance(value, str) and choices:
        if value in choices:
            return
        texts = [str(choice) for choice in choices]
        hint = _did_you_mean(value, texts) or f": it is one of {', '.join(texts)}"
        raise UserError(f"{path}={value!r} is not a value that vLLM accepts{hint}")
    allowed_types = {*plain, *map(type, choices)}
    if float in plain:
        allowed_types.add(int)
    # Other types are vLLM's own, which its classes check.
    value_type = type(value)
    if set(plain) <= {bool, int, float, str, NoneType} and value_type not in allowed_types:
        type_name = kind.__name__ if isinstance(kind, type) else kind
        raise UserError(f"{path}={value!r} must be {type_name}, found {value_type.__name__}")


def _did_you_mean(name: str, candidates: Iterable[str]) -> str:
    names = " or ".join(nearest(name, set(candidates)))
    if names:
        return f": did you mean {names}?"
    return ""


@cache
def _fields(group: Any) -> dict[str, Any]:  # noqa: ANN401  (a dataclass of vLLM's)
    """Field -> its type; a type that is written as a text allows everything."""
    types: dict[str, Any] = {}
    for field in fields(group):
        types[field.name] = object if isinstance(field.type, str) else field.type
    return types


def without_adapters(architectures: Iterable[str]) -> str:
    """The first of these models without adapters in vLLM; "" if there is none.

    Imports vLLM and the models. Models that vLLM does not know are left out.
    """
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora

    for name in architectures:
        model = ModelRegistry.models.get(name)
        if model is not None and not supports_lora(model.load_model_cls()):
            return name
    return ""


def devices(options: Mapping[str, object], tensor_parallel: int) -> int:
    """The devices of an engine: pipeline stages, each of ``tensor_parallel`` devices."""
    stages = options.get("pipeline_parallel_size", 1)
    if isinstance(stages, int):
        return tensor_parallel * stages
    return tensor_parallel
