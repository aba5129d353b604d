"""Samplers: pure functions, resumed to the same prompts; with real runs of every plan."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyasync.config import load_config
from skyasync.config.schema import Config
from skyasync.data.prompts import PromptStream
from skyasync.data.samplers import PassRateSampler, PromptSampler, SampledStream
from skyasync.errors import UserError
from skyasync.observability.jsonl import read_rows
from skyasync.rollout.types import Prompt, PromptId
from skyasync.trainer.extensions.prompt_ledger import audit
from skyasync.trainer.plans import PLANS
from tests.data.test_stream import Rows
from tests.inference.tiny_llama import save_tiny_llama
from tests.trainer.plans.local_run import LocalRun
from tests.trainer.plans.local_run import config as run_config
from tests.trainer.plans.replayed import recorded, replayed, same, weights

ROWS = 20


def config(**data: Any) -> Config:
    cfg = Config()
    cfg.data.sampler = "pass_rate"
    for name, value in data.items():
        setattr(cfg.data, name, value)
    return cfg


def prompt(row: int, epoch: int = 0, **extras: Any) -> Prompt:
    return Prompt(PromptId(epoch, row), [{"role": "user", "content": f"{row}"}], "", extras)


def stream(cfg: Config | None = None, total: int = 10_000) -> SampledStream:
    rows = [prompt(row, level=row % 2) for row in range(ROWS)]
    return SampledStream(PromptStream(rows, 4, 7, total), PassRateSampler(cfg or config()), 4, 7)


def test_the_chance_is_highest_at_a_pass_rate_of_a_half_and_never_below_the_floor() -> None:
    sampler = PassRateSampler(config())
    assert sampler.chance(prompt(0)) == 1.0
    for row, rewards in enumerate([[1.0] * 16, [0.0] * 16, [1.0, 0.0] * 8, [1.0] * 4 + [0.0] * 12]):
        for _ in range(8):
            sampler.observe(prompt(row), rewards)
    right, wrong, half, quarter = (sampler.chance(prompt(row)) for row in range(4))
    assert right == wrong == 0.05 and half > 0.95 and 0.6 < quarter < half


def test_a_look_at_the_data_before_the_run_takes_no_prompt() -> None:
    looked_at = stream()
    assert {looked_at.preview(position).id.row for position in range(ROWS)} == set(range(ROWS))
    assert looked_at.offered == 0 and looked_at.state_dict() == stream().state_dict()


def test_a_pool_judges_prompts_that_have_not_been_sampled() -> None:
    sampler = PassRateSampler(config(sampler_pool_key="level"))
    for row in range(30):
        sampler.observe(prompt(row, level="easy"), [1.0] * 8)
    assert (
        sampler.chance(prompt(99, level="easy")) < 0.2
        and sampler.chance(prompt(99, level="hard")) == 1.0
    )
    assert PassRateSampler(config()).pass_rate(prompt(0)) == 0.5


def test_a_sample_counts_as_right_from_the_passing_reward_on() -> None:
    sampler = PassRateSampler(config(sampler_passing=0.5))
    sampler.observe(prompt(0), [0.5, 0.4])
    assert sampler.pass_rate(prompt(0)) == 0.5


RESULTS = st.lists(
    st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=4), min_size=5, max_size=30
)


@settings(max_examples=50, deadline=None)
@given(RESULTS, st.data())
def test_a_resumed_stream_gives_the_same_prompts_each_once(
    results: list[list[float]], data: st.DataObject
) -> None:
    whole = stream()
    stop = data.draw(st.integers(0, len(results) - 1))
    resumed, taken, again = stream(), [], []
    for position, rewards in enumerate(results):
        if position == stop:
            whole.prompt(
                position + data.draw(st.integers(0, 8))
            )  # prompts that have been admitted early
            resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        taken.append(whole.prompt(position))
        whole.observe([(taken[-1], rewards)], position + 1)
        if position >= stop:
            again.append(resumed.prompt(position))
            resumed.observe([(again[-1], rewards)], position + 1)
    assert again == taken[stop:]
    assert len({each.id for each in taken}) == len(taken)
    assert all(whole.of_identity(each.id) == each for each in taken)


def test_prompts_that_are_always_right_or_wrong_are_passed_over_and_tried_again() -> None:
    sampled, counts = stream(), Counter[int]()
    for position in range(1000):
        one = sampled.prompt(position)
        counts[one.id.row] += position >= 200
        learnable = one.id.row < 5
        sampled.observe(
            [(one, [1.0, 0.0] if learnable else [float(one.id.row % 2)] * 8)], position + 1
        )
    assert sum(counts[row] for row in range(5)) > 0.7 * 800
    assert all(counts[row] > 0 for row in range(ROWS))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_llama(tmp_path_factory.mktemp("model"), tied=False)


def of_run(model: str, steps: int = 4, **trainer: Any) -> Config:
    cfg = run_config(model, steps=steps, eval_interval=0, allow_uncorrected=True, **trainer)
    cfg.data.sampler, cfg.data.sampler_passing = "pass_rate", 0.6
    return cfg


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["sync", "one_step_off", "streamed", "fully_async"])
async def test_every_plan_trains_what_was_taken_each_once(
    plan: str, model: str, tmp_path: Path
) -> None:
    run = await recorded(PLANS.find(plan), of_run(model), tmp_path / "run")
    ends = audit(read_rows(tmp_path / "run" / "ledger.jsonl"))
    assert len(ends) == 16 and all(len(each) == 1 for each in ends.values())
    assert run.trainer.context.prompts.offered > 16  # type: ignore[attr-defined]
    if plan == "fully_async":
        again = await replayed(PLANS.find(plan), of_run(model), tmp_path / "run")
        assert same(weights(run), weights(again))


@pytest.mark.slow
async def test_a_run_resumes_to_the_same_weights(model: str, tmp_path: Path) -> None:
    cfg = of_run(model, ckpt_interval=2, ckpt_path=str(tmp_path / "whole"))
    whole = await LocalRun(PLANS.find("sync"), deepcopy(cfg)).train()
    cfg.trainer.resume_mode, cfg.trainer.ckpt_path = (
        str(tmp_path / "whole" / "step_000002"),
        str(tmp_path / "again"),
    )
    again = await LocalRun(PLANS.find("sync"), deepcopy(cfg)).train()
    assert same(weights(whole), weights(again))
    cfg.data.sampler = "uniform"
    with pytest.raises(
        UserError, match=r"data.sampler=uniform, but checkpoint .* was made with pass_rate"
    ):
        await LocalRun(PLANS.find("sync"), cfg).train()


def test_streamed_data_goes_on_at_its_mark() -> None:
    def sampled() -> SampledStream:
        return SampledStream(Rows(30).stream(buffer=8), PassRateSampler(config()), 3, 7)

    whole, again, taken = sampled(), sampled(), []
    for position in range(50):
        if position == 30:
            again.seek(whole.mark(position))
            again.load_state_dict(json.loads(json.dumps(whole.state_dict())))
        taken.append(whole.prompt(position))
        whole.observe([(taken[-1], [float(taken[-1].id.row % 2)] * 4)], position + 1)
        if position >= 30:
            assert again.prompt(position) == taken[-1]
            again.observe([(taken[-1], [float(taken[-1].id.row % 2)] * 4)], position + 1)
    assert len({each.id for each in taken}) == 50 and whole.offered > 60


OWN = """
from skyasync.data.samplers import PromptSampler


class Even(PromptSampler):
    seen = 0

    def chance(self, prompt):
        return float(prompt.id.row % 2 == 0)

    def observe(self, prompt, rewards):
        self.seen += 1

    def state_dict(self):
        return {"seen": self.seen}
"""


def test_a_sampler_of_ones_own_is_a_class_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    cfg = load_config(
        [f"data.sampler={file}:Even", "trainer.max_training_steps=3", "trainer.train_batch_size=4"]
    )
    sampled = PromptStream.of_run(cfg, [prompt(row) for row in range(ROWS)])
    taken = [sampled.prompt(position).id for position in range(sampled.total)]
    assert len(set(taken)) == 12 and all(identity.row % 2 == 0 for identity in taken)
    sampled.observe([(prompt(0), [1.0]), (prompt(1), [])], 4)
    assert sampled.state_dict()["sampler"] == {"seen": 1}


@pytest.mark.parametrize(
    "setting, message",
    [
        ("environment.domains.a.proportion=0.5", "data.sampler=pass_rate changes shares"),
    ],
)
def test_what_does_not_go_together_is_refused(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(["data.sampler=pass_rate", setting])


@pytest.mark.parametrize("chance", [float("nan"), None, "often"])
def test_a_chance_that_is_no_number_is_an_error_that_names_the_sampler(chance: Any) -> None:
    class Own(PromptSampler):
        def chance(self, prompt: Prompt) -> float:
            return chance  # type: ignore[no-any-return]

    sampled = SampledStream(PromptStream([prompt(0)], 1, 7, 10), Own(Config()), 1, 7)
    with pytest.raises(UserError, match=rf"^Own\.chance returned {chance!r} for e0-i0: no number$"):
        sampled.prompt(0)


def test_a_state_that_a_checkpoint_cannot_keep_is_the_samplers() -> None:
    class Own(PromptSampler):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

    sampled = SampledStream(PromptStream([prompt(0)], 1, 7, 10), Own(Config()), 1, 7)
    with pytest.raises(
        UserError, match=r"^Own\.state_dict\(\) returns what a checkpoint cannot keep .*set"
    ):
        sampled.state_dict()
