"""The table of model families, which is read before transformers is imported, agrees with its classes."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from skyasync.models.parallel.pipeline import PARTS
from skyasync.preflight.model import _WITHOUT_STAGES, _WITHOUT_TENSOR_PLAN


@pytest.mark.parametrize("family", _WITHOUT_TENSOR_PLAN.split())
def test_a_family_that_cannot_be_split_has_no_plan(family: str) -> None:
    assert not CONFIG_MAPPING[family].base_model_tp_plan


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "mixtral"]
)
def test_a_family_that_can_be_split_is_not_refused(family: str) -> None:
    assert CONFIG_MAPPING[family].base_model_tp_plan and family not in _WITHOUT_TENSOR_PLAN.split()


@pytest.mark.parametrize("family", _WITHOUT_STAGES.split())
def test_a_family_that_cannot_be_cut_into_stages_has_no_plan(family: str) -> None:
    assert set(CONFIG_MAPPING[family].base_model_pp_plan or ()) != PARTS


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "mixtral"]
)
def test_a_family_that_can_be_cut_into_stages_is_not_refused(family: str) -> None:
    assert (
        set(CONFIG_MAPPING[family].base_model_pp_plan) == PARTS
        and family not in _WITHOUT_STAGES.split()
    )
