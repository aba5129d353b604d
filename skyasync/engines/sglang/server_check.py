"""Whether an SGLang server can be an engine of a run, by what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyasync.engines.protocol import EngineConfig
from skyasync.engines.server_check import Kind
from skyasync.models.config import overrides_of

WAY = "start it with: python -m sglang.launch_server --model-path MODEL --port PORT"
BEYOND = 5  # tokens that SGLang keeps free behind a prompt


def complaint(url: str, info: Mapping[str, Any], config: EngineConfig) -> str:
    """See ``Kind``."""
    if "vllm_config" in info:
        return f"generator.engines: {url} is a vLLM server: leave generator.backend at auto"
    if "internal_states" not in info or "max_req_input_len" not in info:
        return KIND.foreign(url, "it does not say how it was started")
    longest = int(info["max_req_input_len"]) + 1
    if longest < config.max_model_len:
        return (
            f"generator.engines: {url} has room for {longest} tokens per sequence, and "
            f"generator.max_model_len={config.max_model_len} needs more: start it with --context-length "
            f"{config.max_model_len + BEYOND}, or set generator.max_model_len={longest}"
        )
    asked = overrides_of(config.model_path, config.extra.get("config_kwargs", {}))
    found = json.loads(info.get("json_model_override_args") or "{}")
    if asked != found:
        return (
            f"generator.engines: {url} was started with --json-model-override-args {json.dumps(found)}, and "
            f"trainer.policy.model.config_kwargs come to {json.dumps(asked)}: start it with that"
        )
    dtype = str(info.get("dtype"))
    if "auto" not in (dtype, config.dtype) and config.dtype != dtype:
        return (
            f"generator.engines: {url} computes in {dtype}, and generator.dtype is {config.dtype}: start it with "
            f"--dtype {config.dtype}, or set generator.dtype={dtype}"
        )
    return ""


KIND = Kind(complaint, "SGLang server", WAY)
