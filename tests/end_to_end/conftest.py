"""Small models made once, and a way to run an experiment as a program would, on the session's Ray cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyasync.examples.tiny.model import build
from tests.end_to_end.runs import Train, Trained, train_in


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tied and an untied model of 60,000 parameters, barely trained: their answers have some digits."""
    folder = tmp_path_factory.mktemp("models")
    small = {
        "hidden": 64,
        "head_dim": 32,
        "intermediate": 128,
        "batch_size": 64,
        "steps": 20,
        "tasks": ("sort",),
    }
    return {
        name: build(out=folder / name, progress=False, tied=name == "tied", **small)
        for name in ("tied", "untied")
    }


@pytest.fixture
def train(ray_session: None, models: dict[str, str], tmp_path: Path) -> Train:
    """``train("key=value", ..., experiment=Class)`` runs to the end, by default with the tied model."""
    return train_in(tmp_path, models["tied"])


@pytest.fixture(scope="session")
def whole(
    ray_session: None, models: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Train:
    return train_in(tmp_path_factory.mktemp("whole"), models["tied"])


@pytest.fixture(scope="session")
def sync_run(whole: Train) -> Trained:
    """Six steps without interruption."""
    return whole("trainer.plan=sync", "trainer.max_training_steps=6")


@pytest.fixture(scope="session")
def one_step_off_run(whole: Train) -> Trained:
    """Six steps without interruption."""
    return whole("trainer.plan=one_step_off", "trainer.max_training_steps=6")


@pytest.fixture(params=["sync", "one_step_off"])
def whole_run(request: pytest.FixtureRequest) -> Trained:
    return request.getfixturevalue(f"{request.param}_run")
