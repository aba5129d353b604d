"""Every plan on streamed data: an interrupted run trains the same prompts as an uninterrupted one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from skyasync.data.stream import StreamedPrompts
from skyasync.errors import UserError
from skyasync.rollout.types import Prompt
from tests.trainer.plans.parts import BOUNDED, PLANS, dataset, make_run


class Broken(Exception):
    pass


def streamed(rows: int = 10, buffer: int = 3) -> StreamedPrompts:
    prompts = dataset(rows)

    def as_prompts(first: int, found: Any) -> list[Prompt]:
        return [prompts[first + place] for place in range(len(found))]

    return StreamedPrompts(
        [lambda start: ({"row": row} for row in range(start, rows))], as_prompts, buffer
    )


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {
        "trainer__max_training_steps": 7, "data__streaming": True, "data__shuffle_buffer": 3,
        "trainer__ckpt_path": str(tmp_path), "trainer__ckpt_interval": 1, **more,
    }  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("step", [1, 4])
def test_a_resumed_run_goes_on_at_the_exact_prompt(plan: type, step: int, tmp_path: Path) -> None:
    whole = make_run(plan, train=streamed(), **settings(tmp_path / "whole")).train()
    assert len(whole.trained) == 28 == len(set(whole.trained))  # two passes and eight more
    first = make_run(plan, train=streamed(), **settings(tmp_path / "cut"))
    first.faults["update", len(whole.dispatch.parts) + step + 1] = Broken()
    with pytest.raises(Broken):
        first.train()
    second = make_run(
        plan, train=streamed(), **settings(tmp_path / "cut"), trainer__resume_mode="latest"
    ).train()
    done = [*first.trained[: 28 - len(second.trained)], *second.trained]
    assert Counter(done) == Counter(whole.trained)
    if plan not in BOUNDED:
        assert done == whole.trained


def test_refill_takes_more_from_the_stream(tmp_path: Path) -> None:
    all_right = frozenset({1, 4})
    sampling = "trainer__algorithm__dynamic_sampling__"
    more = {
        f"{sampling}mode": "refill",
        f"{sampling}type": "variance",
        "trainer__max_training_steps": 5,
    }
    run = make_run(
        PLANS[0], train=streamed(), all_right=all_right, **settings(tmp_path, **more)
    ).train()
    assert len(run.dispatch.trained) == 5 and all(
        len(update) == 4 for update in run.dispatch.trained
    )
    assert not {identity.row for identity in run.trained} & all_right


def test_data_that_was_held_is_not_gone_on_with_as_a_stream(tmp_path: Path) -> None:
    make_run(
        PLANS[0], prompts=10, trainer__ckpt_path=str(tmp_path), trainer__ckpt_interval=1
    ).train()
    with pytest.raises(
        UserError, match=r"data\.streaming=true, but checkpoint .* was made with false"
    ):
        make_run(
            PLANS[0], train=streamed(), **settings(tmp_path), trainer__resume_mode="latest"
        ).train()
    other = settings(tmp_path / "other")
    make_run(PLANS[0], train=streamed(), **other).train()
    with pytest.raises(UserError, match=r"data\.shuffle_buffer=4, but checkpoint"):
        changed = other | {"data__shuffle_buffer": 4, "trainer__resume_mode": "latest"}
        make_run(PLANS[0], train=streamed(buffer=4), **changed).train()
