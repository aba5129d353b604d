"""What one rank did, as torch's profiler sees it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

_ROWS = 40  # of the table


class RankProfile:
    """Records from its making to ``finish``, in the thread that makes it."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def finish(self, folder: Path, name: str) -> None:
        """Write ``<name>.json`` (a trace for Perfetto) and ``<name>.txt`` (a table of the longest operations)."""
        self._profile.stop()
        folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(folder / f"{name}.json"))
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = self._profile.key_averages().table(sort_by=by, row_limit=_ROWS)
        (folder / f"{name}.txt").write_text(table, encoding="utf-8")
