"""Checkpoints of a trainer: what it saves, what it does if the disk fails, and what it resumes from (in simulation)."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from skyasync.errors import UserError
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.plans.fully_async import FullyAsyncRayPPOTrainer
from tests.trainer.plans.parts import PLANS, Run, make_run, stream

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)


def run_of(folder: Path, plan: type[RayPPOTrainer] = RayPPOTrainer, **settings: Any) -> Run:
    """Six steps, each of which is saved; all checkpoints are kept."""
    usual = {
        "prompts": 24,
        "trainer__ckpt_path": str(folder),
        "trainer__ckpt_interval": 1,
        "trainer__ckpt_keep": 0,
    }
    return make_run(plan, **{**usual, **settings})


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.iterdir())


@pytest.fixture(autouse=True)
def information(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "skyasync")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [
        record.getMessage() for record in caplog.records if record.name.startswith("skyasync.")
    ]
    assert not any("\n" in line for line in found)
    return found


def flip(folder: Path) -> None:
    (folder / "weights").write_text("9")  # as long as before


# ---------------------------------------------------------------- failing disks


@every_plan
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_a_warning_each_time_and_the_run_goes_on(
    plan: type[RayPPOTrainer], asynchronous: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path, plan, trainer__ckpt_async=asynchronous)
    for call in (2, 3, 5):
        run.faults["save", call] = OSError("No space left on device")
    run.train()
    assert sorted(run.trained) == sorted(stream(24))
    assert steps(tmp_path) == [1, 4, 6]
    said = [line.partition(" could not be saved: No space")[0] for line in lines(caplog)]
    assert said == [f"the checkpoint of step {step}" for step in (2, 3, 5)]
    assert (
        "(the newest is of step 1); the run continues, failure 2 of 3 in a row" in lines(caplog)[1]
    )


@every_plan
@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_failure_too_many_ends_the_run_in_one_line(
    plan: type[RayPPOTrainer], asynchronous: bool, tmp_path: Path
) -> None:
    run = run_of(tmp_path, plan, trainer__ckpt_async=asynchronous)
    for call in (2, 3, 4):
        run.faults["save", call] = OSError("No space left on device")
    with pytest.raises(
        UserError, match=r"step 4 .*No space left .* 3 in a row \(trainer\.ckpt_patience\)"
    ) as caught:
        run.train()
    assert "\n" not in str(caught.value)
    assert steps(tmp_path) == [1]
    assert run.tracker.closed == run.timeline.closed == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_last_checkpoint_that_is_missing_is_told_by_the_end_of_the_run(
    asynchronous: bool, tmp_path: Path
) -> None:
    run = run_of(
        tmp_path / "c", trainer__ckpt_async=asynchronous, trainer__export_path=str(tmp_path / "e")
    )
    run.faults["save", 6] = OSError("No space left on device")
    with pytest.raises(
        UserError, match="the run has ended, but the checkpoint of step 6 could not be saved"
    ):
        run.train()
    assert run.dispatch.exported == [tmp_path / "e"]
    assert steps(tmp_path / "c") == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_of_another_kind_is_no_matter_of_patience(
    asynchronous: bool, tmp_path: Path
) -> None:
    run = run_of(tmp_path, trainer__ckpt_async=asynchronous)
    error = run.faults["save", 2] = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError) as caught:
        run.train()
    assert caught.value is error
    assert steps(tmp_path) == [1]


# ---------------------------------------------------------------- writing while training continues


@every_plan
def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_waits(
    plan: type[RayPPOTrainer], tmp_path: Path
) -> None:
    run = run_of(tmp_path, plan, trainer__ckpt_async=True, updating=[10.0], generating=[0.0])
    run.dispatch.writing_s = 25.0
    run.train()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    stalls = run.tracker.of("time/checkpoint_s")
    assert stalls[1] == 0 and all(10 < stalls[step] < 16 for step in range(2, 7))
    assert run.tracker.of("checkpoint/write_s") == pytest.approx(
        dict.fromkeys(range(2, 7), 25.0), abs=1
    )
    for step in range(1, 7):
        assert (tmp_path / f"step_{step:06d}" / "weights").read_text() == str(step)


@every_plan
def test_a_run_resumes_from_an_asynchronous_checkpoint(
    plan: type[RayPPOTrainer], tmp_path: Path
) -> None:
    first = run_of(tmp_path, plan, trainer__ckpt_async=True, updating=[10.0])
    first.dispatch.writing_s = 3.0
    error = first.faults["update", 5] = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError) as caught:
        first.train()
    assert caught.value is error
    second = run_of(tmp_path, plan, trainer__ckpt_async=True, trainer__resume_mode="latest").train()
    assert sorted(first.trained + second.trained) == sorted(stream(24))
    assert second.dispatch.weights == 6


def test_callbacks_are_told_when_a_checkpoint_is_complete(tmp_path: Path) -> None:
    from skyasync.callbacks import TrainerCallback

    class RecordsCheckpoints(TrainerCallback):
        def on_checkpoint(self, trainer: Any, folder: Path) -> None:
            assert (folder / "manifest.json").is_file()
            told.append((trainer.global_step, folder.name))

    told: list[tuple[int, str]] = []
    run = run_of(
        tmp_path,
        trainer__ckpt_async=True,
        trainer__ckpt_interval=2,
        callbacks=[RecordsCheckpoints()],
    )
    run.dispatch.writing_s = 1.5
    run.train()
    assert told == [(3, "step_000002"), (5, "step_000004"), (6, "step_000006")]


def test_a_checkpoint_that_is_never_written_has_the_limit_of_a_step(tmp_path: Path) -> None:
    run = run_of(tmp_path, trainer__ckpt_async=True, trainer__step_timeout_s=50.0)
    run.dispatch.writing_s = 1e9
    with pytest.raises(TimeoutError, match=r"the checkpoint of step 2 .*trainer\.step_timeout_s"):
        run.train()
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- resuming


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_of(tmp_path, trainer__max_training_steps=4).train()
    flip(tmp_path / "step_000004")
    (tmp_path / "step_000003" / "state.json").write_text("{")
    second = run_of(tmp_path, trainer__resume_mode="latest").train()
    assert second.trained == stream(24)[8:]
    damaged = [line for line in lines(caplog) if " is damaged and left out: " in line]
    assert len(damaged) == 2, "each is named once"
    assert "step_000004 is damaged and left out: weights does not match its checksum" in "".join(
        damaged
    )
    assert any(line.endswith("step_000002, after step 2") for line in lines(caplog))
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_without_a_complete_checkpoint_the_run_does_not_start_from_scratch_by_itself(
    tmp_path: Path,
) -> None:
    run_of(tmp_path, trainer__max_training_steps=2).train()
    for step in (1, 2):
        flip(tmp_path / f"step_{step:06d}")
    with pytest.raises(UserError, match=r"all checkpoints in .* are damaged"):
        run_of(tmp_path, trainer__resume_mode="latest").train()


@pytest.mark.parametrize("mode", ["3", "{folder}/step_000003"])
def test_a_step_or_a_folder_may_be_named(mode: str, tmp_path: Path) -> None:
    run_of(tmp_path, trainer__max_training_steps=5).train()
    mode = mode.format(folder=tmp_path)
    assert run_of(tmp_path, trainer__resume_mode=mode).train().trained == stream(24)[12:]
    flip(tmp_path / "step_000003")
    with pytest.raises(
        UserError, match=r"step_000003 cannot be used: weights does not match"
    ) as caught:
        run_of(tmp_path, trainer__resume_mode=mode).train()
    assert "\n" not in str(caught.value)


def test_a_best_checkpoint_that_is_written_again_after_a_resume_is_judged_again(
    tmp_path: Path,
) -> None:
    def scored(scores: dict[int, float], **settings: Any) -> None:
        run = run_of(
            tmp_path, trainer__ckpt_best_metric="policy/score", trainer__ckpt_interval=2, **settings
        )
        step = run.dispatch.optimizer_step

        async def scoring(schedule_step: int, scale: float, role: str) -> dict[str, float]:
            metrics = await step(schedule_step, scale, role)
            return metrics | {"score": scores.get(run.trainer.global_step + 1, 0.0)}

        run.dispatch.optimizer_step = scoring  # type: ignore[method-assign]
        run.train()

    scored({2: 0.1, 4: 0.2, 6: 0.9})
    best = json.loads((tmp_path / "best.json").read_text())
    assert (best["folder"], best["value"]) == ("step_000006", 0.9)
    scored({5: 0.25, 6: 0.3}, trainer__resume_mode="4")
    best = json.loads((tmp_path / "best.json").read_text())
    assert (best["folder"], best["value"]) == ("step_000006", 0.3)


def test_a_named_checkpoint_of_another_run_is_gone_on_from_in_ones_own_folder(
    tmp_path: Path,
) -> None:
    run_of(tmp_path / "a", trainer__max_training_steps=3).train()
    mode = str(tmp_path / "a" / "step_000002")
    assert run_of(tmp_path / "b", trainer__resume_mode=mode).train().trained == stream(24)[8:]
    assert steps(tmp_path / "a") == [1, 2, 3] and steps(tmp_path / "b") == [3, 4, 5, 6]


def test_what_has_changed_is_said_in_one_line_for_each_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_of(
        tmp_path, trainer__max_training_steps=2, environment__env_config={"size": 3, "same": 1}
    ).train()
    run_of(
        tmp_path, FullyAsyncRayPPOTrainer, trainer__resume_mode="latest", trainer__plan="fully_async",
        trainer__policy__optimizer_config__lr=1e-5, environment__env_config={"size": 4, "same": 1},
    ).train()  # fmt: skip
    changed = [line.partition(": ")[2] for line in lines(caplog) if line.startswith("changed")]
    assert changed == [
        "trainer.policy.optimizer_config.lr: 1e-06 -> 1e-05",
        "trainer.plan: sync -> fully_async",
        "trainer.max_training_steps: 2 -> 0",
        "environment.env_config.size: 3 -> 4",
    ]


def test_nothing_is_said_where_nothing_has_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for mode in ("none", "latest"):
        run_of(tmp_path, trainer__resume_mode=mode).train()
    assert len(lines(caplog)) == 1 and "going on from" in lines(caplog)[0]


def test_another_seed_is_refused_naming_both(tmp_path: Path) -> None:
    run_of(tmp_path).train()
    with pytest.raises(
        UserError, match=r"trainer\.seed=7, but checkpoint .* was made with 42: .*resume_mode=none"
    ):
        run_of(tmp_path, trainer__resume_mode="latest", trainer__seed=7).train()


def test_other_prompts_are_refused_though_they_are_as_many(tmp_path: Path) -> None:
    run_of(tmp_path).train()
    run = run_of(tmp_path, trainer__resume_mode="latest")
    run.trainer.context.prompts._dataset[5].messages[0]["content"] = "another question"
    with pytest.raises(UserError, match=r"made with other prompts than data\.train_data has now"):
        run.train()


def test_a_system_prompt_is_a_setting_and_no_other_data(tmp_path: Path) -> None:
    run_of(tmp_path).train()
    run = run_of(tmp_path, trainer__resume_mode="latest")
    for prompt in run.trainer.context.prompts._dataset:
        prompt.messages.insert(0, {"role": "system", "content": "Think."})
    run.train()


def test_other_shares_of_domains_are_refused(tmp_path: Path) -> None:
    run_of(tmp_path).train()
    config = tmp_path / "step_000006" / "config.json"
    recorded = json.loads(config.read_text())
    recorded["config"]["environment"]["domains"] = {"a": {"proportion": 0.5, "scale": 2.0}}
    with pytest.raises(
        UserError, match=r"environment\.domains \(proportions\)={}, but .* with {a: 0.5}"
    ):
        _check(config, recorded, run_of(tmp_path))


def test_a_model_of_another_shape_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    for name, width in (("a", 64), ("b", 128)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(
            json.dumps({"model_type": "llama", "hidden_size": width})
        )
    folder, key = tmp_path / "c", "trainer__policy__model__path"
    run_of(folder, **{key: str(tmp_path / "a")}).train()
    with pytest.raises(
        UserError, match=r"hidden_size of trainer\.policy\.model\.path .*=128, but .* made with 64"
    ):
        run_of(folder, trainer__resume_mode="latest", **{key: str(tmp_path / "b")}).train()


def _check(config: Path, recorded: dict[str, Any], run: Run) -> None:
    from skyasync.trainer.checkpoint.settings_check import check_recorded

    config.write_text(json.dumps(recorded))
    check_recorded(config.parent, run.trainer.cfg)
