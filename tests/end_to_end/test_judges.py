"""A whole run with two judges, a server's and the run's own engine, in a mixture of domains and two evaluation sets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.tiny.tasks import prompts
from skyasync.errors import UserError
from tests.end_to_end.runs import Train
from tests.rewards.openai_server import Server, serving

pytestmark = pytest.mark.slow

KEY = "sk-of-a-judge-and-nobodys"


def odd_digits(body: dict[str, Any]) -> str:
    """The server rewards odd digits."""
    said = body["messages"][-1]["content"].rpartition("Response:")[2]
    return f"score: {sum(letter in '13579' for letter in said)}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """In a thread of its own: the run blocks this one."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), list[Server]()

    async def run(end: asyncio.Event) -> None:
        async with serving(odd_digits) as serves:
            found.append(serves)
            ready.set()
            await end.wait()

    end = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=[run(end)])
    thread.start()
    assert ready.wait(20)
    monkeypatch.setenv("A_JUDGES_KEY", KEY)
    yield found[0]
    loop.call_soon_threadsafe(end.set)
    thread.join()


def rows(folder: Path, name: str, domains: list[str]) -> str:
    """Half of the rows of each domain; one has instructions in addition."""
    made = [
        {"prompt": row["prompt"], "label": row.get("label", "7"), "domain": domains[number % len(domains)],
         "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]}
        for number, row in enumerate(prompts("train", count=16, seed=1))
    ]  # fmt: skip
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(folder / name)


def settings(server: Server, folder: Path) -> list[str]:
    return [
        "environment.env_class=reward", "environment.env_class_from_rows=false",
        f"environment.judges.far.base_url={server.url}", "environment.judges.far.model=m",
        "environment.judges.far.api_key_env=A_JUDGES_KEY", "environment.judges.far.parser=score",
        "environment.judges.far.scale=0.1", "environment.judges.far.clip=[0,1]",
        "environment.judges.far.prompt='Response:{response}'",
        "environment.judges.self.engine=policy", r"environment.judges.self.parser='\d'",
        "environment.judges.self.prompt='sort 3 1 {final_response}'", "environment.judges.self.max_tokens=4",
        "environment.domains.far.reward_funcs=[judge:far, instruction_following]",
        "environment.domains.self.reward_funcs=[judge:self]",
        f"data.train_data={rows(folder, 'train.jsonl', ['far', 'self'])}",
        f"data.val_sets.one={{data: {rows(folder, 'one.jsonl', ['far'])}, n_samples: 2}}",
        f"data.val_sets.two={rows(folder, 'two.jsonl', ['self'])}",
        "generator.eval_sampling_params.temperature=null", "trainer.max_prompt_length=64",
    ]  # fmt: skip


@pytest.mark.matrix
def test_judges_score_training_and_evaluation_and_no_key_is_written(
    train: Train, server: Server, tmp_path: Path
) -> None:
    plan = [
        "trainer.plan=fully_async",
        "trainer.max_training_steps=1",
        "trainer.train_batch_size=16",
    ]
    run = train(*settings(server, tmp_path), *plan)
    (last,) = run.metrics
    assert (
        last["env/far"] == pytest.approx(0.1 * last["env/far/raw"])
        and last["env/far/no_reward"] == 0.0
    )
    assert last["reward/mean/far"] == pytest.approx(
        last["env/far"] + last["env/instruction_following"]
    )
    assert last["reward/mean/self"] == pytest.approx(last["env/self"], abs=1e-6)
    assert last["reward/mixed_groups/far"] > 0 and 0.0 <= last["env/self/no_reward"] <= 1.0
    assert last["eval/one/score"] == pytest.approx(
        last["eval/one/env_far"] + last["eval/one/env_instruction_following"]
    )
    assert {
        "eval/one/pass@1",
        "eval/one/pass@2",
        "eval/two/pass@1",
        "eval/one/response_truncated",
    } <= last.keys()
    assert "eval/two/pass@2" not in last and "eval/pass@2" not in last
    assert set(server.keys) == {f"Bearer {KEY}"}
    written = [
        path
        for path in run.folder.rglob("*")
        if path.is_file() and KEY.encode() in path.read_bytes()
    ]
    assert written == []
    assert "A_JUDGES_KEY" in (run.folder / "config.yaml").read_text()


def test_a_judge_that_is_not_there_is_told_before_the_run_has_a_folder(
    train: Train, server: Server, tmp_path: Path
) -> None:
    wrong = [*settings(server, tmp_path), "environment.judges.far.base_url=http://127.0.0.1:9/v1"]
    with pytest.raises(
        UserError,
        match=r"environment.judges.far: http://127.0.0.1:9/v1/.* does not answer: Cannot conn",
    ):
        train(*wrong)
    assert not (tmp_path / "run").exists()
