"""Runs that write their controller's warnings to a file, one per line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from skyasync import BasePPOExp
from skyasync.config.schema import Config


class WarningsToFile(BasePPOExp):
    def __init__(self, cfg: Config, file: Path) -> None:
        super().__init__(cfg)
        self.file = file

    def build(self) -> Any:
        logging.getLogger("skyasync").addHandler(logging.FileHandler(self.file))
        return super().build()
