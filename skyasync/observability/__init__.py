"""Watching a run: metrics, trackers, the run's folder, timeline, progress, plots and the final
summary.

Invariant: importing this package imports neither torch nor matplotlib nor rich, and nothing in it
decides how training goes: a part of it that fails costs a picture or a line, never the run.
"""

from skyasync.registry import Registry

#: name -> class built from a ``TrackerContext``; ``trainer.logger`` lists the ones a run uses.
TRACKERS = Registry(
    "tracker",
    ["skyasync.observability.trackers"],
    capabilities={
        "extra": "",
        "package": "",
    },  # what it needs: an extra of this library, or another package
)

from skyasync.observability.run_dir import RunDirectory, default_run_name  # noqa: E402
from skyasync.observability.timeline import Timeline  # noqa: E402

__all__ = ["TRACKERS", "RunDirectory", "Timeline", "default_run_name"]
