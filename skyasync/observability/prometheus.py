"""Runs' newest metrics for Prometheus, and a dashboard of them for Grafana.

    python -m skyasync.observability.prometheus > docs/grafana.json

Invariant: every name and label is one that Prometheus accepts, and no series is there twice; what a run has not logged
is left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyasync.observability import jsonl
from skyasync.observability.alarms import alarms
from skyasync.observability.metric_names import entry_of
from skyasync.observability.report.charts import sections
from skyasync.observability.run_dir import RUNNING, read_status

SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH, HEIGHT = 8, 8  # of a panel, in Grafana's grid of 24 columns


def series_name(metric: str) -> str:
    """``reward/mean`` as ``skyasync_reward_mean``."""
    return "skyasync_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)


def exposition(folders: Mapping[str, Path]) -> str:
    """The newest value of each metric of runs, by the runs' names, in Prometheus' text format."""
    families: dict[str, dict[str, float]] = {}  # series' names, with their labels and values
    meanings: dict[str, str] = {}
    for run, folder in folders.items():
        rows = jsonl.read_rows(folder / "metrics.jsonl")
        label = f'run="{_escaped(run)}"'
        newest = {name: value for row in rows for name, value in row.items() if value is not None}
        for name, value in sorted(newest.items()):
            entry = entry_of(name)
            meanings.setdefault(series_name(name), entry.meaning if entry else f"{name}, of this run's own parts.")
            families.setdefault(series_name(name), {}).setdefault(label, float(value))
        running = families.setdefault("skyasync_running", {})
        running[label] = float(read_status(folder).state == RUNNING)
        for alarm in alarms(rows, jsonl.read_rows(folder / "restarts.jsonl")):
            families.setdefault("skyasync_alarm", {})[f'{label},alarm="{alarm.name}"'] = 1.0
    meanings |= {"skyasync_running": "1 during the run.", "skyasync_alarm": "1 for each alarm that is raised."}
    lines = []
    for name, values in families.items():
        help_text = meanings[name].replace("\\", "\\\\").replace("\n", "\\n")
        lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        lines += [f"{name}{{{labels}}} {value!r}" for labels, value in values.items()]
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def dashboard() -> dict[str, Any]:
    """The report's charts as a dashboard of Grafana, which asks for its Prometheus when it is imported."""
    panels: list[dict[str, Any]] = []
    y = 0
    for section in sections([]):
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": section.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            }
        )
        y += 1
        charts = [chart for chart in section.charts if chart.lines]
        for number, chart in enumerate(charts):
            panels.append(
                {
                    "id": len(panels) + 1,
                    "type": "timeseries",
                    "title": chart.title,
                    "description": chart.says,
                    "datasource": SOURCE,
                    "gridPos": {"x": number % 3 * WIDTH, "y": y + number // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT},
                    "fieldConfig": {"defaults": {"unit": "percentunit" if chart.percent else "short"}, "overrides": []},
                    "targets": [
                        {
                            "refId": chr(ord("A") + place),
                            "datasource": SOURCE,
                            "legendFormat": f"{{{{run}}}} {line.label}",
                            "expr": f'{series_name(line.metric)}{{run=~"$run"}}',
                        }
                        for place, line in enumerate(chart.lines)
                    ],
                }
            )
        y += -(-len(charts) // 3) * HEIGHT
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    run = {
        "name": "run",
        "label": "run",
        "type": "query",
        "datasource": SOURCE,
        "multi": True,
        "includeAll": True,
        "query": "label_values(skyasync_running, run)",
        "refresh": 2,
    }
    return {
        "uid": "skyasync",
        "title": "skyasync",
        "tags": ["skyasync"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source, run]},
        "panels": panels,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
