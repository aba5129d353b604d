"""Judges in addition to an episode's other rewards: on a server, and by the run's own engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from skyasync import load_config
from skyasync.envs.pool import local_pool
from skyasync.errors import UserError
from skyasync.inference.client import InferenceClient
from skyasync.rewards import llm_judge
from skyasync.rewards.settings import env_settings
from skyasync.rollout.generator import EpisodeGenerator, Judges
from tests.rewards.openai_server import serving
from tests.rollout.episodes import ScriptedEngine, prompt, requests, tokenizer

ASKED = "judges.self.prompt='Judge this: {response}'"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(llm_judge, "LONGEST_PAUSE_S", 0.01)
    yield


def reply(tokens: list[int]) -> str:
    """The policy answers 7, and as a judge it answers 3."""
    return "score: 3" if "Judge this" in tokenizer().decode(tokens) else "7"


def playing(*overrides: str, engine: Any = None) -> tuple[EpisodeGenerator, Any]:
    cfg = load_config(
        ["trainer.policy.model.path=a/b", *(f"environment.{each}" for each in overrides)]
    )
    engine = engine or ScriptedEngine(reply)
    client = InferenceClient([engine])
    judges = Judges.of(cfg, {}, client, tokenizer(), 256)
    pool = local_pool(env_settings(cfg.environment))
    return EpisodeGenerator(client, pool, tokenizer(), 256, judges=judges), engine


async def played(generator: EpisodeGenerator, *rows: dict[str, Any], samples: int = 1) -> Any:
    asked = requests(
        [prompt(number, "reward", **row) for number, row in enumerate(rows)], samples, max_tokens=64
    )
    try:
        return await generator.generate_trajectories(asked)
    finally:
        await generator.close()


async def test_the_runs_own_engine_judges_between_its_other_requests() -> None:
    judge = [
        "judges.self.engine=policy",
        "judges.self.parser=score",
        ASKED,
        "judges.self.temperature=0.5",
    ]
    weights = ["reward_funcs=[exact_match, judge:self]", "reward_weights=[1, 0.1]"]
    generator, engine = playing(*judge, *weights, "judges.self.max_tokens=9")
    (trajectory,) = await played(generator, {"label": "7", "domain": "sums"})
    assert trajectory.reward == pytest.approx(1.3)
    assert trajectory.metrics == {
        "exact_match": 1.0, "sums/exact_match": 1.0, "self": 3.0, "self/raw": 3.0, "self/no_reward": 0.0,
        "sums/self": 3.0, "sums/self/raw": 3.0, "sums/self/no_reward": 0.0,
    }  # fmt: skip
    assert [len(segment.tokens) for segment in trajectory.segments][
        1
    ] == 2  # its answer, and not the judge's
    (asked,) = [each for each in engine.requests if each.request_id.startswith("judge-self")]
    assert (asked.sampling.temperature, asked.sampling.max_tokens) == (0.5, 9)


async def test_identical_responses_share_one_request_while_it_runs_and_not_later() -> None:
    generator, engine = playing("judges.self.engine=policy", "judges.self.parser=score", ASKED,
                                "reward_funcs=[judge:self]")  # fmt: skip
    rows = [{"label": "7"}]
    first = await generator.generate_trajectories(
        requests([prompt(0, "reward", **rows[0])], 4, max_tokens=64)
    )
    again = await played(generator, *rows, samples=4)
    assert [t.reward for t in [*first, *again]] == [3.0] * 8
    assert sum(each.request_id.startswith("judge-") for each in engine.requests) == 2


async def test_each_domain_has_its_judges_and_a_row_may_name_one() -> None:
    async with serving("yes") as server:
        generator, _ = playing(
            f"judges.far.base_url={server.url}", "judges.far.model=m", "judges.self.engine=policy",
            "judges.self.parser=score", ASKED, "domains.chat.reward_funcs=[judge:far]", "domains.chat.scale=5",
            "reward_funcs=[exact_match]",
        )  # fmt: skip
        rows = [{"label": "7", "domain": "chat"}, {"label": "8"}, {"reward_funcs": ["judge:self", "judge:far"],
                                                                   "label": "7"}]  # fmt: skip
        rewards = [t.reward for t in await played(generator, *rows)]
    assert rewards == [5.0, 0.0, 4.0]


async def test_an_episode_is_graded_while_others_are_generated() -> None:
    """The first grade comes before the engine has answered the second request, which waits for it."""
    graded = asyncio.Event()

    def grade(body: Any) -> str:
        graded.set()
        return "yes"

    class Slow(ScriptedEngine):
        async def generate(self, requests: Any) -> Any:
            for each in requests:
                if "question 1" in tokenizer().decode(each.prompt_token_ids):
                    await asyncio.wait_for(graded.wait(), 20)
                async for output in super().generate([each]):
                    yield output

    async with serving(grade) as server:
        judge = [
            f"judges.far.base_url={server.url}",
            "judges.far.model=m",
            "reward_funcs=[judge:far]",
        ]
        generator, _ = playing(*judge, engine=Slow(reply))
        assert [t.reward for t in await played(generator, {"label": "7"}, {"label": "7"})] == [
            1.0,
            1.0,
        ]


async def test_a_server_that_is_gone_is_the_runs_error_and_names_the_episode() -> None:
    async with serving(500) as server:
        judge = [f"judges.far.base_url={server.url}", "judges.far.model=m", "judges.far.retries=1"]
        generator, _ = playing(*judge, "reward_funcs=[judge:far]")
        with pytest.raises(RuntimeError, match=r"judge far .* gave no answer in 2 tries") as raised:
            await played(generator, {"label": "7"})
    assert raised.value.__notes__ == ["while playing the episode e0-i0-r0"]


@pytest.mark.parametrize("on_timeout", ["zero", "raise"])
async def test_a_response_without_a_grade_is_zero_and_counted_or_ends_the_run(
    on_timeout: str,
) -> None:
    async with serving("Well.") as server:
        judge = [
            f"judges.far.base_url={server.url}",
            "judges.far.model=m",
            f"reward_on_timeout={on_timeout}",
        ]
        generator, _ = playing(*judge, "reward_funcs=[judge:far, exact_match]")
        if on_timeout == "raise":
            with pytest.raises(
                TimeoutError, match=r"judge:far gave no grade; environment.reward_on_timeout=zero"
            ):
                await played(generator, {"label": "7"})
            return
        (trajectory,) = await played(generator, {"label": "7"})
    assert trajectory.reward == 1.0
    assert (trajectory.metrics["far"], trajectory.metrics["far/no_reward"]) == (0.0, 1.0)


async def test_a_judge_prompt_that_is_too_long_is_counted() -> None:
    generator, _ = playing("judges.self.engine=policy", "judges.self.parser=score", "reward_funcs=[judge:self]",
                           f"judges.self.prompt='{{response}} {'long ' * 300}'")  # fmt: skip
    (trajectory,) = await played(generator, {"label": "7"})
    assert trajectory.metrics["self/no_reward"] == 1.0


async def test_a_row_with_an_unknown_judge_is_rejected() -> None:
    generator, _ = playing("judges.self.engine=policy", "reward_funcs=[exact_match]")
    with pytest.raises(UserError, match="unknown judge 'slef': did you mean 'self'"):
        await played(generator, {"label": "7", "reward_funcs": ["judge:slef"]})


async def test_a_generator_that_was_given_no_judges_says_so() -> None:
    cfg = load_config(["trainer.policy.model.path=a/b", "environment.judges.self.engine=policy"])
    client = InferenceClient([ScriptedEngine(reply)])
    plays = EpisodeGenerator(client, local_pool(env_settings(cfg.environment)), tokenizer(), 256)
    with pytest.raises(
        UserError, match=r"name a judge, and there are none: set environment.judges.NAME"
    ):
        await played(plays, {"label": "7", "reward_funcs": ["judge:self"]})
