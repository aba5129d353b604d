"""Thousands of episodes in flight with environments that wait: engine utilization, and delays of
the event loop.

2,000 episodes (``--in-flight``) are in flight, each of several turns; a step of their environment
waits 200 ms, in a thread (``sync``) or on an event loop (``async``), in one process of its own.
Measured in the middle half of the run, in which that many are in flight throughout:

- throughput: actions per second, relative to the engine's with the same requests without
  environments;
- lag: the delay of a timer of the controller's event loop, every 10 ms.

``virtual``: an engine that decodes at a fixed speed (1,024 sequences, 32 to 96 tokens each, 20 ms
per token), without computing anything. ``embedded``: the real engine in its own process, on the
tiny chat model. ``--quick``: how long 1,024 episodes of one trivial step take through the pool,
median and best of 30.

Run:
``python -m benchmarks.many_episodes [--engine virtual embedded] [--env sync async none] [--quick]``
"""

from __future__ import annotations

import argparse
import asyncio
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from skyasync.envs import BaseTextEnv, BaseTextEnvStepOutput
from skyasync.envs.episodes import EnvSettings
from skyasync.inference.client import InferenceClient
from skyasync.inference.interface import (
    EngineConfig,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    SamplingParams,
)
from skyasync.rollout.chat import ChatTokenizer
from skyasync.rollout.generator import EpisodeGenerator, EpisodeLimits
from skyasync.rollout.types import PromptId, TrajectoryId
from skyasync.simulate.engines import DecodeCosts
from skyasync.simulate.engines import VirtualEngine as Decoder

TURNS = 5
SLOTS = 1024
TOKEN_S = 0.02
TOKENS = {"virtual": 96, "embedded": 9}
SAYS = "The answer is wrong, try again."


class Sync(BaseTextEnv):
    """A step waits as synchronous code does."""

    def step(self, action: str) -> BaseTextEnvStepOutput:
        time.sleep(self.env_config["step_s"])
        return self.answer()

    def answer(self) -> BaseTextEnvStepOutput:
        self.turns += 1
        said = [{"role": "user", "content": SAYS}]
        return {"observations": said, "reward": 0.0, "done": self.turns == TURNS, "metadata": {}}


class Async(Sync):
    async def step(self, action: str) -> BaseTextEnvStepOutput:  # type: ignore[override]
        await asyncio.sleep(self.env_config["step_s"])
        return self.answer()


class Trivial(BaseTextEnv):
    def step(self, action: str) -> BaseTextEnvStepOutput:
        return {"observations": [], "reward": 0.0, "done": True, "metadata": {}}


class TimedEngine(InferenceEngine):
    """Answers with the same token after the time that decoding would take."""

    def __init__(self) -> None:
        self._decoder: Decoder | None = None

    async def start(self) -> None:
        self._decoder = Decoder(DecodeCosts(SLOTS, TOKEN_S))

    async def generate(
        self, requests: Sequence[GenerationRequest]
    ) -> AsyncIterator[list[GenerationOutput]]:
        assert self._decoder is not None
        queue: asyncio.Queue[GenerationRequest] = asyncio.Queue()
        from skyasync.simulate.engines import Sequence as Decoding

        for request in requests:
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            done.add_done_callback(lambda _, request=request: queue.put_nowait(request))
            self._decoder.submit(Decoding(0, _length(request), done))
        left = len(requests)
        while left:
            ended = [await queue.get()]
            while not queue.empty():
                ended.append(queue.get_nowait())
            left -= len(ended)
            yield [_written(request) for request in ended]

    async def shutdown(self) -> None: ...


def _written(request: GenerationRequest) -> GenerationOutput:
    count = _length(request)
    return GenerationOutput(request.request_id, [5] * count, [-1.0] * count, [0] * count, "length")


def _length(request: GenerationRequest) -> int:
    most = request.sampling.max_tokens
    return most // 3 + zlib.crc32(request.request_id.encode()) % (most - most // 3)


class Lag:
    """Delays of timers, and the times at which actions were answered."""

    def __init__(self) -> None:
        self.late: list[tuple[float, float]] = []
        self.answers: list[float] = []

    async def watch(self) -> None:
        while True:
            due_s = time.perf_counter() + 0.01
            await asyncio.sleep(0.01)
            now = time.perf_counter()
            self.late.append((now, now - due_s))

    def counting(self, client: InferenceClient) -> None:
        generate_group = client.generate_group

        async def counted(
            requests: Sequence[GenerationRequest], partial: GenerationOutput | None = None
        ) -> AsyncGenerator[list[GenerationOutput], None]:
            async with aclosing(generate_group(requests, partial)) as arriving:
                async for outputs in arriving:
                    self.answers += [time.perf_counter()] * len(outputs)
                    yield outputs

        client.generate_group = counted  # type: ignore[method-assign]

    def report(self) -> tuple[float, float, float, float]:
        """Actions per second; 50th and 99th percentile and largest lag in ms, all in the middle
        half of the actions."""
        count = len(self.answers)
        start = self.answers[count // 4]
        end = self.answers[3 * count // 4]
        late = [1000 * seconds for when, seconds in self.late if start <= when <= end]
        return (count // 2) / (end - start), *np.percentile(late, [50, 99, 100])  # type: ignore[return-value]


async def alone(client: InferenceClient, chat: ChatTokenizer, asked: Any, in_flight: int) -> None:
    """The requests of the episodes, one after the other, without environments: the engine's own
    limit."""
    turn = asyncio.Semaphore(in_flight)
    prompts = [chat.prompt(prompt) for prompt in asked["prompts"]]
    observation = chat.observation(
        [{"role": "user", "content": SAYS}], [chat.tokenizer.eos_token_id]
    )

    async def one(number: int, prompt: list[int]) -> None:
        async with turn:
            for step in range(TURNS):
                request = GenerationRequest(
                    f"{number}-{step}", prompt, asked["sampling_params"], str(number)
                )
                prompt = [
                    *prompt,
                    *(await client.generate(request)).token_ids.tolist(),
                    *observation,
                ]

    await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))


def generator_input(env: str, count: int, tokens: int) -> Any:
    said = [[{"role": "user", "content": f"Sort the digits: {number}"}] for number in range(count)]
    return {
        "prompts": said,
        "env_classes": [env] * count,
        "env_extras": [{}] * count,
        "sampling_params": SamplingParams(max_tokens=tokens),
        "trajectory_ids": [TrajectoryId(PromptId(0, number), 0) for number in range(count)],
        "is_eval": False,
    }


async def measure(
    engine: str, env: str, options: argparse.Namespace, tokenizer: Any, model: str
) -> list[str]:
    from skyasync.envs.pool import ray_pool
    from skyasync.inference.ray_engine import RayEngine

    config = EngineConfig(model, max_model_len=1024, max_num_seqs=SLOTS, threads=1)
    client = InferenceClient(
        [TimedEngine() if engine == "virtual" else RayEngine("transformers", config, {}, 120.0)]
    )
    await client.start()
    pool = ray_pool(EnvSettings({"step_s": options.step_s}), 1)
    names = {"sync": f"{__name__}:Sync", "async": f"{__name__}:Async"}
    asked = generator_input(names.get(env, ""), options.episodes, TOKENS[engine])
    generator = EpisodeGenerator(
        client, pool, tokenizer, 1024, EpisodeLimits(TURNS, in_flight=options.in_flight)
    )
    lag = Lag()
    lag.counting(client)
    if env != "none":  # processes start before the clock does
        await pool.init("first", names[env], {}, [])
        await pool.close("first")
    watch = asyncio.create_task(lag.watch())
    if env == "none":
        await alone(client, ChatTokenizer(tokenizer), asked, options.in_flight)
    else:
        await generator.generate(asked)
    watch.cancel()
    rate, *late = lag.report()
    pool.pool.close()
    await client.shutdown()
    return [engine, env, f"{rate:,.0f}", *(f"{value:.0f}" for value in late)]


async def quick(tokenizer: Any) -> list[float]:
    """Seconds of 30 times 1,024 episodes of one trivial step, without the engine and everything but
    the environment."""
    from skyasync.envs.pool import ray_pool

    pool = ray_pool(EnvSettings({}), 1)
    seconds = []
    for repeat in range(33):
        started = time.perf_counter()
        names = [f"{repeat}-{number}" for number in range(1024)]
        await asyncio.gather(*(pool.init(name, f"{__name__}:Trivial", {}, [{"role": "user", "content": name}])
                               for name in names))  # fmt: skip
        await asyncio.gather(*(pool.step(name, "12345") for name in names))
        seconds.append(time.perf_counter() - started)
    pool.pool.close()
    return seconds[3:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", nargs="*", default=["virtual", "embedded"])
    parser.add_argument("--env", nargs="*", default=["none", "sync", "async"])
    parser.add_argument("--in-flight", type=int, default=2000)
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--quick", action="store_true", help="measure many trivial steps instead")
    options = parser.parse_args()
    import ray
    from transformers import AutoTokenizer

    from examples.tiny.model import build
    from skyasync.run.ray_cluster import start_on_loopback

    start_on_loopback(num_cpus=8, log_to_driver=False)
    model = build()
    tokenizer = AutoTokenizer.from_pretrained(model)
    if options.quick:
        seconds = asyncio.run(quick(tokenizer))
        print(
            f"1,024 episodes of one trivial step: {median(seconds):.3f} s (best {min(seconds):.3f})"
        )
        return
    table = Table("engine", "environment", "actions/s", "lag p50, ms", "p99", "largest")
    for engine in options.engine:
        for env in options.env:
            table.add_row(*asyncio.run(measure(engine, env, options, tokenizer, model)))
    Console(width=120).print(table)
    ray.shutdown()


if __name__ == "__main__":
    main()
