"""The configuration of a run in the terms of ``EngineConfig``.

Invariant: pure functions of the configuration and of whether there are GPUs. What cannot work is
rejected here, before an engine starts.
"""

from __future__ import annotations

import sys
from math import ceil

from skyasync.config.model_files import config_file, read_json
from skyasync.config.schema import Config
from skyasync.config.schema.generator import BETWEEN_GPUS
from skyasync.config.schema.sampling import backend, sampling_groups
from skyasync.errors import UserError
from skyasync.inference.interface import ENGINES, EngineConfig
from skyasync.registry import resolve_reference
from skyasync.weight_sync.verify.log_probabilities import BFLOAT16, FLOAT32, Rounding

_BETWEEN_GPUS = {
    "nccl": "weights go to the engines from GPU to GPU",
    "cuda_ipc": "engines read the weights on the GPUs that they share with the policy",
}
POSITIONS = "max_position_embeddings"
FEW_TURNS = 4  # for which max_model_len suffices if generator.max_turns is not set


def engine_config(cfg: Config, *, gpus: bool) -> EngineConfig:
    """Raises ``UserError`` for settings that this machine or the chosen engine cannot carry out."""
    generator = cfg.generator
    trainer = cfg.trainer
    name = backend(cfg)
    can = ENGINES.about(name).can
    limits = can["gpu_limits"] if gpus else can["cpu_limits"]
    if limits:
        for problem in resolve_reference(limits, kind="check of an engine")(cfg):
            raise UserError(problem)

    model = trainer.policy.model
    batched_tokens = generator.max_num_batched_tokens
    if 0 < batched_tokens < generator.max_num_seqs:
        raise UserError(
            f"generator.max_num_batched_tokens={batched_tokens} is less than generator.max_num_seqs="
            f"{generator.max_num_seqs}, and each of these sequences gets a token per step: raise the one, lower the "
            f"other, or leave it at 0"
        )
    if trainer.placement.colocate_all:
        sleep = "trainer.placement.colocate_all=true"
    else:
        sleep = ""
    if generator.hybrid_engines:
        sleep = f"generator.hybrid_engines={generator.hybrid_engines}"
    if sleep and ("gpu" if gpus else "cpu") not in can["sleeps_on"]:
        raise UserError(
            f"{sleep} puts engines to sleep during training, which generator.backend="
            f"{name} cannot do on a {'GPU' if gpus else 'CPU'}: set generator.backend=transformers, or "
            f"{sleep.partition('=')[0]}={'0' if generator.hybrid_engines else 'false'}"
        )
    return EngineConfig(
        model_path=model.path,
        dtype=generator.dtype if generator.dtype != "auto" else model.dtype,
        max_model_len=max_model_len(cfg),
        max_num_seqs=generator.max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        tensor_parallel_size=generator.inference_engine_tensor_parallel_size,
        gpu_memory_utilization=generator.gpu_memory_utilization / engines_per_device(cfg),
        kv_cache_gb=generator.kv_cache_gb,
        seed=trainer.seed,
        weight_sync_backend=weight_sync_backend(cfg, gpus=gpus),
        extra={
            "sleep_mode": bool(sleep),
            "one_per_prompt": not generator.is_num_return_sequences_expand,
            "engine_kwargs": dict(generator.engine_kwargs),
            "adapter_rank": adapter_rank(cfg),
            "routed_experts": trainer.policy.router_replay != "none",
            "config_kwargs": dict(model.config_kwargs),
        },
    )


def max_model_len(cfg: Config) -> int:
    """Tokens of a sequence in the engine, at which an episode ends: ``generator.max_model_len``, or
    what 0 stands for.

    Then an episode has room for its turns; the text between its responses is as long as a prompt
    may be.
    """
    generator = cfg.generator
    model = cfg.trainer.policy.model
    if generator.max_model_len:
        return generator.max_model_len
    file = config_file(model.path)
    try:
        if file:
            shape = read_json(file, model.path)
        else:
            shape = {POSITIONS: sys.maxsize}
        longest = int({**shape, **model.config_kwargs}[POSITIONS])
    except (
        UserError,
        KeyError,
        TypeError,
        ValueError,
    ):  # an error is raised where the model is checked
        longest = sys.maxsize
    response = max(sampling.max_generate_length for sampling in sampling_groups(generator).values())
    turn = cfg.trainer.max_prompt_length + response
    return max(min((generator.max_turns or FEW_TURNS) * turn, longest), turn)


def adapter_rank(cfg: Config) -> int:
    """Of the adapters, if engines are sent adapters alone; 0 if they are sent weights."""
    lora = cfg.trainer.policy.lora
    if lora.sync == "adapter":
        return lora.rank
    return 0


def rounding(cfg: Config, *, gpus: bool) -> Rounding:
    """What rounding can do to a log-probability, for the dtypes of policy and engine."""
    dtypes = {cfg.trainer.policy.model.dtype, engine_config(cfg, gpus=gpus).dtype}
    if dtypes <= ({"float32"} if gpus else {"float32", "auto"}):
        return FLOAT32
    return BFLOAT16


def engines_per_device(cfg: Config) -> int:
    """The most engines that have a device together, as ``plan_slots`` places them."""
    placement = cfg.trainer.placement
    if placement.colocate_all:
        return ceil(cfg.generator.own_engines / placement.policy_ranks)
    return 1


def colocated_rank(engine: int, ranks: int) -> int:
    """The policy's rank that shares its device with an engine, with
    ``trainer.placement.colocate_all``."""
    return engine % ranks


def weight_sync_backend(cfg: Config, *, gpus: bool) -> str:
    """How the weights travel: ``generator.weight_sync_backend``, with what ``auto`` stands for
    here."""
    chosen = cfg.generator.weight_sync_backend
    if chosen in BETWEEN_GPUS and not gpus:
        raise UserError(
            f"generator.weight_sync_backend={chosen} needs GPUs, and the cluster has none: use shared_memory"
        )
    together = cfg.trainer.placement.colocate_all
    # The checks reject cuda_ipc without a shared device, but not if a tool separates them.
    if chosen != "auto" and (together or chosen != "cuda_ipc"):
        return chosen
    by_file = (
        cfg.generator.weight_sync_mode == "delta"
        or adapter_rank(cfg)
        or cfg.generator.hybrid_engines
    )
    way = "cuda_ipc" if together else "nccl"
    ways = ENGINES.about(backend(cfg)).can["weight_sync"]
    if gpus and not by_file and way in ways:
        return way
    return str(ways[0])


def loads_as_files(cfg: Config) -> bool:
    """Whether the run's engines load weights by the names of the model's files."""
    engine = ENGINES.builtins().get(
        backend(cfg)
    )  # an engine of the user's may be known to their program alone
    return engine is not None and bool(engine.can["loads_as_files"])


def maps_weights(cfg: Config) -> bool:
    """Whether the trainer writes weights into shared memory that its engines have mapped, and not
    into a file.

    Deltas and adapters are added to weights that an engine has itself.
    """
    engine = ENGINES.builtins().get(
        backend(cfg)
    )  # one of the user's may be known to their program alone
    able = engine is not None and (
        engine.can["computes_on_mapped_weights"] or engine.can["reads_mapped_weights"]
    )
    whole = cfg.generator.weight_sync_mode == "full" and not adapter_rank(cfg)
    return bool(able) and whole and not cfg.generator.weight_sync_dir and sys.platform == "linux"


def computes_on_mapped_weights(cfg: Config) -> bool:
    """Whether the engines compute on the mapped weights, without a copy of their own."""
    return maps_weights(cfg) and bool(ENGINES.about(backend(cfg)).can["computes_on_mapped_weights"])


def chosen_engine(cfg: Config) -> str:
    """The engine of the run, and why it is this one; empty for a run without engines."""
    generator = cfg.generator
    name = backend(cfg)
    if generator.engines:
        return f"{name} (generator.engines: {len(generator.engines)})"
    if generator.num_inference_engines == 0:
        return ""
    if generator.backend != "auto":
        return f"{name} (generator.backend)"
    return f"{name} (generator.backend=auto: vLLM is {'' if name == 'vllm' else 'not '}installed)"


def chosen_backend(cfg: Config, *, gpus: bool) -> str:
    """A line that names what ``auto`` has become, and why; empty if the configuration names a
    backend."""
    if cfg.generator.weight_sync_backend != "auto":
        return ""
    way = weight_sync_backend(cfg, gpus=gpus)
    if way != "shared_memory":
        why = _BETWEEN_GPUS.get(way, f"the {backend(cfg)} engine's own way")
        return f"generator.weight_sync_backend=auto is {way}: {why}"
    delta = cfg.generator.weight_sync_mode == "delta"
    adapters = adapter_rank(cfg)
    if maps_weights(cfg):
        dtype = cfg.generator.dtype
        if not computes_on_mapped_weights(cfg):
            how = f"mapped memory, which the {backend(cfg)} engine loads"
        elif dtype in ("auto", cfg.trainer.policy.model.dtype):
            how = "mapped memory, on which the engines compute"
        else:
            how = f"mapped memory, from which the engines copy (generator.dtype={dtype} is not the policy's)"
    else:
        what = "of the weights"
        if adapters:
            what = "of the adapters alone (trainer.policy.lora.sync=adapter)"
        elif delta:
            what = "of what has changed (generator.weight_sync_mode=delta)"
        where = (
            cfg.generator.weight_sync_dir
            or "memory of this machine (/dev/shm, or the temporary folder)"
        )
        how = f"a file {what} in {where}"
    if gpus and not (delta or adapters):
        why = f" (the {backend(cfg)} engine has no other way)"
    else:
        why = ""
    if crosses_nodes(cfg):
        others = "; engines on other nodes get theirs by broadcast"
    else:
        others = ""
    return f"generator.weight_sync_backend=auto is shared_memory{why}: {how}{others}"


def crosses_nodes(cfg: Config) -> bool:
    """Whether weights that do not go by NCCL may have to reach engines on other nodes of a
    cluster."""
    return (
        bool(cfg.ray.address)
        and cfg.generator.own_engines > 0
        and not cfg.generator.weight_sync_dir
    )
