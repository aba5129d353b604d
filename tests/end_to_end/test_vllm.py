"""The other engine: vLLM behind the same plan, with a tied model, whose output layer its reload leaves out."""

from __future__ import annotations

import pytest

from tests.end_to_end import leftovers
from tests.end_to_end.runs import Train

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


def test_one_step_off_with_vllm(train: Train) -> None:
    pytest.importorskip("vllm")
    run = train(
        "trainer.plan=one_step_off", "trainer.max_training_steps=3",
        "generator.backend=vllm", "generator.kv_cache_gb=0.2", "generator.max_num_seqs=32",
    )  # fmt: skip
    assert max(run.series("sync/logprob_gap")) <= 1e-4
    assert run.versions == [(1, {0}), (2, {0}), (3, {1})]
    assert all(norm > 0 for norm in run.series("policy/grad_norm"))
    assert leftovers.none_soon(leftovers.of_the_cluster) == []
