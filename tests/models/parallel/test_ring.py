"""Ring attention: one rank's gradient, columns from both ends, and the arguments of CUDA's kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig

from skyasync.errors import UserError
from skyasync.models.packing import plain_layout
from skyasync.models.parallel import context as ring
from skyasync.models.parallel.context import Context, check
from skyasync.models.token_model import training_config
from skyasync.workers.policy import PolicyWorker
from tests.models.parallel.test_parallel import of_one, parallel, step
from tests.models.test_shapes import distance
from tests.models.test_shapes import shapes as shapes
from tests.workers.processes import Ranks


@pytest.mark.parametrize(
    ("name", "count"),
    [("llama", 2), pytest.param("qwen3_moe", 4, marks=pytest.mark.matrix)],
    ids=str,
)
def test_a_ring_has_one_ranks_gradient(
    shapes: dict[str, str], name: str, count: int, ranks: Callable[[int], Ranks]
) -> None:
    logprobs, expected, metrics = of_one(shapes[name])
    cfg = parallel(shapes[name], context=count)
    cfg.trainer.parallel.context_kind, cfg.trainer.policy.gradient_checkpointing = (
        "ring",
        name == "llama",
    )
    ranks(count).set_up(PolicyWorker, cfg)
    for rows, said, found, told in ranks(count).call(step):
        torch.testing.assert_close(
            torch.from_numpy(said), logprobs[rows, : said.shape[1]], atol=2e-6, rtol=0
        )
        assert distance(torch.from_numpy(found), expected) < 1e-6
        assert told == pytest.approx(metrics, rel=1e-5)


def test_a_ring_has_no_windows(shapes: dict[str, str]) -> None:
    with pytest.raises(
        UserError, match=r"context_kind=ring has no sliding windows, which gemma2 has"
    ):
        check(training_config(shapes["gemma2_capped"]), 2, kind="ring")
    check(training_config(shapes["llama"]), 3, kind="ring")


@pytest.mark.parametrize("width", [2, 13, 24])
def test_ranks_have_columns_from_both_ends_and_attend_to_as_much(width: int) -> None:
    size, rows = 3, 2
    tokens = torch.arange(1, rows * width + 1).view(rows, width)
    layout = plain_layout(
        tokens, torch.ones_like(tokens, dtype=torch.bool), torch.ones_like(tokens).bool()
    )
    slices = [Context(cast(Any, None), rank, size, ring=True).slice(layout) for rank in range(size)]
    positions = torch.cat([own.positions for own in slices if own.positions is not None], 1)
    assert positions.shape == (rows, -(-width // 6) * 6)
    seen = {
        tuple(pair)
        for own in slices
        for pair in zip(own.cells.tolist(), own.targets.tolist(), strict=True)
    }
    assert seen == set(zip(layout.cells.tolist(), layout.targets.tolist(), strict=True))
    for own in slices:
        where = own.tokens.flatten()[own.predictors]
        torch.testing.assert_close(where + 1, own.targets)  # the token before each
    if width == 24:
        assert (
            len({int((own.positions + 1).sum()) for own in slices if own.positions is not None})
            == 1
        )


def test_cudas_flash_kernel_takes_what_the_rounds_give_it_and_its_shapes_fit() -> None:
    """By torch's fake tensors for the kernel, without numbers or a GPU."""
    with FakeTensorMode():
        query, key = (
            torch.empty(2, heads, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=False)
            for heads in (6, 2)
        )
        for states, keys, causal in (
            (query, key, True),
            (query, key[:, :, :8], False),
            (query[:, :, 8:], key, False),
        ):
            out, sums = ring._attend(states, keys, keys, is_causal=causal, scale=0.1)
            assert (out.shape, sums.shape, sums.dtype) == (
                states.shape,
                states.shape[:-1],
                torch.float32,
            )
            found = ring._attend_backward(
                query=states,
                key=keys,
                value=keys,
                out=out,
                logsumexp=sums,
                is_causal=causal,
                scale=0.1,
                grad_out=out,
            )
            assert [each.shape for each in found] == [states.shape, keys.shape, keys.shape]


@pytest.mark.parametrize(
    ("dtype", "size", "can", "line"),
    [
        (torch.float32, 64, (9, 0), "takes bfloat16, and the model is computed in float32"),
        (
            torch.bfloat16,
            512,
            (9, 0),
            "takes heads of up to 256 in steps of 8, and llama's have 512",
        ),
        (torch.bfloat16, 64, (7, 5), "this GPU can 7.5, and the kernel needs 8.0"),
        (torch.bfloat16, 64, (9, 0), ""),
    ],
    ids=str,
)
def test_what_cudas_kernel_cannot_is_refused_with_ulysses_named(
    dtype: torch.dtype, size: int, can: tuple[int, int], line: str
) -> None:
    config = LlamaConfig(head_dim=size)
    ring.check_ring_device(config, dtype, "cpu")
    with patch.object(torch.cuda, "is_available", lambda: True), patch.object(
        torch.cuda, "get_device_capability", lambda: can
    ):  # fmt: skip
        if not line:
            return ring.check_ring_device(config, dtype, "cuda")
        with pytest.raises(
            UserError, match=f"context_kind=ring: .*{line}: set .*context_kind=ulysses"
        ):
            ring.check_ring_device(config, dtype, "cuda")
    return None
