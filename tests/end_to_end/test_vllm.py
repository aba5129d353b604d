"""The other engine: vLLM with the same plan and a tied model, whose output layer its reload leaves out."""

from __future__ import annotations

import pytest

from tests.end_to_end import leftovers
from tests.end_to_end.runs import PARTS, Train, read_lines

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.usefixtures("engines_on_ray")]


@pytest.mark.matrix
def test_fully_async_with_vllm_loses_no_prompt_and_stamps_every_token(train: Train) -> None:
    """Responses of a fixed length, longer than a step takes, so that weights are updated under them."""
    run = train(
        "trainer.plan=fully_async", "trainer.max_staleness=2", "trainer.partial_rollout=recompute",
        "trainer.max_training_steps=6", "generator.backend=vllm", "generator.kv_cache_gb=0.2",
        "generator.max_num_seqs=128", "generator.sampling_params.max_generate_length=160",
        "generator.sampling_params.min_tokens=160", "generator.n_samples_per_prompt=2",
    )  # fmt: skip
    assert max(run.series("sync/logprob_gap")) <= 1e-4
    assert max(run.series("staleness/max")) <= 2
    trained = [prompt for _, prompts in run.prompts for prompt in prompts]
    assert len(set(trained)) == len(trained) == 6 * 8
    assert {prompt.split("-")[0] for prompt in trained} == {"e0", "e1", "e2"}, (
        "three epochs of two batches, whole"
    )
    rows = read_lines(run.folder / "samples.jsonl")
    assert all(row["versions"] == sorted(row["versions"]) for row in rows)
    assert all(
        row["step"] - 3 <= min(row["versions"]) <= max(row["versions"]) < row["step"]
        for row in rows
    )
    assert leftovers.none_soon(leftovers.of_the_cluster) == []


def test_one_step_off_with_vllm(train: Train) -> None:
    run = train(
        "trainer.plan=one_step_off", "trainer.max_training_steps=3",
        "generator.backend=vllm", "generator.kv_cache_gb=0.2", "generator.max_num_seqs=32",
        f"environment.env_class={PARTS}:Distinct",
    )  # fmt: skip
    assert max(run.series("sync/logprob_gap")) <= 1e-4
    first, *others = run.metrics
    assert 0 < first["gap/mean"] <= first["gap/max"] <= 1e-4, "of the step with staleness 0"
    assert not any("gap/mean" in row for row in others[1:])
    assert run.versions == [(1, {0}), (2, {0}), (3, {1})]
    assert all(norm > 0 for norm in run.series("policy/grad_norm"))
    assert leftovers.none_soon(leftovers.of_the_cluster) == []
