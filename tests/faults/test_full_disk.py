"""A run's folder on a disk that is full or read-only for a while, and then full for good."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from skyasync.errors import UserError
from skyasync.trainer.checkpoint.checkpoints import glance
from skyasync.utils import manifest
from tests.end_to_end import leftovers
from tests.end_to_end.runs import Train, Trained
from tests.faults.disk import FULL, READ_ONLY, WELL, Broken, empty, small_disk
from tests.faults.restarted_command import check

pytestmark = [pytest.mark.slow, pytest.mark.fault]

PATIENCE, STEPS = 4, 14
STATES = {
    5: WELL,
    8: FULL,
}  # before this step is saved; the save that is being written may fail, too
WORDS = {FULL: "No space left", READ_ONLY: "Read-only file system"}
AT_ONCE, IN_BACKGROUND = "trainer.ckpt_async=false", "trainer.ckpt_async=true"


@pytest.mark.parametrize(
    "plan, way, first",
    [
        ("sync", AT_ONCE, READ_ONLY), ("one_step_off", IN_BACKGROUND, FULL),
        ("streamed", AT_ONCE, FULL), ("fully_async", IN_BACKGROUND, READ_ONLY),
    ],
)  # fmt: skip
def test_a_run_continues_while_the_disk_is_full_and_ends_with_one_line_if_it_stays_full(
    plan: str, way: str, first: str, train: Train, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        run, warnings = Trained(disk / "run"), tmp_path / "warnings"
        command = [
            f"trainer.plan={plan}", f"trainer.runs_dir={disk}", "trainer.ckpt_interval=1", "trainer.ckpt_keep=2", way,
            f"trainer.max_training_steps={STEPS}", f"trainer.ckpt_patience={PATIENCE}",
        ]  # fmt: skip
        end = rf"the checkpoint of step 1[01] could not be saved: .*No space left .* {PATIENCE} in a row"
        with pytest.raises(UserError, match=end) as caught:
            train(
                *command,
                experiment=partial(Broken, file=warnings, disk=disk, states={3: first, **STATES}),
            )  # type: ignore[arg-type]
        assert "\n" not in str(caught.value)
        lines = [line for line in warnings.read_text().splitlines() if "could not be saved" in line]
        assert all("the run continues, failure" in line for line in lines)
        assert all(WORDS[first] in line or WORDS[FULL] in line for line in lines)
        assert WORDS[first] in lines[0] and WORDS[FULL] in lines[-1]
        failed = 1 if way == IN_BACKGROUND else 0
        assert 5 <= len(lines) <= 5 + failed, lines
        kept = [path.name for path in run.folder.glob("checkpoints/step_??????")]
        assert len(kept) == 2 and max(kept) in ("step_000006", "step_000007"), kept
        assert all(whole(run.folder / "checkpoints" / name) for name in kept)
        empty(disk)
        train(*command)
        check(run, STEPS)
        assert leftovers.none_soon(leftovers.of_the_cluster) == []


def whole(checkpoint: Path) -> bool:
    return glance(checkpoint) == "" and not list(
        manifest.damage(checkpoint, manifest.read(checkpoint))
    )
