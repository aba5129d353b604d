"""``skyasync forecast`` on the folders of real runs, and its errors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from skyasync.__main__ import command
from skyasync.observability.jsonl import read_rows, write_rows
from tests.end_to_end.conftest import *  # noqa: F403  (fixtures: train, models)
