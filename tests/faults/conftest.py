"""The runs of the end-to-end tests, on the session's Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.leaks import temporary_files
from tests.end_to_end import leftovers
from tests.end_to_end.conftest import models, train
from tests.fork_server import TEMPORARY

__all__ = ["models", "no_temporary_files", "train"]


@pytest.fixture
def no_temporary_files(ray_session: None) -> Iterator[None]:
    """No process of the cluster leaves temporary files during the test."""
    folder = Path(os.environ[TEMPORARY])
    before = set(temporary_files(folder))
    yield
    assert leftovers.none_soon(lambda: sorted(set(temporary_files(folder)) - before)) == []
