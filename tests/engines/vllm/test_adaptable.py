"""What vLLM's sources say of adapters is what its classes say of themselves."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from skyasync.engines.vllm.adaptable import why_not

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("architecture", "able"),
    [("LlamaForCausalLM", True), ("MistralForCausalLM", True), ("Phi3ForCausalLM", True), ("GPT2LMHeadModel", False)],
)
def test_a_class_takes_adapters_if_it_or_one_that_it_comes_from_says_so(architecture: str, able: bool) -> None:
    assert (why_not({"architectures": [architecture]}, gpus=True) == "") is able


def test_what_vllm_does_not_list_is_left_to_it() -> None:
    assert why_not({"architectures": ["Mine"]}, gpus=False) == why_not({}, gpus=False) == ""


def test_experts_have_no_adapters_on_a_cpu_alone() -> None:
    shape = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4}
    assert "num_experts=4" in why_not(shape, gpus=False)
    assert why_not(shape, gpus=True) == why_not({**shape, "num_experts": 0}, gpus=False) == ""
