"""Download of the hub's models to every node, before engines and ranks load them.

Invariant: the start limit of an engine (``generator.engine_start_timeout_s``) counts loading alone.
Engines and ranks of a node load the same files, so each node downloads them once, however long that
takes. The hub's client ends a connection that does not answer for ten seconds and tries it again;
its last error ends the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

from skyasync.config.schema import Config
from skyasync.errors import UserError
from skyasync.workers.roles import Role

log = logging.getLogger(__name__)

PROGRESS_S = 30.0  # between two lines about a download that goes on
#: Formats that no part of the library loads, if a model has safetensors too.
OTHER_FORMATS = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "original/*")


def hub_models(cfg: Config, roles: Sequence[Role]) -> list[str]:
    """Names of the run's models on the hub, each once; without folders of this machine."""
    paths = [cfg.trainer.policy.model.path]
    for role in roles:
        model = role.own_model(cfg)
        if model is not None:
            paths.append(model.path)
    for entry in cfg.trainer.reward.models.values():
        paths.append(entry["path"])
    return [path for path in dict.fromkeys(paths) if path and not Path(path).is_dir()]


def download(name: str) -> str:
    """Download a model into this node's cache of the hub; returns an error's text, or ""."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        files = HfApi().list_repo_files(name)
        has_safetensors = any(file.endswith(".safetensors") for file in files)
        snapshot_download(name, ignore_patterns=list(OTHER_FORMATS) if has_safetensors else None)
    except Exception as error:  # its type depends on the HTTP library of the hub's client
        from skyasync.config.model_files import config_file

        config = config_file(name)
        # Without a connection a model loads from the cache, if that has its weights and not its
        # configuration alone.
        if config is not None and any(config.parent.glob("*.safetensors")):
            return ""
        return f"{type(error).__name__}: {error}"
    return ""


def download_models(names: Sequence[str]) -> None:
    """Download these models on every node of the Ray cluster, at the same time; blocks.

    Raises:
        UserError: for the first node that cannot download a model.
    """
    if not names:
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Without CPUs of its own, so that a download never waits for one; its client retries itself.
    task = ray.remote(num_cpus=0, max_retries=0)(download)
    # Futures, because Ray warns of a blocking ``ray.get`` in the controller, which is an
    # asynchronous actor.
    downloads: dict[Future[str], tuple[str, str]] = {}
    for node in ray.nodes():
        if not node["Alive"]:
            continue
        on_node = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for name in names:
            reference = task.options(scheduling_strategy=on_node).remote(name)
            downloads[reference.future()] = (name, node["NodeManagerAddress"])
    started = time.monotonic()
    running = set(downloads)
    while running:
        finished, running = wait(running, timeout=PROGRESS_S, return_when=FIRST_COMPLETED)
        for future in finished:
            name, address = downloads[future]
            problem = future.result()
            if problem:
                raise UserError(f"the model {name} cannot be downloaded on {address}: {problem}")
        if running:
            missing = ", ".join(sorted({downloads[future][0] for future in running}))
            seconds = time.monotonic() - started
            log.info(
                "downloading %s: %d of %d downloads are under way after %.0f s",
                missing,
                len(running),
                len(downloads),
                seconds,
            )
