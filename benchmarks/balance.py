"""Whether engines of two speeds with one client get work in proportion to their speeds.

    OMP_NUM_THREADS=1 uv run -m benchmarks.balance [--kinds transformers transformers vllm vllm]
    [--requests 1000]

Real engines of one tiny model with the library's client, as ``generator.backend`` starts them, a
thread each. Response lengths are exponential and unknown to the router: every request allows the
longest. A given number is in flight; half as many come first and are not counted, while the
engines' speeds are unknown.

- tokens: of all responses; requests: how many;
- speed: tokens per second at the engine's usual load, by the router's own measure (``router``), of
  these requests alone; on a machine with fewer cores than engines, the speed while the other
  engines run;
- share: tokens over speed, relative to the mean of all engines. The busiest over the idlest is
  below the table.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch

from benchmarks.sync_gaps import Shape, save
from skyasync.arrays import ints
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    ENGINES,
    EngineConfig,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from skyasync.inference.router import Throughput

LONGEST = 240
UNCOUNTED = 2  # one uncounted request per so many counted ones


class Skewed:
    """An engine whose responses have given lengths; its output since ``reset_count``."""

    def __init__(self, engine: Any, lengths: dict[str, int]) -> None:
        self.engine = engine
        self.lengths = lengths
        self.in_flight = 0
        self.reset_count()

    def reset_count(self) -> None:
        self.tokens = self.requests = 0
        self.speed = Throughput()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[list[GenerationOutput]]:
        self._loaded(len(requests))
        cut = [
            replace(each, sampling=replace(each.sampling, max_tokens=self.lengths[each.request_id]))
            for each in requests
        ]
        async for answers in self.engine.generate(cut):
            self._loaded(-len(answers))
            self.requests += len(answers)
            for answer in answers:
                self.speed.answered(len(answer.token_ids))
                self.tokens += len(answer.token_ids)
            yield answers

    def _loaded(self, more: int) -> None:
        self.speed.load(self.in_flight, time.perf_counter())
        self.in_flight += more


async def ask(client: InferenceClient, names: Sequence[str], in_flight: int) -> None:
    positions = asyncio.Semaphore(in_flight)
    sampling = SamplingParams(max_tokens=LONGEST, ignore_eos=True)

    async def one(number: int, name: str) -> None:
        async with positions:
            await client.generate(
                GenerationRequest(
                    name, ints([1 + (number * 7 + i) % 90 for i in range(8)]), sampling
                )
            )

    await asyncio.gather(*(one(number, name) for number, name in enumerate(names)))


async def measure(
    kinds: Sequence[str], path: str, requests: int, in_flight: int
) -> list[tuple[int, int, float]]:
    """Requests, tokens and speed of each engine."""
    draw = random.Random(0)
    names = [f"r{number}" for number in range(requests + requests // UNCOUNTED)]
    lengths = {name: min(1 + int(draw.expovariate(5 / LONGEST)), LONGEST) for name in names}
    config = EngineConfig(
        path, dtype="float32", threads=1, max_model_len=256, max_num_seqs=64, kv_cache_gb=0.1
    )
    engines = [
        Skewed(ENGINES[kind](replace(config, extra={"engine_index": index})), lengths)
        for index, kind in enumerate(kinds)
    ]
    client = InferenceClient(engines)
    await client.start()
    try:
        await ask(client, names[requests:], in_flight)
        for engine in engines:
            engine.reset_count()
        await ask(client, names[:requests], in_flight)
        return [
            (each.requests, each.tokens, each.speed.tokens_per_s or math.nan) for each in engines
        ]
    finally:
        await client.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kinds", nargs="+", default=["transformers", "transformers", "vllm", "vllm"]
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--in-flight", type=int, default=160)
    parser.add_argument(
        "--head-dim", type=int, default=256, help="of two layers with two heads: the model's size"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save(Shape("llama", "tied", "float32"), folder, options.head_dim)
        rows = asyncio.run(measure(options.kinds, folder, options.requests, options.in_flight))
    shares = [tokens / speed for _, tokens, speed in rows]
    print("| engine | requests | tokens | speed | share |\n|---|---|---|---|---|")
    for kind, (count, tokens, speed), share in zip(options.kinds, rows, shares, strict=True):
        print(f"| {kind} | {count} | {tokens} | {speed:.0f} | {share / fmean(shares):.2f} |")
    print(f"\nbusiest over idlest: {max(shares) / min(shares):.3f}")


if __name__ == "__main__":
    main()
