"""FlexAttention, by its own reference on a CPU, equals sdpa with dense masks, forward and backward.

Its public function rejects gradients on a CPU; only its reference has them, which the test calls instead.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.integrations.flex_attention as library
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import flex_attention
from transformers import AutoModelForCausalLM, LlamaConfig

from skyasync.models.attention import (
    RECOMPILATIONS,
    MaskSpec,
    allow_recompilations,
    attention_inputs,
    block_coverage,
    tree_mask,
    window_mask,
)
from skyasync.models.batch import TokenBatch
from skyasync.models.heads import load_causal_lm
from skyasync.models.packed_blocks import NO_END
from skyasync.models.packing import MicroBatches
from skyasync.models.parallel import context
from skyasync.models.token_model import TokenModel
from skyasync.workers.policy import PolicyWorker
from tests.workers.conftest import config_for, make_batch


@pytest.fixture
def by_flex(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Attention on every device; the recorded calls."""
    asked: list[Tensor] = []

    def reference(*args: Any, **options: Any) -> Any:
        asked.append(args[0])
        return flex_attention.flex_attention(
            *args, **{k: v for k, v in options.items() if k != "training"}
        )

    monkeypatch.setattr(library, "compile_friendly_flex_attention", reference)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)
    monkeypatch.setattr(TokenModel, "uses_flex", lambda model, device: True)
    return asked


ENDS = [
    [233] * 70 + [110] * 40 + [200] * 90 + [233] * 33 + [NO_END] * 17,
    [250] * 140 + [190] * 20 + [170] * 10 + [190] * 20 + [250] * 60,
]
"""A prompt with three responses and padding, and one with two, the first of which has a branch."""


@pytest.mark.parametrize("window", [0, 1, 50, 130])
@pytest.mark.parametrize("square", [16, 128])
def test_the_squares_that_are_looked_at_hold_all_that_is_seen(window: int, square: int) -> None:
    for given in (ENDS, [[30] * 30 + [150] * 120 + [157] * 7 + [250] * 93]):
        ends = torch.tensor(given, dtype=torch.int32)
        seen = tree_mask(ends)[:, 0]
        back = torch.arange(250)[:, None] - torch.arange(250)[None, :]
        seen &= (back < window) if window else True
        some, every = block_coverage(ends, window, square)
        missing = -250 % square
        cut = (
            torch.nn.functional.pad(seen, (0, missing, 0, missing))
            .unflatten(2, (-1, square))
            .unflatten(1, (-1, square))
        )
        assert not (cut.any(4).any(2) & ~some).any(), "visible tokens are attended to"
        assert not (every & ~cut.all(4).all(2)).any(), (
            "all tokens are attended to if all count as visible"
        )
        assert every.any() or square == 128 or window in (1,)


def test_packed_rows_and_prompts_in_common_give_the_same_gradient(
    untied_model: str, by_flex: list[Tensor]
) -> None:
    found = _learnt(untied_model)
    assert by_flex and all(states.shape[0] == 1 for states in by_flex), "packed, without rectangles"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenModel, "uses_flex", lambda model, device: False)
        count = len(by_flex)
        expected = _learnt(untied_model)
        assert len(by_flex) == count
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    assert float((found[1] - expected[1]).norm() / expected[1].norm()) < 1e-5


def test_shared_prompts_of_similar_rows_take_no_dense_mask(
    untied_model: str, by_flex: list[Tensor]
) -> None:
    """Rows of one width are not packed."""
    model = TokenModel(load_causal_lm(untied_model, torch.float32))
    tokens = torch.randint(1, 60, (2, 1, 30)).expand(2, 4, 30).reshape(8, 30).clone()
    tokens[:, 20:] = torch.randint(1, 60, (8, 10))
    mask = torch.ones(8, 30, dtype=torch.bool)
    batch = TokenBatch(
        tokens, mask, mask & (torch.arange(30) >= 20), torch.arange(2).repeat_interleave(4)
    )
    (micro,) = MicroBatches(
        batch, max_tokens=1000, share_prefixes=True, hidden_size=64, packs=False
    )
    assert micro.layout.visible_until is not None and not micro.layout.blocks
    found = model(micro.layout)["logprobs"]
    assert by_flex and all(states.shape[0] == 2 for states in by_flex)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenModel, "uses_flex", lambda model, device: False)
        torch.testing.assert_close(found, model(micro.layout)["logprobs"], atol=1e-5, rtol=0)


def _learnt(path: str, *, gradient_checkpointing: str = "auto") -> tuple[Tensor, Tensor]:
    """Groups whose prompt is computed once, and other rows; there are fewer KV heads than heads."""
    cfg = config_for(path)
    cfg.trainer.micro_batch_tokens = 512
    cfg.trainer.policy.gradient_checkpointing = gradient_checkpointing
    worker = PolicyWorker(cfg, threads=1)
    worker.setup()
    batch = make_batch(groups=4, longest_response=30)
    batch.group_ids = torch.where(
        batch.group_ids > 1, torch.arange(len(batch)) + 9, batch.group_ids
    )
    said = worker.logprobs(batch)
    worker.forward_backward(batch)
    return said, torch.cat(
        [p.grad.flatten() for p in worker.backend.model.parameters() if p.grad is not None]
    )


class _Heads(torch.nn.Module):
    is_causal, num_key_value_groups = True, 2


@pytest.mark.parametrize("ends", [None, ENDS])
@pytest.mark.parametrize("window", [None, 60])
def test_slices_attend_over_windows_and_prompts_in_common_alike(
    by_flex: list[Tensor], ends: list[list[int]] | None, window: int | None
) -> None:
    group = context.Context.of(_alone())
    module = _Heads()
    drawn = torch.Generator().manual_seed(0)
    states = [
        torch.randn(2, heads, 250, 8, generator=drawn, requires_grad=True) for heads in (4, 2, 2)
    ]
    seen = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    results = []
    try:
        for flex in (True, False):
            given = attention_inputs(seen, (), torch.device("cpu"), flexible=flex, context=group)
            found, _ = context.attention(
                module, *states, **given, sliding_window=window, scaling=8**-0.5
            )
            weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
            read = weights if seen is None else weights * (seen != NO_END)[:, :, None, None]
            results.append([found.detach(), *torch.autograd.grad((found * read).sum(), states)])
    finally:
        dist.destroy_process_group()
    assert bool(by_flex) is (seen is not None or window is not None)
    for flexed, dense in zip(*results, strict=True):
        torch.testing.assert_close(flexed, dense, atol=1e-5, rtol=0)


def _alone() -> Any:
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def test_a_mask_has_the_squares_that_are_block_coverage() -> None:
    ends = torch.tensor(ENDS, dtype=torch.int32)
    mask = MaskSpec(ends).mask(60)
    some, _ = block_coverage(ends, 60)
    assert torch.equal(mask.to_dense()[:, 0].bool(), some) and mask.seq_lengths == (250, 250)


def test_a_window_over_128k_tokens_takes_no_mask_of_its_square() -> None:
    mask = window_mask(131072, 4096, torch.device("cpu"))
    assert mask.kv_indices.numel() == 1024**2
    assert int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()) < 34 * 1024


@pytest.mark.matrix
@pytest.mark.slow
def test_all_shapes_of_rows_and_windows_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's tracer alone, which counts compilations."""
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *states: None)
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(flex_attention.flex_attention, backend=counter)
    with (
        torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False),
        torch.no_grad(),
    ):
        allow_recompilations()
        for length in (257, 300, 512, 90, 60, 128):
            for count in (1, 2, 4):
                ends = (
                    torch.arange(length).expand(count, -1).div(50, rounding_mode="floor").int() + 1
                ) * 50
                spec, states = MaskSpec(ends), torch.randn(count, 2, length, 16)
                for window in (0, 64):
                    compiled(states, states, states, block_mask=spec.mask(window))
    torch.compiler.reset()
    assert 8 < counter.frame_count < RECOMPILATIONS / 2


@pytest.mark.slow
def test_it_is_compiled_and_learns_the_same_with_selective_checkpointing(
    untied_model: str, by_flex: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncompiled it would allocate the whole matrix of attention scores."""
    expected = _learnt(untied_model)
    compiled_graphs: list[object] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled_graphs.append(graph)
        return aot_eager(graph, inputs)

    torch.compiler.reset()
    compiled = torch.compile(flex_attention.flex_attention, backend=backend)
    monkeypatch.setattr(
        library,
        "compile_friendly_flex_attention",
        lambda *args, **options: compiled(
            *args, **{k: v for k, v in options.items() if k != "training"}
        ),
    )
    found = _learnt(untied_model, gradient_checkpointing="selective")
    torch.compiler.reset()
    assert compiled_graphs
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=0)
    assert float((found[1] - expected[1]).norm() / expected[1].norm()) < 1e-5


def test_a_cpu_and_heads_too_small_for_the_kernel_keep_sdpa() -> None:
    """The kernel of FlexAttention raises for heads of fewer than 16 numbers."""
    gpu = torch.device("cuda")

    def model(head_dim: int) -> TokenModel:
        config = LlamaConfig(
            vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
            head_dim=head_dim,
        )  # fmt: skip
        return TokenModel(AutoModelForCausalLM.from_config(config))

    one, small, dense = model(16), model(8), model(16)
    assert not one.uses_flex(torch.device("cpu")) and one.uses_flex(gpu)
    assert not small.uses_flex(gpu)
    dense.model.set_attn_implementation("sdpa")
    assert not dense.uses_flex(gpu), "attention without block masks gets dense masks"
