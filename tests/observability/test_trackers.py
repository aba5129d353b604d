import json
import logging
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from skyasync.errors import UserError
from skyasync.observability import TRACKERS, RunDirectory, jsonl
from skyasync.observability.jsonl import read_rows
from skyasync.observability.trackers import (
    NON_FINITE,
    JsonlTracker,
    MultiTracker,
    TrackerContext,
    plain_metrics,
)
from skyasync.preflight.parts import check_installed
from tests.full_disk import files_end_at


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path, "run")


def lines(run):
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def without_time(rows):
    return [{key: value for key, value in row.items() if key != "time"} for row in rows]


def test_a_step_logged_in_parts_is_one_line_complete_after_each_call(run):
    tracker = JsonlTracker(TrackerContext(run))
    tracker.log({"eval/score": 0.123456789}, 0)
    tracker.log({"reward/mean": 1.0, "a/long_name": 0.123456789}, 1)
    assert without_time(lines(run))[1] == {
        "step": 1,
        "reward/mean": 1.0,
        "a/long_name": 0.123456789,
    }
    tracker.log(
        {"eval/score": 0.5, "a/long_name": 1.0}, 1
    )  # shorter than before: nothing remains of the old line
    assert without_time(lines(run)) == [
        {"step": 0, "eval/score": 0.123456789},
        {"step": 1, "reward/mean": 1.0, "a/long_name": 1.0, "eval/score": 0.5},
    ]
    assert lines(run)[0]["time"] > 1.6e9


def test_late_metrics_join_the_line_of_their_step(run):
    tracker = JsonlTracker(TrackerContext(run))
    for step in (1, 2, 4):
        tracker.log({"reward/mean": float(step)}, step)
    tracker.log({"eval/score": 0.2}, 2)
    tracker.log({"eval/score": 0.3}, 3)
    tracker.log({"eval/score": 0.4}, 4)
    tracker.log({"eval/score": 0.5}, 5)
    assert without_time(lines(run)) == [
        {"step": 1, "reward/mean": 1.0},
        {"step": 2, "reward/mean": 2.0, "eval/score": 0.2},
        {"step": 3, "eval/score": 0.3},
        {"step": 4, "reward/mean": 4.0, "eval/score": 0.4},
        {"step": 5, "eval/score": 0.5},
    ]


def test_a_resumed_run_drops_the_lines_of_steps_it_does_again(run):
    first = JsonlTracker(TrackerContext(run))
    for step in range(6):
        first.log({"reward/mean": 1.0}, step)
    with run.metrics.open("a") as file:
        file.write('{"step": 6, "rew')  # the crash
    second = JsonlTracker(TrackerContext(run))
    for step in (3, 4):
        second.log({"reward/mean": 2.0}, step)
    assert [(row["step"], row["reward/mean"]) for row in lines(run)] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
    ]


def test_the_first_step_that_is_done_again_has_nothing_of_the_interrupted_run(run):
    first = JsonlTracker(TrackerContext(run))
    first.log({"reward/mean": 1.0}, 1)
    first.log({"reward/mean": 1.0, "eval/score": 0.9, "spikes/count": 1.0}, 2)
    JsonlTracker(TrackerContext(run)).log({"reward/mean": 2.0}, 2)
    assert without_time(lines(run)) == [
        {"step": 1, "reward/mean": 1.0},
        {"step": 2, "reward/mean": 2.0},
    ]


def test_other_metrics_of_the_last_step_are_added_by_a_run_that_begins_with_it(run):
    JsonlTracker(TrackerContext(run)).log({"reward/mean": 1.0}, 1)
    JsonlTracker(TrackerContext(run)).log({"mine/score": 2.0}, 1)
    assert without_time(lines(run)) == [{"step": 1, "reward/mean": 1.0, "mine/score": 2.0}]


def test_readers_leave_a_torn_line_out(run):
    run.metrics.write_bytes(b'{"step": 1, "a": 2}\n[1]\nnull\n{"a": 1}\n\n{"step": 2, "a"')
    assert read_rows(run.metrics) == [{"step": 1, "a": 2}]
    assert read_rows(run.path / "absent.jsonl") == []


def test_numbers_of_any_library_become_floats():
    plain = plain_metrics(
        {"a": np.float32(0.5), "b": torch.tensor([2]), "c": True, "d": np.array(3), "e": 7}
    )
    assert plain == {"a": 0.5, "b": 2.0, "c": 1.0, "d": 3.0, "e": 7.0}
    assert {type(value) for value in plain.values()} == {float}


def test_what_is_not_finite_is_null_and_counted(run):
    tracker = MultiTracker(["jsonl"], run)
    tracker.log({"a": math.nan, "b": torch.tensor(-math.inf), "c": 1}, 1)
    tracker.log({"c": 1}, 2)
    first, second = without_time(lines(run))
    assert first == {"step": 1, "a": None, "b": None, "c": 1.0, NON_FINITE: 2.0}
    assert NON_FINITE not in second


@pytest.mark.parametrize("value", ["0.5", [1.0], torch.zeros(2), object()])
def test_a_metric_that_is_no_number_is_named(value):
    with pytest.raises(TypeError, match="'reward/mean'"):
        plain_metrics({"reward/mean": value})


def test_a_failing_tracker_is_reported_once_and_does_not_stop_others(run, caplog):
    class Failing:
        def log(self, metrics, step):
            raise ConnectionError("no route")

        def close(self):
            raise ConnectionError("still no route")

    class Remembering:
        def __init__(self):
            self.steps, self.closed = [], False

        def log(self, metrics, step):
            self.steps.append(step)

        def close(self):
            self.closed = True

    last = Remembering()
    tracker = MultiTracker(["jsonl"], run, extra=[Failing(), last])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            tracker.log({"a": 1.0}, step)
        tracker.close()
    assert [row["step"] for row in lines(run)] == [1, 2]
    assert (last.steps, last.closed) == ([1, 2], True)
    assert [record.getMessage() for record in caplog.records] == [
        "tracker Failing failed, the run continues: ConnectionError: no route"
    ]


def test_rows_that_failed_on_a_full_disk_are_written_later(run, caplog):
    tracker = MultiTracker(["jsonl"], run)
    tracker.log({"a": 1.0}, 1)
    with files_end_at(run.metrics.stat().st_size + 20):
        for step in (2, 3):
            tracker.log({"a": float(step)}, step)
    assert [row["step"] for row in jsonl.read_rows(run.metrics)] == [1], "readable files are read"
    tracker.log({"b": 3.5}, 3)
    tracker.log({"a": 4.0}, 4)
    assert [(row["step"], row["a"], row.get("b")) for row in lines(run)] == [
        (1, 1.0, None), (2, 2.0, None), (3, 3.0, 3.5), (4, 4.0, None)
    ]  # fmt: skip
    with files_end_at(run.metrics.stat().st_size + 20):
        tracker.log({"a": 5.0}, 5)
    assert [record.getMessage() for record in caplog.records] == [
        "tracker jsonl failed, the run continues: OSError: [Errno 27] File too large"
    ] * 2, "reported once each time"


def test_the_console_prints_a_line_per_step(run, capsys):
    MultiTracker(["console"], run).log({"reward/mean": 0.634, "policy/lr": 1e-4}, 3)
    assert capsys.readouterr().out == "step 3  reward 0.63\n"


def test_an_unknown_tracker_is_refused_with_the_nearest_name(run):
    with pytest.raises(UserError, match="unknown tracker 'jsnl': did you mean 'jsonl'"):
        MultiTracker(["jsnl"], run)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio", "swanlab"])
def test_a_missing_package_is_answered_with_the_command_that_adds_it(run, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)  # the import fails whether it is installed or not
    with pytest.raises(UserError, match=f"not installed; add it with: uv pip install {name}"):
        MultiTracker([name], run)


def test_the_registry_announces_exactly_what_the_modules_register():
    announced = TRACKERS.names()
    assert (
        sorted(TRACKERS)
        == announced
        == ["console", "jsonl", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
    )


def test_a_users_tracker_is_found_by_its_name(run):
    seen = []

    class Mine:
        def __init__(self, context):
            self.lr = context.config["lr"]

        def log(self, metrics, step):
            seen.append((self.lr, metrics, step))

        def close(self): ...

    TRACKERS.register("mine")(Mine)
    try:
        MultiTracker(["mine"], run, {"lr": 0.1}).log({"a": 1}, 4)
    finally:
        del TRACKERS["mine"]
    assert seen == [(0.1, {"a": 1.0}, 4)]


def test_tensorboard_files_hold_the_metrics(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = MultiTracker(["tensorboard"], run)
    tracker.log({"reward/mean": 0.5, "broken": math.nan}, 3)
    tracker.close()
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(3, 0.5)]
    assert "broken" not in events.Tags()["scalars"]


def test_tensorboard_shows_a_step_that_is_made_again_once(run):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, value in (((1, 2, 3), 0.5), ((3, 4), 0.75)):
        tracker = MultiTracker(["tensorboard"], run)
        for step in steps:
            tracker.log({"reward/mean": value}, step)
        tracker.close()
    events = EventAccumulator(str(run.path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert found == [(1, 0.5), (2, 0.5), (3, 0.75), (4, 0.75)]


def test_wandb_writes_an_offline_run_into_the_folder(run, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = MultiTracker(["wandb"], run, {"trainer": {"seed": 1}})
    tracker.log({"reward/mean": 0.5}, 1)
    tracker.close()
    assert list(run.path.glob("wandb/offline-run-*/*.wandb"))
    assert (run.path / "wandb_id").read_text()


def test_mlflow_has_the_metrics_and_a_resumed_run_goes_on_in_the_same(run, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the store that needs no database
    mlflow.set_tracking_uri(run.path.as_uri() + "/mlruns")
    for step in (1, 2):
        tracker = MultiTracker(["mlflow"], run, {"trainer": {"seed": 7}})
        tracker.log({"reward/mean": step / 10, "broken": math.nan}, step)
        tracker.close()
    client = mlflow.MlflowClient()
    found = client.get_run((run.path / "mlflow_id").read_text())
    assert (found.info.run_name, found.info.status, found.data.params) == (
        "run",
        "FINISHED",
        {"trainer.seed": "7"},
    )
    history = client.get_metric_history(found.info.run_id, "reward/mean")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2)]
    assert "broken" not in found.data.metrics


def test_trackio_has_the_metrics_and_a_resumed_run_goes_on_in_the_same(run, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(run.path / "trackio"))  # read when it is imported
    trackio = pytest.importorskip("trackio")
    for step in (1, 2):
        tracker = MultiTracker(["trackio"], run, {"trainer": {"seed": 7}}, project_name="mine")
        tracker.log({"reward/mean": step / 10, "broken": math.nan}, step)
        tracker.close()
    (found,) = trackio.Api().runs("mine")
    assert found.name == "run"
    rows = trackio.sqlite_storage.SQLiteStorage.get_logs("mine", "run")
    assert [(row["step"], row["reward/mean"]) for row in rows] == [(1, 0.1), (2, 0.2)]


def test_swanlab_writes_an_offline_run_into_the_folder(run, monkeypatch):
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    tracker = MultiTracker(["swanlab"], run, {"trainer": {"seed": 1}})
    tracker.log({"reward/mean": 0.5, "broken": math.nan}, 1)
    tracker.close()
    assert list((run.path / "swanlab").iterdir())


def test_importing_the_package_and_its_trackers_imports_nothing_heavy():
    code = "import sys, skyasync.observability.trackers; print({'torch', 'ray', 'matplotlib'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("name", ["mlflow", "trackio", "swanlab"])
def test_a_missing_package_is_found_before_anything_starts(monkeypatch, name):
    monkeypatch.setattr("skyasync.preflight.parts.find_spec", lambda package: None)
    with pytest.raises(
        UserError, match=f"{name} is not installed; add it with: uv pip install {name}"
    ):
        check_installed(TRACKERS, name)
