"""What overlapping generation with training gains: ``one_step_off`` against ``sync`` on the same two cores.

    uv run -m benchmarks.overlap [--steps 14] [--prompts 32] [--lengths 24 40 64] [--hidden 256]

Real vLLM behind Ray on one core (front end and model, one thread), the real policy worker on the other (one thread),
real weight syncs, and the plans' own classes; both plans have the same core each. Every response has the same length,
and that length is chosen so that generating a batch takes as long as training on it (measured first, for the lengths
given). The bound of the gain is then (G + T) / max(G, T) = 2, less what neither overlaps with anything: the weight sync
and its verification.

Behind the measurement the simulator (``skyasync.simulate``) is fed with the synchronous run's metrics, as
``simulate.from_run`` reads them, and predicts the seconds per step of both plans. Metrics and timelines (for
ui.perfetto.dev) are left in the folder.

Micro-batches are small because two cores share their memory's bandwidth: activations that leave the cache slow down
both sides while they overlap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

FIRST = 3  # steps left out at the start: they fill the pipeline
PROBES = 4
ENGINE_CORE, POLICY_CORE = 0, 1
MODEL_LENGTH = 512


@dataclass
class Rows:
    """A tracker that writes what a run's ``metrics.jsonl`` has."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.rows.append({"step": step, **metrics})

    def close(self) -> None:
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    def median(self, name: str) -> float:
        return median(row.get(name, 0.0) for row in self.rows[FIRST:-1])  # the last step overlaps with nothing


class Bench:
    """One engine for all runs; a policy worker for each."""

    def __init__(self, options: argparse.Namespace) -> None:
        from examples.tiny.model import build

        self.options = options
        size = {"hidden": options.hidden, "intermediate": options.hidden * 11 // 4}
        self.model = build(out=options.folder / f"model_{options.hidden}", steps=1, progress=False, **size)

    async def start(self) -> None:
        """Everything that Ray starts inherits this process's core; the policy's thread begins on the other."""
        from skyasync.cluster.ray_cluster import start_on_loopback
        from skyasync.engines.client import InferenceClient
        from skyasync.engines.protocol import EngineConfig
        from skyasync.engines.ray_engine import RayEngine

        samples = self.options.prompts * self.options.samples
        config = EngineConfig(self.model, threads=1, max_model_len=MODEL_LENGTH, max_num_seqs=samples, kv_cache_gb=1.0)
        os.sched_setaffinity(0, {ENGINE_CORE})
        start_on_loopback(num_cpus=2, object_store_memory=1 << 28, log_to_driver=False)
        self.client = InferenceClient([RayEngine("vllm", config, {"num_cpus": 0})])
        await self.client.start()
        os.sched_setaffinity(0, {POLICY_CORE})

    def configuration(self, plan: str, length: int, steps: int) -> Any:
        from skyasync.config import load_config

        options, sampling = self.options, "generator.sampling_params"
        return load_config([
            "--config", "examples/tiny/config.yaml", f"trainer.policy.model.path={self.model}", f"trainer.plan={plan}",
            f"trainer.max_training_steps={steps}", f"trainer.train_batch_size={options.prompts}",
            f"generator.n_samples_per_prompt={options.samples}", "trainer.eval_interval=0", "trainer.save_samples=0",
            f"{sampling}.max_generate_length={length}", f"{sampling}.min_tokens={length}", "generator.backend=vllm",
            "trainer.policy.threads=1", "trainer.micro_batch_tokens=1024",
            "trainer.policy.optimizer_config.scheduler=constant",
        ])  # fmt: skip

    async def run(self, plan: str, length: int, steps: int, name: str) -> Rows:
        from transformers import AutoTokenizer

        from skyasync.data.datasets import load_prompts
        from skyasync.envs.pool import local_pool
        from skyasync.observe.timeline import Timeline
        from skyasync.plans import PLANS
        from skyasync.rollout.chat import ChatTokenizer
        from skyasync.rollout.generator import EpisodeGenerator
        from skyasync.weight_sync.sync import WeightSync
        from skyasync.workers.local import LocalDispatch

        cfg, folder = self.configuration(plan, length, steps), self.options.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "timeline.json").unlink(missing_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        dataset = load_prompts(cfg.data.train_data, cfg, tokenizer)
        generator = EpisodeGenerator(self.client, local_pool(), tokenizer, MODEL_LENGTH)
        rows, dispatch = Rows(folder / "metrics.jsonl"), LocalDispatch(cfg)
        trainer = PLANS[plan](cfg, rows, tokenizer, dataset, self.client, generator)
        probe = [ChatTokenizer(tokenizer).prompt(prompt.messages) for prompt in dataset[:PROBES]]
        sync = WeightSync(dispatch, self.client, probe, 1e-3)
        trainer.attach(dispatch, sync, timeline=Timeline(folder / "timeline.json"))
        try:
            await trainer.train()
        finally:
            await dispatch.shutdown()
        return rows

    async def balanced_length(self) -> int:
        """The length, of those given, at which generation and training of a batch are most alike."""
        imbalance = {}
        for length in self.options.lengths:
            rows = await self.run("sync", length, FIRST + 4, f"length_{length}")
            g, t = rows.median("time/generate_s"), rows.median("time/train_s")
            print(f"length {length}: generation {g:.2f} s, training {t:.2f} s", flush=True)
            imbalance[length] = max(g, t) / min(g, t)
        return min(imbalance, key=imbalance.__getitem__)


async def measure(bench: Bench) -> tuple[dict[str, Rows], int]:
    options = bench.options
    await bench.start()
    try:
        length = await bench.balanced_length() if len(options.lengths) > 1 else options.lengths[0]
        runs = {plan: await bench.run(plan, length, options.steps, plan) for plan in ("sync", "one_step_off")}
    finally:
        await bench.client.shutdown()
    return runs, length


def report(runs: dict[str, Rows], options: argparse.Namespace, length: int) -> list[str]:
    samples = options.prompts * options.samples
    lines = [f"{samples} responses of {length} tokens per step; medians over steps {FIRST + 1} to {options.steps - 1}"]
    names = ("time/step_s", "time/generate_s", "time/train_s", "time/sync_s", "time/wait_data_s",
             "time/wait_generation_s", "idle/trainer", "idle/engines")  # fmt: skip
    lines += ["", "| | sync | one_step_off |", "|---|---|---|"]
    lines += [
        f"| {name} | " + " | ".join(f"{rows.median(name):.3f}" for rows in runs.values()) + " |" for name in names
    ]
    speed = {plan: samples / rows.median("time/step_s") for plan, rows in runs.items()}
    lines += ["| samples/s | " + " | ".join(f"{value:.1f}" for value in speed.values()) + " |", ""]
    sync = runs["sync"]
    g, t, s = (sync.median(f"time/{phase}_s") for phase in ("generate", "train", "sync"))
    lines += [
        f"one_step_off is {speed['one_step_off'] / speed['sync']:.2f} times as fast; with nothing slowed by what runs "
        f"beside it (G+T+S)/(max(G,T)+S) = {(g + t + s) / (max(g, t) + s):.2f}"
    ]
    return lines


def _row(name: str, values: list[float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.4g}" for value in values) + " |"


def predictions(options: argparse.Namespace, runs: dict[str, Rows]) -> list[str]:
    """Seconds per step of both plans by the simulator, from the synchronous run's metrics alone."""
    from skyasync.config.load import load_config
    from skyasync.simulate.advice import read_costs
    from skyasync.simulate.run import simulate
    from skyasync.simulate.settings import SimulationConfig

    cfg = load_config(
        [f"trainer.train_batch_size={options.prompts}", f"generator.n_samples_per_prompt={options.samples}",
         "generator.num_inference_engines=1", "trainer.max_training_steps=30"],
        schema=SimulationConfig, plan="fully_async",
    )  # fmt: skip
    read_costs(cfg, runs["sync"].path)
    lines = []
    for plan, rows in runs.items():
        predicted, measured = simulate(cfg, plan).step_s, rows.median("time/step_s")
        gap = predicted / measured - 1
        lines.append(f"{plan}: simulated {predicted:.3f} s per step, measured {measured:.3f} s ({gap:+.1%})")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--prompts", type=int, default=32, help="per step")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--lengths", type=int, nargs="+", default=[24, 40, 64], help="to choose from, in tokens")
    parser.add_argument("--hidden", type=int, default=256, help="size of the model's hidden state, a multiple of 64")
    parser.add_argument("--folder", type=Path, default=Path("runs/overlap"))
    options = parser.parse_args()
    bench = Bench(options)
    runs, length = asyncio.run(measure(bench))
    print("\n".join([*report(runs, options, length), *predictions(options, runs)]))


if __name__ == "__main__":
    main()
