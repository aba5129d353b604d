"""Alarms are silent at every step of healthy runs, and each is raised by the rows of a run with that problem."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyasync.config.keys import Keys
from skyasync.config.schema import Config
from skyasync.observability.alarms import WINDOW, AlarmWatch, alarm_lines, alarms, alarms_of
from skyasync.observability.jsonl import Row, append_rows, write_rows
from tests.observability.alarm_rows import HEALTHY, ILL, rows_of

# Problems that cause further ones.
ALSO_OTHERS = ("collapse", "entropy", "kl", "effective_sample_size", "truncation", "trainer_idle")


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_raises_none_at_any_step(name: str) -> None:
    rows = rows_of(name)
    assert len(rows) > 40
    raised = {row["step"]: found for n, row in enumerate(rows, 1) if (found := alarms(rows[:n]))}
    assert raised == {}


@pytest.mark.parametrize("name", ILL)
def test_an_ill_run_raises_its_alarm_with_settings_that_exist(name: str) -> None:
    rows = rows_of(name)
    found = {alarm.name: alarm.text for n in range(len(rows)) for alarm in alarms(rows[: n + 1])}
    assert name in found
    keys = Keys.of(Config)
    named = re.findall(
        r"\b(?:trainer|generator|environment|data)\.[\w.]*\w", " ".join(found.values())
    )
    assert [
        key
        for key in named
        if key not in keys and not any(known.path.startswith(f"{key}.") for known in keys)
    ] == []
    assert all(text.endswith(".") and "  " not in text for text in found.values())
    assert name in ALSO_OTHERS or set(found) == {name}


@pytest.mark.parametrize("name", ILL)
def test_too_few_steps_raise_none(name: str) -> None:
    assert alarms([]) == []
    early = alarms([row for row in rows_of(name) if row["step"] < WINDOW])
    assert {alarm.name for alarm in early} <= {"restarts", "score"}


def test_a_difference_of_log_probabilities_that_grows_is_named_before_it_ends_the_run() -> None:
    """By sampled tokens: added to the rows of a healthy run, since no setting lets it grow slowly."""
    rows: list[Row] = [{**row, "gap/mean": 0.004 * 1.1 ** row["step"]} for row in rows_of("sync")]
    (alarm,) = alarms(rows)
    assert alarm.name == "logprob_difference" and "trainer.policy.model.dtype" in alarm.text


def test_a_gradient_of_zero_and_a_score_that_falls_are_named() -> None:
    healthy = rows_of("sync")
    (alarm,) = alarms([{**row, "policy/grad_norm": 0.0} for row in healthy])
    assert alarm.name == "gradient"
    (alarm,) = alarms([*healthy, {"step": healthy[-1]["step"] + 1, "eval/score": 0.5}])
    assert alarm.name == "score" and "trainer.ckpt_best_metric" in alarm.text
    assert [
        alarm.name
        for alarm in alarms([{"step": 0, "eval/score": 0.4}, {"step": 5, "eval/score": 0.0}])
    ] == ["score"]


def test_restarts_of_workers_are_named_until_they_are_old() -> None:
    rows: list[Row] = [{"step": step} for step in range(1, 31)]
    again = [{"step": 25, "what": "a process of the policy"}]
    assert [alarm.name for alarm in alarms(rows, again)] == ["restarts"]
    assert "a process of the policy" in alarms(rows, again)[0].text
    assert alarms(rows, [{**again[0], "step": 3}]) == []


def test_a_solved_task_is_no_illness() -> None:
    """All groups have equal rewards and the entropy is low, since every response is right."""
    rows = [
        {"step": n, "reward/mean": min(1.0, 0.3 + 0.05 * n), "reward/mixed_groups": max(0.0, 0.8 - 0.05 * n),
         "policy/entropy": max(0.05, 0.5 - 0.03 * n), "policy/grad_norm": 0.1}
        for n in range(1, 60)
    ]  # fmt: skip
    assert [alarms(rows[:n]) for n in range(len(rows)) if alarms(rows[:n])] == []


def test_the_update_that_destroyed_the_policy_comes_before_its_consequences() -> None:
    found = alarms(rows_of("collapse"))
    assert [alarm.name for alarm in found] == ["collapse", "truncation", "groups_equal"]
    assert (
        "The policy collapsed before step 2: the mean reward fell from 0.62 to 0.00"
        in found[0].text
    )
    assert "trainer.policy.optimizer_config.lr" in found[0].text
    assert found[1].text.startswith("100% of the responses are cut by their length (1% in step 1).")
    lines = alarm_lines(found)
    assert [line.partition(": ")[0] for line in lines] == [
        "alarm",
        "may follow from it",
        "may follow from it",
    ]


def test_a_reward_that_ignores_the_response_is_a_cause_and_one_of_zero_may_be_a_consequence() -> (
    None
):
    rows = [{**row, "reward/mean": 0.5} for row in rows_of("collapse")[1:]]
    found = alarms(rows)
    assert [alarm.name for alarm in found] == ["groups_equal", "truncation"]
    assert (
        "it is 0.5 in all 15 steps, whatever the response, so nothing is learned" in found[0].text
    )
    zero = alarms([{**row, "reward/mean": 0.0} for row in rows])
    assert [alarm.name for alarm in zero] == ["truncation", "groups_equal"]


def test_a_reward_that_was_always_constant_or_recovers_is_no_collapse() -> None:
    rows = rows_of("collapse")
    assert [alarm.name for alarm in alarms(rows[1:])] == ["truncation", "groups_equal"]
    recovered = [*rows, {**rows[0], "step": len(rows) + 1}]
    assert "collapse" not in [alarm.name for alarm in alarms(recovered)]


@pytest.mark.parametrize("name", ILL)
def test_alarms_of_a_run_that_learns_nothing_are_marked_and_those_of_speed_come_last(
    name: str,
) -> None:
    names = [alarm.name for alarm in alarms(rows_of(name))]
    slow = [alarm for alarm in names if alarm in ("restarts", "engines_idle", "trainer_idle")]
    assert names[len(names) - len(slow) :] == slow
    dead = {"collapse", "groups_equal", "gradient", "reward_flat"}
    assert {alarm.name for alarm in alarms(rows_of(name)) if alarm.nothing_learned} == dead & set(
        names
    )


def test_a_run_that_goes_on_reports_each_alarm_once(tmp_path: Path) -> None:
    clock = [0.0]
    watch = AlarmWatch(tmp_path, lambda: clock[0])
    assert watch.line() == ""  # no step has ended
    lines = []
    for row in rows_of("collapse"):
        append_rows(tmp_path / "metrics.jsonl", [row])
        clock[0] += 1.0
        lines.append(watch.line())
        assert watch.line() == ""
    said = [line for line in lines if line]
    assert lines.index(said[0]) == WINDOW - 1
    assert len(said) == 1 and "\n" not in said[0]
    assert said[0].startswith("alarm: The policy collapsed before step 2")
    assert said[0].endswith(" May follow from it: truncation, groups_equal.")
    write_rows(tmp_path / "restarts.jsonl", [{"step": 15, "what": "a process of the policy"}])
    append_rows(tmp_path / "metrics.jsonl", [{"step": 17}])
    clock[0] += 1.0
    assert watch.line().startswith("alarm: Processes failed")
    assert [alarm.name for alarm in alarms_of(tmp_path)][-1] == "restarts"


def test_looks_at_a_long_run_take_little_of_the_time(tmp_path: Path) -> None:
    """The clock goes on by a second in every look."""
    times = iter([0.0, 1.0, 49.0, 51.0, 52.0])
    watch = AlarmWatch(tmp_path, lambda: next(times))
    write_rows(tmp_path / "metrics.jsonl", [{"step": 1}])
    assert watch.line() == ""  # from 0 to 1
    write_rows(tmp_path / "metrics.jsonl", rows_of("collapse"))
    assert watch.line() == ""  # at 49
    assert watch.line().startswith("alarm: ")  # at 51


def test_a_file_that_cannot_be_read_ends_the_alarms_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watch = AlarmWatch(tmp_path)
    write_rows(
        tmp_path / "metrics.jsonl", [{"step": step, "reward/mean": "high"} for step in range(20)]
    )
    assert watch.line() == "" == watch.line()
    assert caplog.text.count("no alarms of") == 1
