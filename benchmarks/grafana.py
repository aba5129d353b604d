"""A dashboard of runs' metrics for Grafana, with the charts of the report.

python -m benchmarks.grafana > docs/grafana.json
"""

from __future__ import annotations

import json
from typing import Any

from skyasync.observability.report.charts import sections
from skyasync.run.live_page import series_name

SOURCE = {"type": "prometheus", "uid": "${source}"}
# of a panel, in Grafana's grid of 24 columns
WIDTH = 8
HEIGHT = 8


def dashboard() -> dict[str, Any]:
    """The report's charts as a dashboard of Grafana, which asks for its Prometheus when it is
    imported."""
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
                    "gridPos": {
                        "x": number % 3 * WIDTH,
                        "y": y + number // 3 * HEIGHT,
                        "w": WIDTH,
                        "h": HEIGHT,
                    },
                    "fieldConfig": {
                        "defaults": {"unit": "percentunit" if chart.percent else "short"},
                        "overrides": [],
                    },
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
