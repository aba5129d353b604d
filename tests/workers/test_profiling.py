"""A profile of a step contains the workers' operations of that step only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skyasync.observability.run_dir import RunDirectory
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, Memory, config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


async def test_the_steps_that_are_asked_for_are_recorded(model: str, tmp_path: Path) -> None:
    run = LocalRun(Memory, config(model, steps=3, profile_steps=[2], eval_interval=0))
    run.trainer.context.run_dir = RunDirectory(tmp_path, "run")
    await run.train()
    (folder,) = (tmp_path / "run" / "profile").iterdir()
    assert folder.name == "step_000002"
    events = json.loads((folder / "policy_rank0.json").read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= names
    assert "aten::mm" in (folder / "policy_rank0.txt").read_text()
