"""Agent programs in whole runs: real processes, endpoint, engine, updates and in-flight weight updates."""

from __future__ import annotations

import pytest

from examples.agents.model import build
from skyasync import BasePPOExp
from tests.end_to_end import leftovers
from tests.end_to_end.runs import PARTS, Train, read_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The example's model before its warm start."""
    return build(out=tmp_path_factory.mktemp("agent") / "model", steps=0, hidden=64)


@pytest.mark.matrix
def test_a_program_learns_through_the_endpoint(train: Train) -> None:
    run = train(
        "trainer.plan=one_step_off", "trainer.max_training_steps=14", "trainer.policy.optimizer_config.lr=5e-3",
        "trainer.train_batch_size=16", "generator.n_samples_per_prompt=8",
        f"generator.agent_program={PARTS}:sevens", 'environment.env_class=""', f"data.val_data={PARTS}:val_prompts",
        "trainer.eval_before_train=true", "generator.eval_n_samples_per_prompt=4",
        "generator.eval_sampling_params.temperature=null",
    )  # fmt: skip
    scores = [
        row["eval/score"] for row in read_lines(run.folder / "metrics.jsonl") if "eval/score" in row
    ]
    assert scores[0] < 0.2
    assert scores[-1] > 0.4
    assert run.series("env/agent_calls") == [1.0] * 14
    assert run.series("staleness/max") == [0.0] + [1.0] * 13


def test_the_turns_of_a_branching_program_are_trained_as_a_tree(train: Train) -> None:
    run = train(
        "trainer.max_training_steps=2", "trainer.train_batch_size=2", "generator.n_samples_per_prompt=2",
        f"generator.agent_program={PARTS}:branching", 'environment.env_class=""', "generator.max_model_len=160",
    )  # fmt: skip
    assert run.series("env/agent_calls") == [9.0] * 2
    assert run.series("env/agent_sequences") == [7.0] * 2, (
        "a trunk of three calls, and two branches of each"
    )
    for rows, computed, trained in zip(
        *(run.series(f"policy/{name}") for name in ("row_tokens", "computed_tokens", "tokens")),
        strict=True,
    ):
        assert trained < computed < 0.6 * rows
    assert all(gap < 1e-4 for gap in run.series("sync/logprob_gap"))


class PortIsClosed(BasePPOExp):
    """A run that fails if its endpoint still listens at its end."""

    async def close(self) -> None:
        endpoint = self.components.generator._endpoint
        was_open = endpoint.port > 0
        await super().close()
        assert was_open and endpoint.port == 0


@pytest.mark.recipe
@pytest.mark.parametrize("program", ["calculator", "calculator_sdk"])
def test_the_examples_programs_run_while_weights_are_swapped(
    program: str, train: Train, untrained: str
) -> None:
    """OpenAI's client and its Agents SDK; programs are in the middle of a call when the policy changes."""
    run = train(
        f"trainer.policy.model.path={untrained}", f"generator.agent_program=examples.agents.{program}:run_agent",
        "data.train_data=examples.agents.tasks:train_prompts", "generator.max_model_len=96",
        "generator.eval_sampling_params.max_generate_length=8",
        "trainer.plan=fully_async", "trainer.max_staleness=2", "trainer.max_training_steps=3",
        "environment.on_error=mask", 'environment.env_class=""', "generator.episode_timeout_s=60",
        experiment=PortIsClosed,
    )  # fmt: skip
    assert len(run.metrics) == 3
    assert run.series("env/given_up") == [0.0] * 3
    assert max(run.series("staleness/max")) <= 2.0
    assert all(gap < 1e-4 for gap in run.series("sync/logprob_gap"))
    assert leftovers.none_soon(leftovers.of_the_cluster) == []
