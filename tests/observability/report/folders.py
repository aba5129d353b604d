"""Run folders with made-up figures, for pages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from skyasync.observability.timeline import Timeline


def metrics(step: int) -> dict[str, Any]:
    return {
        "step": step, "time": 1000.0 + step, "reward/mean": 1 - math.exp(-step / 9), "reward/mixed_groups": 0.6,
        "reward/mean/add": 0.5, "reward/mean/sort": 0.1 * step, "policy/approx_kl": 0.01, "policy/clip_fraction": 0.02,
        "policy/grad_norm": 0.7, "policy/lr": 1e-4, "off_policy/kl": 1e-3, "off_policy/effective_sample_size": 0.9,
        "off_policy/staleness_0/abs_log_ratio": 0.0, "off_policy/staleness_1/abs_log_ratio": 0.01,
        "off_policy/staleness_0/ratio_mean": 1.0, "off_policy/staleness_1/ratio_mean": 1.01,
        "response/length_mean": 8.0, "response/length_max": 12.0, "response/truncated": 0.05,
        "staleness/mean": 0.8, "staleness/min": 0.0, "staleness/max": 1.0, "staleness/tokens_0": 20.0,
        "staleness/tokens_1": 80.0, "sync/logprob_gap_mean": 1e-6, "idle/trainer": 0.2, "idle/engines": 0.4,
        "throughput/tokens_per_s": 9000.0, "throughput/samples_per_s": 900.0, "time/step_s": 1.0, "time/train_s": 0.7,
        "time/generate_s": 0.9,
    }  # fmt: skip


def sample(step: int) -> dict[str, Any]:
    return {
        "step": step, "prompt_id": "e0-i3-r0", "prompt": "Sort <b>31</b>", "response": "13!", "label": "<b>13</b>",
        "reward": 0.5, "stop_reason": "stop", "versions": [0, 1],
        "tokens": {"text": ["1", "<i>", "said"], "versions": [0, 1, -1], "logprobs": [-0.1, -0.5, None],
                   "trainer_logprobs": [-0.1, -0.9, None]},
    }  # fmt: skip


def make_run(folder: Path, *, steps: int = 12, settings: str = "", error: str = "") -> Path:
    """A run's folder in the format of a real run."""
    folder.mkdir(parents=True)
    rows = [{"step": 0, "time": 1000.0, "eval/score": 0.2}, *map(metrics, range(1, steps + 1))]
    rows[-1]["eval/score"] = 0.6
    lines = {"metrics.jsonl": rows, "samples.jsonl": [sample(step) for step in range(1, steps + 1)]}
    for name, of_file in lines.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in of_file))
    config = (
        settings
        or "trainer:\n  plan: one_step_off\n  max_training_steps: 12\n  seed: 42\nmine:\n  strength: 2\n"
    )
    (folder / "config.yaml").write_text(config)
    (folder / "origins.json").write_text(
        '{"trainer.plan": "command line", "mine.strength": "recipe"}'
    )
    if error:
        (folder / "error.txt").write_text(f"Traceback\n  file\n{error}\n")
    clock = iter(range(10_000))
    timeline = Timeline(folder / "timeline.json", clock=lambda: float(next(clock)))
    for step in range(1, steps + 1):
        with (
            timeline.span("train", "trainer", step=step),
            timeline.span("update", "trainer", step=step),
        ):
            pass
        timeline.add_span("generate", "rollout", 4 * step, 4 * step + 3, step)
    timeline.close()
    return folder
