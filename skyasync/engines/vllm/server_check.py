"""Whether a server can be an engine of a run, and how one is started that can.

Invariant: what a server says of itself is judged here and nowhere else; a complaint is one line that names the server
and the way out. Imports nothing heavy: it is asked before anything starts.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from skyasync.engines.protocol import EngineConfig
from skyasync.errors import UserError
from skyasync.model_config import overrides_of

BACKEND = "shared_memory"
EXTENSION = "skyasync.weight_sync.vllm_shared_memory.WorkerExtension"
WAY = "start it with: skyasync serve MODEL --port PORT"
KEY_VARIABLE = "SKYASYNC_ENGINES_KEY"  # what server and run have to have alike, where the server asks for a key
DOOR = "skyasync.engines.vllm.server_door.Door"
ANSWER_S = 30.0  # the first time it is asked, a server looks its machine over, for seconds

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


def check_servers(urls: list[str], config: EngineConfig, weight_sync_dir: str = "") -> None:
    """Raises UserError, in one line, for the first one that does not answer or cannot be an engine."""
    if weight_sync_dir and not os.access(weight_sync_dir, os.W_OK):
        raise UserError(f"generator.weight_sync_dir={weight_sync_dir} is no folder that can be written to")
    for url in urls:
        if problem := address_complaint(url) or complaint(url, server_info(url), config):
            raise UserError(problem)


def address_complaint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/"):
        return ""
    return f"generator.engines: {url!r} is not the address of a server, such as http://127.0.0.1:8000"


def server_info(url: str) -> dict[str, Any]:
    """What a vLLM server in development mode says of itself.

    Raises:
        UserError: if nothing answers there, or something else.
    """
    try:
        with urllib.request.urlopen(_question(url), timeout=ANSWER_S) as answer:
            found = json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 401:
            has = "another key" if os.environ.get(KEY_VARIABLE) else f"a key: set {KEY_VARIABLE} as it is there"
            raise UserError(f"generator.engines: {url} wants {has}") from None
        raise UserError(foreign(url, f"/server_info answers {error.code}")) from None
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"generator.engines: {url} does not answer ({reason}); {WAY}") from None
    except ValueError:
        raise UserError(foreign(url, "/server_info is not JSON")) from None
    return dict(found) if isinstance(found, dict) else {}


def _question(url: str) -> urllib.request.Request:
    key = os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return urllib.request.Request(f"{url.rstrip('/')}/server_info?config_format=json", headers=headers)


def foreign(url: str, found: str) -> str:
    return f"generator.engines: {url} is no vLLM server with its routes for training ({found}); {WAY}"


def complaint(url: str, info: Mapping[str, Any], config: EngineConfig) -> str:
    """What keeps it from being an engine; empty if nothing does.

    Args:
        config: what an engine of the run's own would be started with.
    """
    settings = info.get("vllm_config")
    if not isinstance(settings, Mapping):
        return foreign(url, "it does not say how it was started")
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
