"""As ``test_kills``, for plans that generate while they train: finished groups are not lost either."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from tests.end_to_end.runs import Train
from tests.faults.restarted_command import check_same_as_undisturbed, run_with_twenty_kills

pytestmark = [pytest.mark.slow, pytest.mark.fault, pytest.mark.timeout(900)]


@pytest.mark.parametrize("plan", ["one_step_off", "fully_async"])
def test_a_run_goes_on_whenever_its_controller_or_its_program_is_killed(
    plan: str, train: Train, tmp_path: Path, models: dict[str, str], fork_socket: Path
) -> None:
    address = ray.get_runtime_context().gcs_address
    run, settings = run_with_twenty_kills(plan, tmp_path, fork_socket, models["tied"], address)
    if plan == "one_step_off":  # the other plan trains first the groups that finish first
        check_same_as_undisturbed(run, settings, train)
