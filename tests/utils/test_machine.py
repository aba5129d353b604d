"""What this machine is said to have."""

from __future__ import annotations

import pytest

from skyasync.utils import machine


@pytest.mark.parametrize(("visible", "count"), [(None, 2), ("1", 1), ("0,1,2", 2), ("", 0), ("-1", 0)])
def test_gpus_that_are_hidden_are_not_counted(visible: str | None, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_gpus", lambda: [(80 << 30, "NVIDIA H100")] * 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = machine.this_machine()
    assert (here.gpus, here.gpu_memory, here.card) == ((count, 80 << 30, "NVIDIA H100") if count else (0, 0, ""))
