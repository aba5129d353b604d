"""The metrics that Prometheus reads from runs' folders, and the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.grafana import dashboard
from skyasync.observability.metric_names import METRICS
from skyasync.run.live_page import exposition, series_name

LINE = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)+)\} (\S+)')
FILE = Path(__file__).parents[2] / "docs" / "grafana.json"


def write_rows(folder: Path, *rows: dict[str, object]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_each_metric_has_its_newest_value_for_each_run(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one", {"step": 1, "eval/score": 0.5, "reward/mean": 0.1},
                     {"step": 2, "reward/mean": None}, {"step": 3, "reward/mean": 0.25})  # fmt: skip
    two = write_rows(tmp_path / "two", {"step": 7, "env/my metric@8": 1e-9, "env/my_metric@8": 2.0})
    text = exposition({'on"e\\\n': one, "two": two})
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = {match[0]: float(match[3]) for line in lines if (match := LINE.fullmatch(line))}
    assert len(found) == len(lines)
    name = 'on\\"e\\\\\\n'
    assert found[f'skyasync_reward_mean{{run="{name}"}} 0.25'] == 0.25
    assert found[f'skyasync_eval_score{{run="{name}"}} 0.5'] == 0.5
    assert len({line.rpartition(" ")[0] for line in lines}) == len(lines)  # no series twice
    assert "# TYPE skyasync_eval_score gauge\n" in text and text.endswith("\n")


def test_alarms_and_states_are_series(tmp_path: Path) -> None:
    rows = [{"step": step, "idle/trainer": 0.95} for step in range(1, 15)]
    text = exposition({"run": write_rows(tmp_path / "run", *rows)})
    assert 'skyasync_alarm{run="run",alarm="trainer_idle"} 1.0' in text
    assert 'skyasync_running{run="run"} 0.0' in text


@pytest.mark.parametrize("metric", [metric.name for metric in METRICS])
def test_every_metric_has_a_name_that_prometheus_accepts(metric: str) -> None:
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", series_name(metric))


def test_the_dashboard_asks_for_metrics_that_runs_log() -> None:
    assert json.loads(FILE.read_text()) == dashboard(), (
        "python -m skyasync.run.live_page > docs/grafana.json"
    )
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    asked = [target["expr"].partition("{")[0] for panel in panels for target in panel["targets"]]
    known = {series_name(metric.name) for metric in METRICS if "<" not in metric.name}
    assert (
        set(asked) - known <= {"skyasync_eval_response_truncated"} and len(panels) > 12
    )  # eval/<name>
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    positions = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard()["panels"]]
    assert len(set(positions)) == len(positions)
