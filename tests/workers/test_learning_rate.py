"""The learning rate of a step is a function of its number: transformers' schedules, after a non-zero warm-up."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import get_scheduler
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
from transformers.trainer_utils import SchedulerType

from skyasync.config import load_config
from skyasync.config.check import check_config
from skyasync.config.schema import Config, OptimizerConfig
from skyasync.config.schema.models import SCHEDULES
from skyasync.errors import UserError
from skyasync.workers.model_worker import learning_rate


def config(**settings: Any) -> OptimizerConfig:
    return OptimizerConfig(lr=1.0, **settings)


def test_the_warm_up_is_linear_and_its_first_step_learns() -> None:
    settings = config(num_warmup_steps=2)
    assert [learning_rate(step, settings, 0) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
    share = config(warmup_ratio=0.2)
    assert [learning_rate(step, share, 10) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]


def test_linear_and_cosine_end_at_zero() -> None:
    settings = config(num_warmup_steps=2, scheduler="linear")
    assert [learning_rate(step, settings, 6) for step in range(2, 7)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert learning_rate(4, config(num_warmup_steps=2, scheduler="cosine"), 6) == pytest.approx(0.5)


@pytest.mark.parametrize(
    "settings",
    [config(scheduler="linear"), config(scheduler="polynomial"), config(warmup_ratio=0.1)],
)
def test_what_needs_an_end_is_refused_without_one(settings: OptimizerConfig) -> None:
    with pytest.raises(UserError, match="max_training_steps"):
        learning_rate(4, settings, 0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine", {"num_cycles": 1.5}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_with_min_lr", {"min_lr": 0.2}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_warmup_with_min_lr", {"min_lr": 0.2, "num_cycles": 0.75}),
        ("polynomial", {"lr_end": 0.1, "power": 2.0}),
        ("inverse_sqrt", {}),
        ("warmup_stable_decay", {"num_decay_steps": 4, "min_lr_ratio": 0.1}),
    ],
)
def test_after_the_warm_up_each_schedule_is_that_of_transformers(
    name: str, options: dict[str, Any]
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_scheduler(name, optimizer, 3, 20, scheduler_specific_kwargs=dict(options))
    ours = config(num_warmup_steps=3, scheduler=name, scheduler_kwargs=options)
    for step in range(20):
        if step >= 3:
            assert learning_rate(step, ours, 20) == pytest.approx(
                theirs.get_last_lr()[0], abs=1e-12
            ), step
        optimizer.step()
        theirs.step()


def test_every_schedule_of_transformers_is_there_or_refused_by_its_name() -> None:
    theirs = {str(name.value) for name in TYPE_TO_SCHEDULER_FUNCTION}
    assert theirs - set(SCHEDULES) == {"reduce_lr_on_plateau", "greedy"}
    for name in theirs - set(SCHEDULES):
        with pytest.raises(
            UserError, match=f"scheduler={name}.*by a metric.*constant, .*warmup_stable_decay"
        ) as caught:
            load_config([f"trainer.policy.optimizer_config.scheduler={name}"])
        assert "\n" not in str(caught.value)


def test_a_warm_up_of_its_own_begins_where_it_is_told() -> None:
    own = config(num_warmup_steps=3, scheduler="cosine_warmup_with_min_lr")
    own.scheduler_kwargs = {"min_lr_rate": 0.1, "warmup_lr_rate": 0.4}
    rates = [learning_rate(step, own, 20) for step in range(4)]
    assert rates[:3] == pytest.approx([0.4, 0.7, 1.0]) and 0.9 < rates[3] < 1.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_a_schedule_may_be_told_is_what_transformers_takes(name: str) -> None:
    takes = inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters
    assert set(SCHEDULES[name]) <= set(takes)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_warmup_steps": 5, "warmup_ratio": 0.1}, "both say how long the warm-up is"),
        (
            {"scheduler": "polynomial", "scheduler_kwargs": {"lr_ende": 0.1}},
            "did you mean 'lr_end'",
        ),
        ({"scheduler_kwargs": {"power": 2}}, "constant takes none"),
        ({"scheduler": "cosine_with_min_lr"}, "needs its final rate in one form"),
        ({"scheduler": "cosine_warmup_with_min_lr"}, "needs its final rate in one form"),
        ({"scheduler": "warmup_stable_decay"}, "num_decay_steps"),
    ],
)
def test_what_contradicts_itself_is_refused_in_a_line(settings: dict[str, Any], said: str) -> None:
    cfg = Config()
    for name, value in settings.items():
        setattr(cfg.trainer.policy.optimizer_config, name, value)
    (problem,) = (line for line in check_config(cfg) if "optimizer_config" in line)
    assert said in problem
