"""How vLLM is started: environment, engine arguments, sampling parameters.

Invariant: no code of a model's repository is run, and nothing is fetched from a network unless the
model's path names it. Importing this module does not import vLLM: its environment must be set
before.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skyasync.config.model_files import config_file, read_json
from skyasync.errors import UserError
from skyasync.heap import use_fixed_segments
from skyasync.inference.backends.vllm.options import devices, no_adapters, without_adapters
from skyasync.inference.interface import (
    EngineConfig,
    GenerationRequest,
    RequestFailedError,
    SamplingParams,
)
from skyasync.models.config import linear_layers, overrides_of
from skyasync.weight_sync.update import ADAPTER_ID, WeightSyncError

if TYPE_CHECKING:
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

BACKENDS = {"nccl": "broadcast"}
"""vLLM's name of a way, if it is not the setting's: vLLM has a transfer engine ``nccl`` of its
own."""
WORKER_EXTENSION = "skyasync.weight_sync.transfers.vllm_worker.WorkerExtension"
MIN_BATCHED_TOKENS = 8192  # per step, prompts included; enough for a group's prompts at once


def prepare_environment(config: EngineConfig) -> None:
    """Set what vLLM reads from the environment. For the process as a whole: one engine per process.

    On a CPU ``config.extra["cpu_bind"]`` pins the engine's threads to cores ("0", "0-3"; vLLM's
    syntax). Without it they are not pinned: vLLM's own choice would put every engine of a machine
    on the same core.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = (
        "spawn"  # a fork would copy this process's threads' locks
    )
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = config.extra.get("cpu_bind", "nobind")
    os.environ.pop(
        "VLLM_CPU_KVCACHE_SPACE", None
    )  # whole GB only, and stronger than the engine's argument
    if config.dtype == "float32":
        # On a GPU Triton multiplies float32 in TF32 unless it is told otherwise: 1e-3 of a
        # log-probability.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    if config.extra.get("sleep_mode"):
        use_fixed_segments()
    workers = devices(config.extra.get("engine_kwargs", {}), config.tensor_parallel_size)
    if config.threads:
        os.environ["OMP_NUM_THREADS"] = str(max(1, config.threads // workers))  # per worker


def check_adapters(config: EngineConfig) -> None:
    """Raises UserError if vLLM computes no adapters of the model, and is to be sent some. Imports
    vLLM then."""
    if config.extra.get("adapter_rank"):
        file = config_file(config.model_path)
    else:
        file = None
    if file:
        shape = {**read_json(file, config.model_path), **config.extra.get("config_kwargs", {})}
    else:
        shape = {}
    name = without_adapters(shape.get("architectures") or ())
    if name:
        raise UserError(no_adapters(config.model_path, f"vLLM has no adapters for {name}"))


def batched_tokens(config: EngineConfig, *, cpu: bool) -> int:
    """Tokens that an engine computes in a step at most, prompts included.

    Left alone, vLLM's ``AsyncLLM`` computes 2,048 on most devices, fewer than the requests that it
    runs. A request with a seed whose prompt is computed in chunks ends vLLM's CPU engine (its
    random generators cannot be set back): on a CPU prompts are computed whole.
    """
    tokens = config.max_num_batched_tokens or max(config.max_num_seqs, MIN_BATCHED_TOKENS)
    if cpu:
        return max(config.max_model_len, tokens)
    return tokens


def engine_arguments(config: EngineConfig, *, cpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``AsyncEngineArgs``.

    vLLM's random generator is the engine's, not the request's: engines of one seed give the k-th
    request the same samples. The first engine has the run's seed, the others have numbers unlike
    those of any run.
    """
    index = config.extra.get("engine_index", 0)
    if index:
        seed = int(np.random.SeedSequence([config.seed, index]).generate_state(1)[0])
    else:
        seed = config.seed
    arguments: dict[str, Any] = {
        "model": config.model_path,
        # vLLM resolves "auto" by the model's files, which may say float16; the policy computes in
        # bfloat16.
        "dtype": "bfloat16" if config.dtype == "auto" else config.dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel_size,
        "max_num_batched_tokens": batched_tokens(config, cpu=cpu),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "seed": seed,
        "trust_remote_code": False,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled from
        "disable_log_stats": True,
        "weight_transfer_config": {
            "backend": BACKENDS.get(config.weight_sync_backend, config.weight_sync_backend)
        },
        "worker_extension_cls": WORKER_EXTENSION,
        "enable_sleep_mode": bool(config.extra.get("sleep_mode", False)),
        "hf_overrides": overrides_of(config.model_path, config.extra.get("config_kwargs", {})),
    }
    if config.extra.get("routed_experts"):
        arguments["enable_return_routed_experts"] = True
    rank = config.extra.get("adapter_rank", 0)
    if rank:
        arguments |= lora_arguments(rank, config.model_path)
    if devices(config.extra.get("engine_kwargs", {}), config.tensor_parallel_size) > 1:
        # Within a placement group vLLM would choose its Ray executor, which rejects the engine's
        # bundle of several GPUs. The engine's actor has them all, so that its workers can be plain
        # children of it.
        arguments["distributed_executor_backend"] = "mp"
    if cpu:
        arguments |= {
            "dtype": "float32" if config.dtype == "auto" else config.dtype,
            "enforce_eager": True,
            "enable_sleep_mode": False,
            "kv_cache_memory_bytes": int(config.kv_cache_gb * 1024**3),
            "enable_chunked_prefill": False,
        }
    return arguments | config.extra.get("engine_kwargs", {})


def sampling_fields(sampling: SamplingParams, *, json: bool = False) -> dict[str, Any]:
    """The fields of vLLM's ``SamplingParams``, with the log-probability of each sampled token and
    as little text as possible."""
    fields = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(sampling).items()
    }
    fields = {
        name: value
        for name, value in fields.items()
        if not (isinstance(value, list | dict) and not value)
    }
    if json and sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    return fields | {
        "top_k": max(sampling.top_k, 0),
        "logprobs": 0,
        "detokenize": bool(sampling.stop),
    }


def sampling_parameters(sampling: SamplingParams, *, samples: int = 1) -> vllm.SamplingParams:
    """vLLM's form of ours."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        StructuredOutputsParams,
    )

    fields = sampling_fields(sampling)
    for name, kind in (
        ("structured_outputs", StructuredOutputsParams),
        ("repetition_detection", RepetitionDetectionParams),
    ):
        if name in fields:
            fields[name] = kind(**fields[name])
    return VLLMSamplingParams(
        n=samples, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, **fields
    )


def scoring_parameters() -> vllm.SamplingParams:
    """For the log-probabilities of a prompt, which vLLM then computes without the prefix cache."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        max_tokens=1,
        temperature=0.0,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def check_expanded(expanded: Sequence[int], tokens: Sequence[int]) -> None:
    """Raises RequestFailedError if vLLM's processor made other tokens of a prompt's images than the
    model's own."""
    if list(expanded) != list(tokens):
        raise RequestFailedError(
            f"vLLM's processor made {len(expanded)} other tokens of its images than the model's own, which made "
            f"{len(tokens)}"
        )


def alike(requests: Sequence[GenerationRequest]) -> list[list[GenerationRequest]]:
    """The requests in bundles of equal prompt, images and sampling; one with a seed of its own
    stands alone."""
    bundles: list[list[GenerationRequest]] = []
    open_ones: dict[bytes, list[list[GenerationRequest]]] = {}
    for request in requests:
        candidates = open_ones.setdefault(request.prompt_token_ids.tobytes(), [])
        same = (request.sampling, request.images)
        bundle = next((b for b in candidates if (b[0].sampling, b[0].images) == same), None)
        if bundle is None or request.sampling.seed is not None:
            bundle = []
            bundles.append(bundle)
            candidates.append(bundle)
        bundle.append(request)
    return bundles


# ---------------------------------------------------------------- adapters, by vLLM's own LoRA

# One adapter, under one name, replaced in place: requests in flight continue with the newest, as
# they do with weights. Requests name it, and vLLM does not load it again.
LORA_KEY = "trainer.policy.lora"
ADAPTER_NAME = "policy"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM allocates memory for


def lora_arguments(rank: int, path: str) -> dict[str, Any]:
    """Engine arguments: the next larger rank that vLLM knows, in all linear layers but the head.

    With an adapter on the head vLLM's CPU engine ends at the first prompt that is scored.
    """
    size = next((size for size in LORA_RANKS if size >= rank), 0)
    if not size:
        most = LORA_RANKS[-1]
        raise UserError(
            f"{LORA_KEY}.rank={rank} is more than vLLM takes as an adapter ({most}): set {LORA_KEY}.sync=merged"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": size,
        "lora_target_modules": linear_layers(path),
    }


def make_adapter_folder(path: str) -> str:
    """A file of adapters as the folder that vLLM reads. Raises WeightSyncError for a file that is
    not what was sent."""
    from skyasync.weight_sync.adapters import (
        read_adapter,
    )  # with torch, which a plan of memory does without

    adapter = read_adapter(path)
    folder = Path(tempfile.mkdtemp(prefix="skyasync-adapter-"))
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config), encoding="utf-8")
    (folder / "adapter_model.safetensors").symlink_to(path)
    return str(folder)


async def load_adapter(llm: AsyncLLM, folder: str, path: str) -> None:
    """Replace the adapter by a folder's, and check it in the workers.

    Raises:
        WeightSyncError: naming layers that have another adapter.
    """
    from vllm.lora.request import LoRARequest

    try:
        await llm.add_lora(
            LoRARequest(ADAPTER_NAME, ADAPTER_ID, lora_path=folder, load_inplace=True)
        )
        for wrong in await llm.collective_rpc("adapter_differences", args=(path,)):
            if wrong:
                raise WeightSyncError(
                    f"the vLLM engine holds another adapter than was sent in {', '.join(wrong[:3])}"
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
