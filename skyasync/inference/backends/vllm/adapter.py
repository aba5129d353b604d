"""The adapter that a vLLM engine computes with, by vLLM's own LoRA.

Invariant: one adapter, under one name, replaced in place: requests in flight continue with the newest, as they do with
weights. Requests name it, and vLLM does not load it again.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyasync.errors import UserError
from skyasync.models.config import linear_layers
from skyasync.weight_sync.update import ADAPTER_ID, WeightSyncError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

KEY = "trainer.policy.lora"
NAME = "policy"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM allocates memory for


def lora_arguments(rank: int, path: str) -> dict[str, Any]:
    """Engine arguments: the next larger rank that vLLM knows, in all linear layers but the head.

    With an adapter on the head vLLM's CPU engine ends at the first prompt that is scored.
    """
    size = next((size for size in RANKS if size >= rank), 0)
    if not size:
        raise UserError(f"{KEY}.rank={rank} is more than vLLM takes as an adapter ({RANKS[-1]}): set {KEY}.sync=merged")
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": size, "lora_target_modules": linear_layers(path)}


def make_folder(path: str) -> str:
    """A file of adapters as the folder that vLLM reads. Raises WeightSyncError for a file that is not what was sent."""
    from skyasync.weight_sync.adapters import read_adapter  # with torch, which a plan of memory does without

    adapter = read_adapter(path)
    folder = Path(tempfile.mkdtemp(prefix="skyasync-adapter-"))
    (folder / "adapter_config.json").write_text(json.dumps(adapter.config), encoding="utf-8")
    (folder / "adapter_model.safetensors").symlink_to(path)
    return str(folder)


async def load(llm: AsyncLLM, folder: str, path: str) -> None:
    """Replace the adapter by a folder's, and check it in the workers.

    Raises:
        WeightSyncError: naming layers that have another adapter.
    """
    from vllm.lora.request import LoRARequest

    try:
        await llm.add_lora(LoRARequest(NAME, ADAPTER_ID, lora_path=folder, load_inplace=True))
        for wrong in await llm.collective_rpc("adapter_differences", args=(path,)):
            if wrong:
                raise WeightSyncError(f"the vLLM engine holds another adapter than was sent in {', '.join(wrong[:3])}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
