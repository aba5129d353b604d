"""The gain of overlapping generation with training: ``one_step_off`` and ``streamed`` against
``sync``.

    uv run -m benchmarks.overlap [--rounds 3] [--steps 8] [--prompts 32] [--waves 4] [--lengths 24
    40 64]

Real vLLM behind Ray on one core (front end and model, one thread), the real policy worker on the
other (one thread), real weight syncs, and the plans' own classes; all plans have the same two
cores. They run a few steps each in turn, in an order that rotates with every round, so that other
work on the machine affects all of them. The result is their ratio.

Every response has the same length, and that length is chosen so that generating a batch takes as
long as training on it (measured first, for the lengths given). The engine decodes the batch in
``--waves`` parts, one after the other, so that groups end at different times: with one wave,
``streamed`` would have nothing to train while the engine works. With generation G, training T and
the weight sync S, which overlaps with nothing, a step takes at best

- ``sync``: G + T + S;
- ``one_step_off``: max(G, T) + S;
- ``streamed``: (G + T) / waves + max(G, T) (waves - 1) / waves + S.

After the measurement the simulator (``skyasync.simulate``) reads the synchronous runs' metrics by
``simulate.from_run``, and predicts the seconds per step of each plan. Metrics and timelines (for
ui.perfetto.dev) are left in the folder.

Micro-batches are small because two cores share their memory's bandwidth: activations that leave the
cache slow down both sides while they overlap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

PLANS = ("sync", "streamed", "one_step_off")
FIRST = 3  # rows left out at the start: before training, and two steps that fill the pipeline
PROBES = 4
ENGINE_CORE = 0
POLICY_CORE = 1
STEP = "from end to end of a step"  # seconds
MODEL_LENGTH = 512


@dataclass
class Rows:
    """A tracker that writes the rows of a run's ``metrics.jsonl``."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)

    def log(self, metrics: dict[str, float], step: int) -> None:
        now = time.time()
        # since the end of the step before
        if self.rows:
            ends_s = now - self.rows[-1]["time"]
        else:
            ends_s = 0.0
        self.rows.append({"step": step, "time": now, STEP: ends_s, **metrics})

    def close(self) -> None:
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows))

    @property
    def steady(self) -> list[dict[str, Any]]:
        return self.rows[FIRST:-1]  # the last step overlaps with nothing

    def median(self, name: str) -> float:
        return median(row.get(name, 0.0) for row in self.steady)


class Joined(Rows):
    """The steady steps of several runs of one plan."""

    def __init__(self, path: Path, runs: list[Rows]) -> None:
        super().__init__(path, [row for run in runs for row in run.steady])
        path.parent.mkdir(parents=True, exist_ok=True)
        self.close()

    @property
    def steady(self) -> list[dict[str, Any]]:
        return self.rows


class Bench:
    """One engine for all runs; a policy worker for each."""

    def __init__(self, options: argparse.Namespace) -> None:
        from examples.tiny.model import build

        self.options = options
        size = {"hidden": options.hidden, "intermediate": options.hidden * 11 // 4}
        self.model = build(
            out=options.folder / f"model_{options.hidden}", steps=1, progress=False, **size
        )

    async def start(self) -> None:
        """Everything that Ray starts inherits this process's core; the policy's thread starts on
        the other."""
        from skyasync.inference.client import InferenceClient
        from skyasync.inference.interface import EngineConfig
        from skyasync.inference.ray_engine import RayEngine
        from skyasync.run.ray_cluster import start_on_loopback

        slots = self.options.prompts * self.options.samples // self.options.waves
        config = EngineConfig(
            self.model, threads=1, max_model_len=MODEL_LENGTH, max_num_seqs=slots, kv_cache_gb=1.0
        )
        os.sched_setaffinity(0, {ENGINE_CORE})
        start_on_loopback(num_cpus=2, object_store_memory=1 << 28, log_to_driver=False)
        self.client = InferenceClient([RayEngine("vllm", config, {"num_cpus": 0})])
        await self.client.start()
        os.sched_setaffinity(0, {POLICY_CORE})

    def configuration(self, plan: str, length: int, steps: int) -> Any:
        from skyasync.config import load_config

        options = self.options
        sampling = "generator.sampling_params"
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
        from skyasync.observability.timeline import Timeline
        from skyasync.rollout.chat import ChatTokenizer
        from skyasync.rollout.generator import EpisodeGenerator
        from skyasync.trainer.plans import PLANS
        from skyasync.weight_sync.sync import WeightSync
        from skyasync.workers.dispatch import LocalDispatch

        cfg = self.configuration(plan, length, steps)
        folder = self.options.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "timeline.json").unlink(missing_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(self.model)
        dataset = load_prompts(cfg.data.train_data, cfg, tokenizer)
        generator = EpisodeGenerator(self.client, local_pool(), tokenizer, MODEL_LENGTH)
        rows = Rows(folder / "metrics.jsonl")
        dispatch = LocalDispatch(cfg)
        trainer = PLANS[plan](cfg, rows, tokenizer, dataset, self.client, generator)
        probe = [
            ChatTokenizer(tokenizer).prompt(prompt.messages).tolist() for prompt in dataset[:PROBES]
        ]
        sync = WeightSync(dispatch, self.client, probe, 1e-3)
        trainer.attach(dispatch, sync, timeline=Timeline(folder / "timeline.json"))
        try:
            await trainer.run()
        finally:
            await dispatch.shutdown()
        return rows

    async def balanced_length(self) -> int:
        """The given length at which generation and training of a batch take most nearly the same
        time."""
        imbalance = {}
        for length in self.options.lengths:
            rows = await self.run("sync", length, FIRST + 4, f"length_{length}")
            g = rows.median("time/generate_s")
            t = rows.median("time/train_s")
            print(f"length {length}: generation {g:.2f} s, training {t:.2f} s", flush=True)
            imbalance[length] = max(g, t) / min(g, t)
        return min(imbalance, key=imbalance.__getitem__)


async def measure(bench: Bench) -> tuple[dict[str, list[Rows]], int]:
    """The runs of each plan, one per round."""
    options = bench.options
    runs: dict[str, list[Rows]] = {plan: [] for plan in PLANS}
    await bench.start()
    try:
        if len(options.lengths) > 1:
            length = await bench.balanced_length()
        else:
            length = options.lengths[0]
        for number in range(options.rounds):
            first = number % len(PLANS)
            for plan in PLANS[first:] + PLANS[:first]:
                runs[plan].append(await bench.run(plan, length, options.steps, f"{plan}_{number}"))
                step_s = runs[plan][-1].median(STEP)
                print(
                    f"round {number + 1}: {plan} {step_s:.3f} s per step, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
    finally:
        await bench.client.shutdown()
    return runs, length


def report(
    runs: dict[str, Rows], rounds: dict[str, list[Rows]], options: argparse.Namespace, length: int
) -> list[str]:
    """Medians over the steady steps of all rounds."""
    samples = options.prompts * options.samples
    waves = options.waves
    lines = [f"{samples} responses of {length} tokens per step, {samples // waves} at once; medians over "
             f"{len(runs['sync'].rows)} steps of {options.rounds} rounds"]  # fmt: skip
    names = (STEP, "time/generate_s", "time/train_s", "time/sync_s", "time/wait_data_s",
             "time/wait_generation_s", "idle/trainer", "idle/engines")  # fmt: skip
    lines += ["", "| | " + " | ".join(runs) + " |", "|---" * (1 + len(runs)) + "|"]
    lines += [_row(name, [rows.median(name) for rows in runs.values()]) for name in names]
    lines += [_row("samples/s", [samples / rows.median(STEP) for rows in runs.values()]), ""]
    sync = runs["sync"]
    g, t, s = (sync.median(f"time/{phase}_s") for phase in ("generate", "train", "sync"))
    best = {
        "one_step_off": max(g, t) + s,
        "streamed": (g + t) / waves + max(g, t) * (waves - 1) / waves + s,
    }
    for plan, step_s in best.items():
        times = sync.median(STEP) / runs[plan].median(STEP)
        by_round = (a.median(STEP) / b.median(STEP)
                    for a, b in zip(rounds["sync"], rounds[plan], strict=True))  # fmt: skip
        lines += [
            f"{plan} is {times:.2f} times as fast as sync (round by round: {', '.join(f'{r:.2f}' for r in by_round)}); "
            f"if generation and training did not slow each other down {(g + t + s) / step_s:.2f}"
        ]
    return lines


def _row(name: str, values: list[float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |"


def predictions(options: argparse.Namespace, runs: dict[str, Rows]) -> list[str]:
    """Seconds per step of the plans by the simulator, from the synchronous runs' metrics alone."""
    from skyasync.config.load import load_config
    from skyasync.simulate.costs import read_costs
    from skyasync.simulate.run import simulate
    from skyasync.simulate.settings import SimulationConfig

    cfg = load_config(
        [f"trainer.train_batch_size={options.prompts}", f"generator.n_samples_per_prompt={options.samples}",
         "generator.num_inference_engines=1", "trainer.max_training_steps=30"],
        schema=SimulationConfig, plan="fully_async",
    )  # fmt: skip
    read_costs(cfg, runs["sync"].path.parent)  # which takes the batch to fit the engine
    cfg.simulate.slots //= options.waves
    cfg.simulate.token_s /= options.waves
    lines = []
    for plan, rows in runs.items():
        predicted = simulate(cfg, plan).step_s
        measured = rows.median(STEP)
        gap = predicted / measured - 1
        lines.append(
            f"{plan}: simulated {predicted:.3f} s per step, measured {measured:.3f} s ({gap:+.1%})"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each plan")
    parser.add_argument(
        "--steps", type=int, default=8, help="per run; the first two and the last are left out"
    )
    parser.add_argument("--prompts", type=int, default=32, help="per step")
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument(
        "--waves", type=int, default=4, help="parts in which the engine decodes a batch"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[24, 40, 64], help="to choose from, in tokens"
    )
    parser.add_argument(
        "--hidden", type=int, default=256, help="size of the model's hidden state, a multiple of 64"
    )
    parser.add_argument("--folder", type=Path, default=Path("runs/overlap"))
    options = parser.parse_args()
    bench = Bench(options)
    rounds, length = asyncio.run(measure(bench))
    runs: dict[str, Rows] = {
        plan: Joined(options.folder / plan / "metrics.jsonl", found)
        for plan, found in rounds.items()
    }
    print("\n".join([*report(runs, rounds, options, length), *predictions(options, runs)]))


if __name__ == "__main__":
    main()
