"""Alarms are silent at every step of healthy runs, and each is raised by the rows of a run with that problem."""

from __future__ import annotations

import re

import pytest

from skyasync.config.keys import Keys
from skyasync.config.schema import Config
from skyasync.observability.alarms import WINDOW, alarms
from skyasync.observability.jsonl import Row
from tests.observability.alarm_rows import HEALTHY, ILL, rows_of

# Problems that cause further ones.
ALSO_OTHERS = ("entropy", "kl", "effective_sample_size", "truncation", "trainer_idle")


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
    named = re.findall(r"\b(?:trainer|generator|environment|data)\.[\w.]*\w", " ".join(found.values()))
    assert [
        key for key in named if key not in keys and not any(known.path.startswith(f"{key}.") for known in keys)
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
    assert [alarm.name for alarm in alarms([{"step": 0, "eval/score": 0.4}, {"step": 5, "eval/score": 0.0}])] == [
        "score"
    ]


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
