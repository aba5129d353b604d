"""Changes of bfloat16 weights by real steps, and the cost of sending only these
(generator.weight_sync_mode=delta).

    OMP_NUM_THREADS=1 uv run -m benchmarks.delta_sync [--backends transformers vllm] [--lrs 1e-6
    5e-6] [--steps 6]

The example's GRPO on one-digit addition (SmolLM2, 4 prompts x 8 samples, plan ``sync``, master
weights in float32), published and computed with in bfloat16. After each step the engine gets the
delta, then all weights. Log-probabilities of the verification prompts must be bitwise identical
after both, and digests verify both. Medians over the steps, one thread each, milliseconds and MB:

- changed: share of the weights that differ from those of the sync before; its range over the steps;
- MB: what is sent; in comparison with all weights;
- publish, update: the trainer compares, digests and writes; the engine reads, overwrites and
  verifies.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.weight_sync import PROBE, timed
from skyasync.config import load_config
from skyasync.data.datasets import load_prompts
from skyasync.envs.pool import local_pool
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import ENGINES, EngineConfig
from skyasync.rollout.generator import EpisodeGenerator
from skyasync.trainer.plans import PLANS
from skyasync.weight_sync.sync import WeightSync
from skyasync.weight_sync.update import WeightUpdate
from skyasync.workers.dispatch import LocalDispatch

COLUMNS = ("changed", "MB", "publish", "update", "MB, all", "publish, all", "update, all")


@dataclass
class BothWays(WeightSync):
    """Syncs the delta, then all weights, and compares."""

    rows: list[dict[str, float]] = field(default_factory=list)

    async def sync(self, version: int) -> None:
        source: Any = self.source
        row: dict[str, float] = {}
        row["publish"], update = await timed(lambda: source.transfer.publish(version))
        row["update"], _ = await timed(lambda: self.destination.update_weights(update))
        by_changes = await self.destination.score(self.probe)
        await source.transfer.release(update)
        policy = source._policy
        write = partial(asyncio.to_thread, policy.transfer_weights, "file", "write")
        row["publish, all"], (path, *_) = await timed(write)
        whole = WeightUpdate(version, "shared_memory", {"path": path}, content=update.content)
        row["update, all"], _ = await timed(lambda: self.destination.update_weights(whole))
        assert await self.destination.score(self.probe) == by_changes, (
            "not the weights of a whole file"
        )
        row["MB, all"] = (
            sum(tensor.nbytes for tensor in policy.weight_sender.file._delta._copy.values()) / 1e6
        )
        await asyncio.to_thread(policy.transfer_weights, "file", "remove", path)
        row["changed"] = update.metrics["sync/share_changed"]
        row["MB"] = update.metrics["sync/bytes"] / 1e6
        self._proven, self._syncs = True, self._syncs + 1
        self.rows.append(row)


class Tracker:
    def log(self, metrics: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


async def measure(
    backend: str, path: str, options: argparse.Namespace, lr: float
) -> list[dict[str, float]]:
    cfg = load_config([
        "--config", options.config, f"trainer.policy.model.path={path}", "trainer.policy.model.dtype=bfloat16",
        f"trainer.policy.optimizer_config.lr={lr}", f"trainer.max_training_steps={options.steps}",
        "trainer.policy.threads=1", f"generator.backend={backend}", "generator.weight_sync_mode=delta",
        "trainer.eval_interval=0", "trainer.eval_before_train=false", "trainer.save_samples=0",
    ])  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(path)
    engine = EngineConfig(
        path, dtype="bfloat16", threads=1, max_model_len=128, max_num_seqs=64, kv_cache_gb=0.5
    )
    client = InferenceClient([ENGINES[backend](engine)])
    dispatch = LocalDispatch(cfg)
    await client.start()
    prompts = load_prompts(cfg.data.train_data, cfg, tokenizer)
    generator = EpisodeGenerator(client, local_pool(), tokenizer, 128)
    trainer = PLANS["sync"](cfg, Tracker(), tokenizer, prompts, client, generator)
    sync = BothWays(dispatch, client, PROBE, 0.5)
    trainer.attach(dispatch, sync)
    try:
        await trainer.run()
    finally:
        await client.shutdown()
        await dispatch.shutdown()
    return sync.rows[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a Hugging Face folder; without it, SmolLM2 from the cache")
    parser.add_argument("--config", default="examples/smollm2/config.yaml")
    parser.add_argument("--backends", nargs="+", default=["transformers", "vllm"])
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-6, 5e-6])
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    from examples.smollm2.model import build

    path = options.model or build()
    print(f"| engine, lr | {' | '.join(COLUMNS)} | range |\n|---|{'---|' * (len(COLUMNS) + 1)}")
    for backend in options.backends:
        for lr in options.lrs:
            rows = asyncio.run(measure(backend, path, options, lr))
            cells = [f"{median(r[c] for r in rows):.3g}" for c in COLUMNS]
            shares = [row["changed"] for row in rows]
            print(
                f"| {backend}, {lr:g} | {' | '.join(cells)} | {min(shares):.3g} to {max(shares):.3g} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
