"""The Tinker server on the tiny model: its time per step compared with ``sync`` on the same work,
and a client under kills.

    python -m benchmarks.tinker ratio --turns 3                            # both train one adapter on the same prompts
    python -m benchmarks.tinker ratio --turns 3 --hidden 512 --layers 8    # of a larger model
    python -m benchmarks.tinker kills --times 20     # kills an engine, the ranks and the server in turn
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import psutil
import tinker
from tinker import types

from benchmarks.step_ends import step_times
from skyasync.examples.tiny.model import build
from skyasync.examples.tiny.tasks import train_prompts

PROMPTS = 32
SAMPLES = 8
TOKENS = 9
RANK = 16
RATE = 3e-3
WARM = 2  # steps that are not timed
KEY = "tml-local"
COMMON = (
    "generator.backend=transformers", "generator.max_model_len=64", "trainer.max_prompt_length=32",
    f"generator.sampling_params.max_generate_length={TOKENS}",
    f"generator.eval_sampling_params.max_generate_length={TOKENS}",
    f"trainer.policy.lora.rank={RANK}", f"trainer.policy.lora.alpha={RANK}",
)  # fmt: skip
PORT = 20000 + os.getpid() % 10000


@contextmanager
def server(folder: Path, model: str) -> Iterator[tuple[str, psutil.Process]]:
    """The server's address, and its process."""
    log = folder / f"server.{time.monotonic_ns()}.log"
    words = [
        "--folder",
        str(folder / "state"),
        "--port",
        str(PORT),
        f"trainer.policy.model.path={model}",
        *COMMON,
    ]
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "skyasync", "tinker", *words], stdout=out, stderr=out
        )
    try:
        said: dict[str, str] = {}
        while "base_model" not in said:
            if process.poll() is not None:
                raise RuntimeError(log.read_text())
            time.sleep(0.2)
            said = dict(line.split("=", 1) for line in log.read_text().splitlines() if "=" in line)
        yield said["TINKER_BASE_URL"], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def train(base_url: str, base_model: str, steps: int) -> list[dict[str, float]]:
    """Of each step: samples of every prompt, a gradient, a step of the optimizer, the next
    sampler."""
    service = tinker.ServiceClient(base_url=base_url, api_key=KEY)
    client = service.create_lora_training_client(base_model=base_model, rank=RANK, seed=0).result()
    tokenizer: Any = client.get_tokenizer()
    rows = cycle(train_prompts())
    sampler = client.save_weights_and_get_sampling_client().result()
    seconds = list[dict[str, float]]()
    for _ in range(steps):
        began = time.perf_counter()
        computed = time.process_time()
        asked = [next(rows) for _ in range(PROMPTS)]
        prompts = [
            list(
                tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)[
                    "input_ids"
                ]
            )
            for row in asked
        ]
        params = types.SamplingParams(max_tokens=TOKENS)
        answers = [
            sampler.sample(types.ModelInput.from_ints(prompt), SAMPLES, params)
            for prompt in prompts
        ]
        sampled = [answer.result().sequences for answer in answers]
        sampling = time.perf_counter() - began
        data = []
        for row, prompt, sequences in zip(asked, prompts, sampled, strict=True):
            texts = [
                tokenizer.decode(list(each.tokens), skip_special_tokens=True) for each in sequences
            ]
            rewards = [float(text.strip() == row["answer"]) for text in texts]
            for sequence, reward in zip(sequences, rewards, strict=True):
                whole = [*prompt, *sequence.tokens]
                zeros = [0.0] * (len(prompt) - 1)
                advantage = (reward - statistics.fmean(rewards)) / PROMPTS
                inputs: dict[str, Any] = {
                    "target_tokens": whole[1:],
                    "logprobs": zeros + list(sequence.logprobs or ()),
                    "advantages": zeros + [advantage] * len(sequence.tokens),
                }
                data.append(types.Datum(types.ModelInput.from_ints(whole[:-1]), inputs))
        gradient = client.forward_backward(data, "importance_sampling")
        step = client.optim_step(types.AdamParams(learning_rate=RATE))
        sampler = client.save_weights_and_get_sampling_client().result()
        step.result()
        gradient.result()
        step_s = time.perf_counter() - began
        own_s = time.process_time() - computed
        seconds.append({"s/step": step_s, "sampling": sampling, "CPU of the client": own_s})
    service.close("success").result()
    return seconds


def train_sync(base_model: str, steps: int, folder: Path) -> list[dict[str, float]]:
    """Of each step of ``sync``, from its metrics."""
    words = [
        "trainer.plan=sync", f"trainer.policy.model.path={base_model}", f"trainer.train_batch_size={PROMPTS}",
        f"generator.n_samples_per_prompt={SAMPLES}",
        f"trainer.policy.optimizer_config.lr={RATE}", f"trainer.max_training_steps={steps}", "trainer.epochs=99",
        "trainer.eval_interval=0", "trainer.eval_before_train=false", "trainer.placement.colocate_all=false",
        f"trainer.runs_dir={folder}", *COMMON,
        "data.train_data=[skyasync.examples.tiny.tasks:train_prompts]",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "skyasync", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    [metrics] = folder.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    times = step_times(rows)
    return [
        {"s/step": times[row["step"]], "sampling": row["time/generate_s"]}
        for row in rows
        if row["step"] in times
    ]


def medians(name: str, steps: list[dict[str, float]]) -> float:
    """Print the medians of all steps but the first; returns that of the whole step."""
    found = {what: statistics.median(step[what] for step in steps[WARM:]) for what in steps[0]}
    print(f"{name:6}", ", ".join(f"{value:.3f} {what}" for what, value in found.items()))
    return found["s/step"]


def ratio(steps: int, turns: int, model: str, folder: Path) -> None:
    """In each turn one trains after the other."""
    ratios = list[float]()
    for turn in range(turns):
        own = folder / str(turn)
        own.mkdir()
        with server(own, model) as (base_url, _):
            through = medians("tinker", train(base_url, model, steps))
        ratios.append(through / medians("sync", train_sync(model, steps, own / "runs")))
        print(f"ratio  {ratios[-1]:.2f} at a load of {os.getloadavg()[0]:.1f}", flush=True)
    print(f"ratio  {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def kill(process: psutil.Process, title: str) -> None:
    """Kill a process of the server whose title begins with ``title``, as soon as there is one."""
    while True:
        for child in process.children(recursive=True):
            try:
                if " ".join(child.cmdline()).startswith(title):
                    child.send_signal(signal.SIGKILL)
                    return
            except psutil.Error:
                continue
        time.sleep(0.2)


def kills(times: int, model: str, folder: Path) -> None:
    """The losses of a model during kills of processes must be those of the same model without
    kills."""
    tokens = list(range(40, 60))
    target: Any = {"target_tokens": tokens[1:]}
    rows = [types.Datum(types.ModelInput.from_ints(tokens[:-1]), target)]

    def step(client: Any, started: Any = None) -> float:
        future = started or client.forward_backward(rows, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        sampler = client.save_weights_and_get_sampling_client().result()
        answer = sampler.sample(
            types.ModelInput.from_ints(tokens[:5]), 2, types.SamplingParams(max_tokens=12)
        )
        assert len(answer.result().sequences) == 2
        return float(future.result().metrics["loss:sum"])

    wanted = list[float]()
    found = list[float]()
    killed = 0
    titles = ("ray::_EngineActor", "ray::MultiAdapterWorker")
    client: Any = None
    started: Any = None  # a request that the server has lost
    while killed < times:
        with server(folder, model) as (base_url, process):
            if client is None:
                service = tinker.ServiceClient(base_url=base_url, api_key=KEY)
                reference = service.create_lora_training_client(model, 4, seed=1).result()
                wanted = [step(reference) for _ in range(times + 2)]
                client = service.create_lora_training_client(model, 4, seed=1).result()
            found.append(step(client, started))
            for title in titles[: times - killed]:
                began = time.perf_counter()
                kill(process, title)
                found.append(step(client))
                killed += 1
                print(
                    f"{killed:2} {title}: the next step took {time.perf_counter() - began:.1f} s",
                    flush=True,
                )
            if killed < times:
                started = client.forward_backward(rows, "cross_entropy")
                process.send_signal(signal.SIGKILL)
                process.wait(60)
                killed += 1
                print(f"{killed:2} the server", flush=True)
    same = found == wanted[: len(found)]
    result = "bitwise those" if same else "NOT those"
    print(f"{killed} kills, {len(found)} steps without an error; losses {result} without kills")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("ratio", "kills"))
    parser.add_argument("--steps", type=int, default=22)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--hidden", type=int, default=0, help="of an untrained model instead of the tiny one"
    )
    parser.add_argument("--layers", type=int, default=8, help="of an untrained model")
    parser.add_argument("--times", type=int, default=20)
    given = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    with tempfile.TemporaryDirectory() as folder:
        model = build()
        if given.hidden:
            wide = given.hidden * 11 // 4
            model = build(
                out=f"{folder}/model",
                steps=1,
                hidden=given.hidden,
                intermediate=wide,
                layers=given.layers,
            )
        if given.what == "ratio":
            ratio(given.steps, given.turns, model, Path(folder))
        else:
            kills(given.times, model, Path(folder))


if __name__ == "__main__":
    main()
