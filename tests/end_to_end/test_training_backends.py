"""A run with a user's training backend: workers, weight syncs and checkpoints use its interface only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.end_to_end.runs import Train

pytestmark = pytest.mark.slow

REFERENCE = Path(__file__).parents[1] / "models" / "reference_backend.py"


@pytest.mark.matrix
def test_another_backend_trains_resumes_and_exports(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its losses are those of the library's own backend on the same samples."""
    shutil.copy(REFERENCE, tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    own = ["trainer.strategy=mine.py:ReferenceBackend", "trainer.run_name=own"]
    first = train(*own, "trainer.max_training_steps=2", "trainer.ckpt_interval=2")
    usual = train("trainer.max_training_steps=2")
    for name in ("policy/loss", "policy/grad_norm"):
        assert first.series(name) == pytest.approx(usual.series(name), rel=1e-3, abs=1e-5)
    whole = train(
        *own, "trainer.max_training_steps=3", f"trainer.export_path={tmp_path / 'export'}"
    )
    assert [row["step"] for row in whole.metrics] == [1, 2, 3]
    assert (tmp_path / "export" / "model.safetensors").is_file()
