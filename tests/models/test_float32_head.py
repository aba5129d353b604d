"""Logits in float32 of a model in bfloat16: exact for its states and weights, in trainer and engines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from skyasync.config import load_config
from skyasync.errors import UserError
from skyasync.inference.settings import engine_config
from skyasync.models.float32_head import _AccumulatedInFloat32, use_float32_head
from skyasync.workers.policy import PolicyWorker
from tests.models.test_shapes import SHAPES, distance, gradient, ragged, settings
from tests.models.test_shapes import shapes as shapes

BFLOAT16 = ["trainer.policy.model.dtype=bfloat16", "trainer.policy.model.path=any"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.head = nn.Linear(16, 40, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.states = torch.randn(7, 16, generator=generator).bfloat16()

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def exact_logits(model: Model) -> Tensor:
    bias = model.head.bias
    assert bias is not None
    return model.states.double() @ model.head.weight.double().t() + bias.double()


def test_logits_are_exact_to_float32() -> None:
    model = Model()
    rounded = (model.head(model.states).double() - exact_logits(model)).abs().max()
    use_float32_head(model)  # type: ignore[arg-type]
    logits = model.head(model.states)
    assert logits.dtype == torch.float32
    assert (logits.double() - exact_logits(model)).abs().max() < 1e-5 < 1e-3 < rounded


def test_the_gradient_on_a_gpu_is_that_of_mixed_precision() -> None:
    """The formula of the backward pass; the forward pass needs a GPU."""
    model = Model()
    weight = model.head.weight.detach().requires_grad_()
    states = model.states.requires_grad_()
    gradient = torch.randn(7, 40, generator=torch.Generator().manual_seed(1))
    (states @ weight.t()).backward(gradient.bfloat16())
    context = SimpleNamespace(saved_tensors=(states.detach(), weight.detach()))
    found = _AccumulatedInFloat32.backward(context, gradient)  # type: ignore[arg-type]
    assert torch.equal(found[0], states.grad) and torch.equal(found[1], weight.grad)


@pytest.mark.parametrize("name", SHAPES)
def test_a_bfloat16_model_is_as_near_to_float32_as_before(
    shapes: dict[str, str], name: str
) -> None:
    """Log-probabilities, and not farther by the gradient."""

    def trained(dtype: str, head_dtype: str) -> tuple[Tensor, Tensor]:
        cfg = settings(shapes[name])
        cfg.trainer.policy.model.dtype = dtype
        cfg.trainer.policy.head_dtype = head_dtype
        worker = PolicyWorker(cfg, threads=1)
        worker.setup()
        logprobs = worker.logprobs(ragged())
        worker.forward_backward(ragged())
        return logprobs, gradient(worker)

    exact, exact_gradient = trained("float32", "model")
    as_model, gradient_as_model = trained("bfloat16", "model")
    in_float32, gradient_in_float32 = trained("bfloat16", "float32")
    # The layers' own rounding stays, and is the larger part of one model's distance from float32.
    assert distance(in_float32, exact) < 1.2 * distance(as_model, exact)
    assert distance(gradient_in_float32, exact_gradient) < 1.2 * distance(
        gradient_as_model, exact_gradient
    )
    assert not torch.equal(in_float32, as_model)
    same, same_gradient = trained("float32", "float32")
    assert torch.equal(same, exact) and torch.equal(same_gradient, exact_gradient)


@pytest.mark.parametrize(("dtype", "expected"), [("model", False), ("float32", True)])
def test_trainer_and_engines_follow_one_setting(dtype: str, expected: bool) -> None:
    cfg = load_config([*BFLOAT16, f"trainer.policy.head_dtype={dtype}"])
    assert engine_config(cfg, gpus=False).extra["float32_head"] is expected
    assert PolicyWorker(cfg).spec().float32_head is expected


def test_a_head_with_an_adapter_is_rejected() -> None:
    adapters = ["trainer.policy.lora.rank=8", "trainer.policy.lora.target_modules=[lm_head]"]
    with pytest.raises(UserError, match="head_dtype=float32 computes with the weights of lm_head"):
        load_config([*BFLOAT16, "trainer.policy.head_dtype=float32", *adapters])
