import io
import json

import pytest
from rich.console import Console

from skyasync.observability import summary
from skyasync.observability.jsonl import write_rows
from skyasync.observability.summary import Evaluation, render, run_times, summarise
from tests.observability.alarm_rows import rows_of


def step(number, step_s=2.0, **values):
    row = {"step": number, "time/step_s": step_s}
    return row | {key.replace("__", "/"): value for key, value in values.items()}


def text_of(result):
    console = Console(file=io.StringIO(), width=100, color_system=None)
    console.print(render(result))
    return console.file.getvalue()


def test_scores_name_their_steps():
    rows = [
        {"step": 0, "eval/score": 0.5},
        step(1, eval__score=0.9),
        step(2, eval__score=None),
        step(3, eval__score=0.8),
    ]
    result = summarise(rows)
    assert (result.first, result.best, result.last) == (
        Evaluation(0.5, 0),
        Evaluation(0.9, 1),
        Evaluation(0.8, 3),
    )
    assert "0.50 (step 0) → 0.80 (step 3), best 0.90 (step 1)" in text_of(result)


def test_rates_and_shares_are_weighted_by_time():
    rows = [
        step(1, 1.0, throughput__samples_per_s=100, idle__trainer=0.0),
        step(2, 3.0, throughput__samples_per_s=20, idle__trainer=0.4),
    ]
    result = summarise(rows)
    assert result.step_s == 2.0 and result.total_s == 4.0
    assert result.means == pytest.approx({"throughput/samples_per_s": 40, "idle/trainer": 0.3})


def test_phases_are_means_over_all_steps_longest_first():
    rows = [
        step(1, time__sync_s=0.2, time__train_s=1.0),
        step(2, time__train_s=0.5, time__eval_s=None),
    ]
    assert list(summarise(rows).phases.items()) == [("train", 0.75), ("sync", 0.1), ("eval", 0.0)]
    shown = text_of(summarise(rows))
    assert "where the time of training goes" in shown
    assert [line.split() for line in shown.splitlines() if line.startswith("train")] == [
        ["train", "0.750", "38%"]
    ]


def test_the_rate_is_that_of_all_of_training_with_the_rate_without_evaluations_after_it():
    """An evaluation of 6 s follows step 2; the batch of step 4 was generated meanwhile, and step 3 waited for none."""
    rows = [
        {"step": 0, "eval/score": 0.5, "time/eval_s": 9.0},
        step(1, 2.0, time__interval_s=2.0, throughput__samples_per_s=50, time__start_s=30.0),
        step(2, 2.0, time__interval_s=2.0, throughput__samples_per_s=50, time__eval_s=6.0),
        step(3, 0.5, time__interval_s=6.5, throughput__samples_per_s=100 / 6.5),
        step(
            4,
            1.5,
            time__interval_s=1.5,
            throughput__samples_per_s=100 / 1.5,
            rollout__in_evaluation=0.5,
        ),
        step(
            5, 2.0, time__interval_s=2.0, throughput__samples_per_s=50, rollout__in_evaluation=0.0
        ),
    ]
    result = summarise(rows)
    assert result.total_s == 8.0 + 6.0
    assert result.step_s == 2.0
    assert result.means["throughput/samples_per_s"] == pytest.approx(500 / 14)
    assert result.samples_per_s == pytest.approx(50.0)
    shown = text_of(result)
    assert "5 in 0:14 (evaluation 0:06), 2.00 s each without evaluations" in shown
    assert "36 (50 without evaluations)" in shown
    assert "start           0:30" in shown


def test_idle_shares_are_weighted_by_the_time_in_which_they_were_measured():
    rows = [
        step(1, 2.0, time__interval_s=2.0, idle__engines=0.1, time__eval_s=8.0),
        step(2, 2.0, time__interval_s=10.0, idle__engines=0.7),
    ]
    assert summarise(rows).means["idle/engines"] == pytest.approx((0.1 * 2 + 0.7 * 10) / 12)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"idle__trainer": 0.41, "idle__engines": 0.07},
            "generation is the bottleneck: the trainer waited 41% of the time, the engines 7%; "
            "more devices for engines would help",
        ),
        (
            {"idle__trainer": 0.05, "idle__engines": 0.5},
            "training is the bottleneck: the trainer waited 5% of the time, the engines 50%; "
            "more devices for the trainer would help",
        ),
        (
            {"idle__trainer": 0.2, "idle__engines": 0.15},
            "generation and training are balanced: the trainer waited 20% of the time, the engines 15%",
        ),
        (
            {"idle__trainer": 0.6, "idle__engines": 0.4},
            "trainer and engines take turns, generation longer: the trainer waited 60% of the time, the engines 40%; "
            "an asynchronous plan would overlap them",
        ),
        (
            {"idle__trainer": 0.6, "idle__engines": 0.4, "time__wait_data_s": 1.0},
            "trainer and engines wait for each other, though the plan lets them overlap: the trainer waited 60% of the "
            "time, the engines 40%; generating further ahead (trainer.max_staleness, trainer.async_queue_size) would "
            "help",
        ),
        (  # neither works for most of the time
            {"idle__trainer": 0.3, "idle__engines": 0.52, "time__wait_data_s": 0.4},
            "trainer and engines wait for each other, though the plan lets them overlap: the trainer waited 30% of the "
            "time, the engines 52%; generating further ahead (trainer.max_staleness, trainer.async_queue_size) would "
            "help",
        ),
        (
            {"idle__trainer": 0.6, "idle__engines": 0.7, "time__wait_data_s": 0.2},
            "neither trainer nor engines are the bottleneck: the trainer waited 60% of the time, the engines 70%; the "
            "controller, environments and reward functions took much of the time: the trainer waited for samples in "
            "10% of it",
        ),
        (
            {"idle__trainer": 0.8, "idle__engines": 0.15, "time__wait_data_s": 1.5},
            "generation is the bottleneck: the trainer waited 80% of the time, the engines 15%; "
            "more devices for engines would help",
        ),
        (
            {"time__wait_generation_s": 1.0, "time__wait_data_s": 0.2, "idle__engines": 0.1},
            "generation is the bottleneck: the trainer waited 60% of the time, the engines 10%; "
            "more devices for engines would help",
        ),
        (
            {"time__sync_s": 0.8, "idle__trainer": 0.1, "idle__engines": 0.4},
            "weight sync is the bottleneck: it took 40% of the time",
        ),
        (
            {"time__eval_s": 6.0, "idle__trainer": 0.1},
            "evaluation is the bottleneck: it took 75% of the time",
        ),
        (
            {"idle__trainer": 0.7},
            "generation is the bottleneck: the trainer waited 70% of the time",
        ),
        ({"time__train_s": 1.0}, "too few figures to say what limits the speed"),
    ],
)
def test_one_sentence_says_what_limits_the_speed(values, sentence):
    assert summarise([step(number, **values) for number in range(1, 4)]).limit == sentence


@pytest.mark.parametrize(
    "rows", [[], [{"step": 0, "eval/score": None}], [{"step": 1, "reward/mean": 0.5}]]
)
def test_a_run_without_figures_is_summarised_without_guesses(rows):
    result = summarise(rows)
    assert (result.steps, result.step_s, result.first, result.means) == (0, None, None, {})
    assert text_of(result).strip() == "too few figures to say what limits the speed"


def test_values_that_were_not_finite_are_counted():
    rows = [step(1, warnings__non_finite=2.0), step(2), step(3, warnings__non_finite=1.0)]
    assert "3 values were NaN or infinite" in text_of(summarise(rows))


def test_the_summary_of_a_file_is_printed(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step(1, idle__trainer=0.7)) + "\n")
    assert summary.print_summary(tmp_path / "metrics.jsonl")
    assert "generation is the bottleneck" in capsys.readouterr().out
    assert not summary.print_summary(tmp_path / "absent.jsonl")


def test_metrics_that_cannot_be_summed_up_are_a_warning(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time/step_s": "long"}\n')
    assert not summary.print_summary(tmp_path / "metrics.jsonl")
    assert "no summary of" in caplog.text


def test_the_times_of_a_run_are_all_of_its_seconds():
    rows = [
        {"step": 0, "time": 130.0, "eval/score": 0.5},
        step(1, 10.0, time__start_s=30.0, time__eval_s=4.0, time=144.0),
        step(2, 8.0, time=152.0),
    ]
    assert run_times(rows, 159.0) == "start 0:30, 2 steps 0:18, evaluation 0:04, finish 0:07"


def test_the_seconds_of_a_run_add_up_with_the_evaluation_before_training():
    rows = [
        {"step": 0, "time": 145.0, "eval/score": 0.5, "time/eval_s": 15.0},
        step(1, 8.0, time__start_s=30.0) | {"time": 153.0},
        step(2, 12.0, time__eval_s=5.0) | {"time": 170.0},
    ]
    assert (
        run_times(rows, 177.0) == "start 0:30, 2 steps 0:20, evaluation 0:20, finish 0:07"
    )  # from 100 to 177


def test_a_run_without_steps_has_no_times():
    assert run_times([{"step": 0, "time": 130.0, "eval/score": 0.5}], 140.0) == ""
    assert run_times([], 140.0) == ""


@pytest.mark.parametrize("name", ["groups_equal", "collapse", "gradient", "reward_flat"])
def test_a_run_that_learns_nothing_ends_with_its_alarms_and_no_advice_on_speed(
    name, tmp_path, capsys
):
    rows = [
        {"time/step_s": 1.0, "idle/trainer": 0.6, "idle/engines": 0.4} | row
        for row in rows_of(name)
    ]
    write_rows(tmp_path / "metrics.jsonl", rows)
    assert summary.print_summary(tmp_path / "metrics.jsonl")
    shown = " ".join(capsys.readouterr().out.split())
    assert "alarm: " in shown
    assert summarise(rows).limit not in shown


def test_alarms_of_speed_leave_the_sentence_about_it_and_restarts_are_among_them(tmp_path, capsys):
    write_rows(
        tmp_path / "metrics.jsonl", [step(number, idle__trainer=0.7) for number in range(1, 13)]
    )
    write_rows(tmp_path / "restarts.jsonl", [{"step": 11, "what": "a process of the policy"}])
    assert summary.print_summary(tmp_path / "metrics.jsonl")
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "alarm: Processes failed in the last 10 steps and were restarted: a process of the policy."
        in shown
    )
    assert "generation is the bottleneck" in shown
