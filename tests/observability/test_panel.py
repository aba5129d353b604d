"""The live view's panel, in terminals of all sizes."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from skyasync.observability.progress import LatestSample, ProgressReport
from skyasync.observability.terminal import History, panel, sparkline

METRICS = {
    "reward/mean": 0.634, "eval/score": 0.612, "response/length_mean": 9.81, "response/truncated": 0.02,
    "throughput/tokens_per_s": 1512.3, "throughput/engine_0_tokens_per_s": 800.0,
    "throughput/engine_1_tokens_per_s": 712.3, "throughput/samples_per_s": 93.1, "staleness/mean": 1.0,
    "staleness/max": 2.0, "idle/trainer": 0.12, "idle/engines": 0.31, "time/step_s": 1.42,
    "memory/controller_gib": 0.5, "memory/free_gib": 9.0,
}  # fmt: skip
SAMPLE = LatestSample(12, "Sort these:\n3 1 2", "1 2 3\x1b[2J漢字", 1.0)
REPORT = ProgressReport(
    12, 80, "training", dict(METRICS), elapsed_s=42.0, eta_s=233.0,
    limit="training is the bottleneck: more", sample=SAMPLE, warnings=2, warning="the disk\nis nearly full",
)  # fmt: skip


def a_history() -> History:
    history = History()
    for step in range(1, 90):
        history.add(step, {"reward/mean": step / 100, "eval/score": 0.7 if step == 10 else None})
    return history


def text(width: int, height: int, report: ProgressReport = REPORT) -> list[str]:
    return [line.plain for line in panel(report, a_history(), width, height)]


def test_it_says_how_far_how_well_how_fast_who_waits_how_stale_and_shows_a_sample() -> None:
    head, reward, speed, waits, stale, memory, sample, warning = text(120, 24)
    assert head.startswith("step 12/80 ━━━━") and head.endswith("─ 0:42, 3:53 left, training")
    assert reward.startswith("reward  0.63 ") and reward.endswith(
        "█ eval 0.61, best 0.70 at step 10"
    )
    assert speed == "speed   1.4 s/step, 93 samples/s, 1,512 tokens/s (engines 800, 712)"
    assert waits == "waits   trainer 12%, engines 31% idle; training is the bottleneck"
    assert stale == "stale   1.00 versions, at most 2; responses of 9.8 tokens, 2% cut"
    assert memory == "memory  controller 0.5 GiB; 9.0 GiB free"
    assert sample == "sample  1.00: Sort these: 3 1 2 → 1 2 3·[2J漢字"
    assert warning == "warning (2) the disk is nearly full"


@pytest.mark.parametrize("width", [1, 2, 9, 19, 20, 33, 60, 80, 250])
@pytest.mark.parametrize("height", [1, 2, 3, 5, 8, 60])
def test_it_never_wraps_nor_fills_the_terminal(width: int, height: int) -> None:
    lines = text(width, height)
    assert 1 <= len(lines) <= max(1, height - 1)
    assert max(cell_len(line) for line in lines) <= max(1, width - 1)


def test_what_matters_least_goes_first() -> None:
    assert [line.partition(" ")[0] for line in text(80, 4)] == ["step", "reward", "warning"]


def test_what_is_unknown_or_not_finite_is_left_out() -> None:
    assert [
        line.plain
        for line in panel(ProgressReport(0, 0, "starting", elapsed_s=3), History(), 80, 24)
    ] == ["starting 0:03"]
    nothing = ProgressReport(1, 3, "training", dict.fromkeys(METRICS))
    assert len(panel(nothing, History(), 80, 24)) == 1


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
