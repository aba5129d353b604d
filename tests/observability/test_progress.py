import io
import logging
import pickle

import pytest
from rich.console import Console

from skyasync.observability.lines import duration, status_line
from skyasync.observability.progress import LatestSample, ProgressRecorder, warnings_to
from skyasync.observability.terminal import ProgressView

FULL = {
    "reward/mean": 0.634, "eval/score": 0.612, "response/length_mean": 9.81, "throughput/tokens_per_s": 1512.3,
    "staleness/mean": 1.0, "idle/trainer": 0.12, "idle/engines": 0.31, "time/step_s": 1.42, "policy/lr": 1e-4,
}  # fmt: skip
LINE = "reward 0.63  eval 0.61  len 9.8  1,512 tok/s  staleness 1.00  idle trainer 12% engines 31%  1.4 s/step"


class VirtualClock:
    now = 0.0

    def __call__(self):
        return self.now


def a_view(*, mode="auto"):
    screen = io.StringIO()
    console = Console(file=screen, width=120, color_system=None, legacy_windows=False)
    return ProgressView(mode=mode, console=console), screen


def test_the_line_of_a_step_has_what_was_logged_and_nothing_else():
    assert status_line(12, FULL, 60) == f"step 12/60  {LINE}"
    assert status_line(3, {"idle/engines": 0.5}, 60) == "step  3/60  idle engines 50%"
    assert status_line(3, {}) == "step 3"


def test_a_value_that_was_not_finite_reads_nan():
    assert (
        status_line(3, {"reward/mean": None, "idle/trainer": None})
        == "step 3  reward nan  idle trainer nan%"
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (727, "12:07"), (3800, "1:03:20")]
)
def test_durations_read_as_clocks(seconds, text):
    assert duration(seconds) == text


def test_a_tracker_that_writes_the_steps_writes_them_alone():
    recorder, screen = ProgressRecorder(60), io.StringIO()
    view = ProgressView(console=Console(file=screen, width=120), steps=False)
    with view:
        recorder.phase("starting engines")
        view.update(recorder.report(view.seen))
        recorder.log(FULL, 2)
        view.update(recorder.report(view.seen))
    assert screen.getvalue() == "starting engines\n"
    assert view.seen == 2


def test_without_a_terminal_each_step_is_one_line_however_rarely_it_is_polled():
    recorder, (view, screen) = ProgressRecorder(60), a_view()
    with view:
        recorder.phase("starting engines")
        view.update(recorder.report(view.seen))
        view.update(recorder.report(view.seen))
        recorder.log({"eval/score": 0.5}, 0)
        recorder.log({"reward/mean": 0.51}, 1)
        view.update(recorder.report(view.seen))
        recorder.phase("training")
        view.update(recorder.report(view.seen))
        recorder.log(FULL, 2)
        view.update(recorder.report(view.seen))
    assert screen.getvalue().splitlines() == [
        "starting engines",
        "step  0/60  eval 0.50",
        "step  1/60  reward 0.51",
        f"step  2/60  {LINE}",
    ]


def test_an_unanswered_poll_loses_and_doubles_nothing():
    recorder, (view, screen) = ProgressRecorder(3), a_view()
    recorder.log({"reward/mean": 0.1}, 1)
    recorder.report(view.seen)  # this answer is lost
    recorder.log({"reward/mean": 0.2}, 2)
    late = recorder.report(view.seen)
    view.update(late)
    view.update(late)
    assert screen.getvalue().splitlines() == ["step 1/3  reward 0.10", "step 2/3  reward 0.20"]


def test_the_remaining_time_follows_the_recent_steps():
    clock = VirtualClock()
    recorder = ProgressRecorder(100, clock=clock)
    assert recorder.report().eta_s is None
    for step in range(1, 31):
        clock.now += 10.0 if step <= 5 else 2.0  # the slow first steps are forgotten
        recorder.log({}, step)
        recorder.log({"eval/score": 0.5}, step)
    report = recorder.report()
    assert report.eta_s == pytest.approx(70 * 2.0)
    assert report.elapsed_s == 5 * 10 + 25 * 2
    clock.now += 1.5
    assert recorder.report().eta_s == pytest.approx(70 * 2.0 - 1.5)


def test_a_resumed_run_starts_where_it_was():
    clock = VirtualClock()
    recorder = ProgressRecorder(20, clock=clock)
    recorder.resume(10)
    assert recorder.report().step == 10
    for step in (11, 12):
        clock.now += 3
        recorder.log({}, step)
    assert (recorder.report().step, recorder.report().eta_s) == (12, pytest.approx(8 * 3))


def test_the_recorder_forgets_what_was_seen_and_a_report_survives_pickling():
    recorder = ProgressRecorder(5000)
    for step in range(1, 1001):
        recorder.log(FULL, step)
        recorder.report(step - 2)
    report = recorder.report(998)
    assert [step for step, _ in report.rows] == [999, 1000]
    assert "policy/lr" not in report.metrics
    assert pickle.loads(pickle.dumps(report)) == report


def test_the_recorder_says_what_limits_the_speed_and_keeps_the_newest_sample_and_warning():
    recorder = ProgressRecorder(9)
    for step in range(1, 4):
        recorder.log(
            {"time/step_s": 1.0, "time/wait_data_s": 0.6, "idle/trainer": 0.6, "idle/engines": 0.1},
            step,
        )
    recorder.sample = LatestSample.of(3, {"prompt": "x" * 9999, "response": "y", "reward": 1})
    recorder.warn("first")
    recorder.warn("second")
    report = recorder.report()
    assert report.limit.startswith(
        "generation is the bottleneck: the trainer waited 60% of the time"
    )
    assert (len(report.sample.prompt), report.sample.response) == (2000, "y")
    assert (report.warnings, report.warning) == (2, "second")


def test_warnings_of_the_library_are_told_and_still_printed(capsys, monkeypatch):
    recorder, other = ProgressRecorder(), logging.getLogger("skyasync.anything")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # those of pytest
    with warnings_to(recorder):
        other.warning("the disk is %s", "full")
        other.info("engine 3 has joined")
        logging.getLogger("somebody").warning("else")
        before = capsys.readouterr().err
    other.warning("behind it")
    other.info("nothing")
    report = recorder.report()
    assert (report.warnings, report.warning) == (1, "the disk is full")
    assert before.splitlines()[:2] == ["the disk is full", "engine 3 has joined"], (
        "information is no warning"
    )
