"""Experts that ranks with different rows divide: tokens are exchanged, and the gradient is one rank's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from skyasync.workers.policy import PolicyWorker
from tests.models.parallel.test_pipeline import difference, go_on, joined, of_one, settings, updates
from tests.models.test_shapes import WIDE
from tests.models.tiny_models import save_models
from tests.workers.processes import Ranks
from tests.workers.test_critic import EXPERTS

pytestmark = pytest.mark.slow

EIGHT = {**EXPERTS, "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 8}
MODELS = {
    "qwen3_moe": Qwen3MoeConfig(**WIDE, **EIGHT),
    "mixtral_tied": MixtralConfig(**WIDE, num_local_experts=4, tie_word_embeddings=True),
}
CASES = [
    ("mixtral_tied", 2, {"expert": 2, "recomputed": True}),
    pytest.param("qwen3_moe", 4, {"expert": 4}, marks=pytest.mark.matrix),
    pytest.param("qwen3_moe", 2, {"expert": 2}, marks=pytest.mark.matrix),
    pytest.param("qwen3_moe", 4, {"expert": 2, "recomputed": True}, marks=pytest.mark.matrix),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_models(MODELS, tmp_path_factory.mktemp("mixtures"))


@pytest.mark.parametrize(("name", "count", "sizes"), CASES, ids=str)
def test_divided_experts_have_one_ranks_gradient(
    models: dict[str, str],
    name: str,
    count: int,
    sizes: dict[str, Any],
    ranks: Callable[[int], Ranks],
) -> None:
    alone = of_one(models[name])
    ranks(count).close()
    ranks(count).set_up(PolicyWorker, settings(models[name], **sizes))
    answers = ranks(count).call(updates)
    for number, (_, logprobs, _, expected, metrics) in enumerate(alone):
        for of_rank in answers:
            rows, said, _, gradients, told = of_rank[number]
            assert abs(said - logprobs[rows, : said.shape[1]]).max() < 1e-5
            assert gradients.keys() == expected.keys()
            assert difference(gradients, expected) < 1e-6
            assert told == pytest.approx(metrics, rel=1e-5)


@pytest.mark.matrix
def test_checkpoints_and_weights_of_divided_experts_are_the_whole_models(
    models: dict[str, str], ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    before: dict[str, Any] = {}
    ways: list[tuple[int, dict[str, int]]] = [
        (2, {"expert": 2}),
        (1, {}),
        (4, {"expert": 2}),
        (2, {"tensor": 2}),
    ]
    for number, (count, sizes) in enumerate(ways):
        ranks(count).close()
        ranks(count).set_up(PolicyWorker, settings(models["qwen3_moe"], **sizes))
        found = ranks(count).call(
            go_on, str(tmp_path / str(number - 1)) if number else "", str(tmp_path / str(number))
        )
        loaded, after = (joined([each[i] for each in found]) for i in (0, 1))
        assert all((loaded[name] == value).all() for name, value in before.items()), (
            f"{sizes} loads other weights"
        )
        before = after
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"{number}_export")
        weights = dict(exported.named_parameters())
        assert found[0][2].keys() == weights.keys()
        assert all(
            (weights[name].detach().numpy() == weight).all() for name, weight in found[0][2].items()
        )
