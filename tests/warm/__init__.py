"""Ray clusters of the tests start their workers as forks of one process that has imported what is slow to import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

HERE = Path(__file__).parent


@contextmanager
def warm_workers() -> Iterator[None]:
    """Inside, every cluster that this process starts takes its workers from a nursery."""
    from ray._private.parameter import RayParams

    defaults = RayParams.update_if_absent

    def with_stand_in(self: RayParams, **given: Any) -> None:
        if "setup_worker_path" in given:
            given["setup_worker_path"] = str(HERE / "stand_in.py")
        defaults(self, **given)

    with TemporaryDirectory() as folder:
        door = f"{folder}/nursery"
        command = [sys.executable, HERE / "nursery.py", door]
        with (
            mock.patch.object(RayParams, "update_if_absent", with_stand_in),
            mock.patch.dict(os.environ, SKYASYNC_NURSERY=door),
            subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as nursery,
        ):
            try:
                yield
            finally:
                with suppress(subprocess.TimeoutExpired):
                    nursery.communicate(timeout=30)
                nursery.kill()
