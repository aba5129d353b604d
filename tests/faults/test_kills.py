"""The controller and the program are killed at ten points each in one run: the same command resumes, and nothing is
lost.

These plans have nothing in flight while they train. ``test_kills_async`` has the others, so that another process runs
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.end_to_end.runs import Train
from tests.faults.restarted_command import check_same_as_undisturbed, run_with_twenty_kills

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(900)]


@pytest.mark.parametrize("plan, own", [("sync", True), ("streamed", False)])
def test_a_run_goes_on_whenever_its_controller_or_its_program_is_killed(
    plan: str, own: bool, train: Train, tmp_path: Path, models: dict[str, str], fork_socket: Path
) -> None:
    """``own``: with a Ray cluster of its own, started again at once; otherwise on a cluster that stays."""
    address = "" if own else ray.get_runtime_context().gcs_address
    run, settings = run_with_twenty_kills(plan, tmp_path, fork_socket, models["tied"], address)
    check_same_as_undisturbed(run, settings, train)
