"""Oversampling: the first complete samples are trained, under the requested names."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.config.check import check_config
from skyasync.config.schema import Config
from skyasync.inference.interface import GenerationOutput, SamplingParams
from skyasync.rollout.group_sampling import first_complete, with_extra_samples
from skyasync.rollout.types import (
    Prompt,
    PromptId,
    RolloutRequest,
    Segment,
    Trajectory,
    TrajectoryId,
)
from skyasync.simulate.clock import run_virtual
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun, Memory, config


def requests_of(groups: int, samples: int) -> list[RolloutRequest]:
    names = [TrajectoryId(PromptId(0, g), s) for g in range(groups) for s in range(samples)]
    return [
        RolloutRequest(
            name, Prompt(name.prompt, [], "e"), {"group": name.prompt.row}, SamplingParams()
        )
        for name in names
    ]


def ids(requests: list[RolloutRequest]) -> list[TrajectoryId]:
    return [request.id for request in requests]


class Episodes:
    """Episodes last ``seconds``, and record their end; ``fails``: those that fail."""

    def __init__(self, seconds: dict[TrajectoryId, int], fails: set[TrajectoryId]) -> None:
        self.seconds, self.fails = seconds, fails
        self.ended: list[TrajectoryId] = []
        self.cancelled: list[TrajectoryId] = []

    async def play(self, name: TrajectoryId) -> Trajectory:
        try:
            await asyncio.sleep(self.seconds[name])
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        self.ended.append(name)
        own = Segment("action", [name.repetition], [0.0], [0])
        metrics = {"given_up": 1.0} if name in self.fails else {"given_up": 0.0}
        return Trajectory(name, [Segment("prompt", [1]), own], metrics=metrics)

    async def progress(self) -> dict[str, GenerationOutput]:
        now = int(asyncio.get_running_loop().time())
        row = [0] * now
        return {
            f"{name}-t0": GenerationOutput(f"{name}-t0", row, row, row) for name in self.seconds
        }


@settings(max_examples=60)
@given(st.data(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
def test_the_first_complete_samples_are_taken_once_under_the_names_asked_for(
    data, groups, samples, spares
) -> None:
    requests = requests_of(groups, samples)
    started = ids(with_extra_samples(requests, spares))
    seconds = {name: data.draw(st.integers(1, 9)) for name in started}
    fails = {name for name in started if data.draw(st.booleans())}
    episodes = Episodes(seconds, fails)
    found = run_virtual(
        first_complete(
            ids(requests), {name: episodes.play(name) for name in started}, episodes.progress
        )
    )
    assert [trajectory.id for trajectory in found] == ids(requests)
    for group in range(groups):
        of_group = [name for name in started if name.prompt.row == group]
        good = sorted((seconds[name], name) for name in of_group if name not in fails)
        own = [t for t in found if t.id.prompt.row == group]
        taken = [TrajectoryId(PromptId(0, group), int(t.actions[0].tokens[0])) for t in own]
        assert len(set(taken)) == samples
        assert sum(name in fails for name in taken) == max(0, samples - len(good)), (
            "failed samples fill the missing places"
        )
        last = good[samples - 1][0] if len(good) >= samples else 9
        assert all(seconds[name] <= last for name in taken)
        kept = {t.id for t in own if t.id.repetition == t.actions[0].tokens[0]}
        assert kept == {name for name in taken if name.repetition < samples}, (
            "a requested sample keeps its name"
        )
        dropped = [name for name in of_group if name in episodes.cancelled]
        told = [t.metrics for t in own if "dropped" in t.metrics]
        assert len(dropped) <= sum(int(each["dropped"]) for each in told) <= spares, (
            "some may end at the same time"
        )
        assert all(each["dropped_tokens"] == last for each in told)


def test_a_copy_of_a_sample_has_what_the_sample_has() -> None:
    more = with_extra_samples(requests_of(2, 2), 1)
    assert [str(name) for name in ids(more)] == [
        f"e0-i{g}-r{r}" for g in range(2) for r in range(3)
    ]
    assert [request.extras["group"] for request in more] == [0, 0, 0, 1, 1, 1]


def test_an_error_is_raised_and_nothing_is_left_running() -> None:
    async def fails() -> Trajectory:
        await asyncio.sleep(2)
        raise ValueError("broken")

    async def check() -> None:
        requests = requests_of(1, 2)
        names = ids(with_extra_samples(requests, 1))
        episodes = Episodes(dict.fromkeys(names, 5), set())
        playing = {
            names[0]: episodes.play(names[0]),
            names[1]: fails(),
            names[2]: episodes.play(names[2]),
        }
        with pytest.raises(ValueError, match="broken"):
            await first_complete(ids(requests), playing, episodes.progress)
        assert sorted(episodes.cancelled) == [names[0], names[2]]

    run_virtual(check())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("generator.agent_program", "a.py:f"),
        ("generator.is_num_return_sequences_expand", False),
        ("trainer.algorithm.dynamic_sampling.early_end", True),
    ],
)
def test_what_cannot_take_the_first_is_refused_by_its_key(key: str, value: object) -> None:
    cfg = Config()
    cfg.trainer.policy.model.path = "model"
    cfg.generator.oversample_per_prompt = 2
    section, _, name = key.rpartition(".")
    group: object = cfg
    for part in section.split("."):
        group = getattr(group, part)
    setattr(group, name, value)
    assert any(
        "generator.oversample_per_prompt=2" in line and key in line for line in check_config(cfg)
    )


@pytest.mark.parametrize("plan", ["sync", "one_step_off", "streamed", "fully_async"])
async def test_every_plan_trains_whole_groups_of_the_size_asked_for(
    plan: str, tmp_path_factory
) -> None:
    from skyasync.trainer.plans import PLANS

    class Remembering(Memory, PLANS.find(plan)): ...  # type: ignore[misc]

    model = save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)
    cfg = config(model, steps=2, train_length=24)
    cfg.generator.oversample_per_prompt = 2
    run = LocalRun(Remembering, cfg)
    await run.train()
    groups = [group for step in run.trainer.trained for group in step]
    assert {len(group.trajectories) for group in groups} <= {4}
    assert sum(len(batch.loss_mask) for batch in run.dispatch.batches) == 2 * 4 * 4
    rows = run.tracker.rows
    assert rows[1]["env/dropped"] == 2 and 0 <= rows[1]["env/dropped_tokens"] <= 24
