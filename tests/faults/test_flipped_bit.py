"""A bit of the weights that flips after they are written ends the run, in the same sync."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from skyasync.observability.jsonl import read_rows
from tests.chaos.channel import VARIABLE, Order, Orders
from tests.end_to_end.runs import outside_environment

pytestmark = [pytest.mark.slow, pytest.mark.fault]

SETTINGS = (
    "trainer.run_name=run", "trainer.train_batch_size=8", "trainer.eval_interval=0", "trainer.max_training_steps=4",
    "trainer.eval_before_train=false", "trainer.terminal=lines", "generator.backend=transformers",
    "generator.n_samples_per_prompt=2", "environment.num_workers=1",
)  # fmt: skip


@pytest.mark.parametrize("way", ["lent", "changes"])
def test_a_flipped_bit_ends_the_run_before_an_engine_computes_with_it(
    way: str, tmp_path: Path
) -> None:
    orders, run = Orders(tmp_path), tmp_path / "run"
    orders.give(Order(1, "flip-bit", time.time() + 300, pick=0.5))
    settings = [*SETTINGS, f"trainer.runs_dir={tmp_path}"]
    settings += ["generator.weight_sync_mode=delta"] if way == "changes" else []
    program = subprocess.run(
        [sys.executable, "-m", "tests.chaos.program", *settings],
        env=outside_environment() | {VARIABLE: str(tmp_path)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    output = program.stdout + program.stderr
    assert program.returncode == 1, output
    assert "WeightSyncError: " in (run / "error.txt").read_text()
    assert orders.taken()[1].startswith("the weights of version ")
    assert read_rows(run / "metrics.jsonl") == [], "the weights of the first sync"
