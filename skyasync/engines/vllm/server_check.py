"""Whether a server can be an engine of a run, and how one is started that can.

Invariant: what a server says of itself is judged here and nowhere else; a complaint is one line that names the server
and the way out. Imports nothing heavy: it is asked before anything starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyasync.engines.protocol import EngineConfig
from skyasync.engines.server_check import KEY_VARIABLE, Kind, check_servers
from skyasync.model_config import overrides_of

__all__ = ["KEY_VARIABLE", "check_servers", "complaint"]

BACKEND = "shared_memory"
EXTENSION = "skyasync.weight_sync.transfers.vllm_worker.WorkerExtension"
WAY = "start it with: skyasync serve MODEL --port PORT"
DOOR = "skyasync.engines.vllm.server_door.Door"

#: What vLLM's server is started with besides its model. The routes need ``VLLM_SERVER_DEV_MODE=1``.
ARGUMENTS = {
    "--enable-scale-out": "",
    "--worker-extension-cls": EXTENSION,
    "--weight-transfer-config": json.dumps({"backend": BACKEND}),
    "--logprobs-mode": "processed_logprobs",
    "--stream-interval": "16",
    "--middleware": DOOR,
}
#: On a CPU; a request with a seed whose prompt is computed in chunks ends vLLM's CPU engine.
ON_CPU = {"--enforce-eager": "", "--no-enable-chunked-prefill": "", "--dtype": "float32"}


def complaint(url: str, info: Mapping[str, Any], config: EngineConfig) -> str:
    """What keeps it from being an engine; empty if nothing does.

    Args:
        config: what an engine of the run's own would be started with.
    """
    settings = info.get("vllm_config")
    if not isinstance(settings, Mapping):
        return _foreign(url, info)
    model = settings.get("model_config") or {}
    transfer = (settings.get("weight_transfer_config") or {}).get("backend")
    extension = (settings.get("parallel_config") or {}).get("worker_extension_cls")
    if transfer != BACKEND or extension != EXTENSION:
        return f"generator.engines: {url} takes no weights from this run (backend {transfer}); {WAY}"
    if model.get("logprobs_mode") != ARGUMENTS["--logprobs-mode"]:
        return (
            f"generator.engines: {url} reports {model.get('logprobs_mode')}, and training needs the log-probabilities "
            f"of what was sampled from (--logprobs-mode processed_logprobs); {WAY}"
        )
    if int(model.get("max_model_len") or 0) < config.max_model_len:
        return (
            f"generator.engines: {url} has room for {model.get('max_model_len')} tokens per sequence, and "
            f"generator.max_model_len={config.max_model_len} needs more: start it with --max-model-len "
            f"{config.max_model_len}, or set generator.max_model_len"
        )
    asked = overrides_of(config.model_path, config.extra.get("config_kwargs", {}))
    if asked != (model.get("hf_overrides") or {}):
        return (
            f"generator.engines: {url} was started with --hf-overrides {json.dumps(model.get('hf_overrides') or {})}, "
            f"and trainer.policy.model.config_kwargs come to {json.dumps(asked)}: start it with that"
        )
    dtype = str(model.get("dtype")).removeprefix("torch.")
    if config.dtype not in ("auto", dtype):
        return (
            f"generator.engines: {url} computes in {dtype}, and generator.dtype is {config.dtype}: start it with "
            f"--dtype {config.dtype}, or set generator.dtype={dtype}"
        )
    return ""


def _foreign(url: str, info: Mapping[str, Any]) -> str:
    if "internal_states" in info:
        return f"generator.engines: {url} is an SGLang server: set generator.backend=sglang_server"
    return KIND.foreign(url, "it does not say how it was started")


KIND = Kind(complaint, "vLLM server with its routes for training", WAY)
