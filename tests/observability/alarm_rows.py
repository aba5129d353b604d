"""Rows of real runs for the alarms: healthy runs, and runs with a deliberate problem.

    python -m tests.observability.alarm_rows [NAME ...] [--from FOLDER]

Runs each recipe below (one to two minutes on two cores) and keeps the metrics that alarms read, in
``alarm_rows/<NAME>.jsonl``. ``--from`` takes the rows of finished runs, FOLDER/<NAME>, instead.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from skyasync.examples.tiny.tasks import train_prompts
from skyasync.observability.jsonl import Row, read_rows, write_rows
from tests.chaos.process_tree import family, target_of

ROWS = Path(__file__).with_suffix("")
READ = (
    "step", "reward/mean", "reward/mixed_groups", "policy/entropy", "policy/approx_kl", "policy/grad_norm",
    "off_policy/kl", "off_policy/effective_sample_size", "gap/mean", "sync/logprob_gap_mean", "sync/logprob_gap_limit",
    "response/truncated", "idle/engines", "idle/trainer", "engines/deaths", "eval/score",
)  # fmt: skip

HEALTHY = {
    "one_step_off": ["trainer.plan=one_step_off", "trainer.max_training_steps=40"],
    "fully_async": ["trainer.plan=fully_async", "trainer.max_training_steps=40"],
    "sync": ["trainer.plan=sync", "trainer.max_training_steps=40"],
}
_HERE = "tests.observability.alarm_rows"
_SHORT = ["trainer.train_batch_size=16", "generator.n_samples_per_prompt=8", "trainer.max_training_steps=24",
          "trainer.eval_interval=0", "trainer.eval_before_train=false", "data.val_data=[]"]  # fmt: skip
_FAST = "trainer.policy.optimizer_config.lr="
_REWARD = [
    "environment.env_class=reward",
    "environment.env_class_from_rows=false",
    "data.label_key=answer",
]
_ENTROPY = [
    "trainer.algorithm.use_entropy_loss=true",
    "trainer.algorithm.entropy_loss_coef=1e-9",
]  # its metric
#: By the alarm that each must raise.
ILL = {
    # The first update alone destroys the policy.
    "collapse": [*_SHORT, "trainer.plan=sync", f"{_FAST}0.3", "trainer.max_training_steps=16"],
    "reward_flat": [*_SHORT, "trainer.plan=sync", f"{_FAST}0", "trainer.max_training_steps=32"],
    "groups_equal": [*_SHORT, "trainer.plan=sync", *_REWARD, f"environment.reward_funcs=[{_HERE}:always]"],
    "entropy": [*_SHORT, "trainer.plan=sync", f"{_FAST}1e-2", "trainer.policy.optimizer_config.scheduler=constant",
                *_REWARD, f"environment.reward_funcs=[{_HERE}:nines]"],
    "kl": [*_SHORT, "trainer.plan=one_step_off", "trainer.async_queue_size=4", f"{_FAST}2e-3"],
    "effective_sample_size": [*_SHORT, "trainer.plan=one_step_off", "trainer.async_queue_size=8", f"{_FAST}5e-3"],
    "truncation": [*_SHORT, "trainer.plan=sync", "generator.sampling_params.max_generate_length=4"],
    "engines_idle": [*_SHORT, "trainer.plan=one_step_off", "trainer.update_epochs_per_batch=16",
                     f"{_FAST}1e-5"],
    "trainer_idle": [*_SHORT, "trainer.plan=one_step_off", *_REWARD, f"environment.reward_funcs=[{_HERE}:slow]",
                     "trainer.max_training_steps=14"],
    "restarts": [*_SHORT, "trainer.plan=one_step_off"],
    # The engine computes in another precision than the trainer, and the tolerance lets the run continue.
    "logprob_difference": [*_SHORT, "trainer.plan=sync", "generator.dtype=bfloat16", "generator.verify_interval=1",
                           "generator.weight_sync_tolerance=0.03"],
    # A limit with a typo (1.09 for 0.99): the mask drops every sequence. Without the entropy term nothing is left.
    "gradient": [*_SHORT, "trainer.plan=sync", "trainer.algorithm.off_policy_correction=geometric_mask",
                 "trainer.algorithm.geo_mask_low=1.09", "trainer.algorithm.geo_mask_high=1.1"],
    # Training pays for digits that descend, and the evaluation for sorted ones.
    "score": [*_SHORT, "trainer.plan=sync", f"{_FAST}1e-3", f"data.train_data=[{_HERE}:paid_for_descending]",
              f"environment.reward_funcs=[{_HERE}:descending]", "trainer.eval_interval=6",
              "trainer.eval_before_train=true", "data.val_data=[skyasync.examples.tiny.tasks:val_prompts]",
              "generator.sampling_params.max_generate_length=9", "trainer.max_training_steps=18"],
}  # fmt: skip
KILLED_AFTER = 8  # steps of "restarts", whose engine then gets SIGKILL


def always(response: str) -> float:
    """The same reward for every response."""
    return 1.0


def nines(response: str) -> float:
    """A reward that is easily exploited: the share of nines."""
    return response.count("9") / max(1, len(response))


def descending(response: str) -> float:
    """The share of characters that are followed by a smaller one."""
    return sum(after < before for before, after in pairwise(response)) / max(1, len(response) - 1)


def paid_for_descending() -> list[dict[str, Any]]:
    """The training prompts of the tiny task, rewarded by ``environment.reward_funcs``."""
    return [row | {"env_class": "reward"} for row in train_prompts()]


def slow(response: str, label: str) -> float:
    """A correct reward that takes long."""
    time.sleep(0.15)
    return float(response == label)


def train(name: str, settings: list[str], runs: Path) -> None:
    command = [
        sys.executable, "-m", "skyasync", f"trainer.runs_dir={runs}", f"trainer.run_name={name}",
        "generator.backend=transformers", "trainer.terminal=lines", "trainer.report=false", "trainer.save_samples=0",
        *([] if name == "gradient" else _ENTROPY), *settings,
    ]  # fmt: skip
    with subprocess.Popen(command) as run:
        if name == "restarts":
            threading.Thread(
                target=_kill_an_engine, args=(run, runs / name / "metrics.jsonl"), daemon=True
            ).start()
        if run.wait():
            raise SystemExit(f"{name} ended with status {run.returncode}")


def _kill_an_engine(run: subprocess.Popen[bytes], metrics: Path) -> None:
    while run.poll() is None:
        if read_rows(metrics)[-1:] and read_rows(metrics)[-1]["step"] >= KILLED_AFTER:
            next(p for p in family(run.pid) if target_of(p.title) == "engine").send(signal.SIGKILL)
            return
        time.sleep(0.1)


def rows_of(name: str) -> list[Row]:
    return read_rows(ROWS / f"{name}.jsonl")


def main() -> None:
    known = {**HEALTHY, **ILL}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*known, []], metavar="NAME")
    parser.add_argument("--from", dest="folder", type=Path)
    given = parser.parse_args()
    ROWS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        runs = given.folder or Path(scratch)
        for name in given.names or known:
            if not given.folder:
                train(name, known[name], runs)
            rows = read_rows(runs / name / "metrics.jsonl")
            short = [{key: _short(row[key]) for key in READ if key in row} for row in rows]
            write_rows(ROWS / f"{name}.jsonl", short)


def _short(value: float | None) -> float | None:
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")


if __name__ == "__main__":
    main()
