"""From the engines' answers to the training batch: the cost of a token in the controller.

One object that computes nothing replaces the engines: its answers exist already, pickled as in
messages. The rest is real: the client, the episodes, the checks, the groups, the metrics and the
batch. An environment rewards at once, and reads no text unless ``--text`` (then that of SmolLM2's
tokenizer, whose own time it is).

- time: from the first answer to the batch, per token of prompts and responses, in seconds of this
  process's CPU, which other work on the machine changes little;
- memory: the process's peak minus its memory before the first answer, per token, the answers
  themselves included;
- turn: the longest delay of a due timer in the event loop, in seconds of its thread's CPU, and in
  wall-clock seconds, which other work increases.

``lists``: the same by a generator with an overridden ``generate``, that is, through SkyRL's
parallel lists.

Run:
``python -m benchmarks.data_path [--prompts 64] [--samples 16] [--tokens 10000] [--text] [--ways arrays lists]``
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import multiprocessing
import pickle
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from skyasync.config.schema import GeneratorConfig
from skyasync.envs.base import BaseTextEnv
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import GenerationOutput, GenerationRequest, InferenceEngine
from skyasync.inference.ray_engine import messages
from skyasync.rollout.collate import collate_in_turns
from skyasync.rollout.generator import EpisodeGenerator
from skyasync.rollout.generator_api import rollout_requests, run_generator
from skyasync.rollout.metrics import rollout_metrics, staleness_metrics
from skyasync.rollout.types import GeneratorInput, GeneratorOutput, Prompt, PromptId

PROMPT_TOKENS = 100
TICK_S = 0.001
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Shape:
    """Number of responses, and their lengths: uniformly from ``shortest`` to ``longest``."""

    prompts: int
    samples: int
    shortest: int
    longest: int


class ReadyEngine(InferenceEngine):
    """Has its answers ready; the clock starts with the first one."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.started_s = 0.0
        self.memory_before = 0

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[list[GenerationOutput]]:
        random = np.random.default_rng(0)
        answers = [self._answer(request.request_id, random) for request in requests]
        self.letters = letters = [
            pickle.dumps(message, pickle.HIGHEST_PROTOCOL) for message in messages(answers)
        ]
        del answers
        gc.collect()
        await asyncio.sleep(0.1)
        self.memory_before = forget_peak()
        self.started_s = time.process_time()
        for letter in letters:
            yield pickle.loads(letter)
            await asyncio.sleep(0)

    def _answer(self, name: str, random: np.random.Generator) -> GenerationOutput:
        length = int(random.integers(self._shape.shortest, self._shape.longest, endpoint=True))
        tokens = random.integers(0, 30_000, length)
        return GenerationOutput(name, tokens, -random.random(length), np.full(length, 3), "stop")


class Judge:
    """In place of the environments' pool."""

    async def init_group(self, *_: Any) -> None: ...

    def starts_from_prompt(self, *_: Any) -> bool:
        return True

    def plays_here(self, *_: Any) -> bool:
        return True

    def collecting(self) -> Any:
        return nullcontext()

    def step(self, episode: str, text: str, seen: None = None) -> Any:
        return self._at_once({"reward": len(episode) % 2, "done": True, "metrics": {"turns": 1.0}})

    env_config = None

    def env_class(self, _: str) -> type[BaseTextEnv]:
        return BaseTextEnv

    def abandon(self, _: str) -> None: ...

    @staticmethod
    async def _at_once(answer: Any) -> Any:
        return answer


class NoText:
    """In place of a tokenizer."""

    name_or_path = ""

    def apply_chat_template(self, *_: Any, **__: Any) -> list[int]:
        return list(range(PROMPT_TOKENS))

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


class Lists(EpisodeGenerator):
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        return await super().generate(input_batch)


@dataclass
class Result:
    tokens: int
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    longest_turn_s: float = 0.0
    by_the_clock_s: float = 0.0

    @property
    def us_per_token(self) -> float:
        return sum(self.seconds.values()) / self.tokens * 1e6

    @property
    def bytes_per_token(self) -> float:
        return self.peak_bytes / self.tokens


async def measure(shape: Shape, way: str = "arrays", tokenizer: Any = None) -> Result:
    engine = ReadyEngine(shape)
    generator_class = Lists if way == "lists" else EpisodeGenerator
    client, judge = InferenceClient([engine]), Judge()  # type: ignore[list-item]
    generator = generator_class(
        client, judge, tokenizer or NoText(), shape.longest + PROMPT_TOKENS + 1
    )  # type: ignore[arg-type]
    prompts = [
        Prompt(PromptId(0, row), [{"role": "user", "content": "?"}], "judge")
        for row in range(shape.prompts)
    ]
    asked = GeneratorConfig(n_samples_per_prompt=shape.samples)
    asked.sampling_params.max_generate_length = shape.longest
    requests = rollout_requests(prompts, asked)
    async with turns(engine) as longest:
        groups, _ = await run_generator(generator, requests, 0)
        grouped = time.process_time()
        rollout_metrics(groups)
        await staleness_metrics(groups, 4)
        measured = time.process_time()
        batch = await collate_in_turns(groups)
        collated = time.process_time()
    peak = memory("VmHWM") - engine.memory_before
    seconds = {
        "groups": grouped - engine.started_s,
        "metrics": measured - grouped,
        "batch": collated - measured,
    }
    return Result(
        int(batch.attention_mask.sum()), seconds, peak, *map(max, zip(*longest, strict=True))
    )


@asynccontextmanager
async def turns(engine: ReadyEngine) -> AsyncIterator[list[tuple[float, float]]]:
    """Between two ticks of a timer, from the engine's first answer on: CPU seconds, and seconds of
    delay."""
    late = [(0.0, 0.0)]

    async def tick() -> None:
        while True:
            started = engine.started_s
            before = time.thread_time()
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            if started:
                late.append((time.thread_time() - before, time.perf_counter() - due_s))

    task = asyncio.create_task(tick())
    try:
        yield late
    finally:
        await asyncio.sleep(2 * TICK_S)
        task.cancel()


def memory(line: str) -> int:
    """Bytes that this process has (VmRSS), or at most has had (VmHWM)."""
    return next(
        int(text.split()[1]) * 1024
        for text in STATUS.read_text().splitlines()
        if text.startswith(line)
    )


def forget_peak() -> int:
    """Reset the peak to the current memory, which is returned. Freed memory goes back to the system
    first."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def touch(megabytes: int) -> None:
    """Have the machine's memory ready: a virtual machine's host is slow to give memory that was
    never used."""
    np.ones(megabytes << 20, np.int8)


def measured(shape: Shape, way: str, text: bool) -> Result:
    touch(4096)
    tokenizer = None
    if text:
        from examples.smollm2.model import build
        from skyasync.rollout.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(build())
    return asyncio.run(measure(shape, way, tokenizer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=10_000, help="of the longest response")
    parser.add_argument(
        "--shortest",
        type=float,
        default=0.9,
        help="the shortest response, as a share of the longest",
    )
    parser.add_argument("--text", action="store_true", help="the environment reads the responses")
    parser.add_argument(
        "--ways", nargs="+", default=["arrays", "lists"], choices=["arrays", "lists"]
    )
    args = parser.parse_args()
    shape = Shape(args.prompts, args.samples, int(args.shortest * args.tokens), args.tokens)
    table = Table(
        "way",
        "tokens",
        "us/token",
        "groups",
        "metrics",
        "batch",
        "bytes/token",
        "turn, ms",
        "by the clock",
    )
    for way in args.ways:
        with multiprocessing.get_context("spawn").Pool(
            1
        ) as fresh:  # so that its memory was not used before
            found = fresh.apply(measured, (shape, way, args.text))
        parts = (f"{seconds / found.tokens * 1e6:.3f}" for seconds in found.seconds.values())
        late = (f"{seconds * 1e3:.1f}" for seconds in (found.longest_turn_s, found.by_the_clock_s))
        table.add_row(
            way,
            f"{found.tokens:,}",
            f"{found.us_per_token:.3f}",
            *parts,
            f"{found.bytes_per_token:.0f}",
            *late,
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
