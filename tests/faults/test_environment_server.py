"""A server of environments fails repeatedly in the middle of episodes and is restarted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyasync.trainer.extensions.prompt_ledger import audit
from tests.chaos.audit import unlike, wrong_prompts, wrong_steps
from tests.end_to_end.runs import Train, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.fault]

BATCH, STEPS, SAMPLES, TURNS = 8, 6, 4, 2
STEPS_BEFORE_FAILURE = 90  # steps of a server: a training step takes 64


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Its address, and the file with a line for each failure."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path / "failures"
    log.touch()
    once = f"{sys.executable} -m tests.faults.env_server {port} {STEPS_BEFORE_FAILURE} {log}"
    loop = subprocess.Popen(
        ["bash", "-c", f"while :; do {once}; sleep 0.5; done"], start_new_session=True
    )
    try:
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < until
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", log
    finally:
        os.killpg(loop.pid, signal.SIGKILL)
        loop.wait()


@pytest.mark.parametrize("plan", ["sync", "fully_async"])
def test_no_prompt_is_lost_or_doubled_when_the_server_fails(
    plan: str, train: Train, server: tuple[str, Path]
) -> None:
    url, log = server
    run = train(
        f"trainer.plan={plan}", f"trainer.max_training_steps={STEPS}", f"environment.env_class=openenv:{url}",
        "environment.on_error=mask", "environment.max_retries=6", "generator.max_turns=4",
        "generator.max_model_len=128",
    )  # fmt: skip
    failures = log.read_text().splitlines()
    assert len(failures) >= 3, "the server failed several times"
    ledger, steps = read_lines(run.folder / "ledger.jsonl"), run.series("step")
    assert steps == list(range(1, STEPS + 1))
    assert wrong_steps(steps) + wrong_prompts(ledger) + unlike(ledger, steps) == []
    assert len(audit(ledger)) == STEPS * BATCH
    given_up = round(sum(run.series("env/given_up")) * BATCH * SAMPLES)
    assert 1 <= given_up < STEPS * BATCH * SAMPLES, (
        "those that were in the middle fail, and not all"
    )
    played = [
        row["env/steps"] for row in run.metrics if "env/steps" in row
    ]  # absent if a whole step failed
    assert played and max(played) <= TURNS, "nothing is sent twice"
