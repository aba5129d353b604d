"""A judge on a server: real requests on the loopback interface, good and bad."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import Any

import pytest

from skyasync.config.schema.judges import JudgeConfig
from skyasync.errors import UserError
from skyasync.rewards import llm_judge
from skyasync.rewards.llm_judge import ILLEGIBLE, ChatServer, LLMJudge, key_of
from tests.rewards.openai_server import Server, serving

HERE = "tests.rewards.functions"
PROMPT = "Q: {question} T: {ground_truth} R: {response}"


def known(response: str = "4", **row: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "2 + 2?"}]
    return {"prompt": "2 + 2?", "messages": messages, "response": response, "label": "4", **row}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_judge, "LONGEST_PAUSE_S", 0.01)


@asynccontextmanager
async def judging(*replies: Any, key: str = "", **settings: Any) -> Any:
    async with serving(*replies) as server:
        config = JudgeConfig(
            base_url=server.url, model="m", **{"prompt": PROMPT, "retries": 3, **settings}
        )
        judge = LLMJudge("j", config, ChatServer("j", config, key), remembers=config.cache)
        try:
            yield judge, server
        finally:
            await judge.close()


async def test_a_question_holds_what_the_prompt_shows_and_the_request_what_is_set() -> None:
    settings: dict[str, Any] = {"system_prompt": "Be fair.", "temperature": 0.5, "max_tokens": 7}
    more = {"extra_body": {"max_tokens": None, "max_completion_tokens": 9}}
    async with judging("Yes.", key="sesame", **settings, **more) as (judge, server):
        assert (await judge.score(known("{label} is 4"))).reward == 1.0
    assert server.seen == [{
        "model": "m", "temperature": 0.5, "max_completion_tokens": 9,
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": "Q: 2 + 2? T: 4 R: {label} is 4"},
        ],
    }]  # fmt: skip
    assert server.keys == ["Bearer sesame"]


async def test_a_question_that_is_asked_or_was_answered_is_not_asked_again() -> None:
    async with judging("yes") as (judge, server):
        await asyncio.gather(*(judge.score(known("4")) for _ in range(5)))
        await judge.score(known("4"))
        await judge.score(known("5"))
    assert sorted(server.questions) == ["Q: 2 + 2? T: 4 R: 4", "Q: 2 + 2? T: 4 R: 5"]


async def test_without_a_cache_only_a_question_under_way_is_shared() -> None:
    async with judging("yes", cache=False) as (judge, server):
        await asyncio.gather(*(judge.score(known("4")) for _ in range(5)))
        await judge.score(known("4"))
    assert len(server.seen) == 2


async def test_a_caller_that_times_out_does_not_cancel_the_grade_of_others() -> None:
    async with judging("yes") as (judge, server):
        first, second = (asyncio.ensure_future(judge.score(known("4"))) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second).reward == 1.0
    assert len(server.seen) == 1


async def test_so_many_questions_at_once_and_no_more() -> None:
    async with judging("yes", max_concurrent=3) as (judge, server):
        await asyncio.gather(*(judge.score(known(str(n))) for n in range(12)))
    assert server.most_at_once == 3


NO_TEXT = b'{"choices": [{"message": {"content": [{"type": "text", "text": null}]}}]}'


@pytest.mark.parametrize(
    "fault",
    [500, 503, 429, b"<html>gateway</html>", b'{"choices": []}', b"[1]", b"[" * 100_000, NO_TEXT],
)
async def test_what_passes_is_tried_again(fault: Any) -> None:
    async with judging(fault, fault, "yes") as (judge, server):
        assert (await judge.score(known())).reward == 1.0
    assert len(server.seen) == 3


async def test_an_answer_that_does_not_come_is_asked_for_again() -> None:
    async with judging(None, "yes", timeout_s=0.1) as (judge, _):
        assert (await judge.score(known())).reward == 1.0


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        (
            500,
            r"judge j \(environment.judges.j\): http.*/chat/completions gave no answer in 4 tries; the last: ",
        ),
        (None, r"the last: no answer within 0.05 s \(environment.judges.j.timeout_s\)"),
        (b"garbage", "the last: this is not a chat completion: garbage"),
    ],
)
async def test_a_judge_that_is_gone_ends_the_run_in_one_line(fault: Any, line: str) -> None:
    async with judging(fault, timeout_s=0.05) as (judge, _):
        with pytest.raises(RuntimeError, match=line) as raised:
            await judge.score(known())
    assert "\n" not in str(raised.value)


async def test_a_reply_without_end_is_cut_off_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llm_judge, "MOST_BYTES", 10_000)
    async with judging(b"x" * 20_000, "yes") as (judge, server):
        assert (await judge.score(known())).reward == 1.0
    assert len(server.seen) == 2
    async with judging(b"x" * 20_000, retries=0) as (judge, _):
        with pytest.raises(RuntimeError, match="the last: its answer has more than 10,000 bytes"):
            await judge.score(known())


async def test_a_question_that_fails_alone_is_counted_and_ends_nothing() -> None:
    def reply(body: Any) -> Any:
        return 500 if "bad" in body["messages"][0]["content"] else "yes"

    async with judging(reply, retries=1) as (judge, _):
        bad, *good = await asyncio.gather(*(judge.score(known(r)) for r in ("bad", "a", "b")))
    assert bad.no_reward and bad.reward == 0.0
    assert [score.reward for score in good] == [1.0, 1.0]


async def test_a_question_that_is_refused_is_counted_at_once() -> None:
    async with judging(400, "yes") as (judge, server):
        assert (await judge.score(known("long"))).no_reward
        assert (await judge.score(known("long"))).reward == 1.0  # a missing grade is not cached
    assert len(server.seen) == 2


@pytest.mark.parametrize(
    ("status", "key"), [(401, "api_key_env"), (403, "api_key_env"), (404, "base_url, .*model")]
)
async def test_a_server_that_rejects_all_requests_ends_the_run_and_no_key_is_shown(
    status: int, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with judging(status, key="sk-very-secret") as (judge, server):
        with pytest.raises(
            UserError, match=rf"judge j: .* refuses \(environment.judges.j.{key}\): status"
        ) as raised:
            await judge.score(known())
    assert len(server.seen) == 1
    assert "***" in str(raised.value) and "sk-very-secret" not in f"{raised.value}{caplog.text}"


async def test_prose_is_no_grade_and_only_prose_ends_the_run() -> None:
    async with judging("I like it.") as (judge, _):
        scores = [await judge.score(known(str(n))) for n in range(ILLEGIBLE - 1)]
        assert all(score.no_reward and score.reward == 0.0 for score in scores)
        with pytest.raises(
            UserError, match=r"parser=yes_no finds no grade in any of its first 32.*'I like it.'"
        ):
            await judge.score(known("one more"))


async def test_prose_now_and_then_is_counted() -> None:
    async with judging("yes", "Hm.") as (judge, _):
        found = [await judge.score(known(str(n))) for n in range(ILLEGIBLE + 8)]
    assert [score.no_reward for score in found] == [False] + [True] * (ILLEGIBLE + 7)


async def test_an_answer_that_was_all_thinking_is_explained() -> None:
    async with judging(lambda body: None if "never" in body else "") as (judge, _):
        with pytest.raises(UserError, match="it is empty: max_tokens=512 may end its thinking"):
            for number in range(ILLEGIBLE):
                await judge.score(known(str(number)))


async def test_scores_are_shifted_scaled_and_clipped() -> None:
    async with judging(
        "score: 7", "score: 99", parser="score", offset=1, scale=0.1, clip=[0, 1]
    ) as (judge, _):
        first, second = await judge.score(known("a")), await judge.score(known("b"))
    assert first.reward == pytest.approx(0.6) and first.metrics == {"raw": 7.0}
    assert second.reward == 1.0 and second.metrics == {"raw": 99.0}


async def test_a_parser_of_the_users_own_in_a_process_of_its_own() -> None:
    async with judging("good", "hang", "bad", parser=f"{HERE}:reads") as (judge, _):
        assert (await judge.score(known("a"))).metrics == {"length": 4.0, "raw": 1.0}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("skyasync.rewards.llm_judge.READ_S", 0.5)
            assert (await judge.score(known("b"))).no_reward
        assert (await judge.score(known("c"))).no_reward  # it returned None


async def test_a_pattern_of_the_users_own() -> None:
    async with judging("<v>3</v> or <v>4.5</v>", parser="<v>(.*?)</v>") as (judge, _):
        assert (await judge.score(known())).reward == 4.5


# ---------------------------------------------------------------- before the run


async def probe(server: Server, key: str = "", **settings: Any) -> None:
    config = JudgeConfig(base_url=settings.pop("base_url", server.url), model="m", **settings)
    await ChatServer("j", config, key).probe()


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (401, r"refuses \(environment.judges.j.api_key_env\): status 401"),
        (404, r"refuses \(environment.judges.j.base_url, environment.judges.j.model\)"),
        (400, "environment.judges.j: .* refuses the question, status 400"),
        (500, "does not answer: status 500"),
        (b"<html>", "does not answer: this is not a chat completion: <html>"),
        (None, "does not answer: no answer within 0.1 s"),
    ],
)
async def test_what_would_refuse_every_question_is_told_at_once(reply: Any, line: str) -> None:
    async with serving(reply) as server:
        with pytest.raises(UserError, match=line):
            await probe(server, timeout_s=0.1)
    assert len(server.seen) == 1


@pytest.mark.parametrize("reply", ["1", "", 429, 503])
async def test_a_server_that_is_there_is_fit_to_begin_with(reply: Any) -> None:
    async with serving(reply) as server:
        await probe(server)


async def test_no_server_at_the_address() -> None:
    async with serving("1") as server:
        url = server.url
    with pytest.raises(
        UserError,
        match=r"environment.judges.j: http://127.0.0.1.* does not answer: .*refused|Connect",
    ):
        await probe(server, base_url=url)


def test_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = JudgeConfig(base_url="http://h/v1", model="m", api_key_env="A_JUDGES_KEY")
    monkeypatch.delenv("A_JUDGES_KEY", raising=False)
    with pytest.raises(
        UserError,
        match=r"judges\.j\.api_key_env=A_JUDGES_KEY: this environment variable is not set",
    ):
        key_of("j", config)
    monkeypatch.setenv("A_JUDGES_KEY", "sk-1\nsk-2")
    with pytest.raises(UserError, match="holds no key") as raised:
        key_of("j", config)
    assert "sk-1" not in str(raised.value)
    monkeypatch.setenv("A_JUDGES_KEY", " sk-1\n")
    assert key_of("j", config) == "sk-1"
