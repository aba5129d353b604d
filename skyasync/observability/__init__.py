"""Metrics, trackers, the run's folder, timeline, progress, plots and the summary of a run.

Invariant: importing this package imports neither torch nor matplotlib nor rich, and nothing in it
decides how training goes: if it fails, a picture or a line is missing, and the run continues.
"""

from skyasync.registry import Registry

#: name -> class built from a ``TrackerContext``; ``trainer.logger`` lists the ones a run uses.
TRACKERS = Registry(
    "tracker",
    ["skyasync.observability.trackers"],
    # What it needs: an extra of this library, or another package.
    capabilities={"extra": "", "package": ""},
)

from skyasync.observability.run_dir import RunDirectory, default_run_name  # noqa: E402
from skyasync.observability.timeline import Timeline  # noqa: E402

__all__ = ["TRACKERS", "RunDirectory", "Timeline", "default_run_name"]
