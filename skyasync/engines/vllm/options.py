"""vLLM's own engine arguments, as ``generator.engine_kwargs`` may say them.

Invariant: what may be said is read off the installed vLLM's ``EngineArgs``, from its source, so that a wrong name, type
or choice is refused at once: importing vLLM would take seconds. What a run says with a key of its own is not said here.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from skyasync.engines.vllm.option_types import problem
from skyasync.errors import nearest

KEY = "generator.engine_kwargs"

#: Argument -> the key that says it, or why nothing may.
SAID_ELSEWHERE = {
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
    "trust_remote_code": "no code of a model's folder is run",
}

#: Values that vLLM takes and a run cannot use.
REFUSED: dict[tuple[str, object], str] = {
    ("load_format", "dummy"): "the engine would compute with random weights until the first weight sync",
}


def complaints(options: Mapping[str, object]) -> Iterator[str]:
    """What is wrong with ``generator.engine_kwargs``, a line each; nothing where vLLM is not installed."""
    known = arguments()
    for name, value in options.items():
        if reason := SAID_ELSEWHERE.get(name):
            yield f"{KEY}.{name} is not taken: {reason}"
        elif known and name not in known:
            close = " or ".join(nearest(name, set(known) - set(SAID_ELSEWHERE)))
            hint = f": did you mean {close}?" if close else ""
            yield f"{KEY}.{name} is no argument of vLLM's AsyncEngineArgs{hint}"
        elif isinstance(value, str) and (name, value) in REFUSED:
            yield f"{KEY}.{name}={value!r} is not taken: {REFUSED[name, value]}"
        elif known and (wrong := problem(f"{KEY}.{name}", name, value, known[name])):
            yield wrong


def devices(options: Mapping[str, object], tensor_parallel: int) -> int:
    """How many devices an engine takes: pipeline stages, each over so many."""
    stages = options.get("pipeline_parallel_size", 1)
    return tensor_parallel * stages if isinstance(stages, int) else tensor_parallel


@cache
def arguments() -> dict[str, str]:
    """Argument -> its annotation, as the installed vLLM has them."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return {}
    file = Path(found.submodule_search_locations[0], "engine", "arg_utils.py")
    classes = {node.name: node for node in ast.parse(file.read_bytes()).body if isinstance(node, ast.ClassDef)}
    return {
        field.target.id: ast.unparse(field.annotation)
        for name in ("EngineArgs", "AsyncEngineArgs")
        for field in classes[name].body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id[0] != "_"
    }
