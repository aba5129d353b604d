"""How new weights reach the engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyasync.config.keys import key
from skyasync.config.parts import engines_with
from skyasync.config.schema.sampling import backend

if TYPE_CHECKING:
    from skyasync.config.schema import Config

BETWEEN_GPUS = ("nccl", "cuda_ipc")
"""Values of ``weight_sync_backend`` by which weights never lie in host memory."""

_TRANSFERS = "skyasync.weight_sync.transfers:TRANSFERS"


@dataclass
class WeightSyncConfig:
    """The part of ``GeneratorConfig`` that is about new weights."""

    weight_sync_backend: str = key("auto", choices=("auto",), registry=_TRANSFERS)
    """How weights reach the engines; auto is nccl for vllm on GPUs of its own, cuda_ipc on GPUs that it shares with the
    policy (trainer.placement.colocate_all), else shared_memory; engines on other nodes of a cluster then receive a
    broadcast over TCP."""
    weight_sync_mode: str = key("full", choices=("full", "delta"))
    """What a weight sync sends: all weights, or only those that have changed since the last one (delta; not by nccl or
    cuda_ipc). Both ends keep a copy for it; where most have changed, or an engine is new, all are sent."""
    weight_sync_dir: str = key("", open_ended=True, when="generator.engines")
    """Folder that the policy's machine and those of generator.engines see under this path, for weights on their way;
    empty is shared memory, for servers on the policy's machine."""
    verify_weight_sync: bool = key(True)
    """Compare log-probabilities of verification prompts, trainer against engine, after weight syncs."""
    verify_interval: int = key(10, low=1)
    """Syncs from one such comparison to the next; digests prove every sync but those by nccl and cuda_ipc."""
    weight_sync_tolerance: float = key(0.0, low=0.0, when="generator.verify_weight_sync")
    """Largest mean difference per token allowed in it, in nats; 0 takes 4 times the difference at start-up."""


def check_weight_sync(cfg: Config) -> Iterator[str]:
    """Ways that the chosen engine does not have, or that contradict its devices or what is trained."""
    from skyasync.inference.interface import ENGINES

    generator, engine = cfg.generator, backend(cfg)
    way, can = generator.weight_sync_backend, ENGINES.about(engine).can
    if generator.weight_sync_mode == "delta" and not can["takes_changes"]:
        yield (
            f"generator.weight_sync_mode=delta needs {engines_with('takes_changes')}: generator.backend={engine} "
            f"does not say that it takes changes alone (takes_changes)"
        )
    elif generator.weight_sync_mode == "delta" and way in BETWEEN_GPUS:
        yield (
            f"generator.weight_sync_mode=delta goes by a file, generator.weight_sync_backend={way} sends all weights: "
            f"remove one of them"
        )
    if way not in ("auto", *can["weight_sync"]):
        yield (
            f"generator.weight_sync_backend={way} needs {engines_with('weight_sync', way)}: with generator.backend="
            f"{engine} use generator.weight_sync_backend={'|'.join(can['weight_sync'])}"
        )
    lora, key = cfg.trainer.policy.lora, "trainer.policy.lora.sync=adapter"
    if lora.rank and lora.sync == "adapter":
        if not can["takes_adapters"]:
            yield f"{key} needs {engines_with('takes_adapters')}; found {engine}: set trainer.policy.lora.sync=merged"
        elif "lm_head" in lora.target_modules and "head" not in can["takes_adapters"]:
            yield (
                f"{key} sends an adapter of lm_head (trainer.policy.lora.target_modules), which generator.backend="
                f"{engine} cannot compute with: leave lm_head out, or set trainer.policy.lora.sync=merged"
            )
        if way in BETWEEN_GPUS:
            yield f"{key} goes by a file, generator.weight_sync_backend={way} sends all weights: remove one of them"
        if generator.weight_sync_mode == "delta":
            yield f"{key} and generator.weight_sync_mode=delta both send less than all weights: remove one of them"
        if cfg.trainer.placement.colocate_all and can["forgets_asleep"]:
            yield (
                f"{key} adds to weights that the engine keeps, and trainer.placement.colocate_all=true has generator."
                f"backend={engine} give them away while it sleeps: set trainer.policy.lora.sync=merged"
            )
    if cfg.generator.hybrid_engines and generator.weight_sync_backend in BETWEEN_GPUS:
        yield (
            f"generator.weight_sync_backend={generator.weight_sync_backend} reaches engines that are awake at a weight "
            f"sync, and generator.hybrid_engines={generator.hybrid_engines} sleep then: use "
            f"generator.weight_sync_backend=shared_memory"
        )
    if not cfg.trainer.placement.colocate_all:
        if generator.weight_sync_backend == "cuda_ipc":
            yield (
                "generator.weight_sync_backend=cuda_ipc has engines read on the policy's own GPUs, and "
                "trainer.placement.colocate_all=false gives them others: use generator.weight_sync_backend=nccl, or "
                "set trainer.placement.colocate_all=true"
            )
        return
    if generator.weight_sync_backend == "nccl":
        yield (
            "generator.weight_sync_backend=nccl broadcasts from one GPU to others, and "
            "trainer.placement.colocate_all=true puts policy and engines on the same: use "
            "generator.weight_sync_backend=cuda_ipc or shared_memory, or set trainer.placement.colocate_all=false"
        )
    if generator.devices_per_engine > 1:
        size = generator.inference_engine_tensor_parallel_size
        key = f"generator.inference_engine_tensor_parallel_size={size}" if size > 1 else "pipeline_parallel_size"
        yield (
            f"{key} needs as many GPUs per engine, and trainer.placement.colocate_all=true gives it a share of one: "
            f"set the size to 1, or trainer.placement.colocate_all=false"
        )
