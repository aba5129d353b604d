"""The losses against their formulas, and rejected requests."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tinker", reason="the extra tinker is not installed")

from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output

from skyasync.errors import UserError
from skyasync.interop.tinker.losses import LOSSES, NOT_SUPPORTED, token_losses
from skyasync.interop.tinker.wire import loss_batch, loss_result
from skyasync.models.packing import sorted_rows

LIMITS = {"vocabulary": 50, "most_tokens": 16}
numbers = st.floats(-3, 3, width=32)


def encoded(data: list[types.Datum], name: str, config: dict[str, float] | None = None) -> bytes:
    given_input = types.ForwardBackwardInput(data=data, loss_fn=name, loss_fn_config=config)  # type: ignore[arg-type]
    request = types.ForwardBackwardRequest(
        forward_backward_input=given_input, model_id="s:train:0", seq_id=1
    )
    message: pb.ForwardBackwardRequest = forward_backward_request_to_proto(request)
    return message.SerializeToString()


def datum(tokens: list[int], **inputs: list[float]) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
    )


@st.composite
def rows(draw: st.DrawFn) -> list[dict[str, list[float]]]:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    names = ("current", "logprobs", "advantages", "weights")
    return [
        {name: draw(st.lists(numbers, min_size=n, max_size=n)) for name in names} for n in lengths
    ]


@given(rows(), st.sampled_from(sorted(LOSSES)), st.floats(0.5, 1), st.floats(1, 2), st.floats(0, 1))
def test_a_loss_is_the_sum_of_its_formula_over_the_tokens_of_each_datum(
    drawn: list[dict[str, list[float]]], name: str, low: float, high: float, beta: float
) -> None:
    settings = {key: {"clip_low_threshold": low, "clip_high_threshold": high, "beta": beta}[key]
                for key in LOSSES[name].settings}  # fmt: skip
    inputs = [
        {key: row[key] for key in row if key in LOSSES[name].required | LOSSES[name].optional}
        for row in drawn
    ]
    data = [
        datum(list(range(1, len(row["current"]) + 2)), **own)
        for row, own in zip(drawn, inputs, strict=True)
    ]
    batch = loss_batch(encoded(data, name, settings), **LIMITS)
    logprobs = torch.zeros(batch.tokens.shape)
    for number, row in enumerate(drawn):
        logprobs[number, 1 : len(row["current"]) + 1] = torch.tensor(row["current"])
    total = 0.0
    for row in drawn:
        p, q, a, w = (torch.tensor(row[key], dtype=torch.float64) for key in row)
        ratio = (p - q).exp()
        if name == "gspo":
            counted = (p - q)[a != 0]
            ratio = torch.ones_like(p) * (counted.mean().exp() if len(counted) else 1.0)
        clipped = ratio.clamp(low, high)
        total += {
            "cross_entropy": -p * w,
            "importance_sampling": -ratio * a,
            "ppo": -torch.minimum(ratio * a, clipped * a),
            "gspo": -torch.minimum(ratio * a, clipped * a),
            "cispo": -clipped * p * a,
            "dro": -(p * a - 0.5 * beta * (p - q) ** 2),
        }[name].sum().item()  # fmt: skip
    output = deserialize_forward_backward_output(loss_result(logprobs, batch))
    assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-4, abs=1e-3)
    assert [list(each["logprobs"].data) for each in output.loss_fn_outputs] == [
        pytest.approx(row["current"]) for row in drawn
    ]


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_gradient_of_a_token_is_that_of_its_loss(name: str) -> None:
    """For ratios of 1 every policy loss has the gradient of -advantage * log-probability."""
    own = (
        {"logprobs": [-1.0, -2.0], "advantages": [0.5, 0.5]}
        if name != "cross_entropy"
        else {"weights": [0.5, 0.5]}
    )
    batch = loss_batch(encoded([datum([1, 2, 3], **own)], name), **LIMITS)
    logprobs = torch.tensor([[0.0, -1.0, -2.0]], requires_grad=True)
    token_losses(logprobs, batch).where(batch.loss_mask, 0.0).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[0.0, pytest.approx(-0.5), pytest.approx(-0.5)]]


def sparse_target() -> types.Datum:
    sparse = types.TensorData(
        data=[2, 3],
        dtype="int64",
        shape=[2, 2],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[0, 0],
    )
    return types.Datum(
        model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": sparse}
    )


POLICY = {"logprobs": [-1.0], "advantages": [1.0]}


@pytest.mark.parametrize(
    ("data", "name", "config", "says"),
    [
        ([datum([1, 2])], "stable_reinforce", None, NOT_SUPPORTED["stable_reinforce"]),
        ([datum([1, 2])], "custom", None, NOT_SUPPORTED["custom"]),
        ([datum([1, 2])], "ppo", None, "datum 0: loss_fn_inputs lacks"),
        (
            [datum([1, 2]), datum([1, 50])],
            "cross_entropy",
            None,
            "datum 1: there is no token 50: the model has 50",
        ),
        ([datum([1, 2], weights=[1.0, 1.0])], "cross_entropy", None, "weights has the shape [2]"),
        ([datum([1, 2], weights=[float("nan")])], "cross_entropy", None, "weights has NaN"),
        (
            [datum([1, 2], **POLICY)],
            "cross_entropy",
            None,
            "cross_entropy reads target_tokens, weights",
        ),
        ([datum([1, 2], **POLICY)], "importance_sampling", {"beta": 1.0}, "no beta is read"),
        ([datum([1, 2], **POLICY)], "ppo", {"clip_low": 1.0}, "did you mean 'clip_low_threshold'"),
        (
            [datum([1] * 17)],
            "cross_entropy",
            None,
            "it has 17 tokens with the last target; the server takes 16",
        ),
        (
            [sparse_target()],
            "cross_entropy",
            None,
            "several targets per position are not supported",
        ),
    ],
)
def test_what_cannot_be_computed_is_rejected_with_its_reason(
    data: list[types.Datum], name: str, config: dict[str, float] | None, says: str
) -> None:
    with pytest.raises(UserError) as error:
        loss_batch(encoded(data, name, config), **LIMITS)
    assert says in str(error.value)


def test_rows_that_begin_alike_share_what_is_computed() -> None:
    batch = loss_batch(
        encoded([datum([1, 2, 3, 4]), datum([9, 2]), datum([1, 2, 3, 7])], "cross_entropy"),
        **LIMITS,
    )
    assert sorted_rows(batch).prefixes.tolist().count(3) == 1


def test_where_tokens_come_from_changes_no_loss() -> None:
    """The cookbook's recipes always send it; the only loss that reads it is rejected."""
    plain = datum([1, 2, 3], logprobs=[-1.0, -1.0], advantages=[1.0, 1.0])
    read, wrote = (
        types.PromptProvenanceSpan(sequence_id="s", offset=0, length=1),
        types.SampledProvenanceSpan(sequence_id="s", length=1),
    )
    told = plain.with_provenance(model_input=[read, wrote], loss_fn_inputs=[wrote, wrote])
    assert encoded([told], "ppo") != encoded([plain], "ppo")
    with_spans, without = (loss_batch(encoded([each], "ppo"), **LIMITS) for each in (told, plain))
    assert repr(with_spans) == repr(without)


def test_a_target_that_is_not_the_following_token_is_rejected() -> None:
    wrong = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 4, 4]},
    )
    with pytest.raises(
        UserError, match=r"datum 0: target_tokens\[1\] is not the token that follows"
    ):
        loss_batch(encoded([wrong], "cross_entropy"), **LIMITS)
