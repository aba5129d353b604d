"""Run experiments, and read their results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyasync import BasePPOExp, load_config

PARTS = "tests.end_to_end.parts"
SETTINGS = {
    "trainer.policy.optimizer_config.lr": "1e-3",
    "trainer.epochs": "99",
    "trainer.train_batch_size": "8",
    "trainer.max_prompt_length": "32",
    "trainer.eval_before_train": "false",
    "trainer.eval_interval": "0",
    "trainer.save_samples": "8",
    "trainer.policy.threads": "1",  # the same number in both plans: sums over threads round differently
    "trainer.run_name": "run",
    "trainer.terminal": "lines",
    "trainer.report": "false",  # drawing takes seconds
    "generator.threads": "1",
    "generator.backend": "transformers",
    "generator.verify_interval": "1",  # the runs are short, and every sync should be verified
    "generator.n_samples_per_prompt": "4",
    "generator.sampling_params.max_generate_length": "8",
    "environment.env_class": f"{PARTS}:Sevens",
    "data.train_data": f"{PARTS}:train_prompts",
}


@dataclass(frozen=True)
class Trained:
    """A run's folder and the result of ``run``."""

    folder: Path
    result: dict[str, float] | None = None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per step, without the evaluation before the first."""
        return [row for row in read_lines(self.folder / "metrics.jsonl") if row["step"] > 0]

    def series(self, name: str) -> list[Any]:
        return [row[name] for row in self.metrics]

    @property
    def prompts(self) -> list[tuple[int, list[str]]]:
        """Step and its trained prompts, in order. All are in samples.jsonl: SETTINGS saves a whole batch."""
        rows = read_lines(self.folder / "samples.jsonl")
        steps = sorted({row["step"] for row in rows})
        return [(step, [row["prompt_id"] for row in rows if row["step"] == step]) for step in steps]

    @property
    def versions(self) -> list[tuple[int, set[int]]]:
        """Step and the policy versions of its tokens."""
        rows = read_lines(self.folder / "samples.jsonl")
        steps = sorted({row["step"] for row in rows})
        return [
            (step, {v for row in rows if row["step"] == step for v in row["versions"]})
            for step in steps
        ]


Train = Callable[..., Trained]


def train_in(runs: Path, model: str) -> Train:
    """A function that trains in this process's Ray cluster, in a run folder below ``runs``."""

    def train(*overrides: str, experiment: type[BasePPOExp] = BasePPOExp) -> Trained:
        run = experiment(load_config(arguments(*overrides, runs=runs, model=model)))
        result = run.run()
        assert run.run_dir is not None
        return Trained(run.run_dir.path, result)

    return train


def arguments(*overrides: str, runs: Path, model: str) -> list[str]:
    """The command line of a small run; ``overrides`` replace settings of the same key."""
    given = dict(override.split("=", 1) for override in overrides)
    settings = {
        "trainer.policy.model.path": model,
        "trainer.runs_dir": str(runs),
        **SETTINGS,
        **given,
    }
    return [f"{key}={value}" for key, value in settings.items()]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in path.read_text().split("\n") if line
    ]  # text may have other line ends


def outside_environment() -> dict[str, str]:
    """For separate programs: they find the examples and test modules, and start their own cluster."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
