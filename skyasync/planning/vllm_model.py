"""A program: builds the model of an engine's first worker by vLLM, without memory, and prints a
``VLLMReport`` as JSON.

Its process group has one rank, and says the size that the engine's tensor parallelism has.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import (
    get_kv_cache_capacity,
    get_kv_cache_configs,
    max_memory_usage_bytes,
)
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

from skyasync.weight_sync.tensors import from_message, meta_tensors

TRIALS = 3  # of loading, each without the tensors at which the earlier ones ended


def examine(
    arguments: dict[str, Any], specs: Mapping[str, Any], cache: int, share: int
) -> dict[str, Any]:
    """Of ``AsyncEngineArgs`` and the specs of what is sent; a worker's KV cache is ``cache``, or
    all but weights of its ``share`` of a device."""
    arguments |= {"runner": "generate", "skip_tokenizer_init": True}
    arguments |= (
        {"enforce_eager": True, "enable_sleep_mode": False} if current_platform.is_cpu() else {}
    )
    config = AsyncEngineArgs(**arguments).create_engine_config()
    model = build(config)
    weights = sum(
        {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}.values()
    )
    loading = Loading(model, meta_tensors(from_message(specs)))
    missing = [
        name for name, p in model.named_parameters() if loading.written[storage(p)] < p.numel()
    ]
    current_platform.update_block_size_for_backend(config)
    register_all_kvcache_specs(config)
    layers = get_kv_cache_spec(config)
    cache = cache or share - weights
    layouts = [
        layout.name for layout in get_supported_kv_cache_layouts(get_current_attn_backends(config))
    ]
    resolve_kv_cache_layout(config, [layouts], layers.values())
    least = max_memory_usage_bytes(config, layers.values())
    tokens = 0
    sequences = 0.0
    try:
        tokens, sequences = get_kv_cache_capacity(
            config, get_kv_cache_configs(config, [layers], [cache])[0]
        )
    except ValueError:  # it has no memory for a sequence of full length
        least = max(least, cache + 1)
    report = {
        "tensors": len(specs),
        "refused": loading.refused,
        "missing": missing,
        "weights": weights,
    }
    return report | {"cache": cache, "least_cache": least, "tokens": tokens, "sequences": sequences}


def build(config: VllmConfig) -> nn.Module:
    parallel = config.parallel_config
    dtype = cast(torch.dtype, config.model_config.dtype)
    if (
        config.quant_config is not None
        or parallel.enable_expert_parallel
        or parallel.pipeline_parallel_size > 1
    ):
        raise ValueError(
            "quantized weights, expert parallelism and pipelines need workers on devices"
        )
    with set_current_vllm_config(config):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.init_distributed_environment(1, 0, local_rank=0, backend="gloo")
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")
    parallel_state.get_tp_group().world_size = parallel.tensor_parallel_size
    with set_default_torch_dtype(dtype), torch.device("meta"):
        return initialize_model(config)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Loading(TorchDispatchMode):
    """``load_weights``, watched: some of vLLM's skip a name silently, or are content with a part of
    a fused layer.

    ``written`` counts elements by storage; ``refused`` are tensors that vLLM raised an error at, or
    else never read.
    """

    def __init__(self, model: Any, tensors: Mapping[str, Tensor]) -> None:  # noqa: ANN401  (of vLLM's interface)
        super().__init__()
        self.written = Counter[int]()
        self._read = set[int]()
        self.refused = dict[str, str]()
        while len(self.refused) < TRIALS:
            self.written.clear()
            try:
                with self:
                    model.load_weights(self._given(tensors))
                break
            except Exception as error:
                self.refused[self._last] = re.split(r"\.? The |\n", str(error).strip())[0]
        unread = [name for name, tensor in tensors.items() if storage(tensor) not in self._read]
        self.refused = self.refused or dict.fromkeys(unread, "it is ignored")

    def _given(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for self._last, tensor in tensors.items():
            if self._last not in self.refused:
                yield self._last, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self._read.update(map(storage, given))
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1  # there are no numbers
        if func._schema.is_mutable:
            self.written[storage(given[0])] += given[0].numel()
        return func(*args, **(kwargs or {}))


if __name__ == "__main__":
    try:
        answer = examine(**json.load(sys.stdin))
    except Exception as error:  # may be a limit of this machine's kind of vLLM
        answer = {"unknown": f"vLLM: {' '.join(str(error).split()):.300}"}
    print("\n" + json.dumps(answer), end="")
