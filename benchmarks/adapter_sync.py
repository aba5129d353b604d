"""Syncs of adapters alone, compared with syncs of merged weights (trainer.policy.lora.sync): bytes
and time.

    OMP_NUM_THREADS=1 uv run -m benchmarks.adapter_sync [--model FOLDER] [--rank 16] [--backends
    transformers vllm]

Adapters on all linear layers, policy and engine in one process with a thread each; the adapters are
changed at random before each sync. Medians, milliseconds and MB:

- publish: the trainer gathers (merged: adds), digests and writes; update: the engine reads, loads
  or adds, and the weights are verified by the engine or, if it computes on the trainer's buffer, by
  the trainer meanwhile;
- gap: the mean difference of the verification prompts' log-probabilities, trainer to engine, after
  the last sync; floor: at first.
"""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks.weight_sync import PROBE, timed
from skyasync.config.schema import Config
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import ENGINES, EngineConfig
from skyasync.utils.task_group import run_together
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.verify.log_probabilities import BFLOAT16, FLOAT32, gap
from skyasync.workers.dispatch import LocalDispatch

COLUMNS = ("MB", "publish", "update", "floor", "gap")


async def measure(
    backend: str, path: str, sync: str, options: argparse.Namespace
) -> dict[str, float]:
    cfg = Config()
    policy = cfg.trainer.policy
    policy.model.path = path
    policy.model.dtype = options.dtype
    policy.threads = 1
    policy.lora.rank = options.rank
    policy.lora.sync = sync
    cfg.generator.backend = backend
    dispatch = LocalDispatch(cfg)
    extra = {"adapter_rank": options.rank if sync == "adapter" else 0}
    config = EngineConfig(
        path,
        dtype=options.dtype,
        threads=1,
        max_model_len=256,
        max_num_seqs=16,
        kv_cache_gb=0.5,
        extra=extra,
    )
    client = InferenceClient([ENGINES[backend](config)])
    rounding = FLOAT32 if options.dtype == "float32" else BFLOAT16
    weights = WeightSync(dispatch, client, PROBE, rounding=rounding, adapted=True)
    await client.start()
    rows = []
    try:
        await weights.measure_floor()
        for version in range(1, options.syncs + 1):
            change(dispatch)
            publish, update = await timed(partial(dispatch.transfer.publish, version))
            took, _ = await timed(
                partial(run_together, dispatch.transfer.send(update), client.update_weights(update))
            )
            size = await asyncio.to_thread(
                lambda update=update: Path(update.info["path"]).stat().st_size
            )
            rows.append({"publish": publish, "update": took, "MB": size / 1e6})
            await dispatch.transfer.release(update)
        expected, (found,) = await dispatch.score(PROBE), await client.score(PROBE)
    finally:
        await client.shutdown()
        await dispatch.shutdown()
    row = {name: median(row[name] for row in rows[1:]) for name in rows[0]}
    return row | {"gap": gap(expected, found).mean, "floor": weights._floor or 0.0}


@torch.no_grad()
def change(dispatch: LocalDispatch) -> None:
    for parameter in dispatch._policy.backend.model.parameters():
        if parameter.requires_grad:
            local = getattr(parameter, "_local_tensor", parameter)
            local += 1e-4 * torch.randn_like(local)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face folder; without it, SmolLM2 from the cache")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--backends", nargs="+", default=["transformers", "vllm"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--syncs", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    from examples.smollm2.model import build

    path = options.model or build()
    print(
        f"| engine, {options.dtype} | sync | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}"
    )
    for backend in options.backends:
        for sync in ("merged", "adapter"):
            row = asyncio.run(measure(backend, path, sync, options))
            print(
                f"| {backend} | {sync} | {' | '.join(f'{row[c]:.3g}' for c in COLUMNS)} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
