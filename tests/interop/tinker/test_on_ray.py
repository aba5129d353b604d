"""The command itself: a program of the SDK learns, and loses no answer while processes are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("tinker", reason="the extra tinker is not installed")

import tinker
from tinker import types

from examples.tinker.arithmetic import learn
from tests.interop.tinker.local_server import KEY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
START_S = 240.0
QUICK = ("generator.backend=transformers",)  # it starts sooner than vLLM
RANKS, ENGINES = "ray::MultiAdapterWorker", "ray::_EngineActor"


@contextmanager
def command(
    folder: Path, port: int = 0, *settings: str
) -> Iterator[tuple[str, str, psutil.Process]]:
    """The server's address, its model, and its process."""
    log = folder.with_suffix(f".{time.monotonic_ns()}")
    words = [
        sys.executable,
        "-m",
        "skyasync",
        "tinker",
        "--folder",
        str(folder),
        "--port",
        str(port),
        *settings,
    ]
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline, said = time.monotonic() + START_S, dict[str, str]()
        while "base_model" not in said:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
            said = dict(line.split("=", 1) for line in log.read_text().splitlines() if "=" in line)
        yield said["TINKER_BASE_URL"], said["base_model"], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.recipe
def test_a_program_that_knows_a_base_url_and_a_model_learns_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    with command(tmp_path / "server", 0, *QUICK) as (base_url, model, _):
        rewards = learn(base_url, model)
    assert sum(rewards[-5:]) / 5 > sum(rewards[:2]) / 2 + 0.1


def process_of(server: psutil.Process, title: str) -> psutil.Process | None:
    """A process of the server, if there is one at this time."""
    for child in server.children(recursive=True):
        try:
            if " ".join(child.cmdline()).startswith(title):
                return child
        except psutil.Error:
            continue
    return None


def kill(server: psutil.Process, title: str) -> None:
    while (process := process_of(server, title)) is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)


@pytest.mark.fault
def test_a_client_goes_on_when_an_engine_a_rank_and_the_server_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    tokens, losses = list(range(40, 60)), list[list[float]]()
    rows = [types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]
    prompt, params = types.ModelInput.from_ints(tokens[:5]), types.SamplingParams(max_tokens=12)

    def steps(client: Any, count: int) -> list[float]:
        values = []
        for _ in range(count):
            future = client.forward_backward(rows, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
            values.append(future.result().metrics["loss:sum"])
            sampler = client.save_weights_and_get_sampling_client().result()
            assert len(sampler.sample(prompt, 2, params).result().sequences) == 2
        return values

    port = 20000 + os.getpid() % 10000
    with command(tmp_path / "server", port, *QUICK) as (base_url, model, server):
        service = tinker.ServiceClient(base_url=base_url, api_key=KEY)
        losses.append(steps(service.create_lora_training_client(model, 4, seed=1).result(), 6))
        client = service.create_lora_training_client(model, 4, seed=1).result()
        progress = steps(client, 2)
        kill(server, ENGINES)
        progress += steps(client, 1)
        kill(server, RANKS)
        progress += steps(client, 1)
        future = client.forward_backward(rows, "cross_entropy")
        server.send_signal(signal.SIGKILL)
        server.wait(60)
    with command(tmp_path / "server", port, *QUICK):
        client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        progress += [future.result().metrics["loss:sum"], *steps(client, 1)]
        service.close("success").result()
    assert progress == losses[0]
