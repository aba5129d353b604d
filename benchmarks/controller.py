"""CPU time of the controller per episode: prompts to requests, answers to environments, groups to a
batch.

The engine is one object in this process, whose answers cost nothing that is counted. Everything
else is real: requests, client, router, episodes, environments, tokenizer, checks, metrics and
collation.

- CPU: seconds of this process per 1,000 episodes, without the engine's own, best of ``--repeats``;
- per turn: the same, in milliseconds per turn of an episode;
- turn: 99th percentile and largest CPU time of a turn of the event loop while episodes begin, end
  and are collated.

Environments: ``instant`` rewards in the controller (``gsm8k``), ``local`` is an ordinary one with
one turn, ``ray`` the same one in a process of its own, ``turns`` has four turns in this process.

``--calls``: function calls and files of the library in the second step of a run of one sample in
one process (the synchronous plan, the embedded engine, no Ray, no run folder), by
``sys.setprofile``.

Run:
``python -m benchmarks.controller [--prompts 64 1024] [--samples 16] [--env instant local turns] [--calls]``
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

import skyasync
from skyasync.config.schema import GeneratorConfig
from skyasync.envs.base import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.envs.episodes import EnvSettings
from skyasync.envs.pool import EnvPool, local_pool, ray_pool
from skyasync.heap import freeze_start
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationOutput, GenerationRequest, InferenceEngine
from skyasync.rollout.collate import collate_in_turns
from skyasync.rollout.generator import EpisodeGenerator, EpisodeLimits
from skyasync.rollout.generator_api import rollout_requests, run_generator
from skyasync.rollout.metrics import rollout_metrics, staleness_metrics
from skyasync.rollout.types import Prompt, PromptId
from skyasync.trainer import RayPPOTrainer

TOKENS = 8
TURNS = 4
TICK_S = 0.001
LIBRARY = str(Path(skyasync.__file__).parent)


class SingleTurn(BaseTextEnv):
    """The tiny chat model's environment: one turn, one comparison."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reward = float(action.strip() == self.extras["answer"])
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}


class SeveralTurns(BaseTextEnv):
    """Asks again until its last turn."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        question = [{"role": "user", "content": "Again."}]
        return {
            "observations": question,
            "reward": 0.5,
            "done": self.turns == TURNS,
            "metadata": {},
        }


ENVIRONMENTS = {
    "instant": "gsm8k",
    "local": f"{__name__}:SingleTurn",
    "ray": "benchmarks.controller:SingleTurn",
    "turns": f"{__name__}:SeveralTurns",
}


class ReadyEngine(InferenceEngine):
    """Answers at once, in messages of as many answers as a large decoding batch ends in one
    step."""

    MESSAGE = 256

    def __init__(self) -> None:
        self.own_s = 0.0  # CPU seconds that are not the controller's
        random = np.random.default_rng(0)
        self._tokens = random.integers(300, 400, TOKENS, dtype=np.int32)
        self._logprobs = -random.random(TOKENS, dtype=np.float32)
        self._versions = np.full(TOKENS, 3, np.int32)

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[list[GenerationOutput]]:
        for start in range(0, len(requests), self.MESSAGE):
            began_s = time.process_time()
            message = [self._answer(request) for request in requests[start : start + self.MESSAGE]]
            self.own_s += time.process_time() - began_s
            yield message
            await asyncio.sleep(0)

    def _answer(self, request: GenerationRequest) -> GenerationOutput:
        return GenerationOutput(
            request.request_id, self._tokens, self._logprobs, self._versions, "stop"
        )


class Cost(NamedTuple):
    """CPU seconds of one batch, its number of episodes and turns, and of the loop's turns."""

    cpu_s: float
    episodes: int
    turns: int
    loop_turns_s: list[float]

    @property
    def ms_per_turn(self) -> float:
        return self.cpu_s / self.turns * 1000


async def measure(
    env: str, prompts: int, samples: int, repeats: int, profile: cProfile.Profile | None
) -> list[Cost]:
    """The cost of each of ``repeats`` batches, after one that is not counted."""
    engine = ReadyEngine()
    client = InferenceClient([engine])
    pool: EnvPool = ray_pool(EnvSettings({}), 1) if env == "ray" else local_pool()
    limits = EpisodeLimits(TURNS if env == "turns" else 1)
    generator = EpisodeGenerator(client, pool, _tokenizer(), 1024, limits)
    costs = [await _batch(env, prompts, samples, generator, engine, None)]
    freeze_start()  # as in the controller's process
    for _ in range(repeats):
        costs.append(await _batch(env, prompts, samples, generator, engine, profile))
    gc.unfreeze()
    pool.pool.close()
    return costs[1:]


async def _batch(
    env: str,
    prompts: int,
    samples: int,
    generator: EpisodeGenerator,
    engine: ReadyEngine,
    profile: cProfile.Profile | None,
) -> Cost:
    rows = [_prompt(row, ENVIRONMENTS[env]) for row in range(prompts)]
    settings = GeneratorConfig(n_samples_per_prompt=samples)
    settings.sampling_params.max_generate_length = TOKENS
    loop_turns_s: list[float] = []
    watch = asyncio.create_task(_watch(loop_turns_s))
    await asyncio.sleep(0)
    engine.own_s = 0.0
    began_s = time.process_time()
    if profile is not None:
        profile.enable()
    groups, _ = await run_generator(generator, rollout_requests(rows, settings), 0)
    rollout_metrics(groups)
    await staleness_metrics(groups, 4)
    batch = await collate_in_turns(groups)
    if profile is not None:
        profile.disable()
    cpu_s = time.process_time() - began_s - engine.own_s
    watch.cancel()
    with suppress(asyncio.CancelledError):
        await watch
    turns = sum(len(trajectory.actions) for group in groups for trajectory in group.trajectories)
    return Cost(cpu_s, len(batch.tokens), turns, loop_turns_s)


def _prompt(row: int, env: str) -> Prompt:
    extras = {"answer": str(row), "task": "sort"}
    return Prompt(
        PromptId(0, row), [{"role": "user", "content": f"Sort the digits: {row}"}], env, extras
    )


def _tokenizer() -> Any:
    from skyasync.examples.tiny.model import Recipe

    return Recipe(corpus_size=64, rarest_merge=8).make_tokenizer()


async def _watch(turns_s: list[float]) -> None:
    """CPU seconds of each turn of the event loop: wall-clock seconds would include what else the
    machine does."""
    before_s = time.thread_time()
    while True:
        await asyncio.sleep(TICK_S)
        now_s = time.thread_time()
        turns_s.append(now_s - before_s)
        before_s = now_s


# ---------------------------------------------------------------- calls of one sample's step


class CallCounter:
    """Counts calls of functions of the library, by file, in all threads that start after it was
    made."""

    def __init__(self) -> None:
        self.counts = False
        self.files: Counter[str] = Counter()
        threading.setprofile(self._count)
        sys.setprofile(self._count)

    def _count(self, frame: FrameType, event: str, argument: object) -> None:
        if self.counts and event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            self.files[frame.f_code.co_filename] += 1


def calls_of_one_sample() -> Counter[str]:
    """Calls by file in the second step of a run of one prompt with one sample of at most 12
    tokens."""
    models = import_module("tests.inference.tiny_llama")
    runs = import_module("tests.trainer.plans.local_run")
    counter = CallCounter()

    class SecondStep(RayPPOTrainer):
        async def _begin_step(self, step: int) -> None:
            await super()._begin_step(step)
            counter.counts = step == 2

    with TemporaryDirectory() as folder:
        model = models.save_tiny_llama(Path(folder), tied=False)
        cfg = runs.config(model, steps=3, train_batch_size=1, eval_interval=0)
        cfg.generator.n_samples_per_prompt = 1
        asyncio.run(runs.LocalRun(SecondStep, cfg).train())
    return counter.files


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--env", nargs="+", default=["instant", "local", "turns"], choices=list(ENVIRONMENTS)
    )
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument(
        "--calls", action="store_true", help="count the calls of one sample's step instead"
    )
    options = parser.parse_args()
    if options.calls:
        files = calls_of_one_sample()
        for file, calls in files.most_common():
            print(f"{calls:5}  {file.removeprefix(LIBRARY)}")
        print(f"{files.total()} calls in {len(files)} files")
        return
    if "ray" in options.env:
        from skyasync.run.ray_cluster import start_on_loopback

        start_on_loopback(num_cpus=2, log_to_driver=False)
    table = Table(
        "environment",
        "prompts x samples",
        "s per 1,000 episodes",
        "ms per turn",
        "turn p99, ms",
        "largest",
    )
    for env in options.env:
        for prompts in options.prompts:
            profile = cProfile.Profile() if options.profile else None
            costs = asyncio.run(measure(env, prompts, options.samples, options.repeats, profile))
            best = min(costs, key=lambda cost: cost.cpu_s)
            loop_ms = np.concatenate([cost.loop_turns_s for cost in costs]) * 1000
            table.add_row(
                env,
                f"{prompts} x {options.samples}",
                f"{best.cpu_s / best.episodes * 1000:.3f}",
                f"{best.ms_per_turn:.3f}",
                f"{np.percentile(loop_ms, 99):.1f}",
                f"{loop_ms.max():.1f}",
            )
            if profile is not None:
                import pstats

                pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
