"""The start of vLLM: environment, engine arguments, sampling parameters.

Invariant: no code of a model's repository is run, and nothing is fetched from a network unless the
model's path names it. Importing this module does not import vLLM: its environment must be set
before.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections import defaultdict
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

#: vLLM's name of a transfer, if it is not the setting's: vLLM has another transfer engine ``nccl``.
BACKENDS = {"nccl": "broadcast"}
WORKER_EXTENSION = "skyasync.weight_sync.transfers.vllm_worker.WorkerExtension"
MIN_BATCHED_TOKENS = 8192  # per step, prompts included; enough for a group's prompts at once
CAPTURED = 512  # requests of the largest batch that vLLM captures as a CUDA graph by default
MOST_CAPTURED = 1024  # each graph takes memory and time at the start


def prepare_environment(config: EngineConfig) -> None:
    """Set vLLM's variables in the environment of this process: one engine per process.

    On a CPU ``config.extra["cpu_bind"]`` pins the engine's threads to cores ("0", "0-3"; vLLM's
    syntax). Without it they are not pinned: vLLM's own choice would put every engine of a machine
    on the same core.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A fork would copy locks that this process's threads hold.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = config.extra.get("cpu_bind", "nobind")
    # It takes full GB only, and overrides the engine's argument.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if config.dtype == "float32":
        # By default Triton multiplies float32 in TF32 on a GPU, which changes log-probabilities by
        # 1e-3.
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    if config.extra.get("sleep_mode"):
        use_fixed_segments()  # vLLM's allocator for sleep rejects PyTorch's expandable segments
    workers = devices(config.extra.get("engine_kwargs", {}), config.tensor_parallel_size)
    if config.threads:
        threads = max(1, config.threads // workers)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # per worker


def check_adapters(config: EngineConfig) -> None:
    """Check that vLLM computes adapters of the model, if they will be sent. Imports vLLM.

    Raises:
        UserError: if it does not.
    """
    if not config.extra.get("adapter_rank"):
        return
    file = config_file(config.model_path)
    if not file:
        return
    shape = read_json(file, config.model_path) | config.extra.get("config_kwargs", {})
    name = without_adapters(shape.get("architectures") or ())
    if name:
        raise UserError(no_adapters(config.model_path, f"vLLM has no adapters for {name}"))


def batched_tokens(config: EngineConfig, *, cpu: bool) -> int:
    """The most tokens that an engine computes in a step, prompts included.

    By default vLLM's ``AsyncLLM`` computes 2,048 on most devices, fewer than the requests that it
    runs. A request with a seed whose prompt is computed in chunks ends vLLM's CPU engine (its
    random generators cannot be set back): on a CPU a prompt is computed in one step.
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
    seed = config.seed
    if index:
        sequence = np.random.SeedSequence([config.seed, index])
        seed = int(sequence.generate_state(1)[0])
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
    if config.extra.get("float32_head"):
        arguments["hf_overrides"]["head_dtype"] = "float32"
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
    if not cpu and config.max_num_seqs > CAPTURED:
        # Larger batches of decoded tokens would run without a CUDA graph (vllm/config/vllm.py).
        largest = min(config.max_num_seqs, MOST_CAPTURED)
        arguments["compilation_config"] = {"max_cudagraph_capture_size": largest}
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
    """The fields of vLLM's ``SamplingParams``.

    With the log-probability of each sampled token, and as little text as possible.

    Args:
        json: for a server: the keys of dicts are texts.
    """
    fields: dict[str, Any] = {}
    for name, value in vars(sampling).items():
        if isinstance(value, tuple | dict) and not value:  # vLLM's default is None
            continue
        fields[name] = list(value) if isinstance(value, tuple) else value
    if json and sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    fields["top_k"] = max(sampling.top_k, 0)
    fields["logprobs"] = 0  # of the sampled token, without others
    fields["detokenize"] = bool(sampling.stop)
    return fields


def sampling_parameters(sampling: SamplingParams, *, samples: int = 1) -> vllm.SamplingParams:
    """vLLM's form of ours."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import (
        RepetitionDetectionParams,
        RequestOutputKind,
        StructuredOutputsParams,
    )

    fields = sampling_fields(sampling)
    if sampling.structured_outputs:
        fields["structured_outputs"] = StructuredOutputsParams(**sampling.structured_outputs)
    if sampling.repetition_detection:
        fields["repetition_detection"] = RepetitionDetectionParams(**sampling.repetition_detection)
    return VLLMSamplingParams(
        n=samples,
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        **fields,
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
    """Compare the tokens of a prompt with images.

    Args:
        expanded: by vLLM's processor.
        tokens: by the model's own processor.

    Raises:
        RequestFailedError: if they differ.
    """
    if list(expanded) != list(tokens):
        raise RequestFailedError(
            f"vLLM's processor made {len(expanded)} other tokens of its images than the model's own, which made "
            f"{len(tokens)}"
        )


def alike(requests: Sequence[GenerationRequest]) -> list[list[GenerationRequest]]:
    """The requests in bundles of equal prompt, images and sampling.

    A request with a seed is a bundle of its own: vLLM would compute all samples with this seed.
    """
    bundles: list[list[GenerationRequest]] = []
    bundles_of_prompt: defaultdict[bytes, list[list[GenerationRequest]]] = defaultdict(list)
    for request in requests:
        candidates = bundles_of_prompt[request.prompt_token_ids.tobytes()]
        if request.sampling.seed is None:
            for bundle in candidates:
                sample = bundle[0]
                if sample.sampling == request.sampling and sample.images == request.images:
                    bundle.append(request)
                    break
            else:
                candidates.append([request])
                bundles.append(candidates[-1])
        else:
            bundles.append([request])
    return bundles


# ---------------------------------------------------------------- adapters, by vLLM's own LoRA

# One adapter under one name, replaced in place: requests in flight continue with the newest, as
# they do with weights. Requests name it, and vLLM does not load it again.
LORA_KEY = "trainer.policy.lora"
ADAPTER_NAME = "policy"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM allocates memory for one of these


def lora_arguments(rank: int, path: str) -> dict[str, Any]:
    """Engine arguments: the next larger rank that vLLM knows, in all linear layers but the head.

    With an adapter on the head vLLM's CPU engine ends at the first prompt that is scored.
    """
    size = next((size for size in LORA_RANKS if size >= rank), 0)
    if not size:
        largest = LORA_RANKS[-1]
        raise UserError(
            f"{LORA_KEY}.rank={rank} is more than vLLM takes as an adapter ({largest}): set {LORA_KEY}.sync=merged"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": size,
        "lora_target_modules": linear_layers(path),
    }


def make_adapter_folder(path: str) -> str:
    """A file of adapters as the folder that vLLM reads.

    Raises:
        WeightSyncError: if the file is not what was sent.
    """
    # It imports torch, which a plan of memory does without.
    from skyasync.weight_sync.adapters import read_adapter

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

    request = LoRARequest(ADAPTER_NAME, ADAPTER_ID, lora_path=folder, load_inplace=True)
    try:
        await llm.add_lora(request)
        for layers in await llm.collective_rpc("adapter_differences", args=(path,)):
            if layers:
                raise WeightSyncError(
                    f"the vLLM engine holds another adapter than was sent in {', '.join(layers[:3])}"
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
