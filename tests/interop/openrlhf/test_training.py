"""Unchanged files that were written for OpenRLHF, each in one of its documented forms."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skyasync.errors import UserError
from tests.interop.harness import ROWS, train
from tests.interop.test_reward_signatures import Server

pytestmark = pytest.mark.slow

FILES = Path(__file__).parent / "files"
LABEL = "data.label_key=answer"
PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFc"
    "SJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def agent(name: str, *overrides: str, rows=ROWS):
    return train(f"generator.agent_func_path={FILES / name}", LABEL, *overrides, rows=rows)


@pytest.mark.parametrize("file", ["reward_dictionary", "reward_list", "reward_boxed"])
def test_a_reward_file(file: str) -> None:
    run = train(f"environment.reward_funcs=[{FILES / file}.py]", LABEL)
    assert run.learned
    assert run.metrics["reward/std"] > 0
    assert "openrlhf" not in sys.modules
    if file == "reward_dictionary":
        assert run.metrics["env/reward_func/score"] + run.metrics[
            "env/reward_func/digits"
        ] == pytest.approx(run.metrics["reward/mean"])


def test_reward_servers() -> None:
    server = Server({"rewards": [1.0], "scores": [0.5], "extra_logs": {"seconds": [2.0]}})
    run = train(f"environment.reward_funcs=['{server.url},{server.url}']", LABEL)
    assert run.metrics["reward/mean"] == 1.0
    assert run.metrics["env/remote_reward/seconds"] == 2.0
    assert len(server.asked) == 8
    asked = server.asked[0]
    assert asked["query"][0].startswith(asked["prompts"][0]) and asked["labels"][0].isdigit()


def test_the_current_agent_plays_several_turns_and_its_file_is_loaded_once() -> None:
    run = agent("agent_guess.py")
    assert run.learned
    assert run.metrics["env/tries"] == 2.0
    assert run.metrics["env/loads"] == 1.0
    assert all(
        text.startswith("<user>") and "<a>Think. " in text and " No. " in text for text in run.texts
    )
    assert "env/score" in run.metrics


def test_an_agent_without_reset_edits_how_it_is_sampled() -> None:
    run = agent("agent_sampling.py")
    assert run.learned
    for batch in run.batches:
        for row, mask in zip(batch.tokens, batch.loss_mask, strict=True):
            positions = mask.nonzero().squeeze(1).tolist()
            second = [p for p in positions if p > max(positions) - 2]
            assert len(row) and len(second) <= 2
    assert all("..." in text for text in run.texts)


def test_an_executor_that_passes_through() -> None:
    run = agent("agent_passes_through.py")
    assert run.learned
    assert run.metrics["env/steps"] == 2.0
    assert run.metrics["env/agent_calls"] == 2.0
    assert run.metrics["env/agent_sequences"] == 1.0
    assert all("Human: again" in text for text in run.texts)


def test_a_single_turn_executor_with_a_reward_file() -> None:
    run = agent("agent_single_turn.py")
    assert run.learned
    assert run.metrics["reward/mean"] >= 10.0
    assert run.metrics["response/length_max"] <= 4.0
    assert "env/cut" in run.metrics and "env/score" in run.metrics


def test_an_executor_with_a_loop_of_its_own_trains_what_it_names() -> None:
    run = agent("agent_best_of_two.py")
    assert run.learned
    assert run.metrics["env/drafts"] == 2.0
    assert run.metrics["env/agent_calls"] == 1.0
    assert run.metrics["response/length_mean"] == 6.0


def test_the_first_interface_has_separate_globals() -> None:
    run = agent("agent_function.py")
    assert run.learned
    assert run.metrics["env/steps"] == 2.0
    assert all(" again: " in text for text in run.texts)


def test_pictures_are_refused_in_words() -> None:
    with pytest.raises(Exception, match="images are not read here"):
        agent("agent_pictures.py")
    with pytest.raises(
        UserError, match=r"data row 0: .* reads only text: images need a vision-language model"
    ):
        agent("agent_guess.py", rows=[{**row, "images": [PIXEL]} for row in ROWS])
    with pytest.raises(
        Exception, match=r"data row 0: .* reads only text: images need a vision-language model"
    ):
        agent("agent_single_turn.py", rows=[{**row, "images": [PIXEL]} for row in ROWS])


def test_tokens_that_the_engine_did_not_write_are_refused() -> None:
    with pytest.raises(Exception, match="tokens that the engine did not generate"):
        agent("agent_invents.py")
