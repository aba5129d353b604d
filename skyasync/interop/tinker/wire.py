"""Messages of the protocol in protobuf: training requests, results of training and sampling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from skyasync.arrays import Floats
from skyasync.errors import UserError, unknown
from skyasync.inference.interface import GenerationOutput
from skyasync.interop.tinker.losses import LOSSES, NOT_SUPPORTED, LossBatch, token_losses

PROTOBUF = "application/x-protobuf"
_TOKEN_BYTES = 4  # int32
MOST_POSITIONS = 1 << 23
"""Tokens of a request's rows after padding to the longest. A position takes some 200 bytes while it
is computed, so this is about 1.7 GB."""
_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


def check_padding(message: pb.ForwardBackwardRequest) -> None:
    """Raises UserError for a request whose rows would take too much memory as one padded batch."""
    longest = 0
    for datum in message.data:
        size = sum(len(chunk.encoded_text.tokens) for chunk in datum.model_input)
        longest = max(longest, size // _TOKEN_BYTES + 1)
    rows = len(message.data)
    if rows * longest > MOST_POSITIONS:
        raise UserError(
            f"the request's {rows} rows, padded to the longest of {longest} tokens, have {rows * longest} positions; "
            f"{MOST_POSITIONS} are the most: send long rows in a request of their own"
        )


def loss_batch(body: bytes, *, vocabulary: int, most_tokens: int) -> LossBatch:
    """The rows of a request, each ``model_input`` with the last of ``target_tokens``.

    Args:
        vocabulary: the number of tokens of the model.
        most_tokens: the largest length of a row.

    Raises:
        UserError: for a request that no rank could compute; the error names the datum.
    """
    message = pb.ForwardBackwardRequest.FromString(body)
    name = message.loss_fn
    if name in NOT_SUPPORTED:
        raise UserError(f"the loss {name} is not supported: {NOT_SUPPORTED[name]}")
    if name not in LOSSES:
        raise UserError(unknown("loss", name, LOSSES))
    if not message.data:
        raise UserError("the request has no data")
    check_padding(message)
    settings = _settings(message, LOSSES[name].settings)
    rows: list[NDArray[np.int64]] = []
    inputs: list[dict[str, Floats]] = []
    for index, datum in enumerate(message.data):
        try:
            row = _tokens(datum, vocabulary, most_tokens)
            rows.append(row)
            inputs.append(_inputs(datum, name, len(row) - 1))
        except ValueError as error:
            raise UserError(f"datum {index}: {error}") from error
    lengths = [len(row) for row in rows]
    longest = max(lengths)
    # [batch, length], padded on the right
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    for padded_row, row in zip(tokens, rows, strict=True):
        padded_row[: len(row)] = row
    positions = torch.arange(longest)  # [length]
    mask = positions < torch.tensor(lengths)[:, None]  # [batch, length]
    loss_mask = mask.clone()
    loss_mask[:, 0] = False  # nothing predicts the first token

    def column(key: str, default: float = 0.0) -> Tensor:
        """The input of the loss tokens, ``[batch, length]``; the default for rows without it."""
        values = np.zeros(tokens.shape, dtype=np.float32)
        for padded_row, row_inputs, length in zip(values, inputs, lengths, strict=True):
            padded_row[1:length] = row_inputs.get(key, default)
        return torch.from_numpy(values)

    return LossBatch(
        tokens=torch.from_numpy(tokens),
        attention_mask=mask,
        loss_mask=loss_mask,
        # One group, because any rows may have a shared prefix, which is computed once.
        group_ids=torch.zeros(len(rows), dtype=torch.int64),
        behaviour_logprobs=column("logprobs"),
        versions=torch.zeros(mask.shape, dtype=torch.int32),
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        rewards=torch.zeros(mask.shape),
        advantages=column("advantages"),
        loss_weights=column("weights", 1.0),
        loss_name=name,
        beta=settings.get("beta", 0.0),
        clip_low=column("clip_low_threshold", settings.get("clip_low_threshold", 1.0)),
        clip_high=column("clip_high_threshold", settings.get("clip_high_threshold", 1.0)),
        ratio_mask=column("sequence_ratio_mask"),
        forward_only=message.forward_only,
    )


def _settings(
    message: pb.ForwardBackwardRequest, defaults: Mapping[str, float]
) -> dict[str, float]:
    """The settings of the loss; the protocol has a field of numbers, and a newer one of values."""
    settings = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise UserError(f"loss_fn_config: {key} is a text, and no loss here reads one")
        settings[key] = value.number
    for key, number in settings.items():
        if key not in defaults:
            problem = unknown("setting", key, defaults) if defaults else f"no {key} is read"
            raise UserError(f"loss_fn_config: {problem}")
        if not math.isfinite(number):
            raise UserError(f"loss_fn_config: {key} is {number}")
    return {**defaults, **settings}


def _tokens(datum: pb.Datum, vocabulary: int, most_tokens: int) -> NDArray[np.int64]:
    """The tokens of a row, ``[length]``: all that the model reads, then the last target."""
    texts = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise ValueError("images and audio are not supported: the policy reads text")
        texts.append(chunk.encoded_text.tokens)
    # The protocol sends int32; torch indexes with int64.
    encoded = np.frombuffer(b"".join(texts), dtype=np.int32)
    read = encoded.astype(np.int64)  # [length - 1]
    target = _array(datum.loss_fn_inputs, "target_tokens")
    if target is None or not len(read):
        raise ValueError("it needs tokens and target_tokens")
    if target.shape != read.shape:
        raise ValueError(
            f"target_tokens has the shape {list(target.shape)}, and there are {len(read)} tokens"
        )
    target = target.astype(np.int64)
    # A rank computes a row as one sequence: a target is the token that the model reads next.
    differs = target[:-1] != read[1:]  # [length - 2]
    if differs.any():
        raise ValueError(
            f"target_tokens[{differs.argmax()}] is not the token that follows in model_input, as it must be"
        )
    if len(read) + 1 > most_tokens:
        raise ValueError(
            f"it has {len(read) + 1} tokens with the last target; the server takes {most_tokens}"
        )
    row: NDArray[np.int64] = np.append(read, target[-1])
    invalid = row[(row < 0) | (row >= vocabulary)]
    if invalid.size:
        raise ValueError(f"there is no token {invalid[0]}: the model has {vocabulary}")
    return row


def _inputs(datum: pb.Datum, name: str, length: int) -> dict[str, Floats]:
    """The inputs of the loss that the datum has, each float32 ``[length]``."""
    loss = LOSSES[name]
    allowed = {"target_tokens", *loss.required, *loss.optional}
    for key in datum.loss_fn_inputs:
        if key not in allowed:
            names = ", ".join(sorted(allowed))
            raise ValueError(f"loss_fn_inputs has {key}; {name} reads {names}")
    values: dict[str, Floats] = {}
    for key in (*loss.required, *loss.optional):
        array = _array(datum.loss_fn_inputs, key)
        if array is None:
            if key in loss.required:
                raise ValueError(f"loss_fn_inputs lacks {key}, which {name} needs")
            continue
        if array.shape != (length,):
            raise ValueError(
                f"{key} has the shape {list(array.shape)}, and there are {length} target_tokens"
            )
        if not np.isfinite(array).all():
            raise ValueError(f"{key} has NaN or an infinite number")
        values[key] = array.astype(np.float32)  # [length]
    if "advantages" in values:
        # By default the ratio of a sequence is over the tokens with an advantage.
        has_advantage = values["advantages"] != 0
        values.setdefault("sequence_ratio_mask", has_advantage.astype(np.float32))
    return values


def _array(inputs: Mapping[str, Any], key: str) -> np.ndarray[Any, Any] | None:
    """One input of the loss; None if the datum lacks it."""
    if key not in inputs:
        return None
    tensor = inputs[key]
    if tensor.HasField("sparse_csr"):
        raise ValueError(f"{key} is sparse: several targets per position are not supported")
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"{key} is neither float32 nor an integer")
    array = np.frombuffer(tensor.dense, dtype=_DTYPES[tensor.dtype])
    if tensor.shape:
        return array.reshape(list(tensor.shape))
    return array  # one dimension


def loss_result(logprobs: Tensor, batch: LossBatch) -> bytes:
    """The answer of a training request.

    It has the log-probability and the loss of each target token, and the sum of the losses.

    Args:
        logprobs: ``[batch, length]``.
    """
    losses = token_losses(logprobs, batch)  # [batch, length]
    record = pb.ArrayRecord(num_datums=len(batch))
    lengths = (batch.attention_mask.sum(1) - 1).tolist()  # target tokens: without the first token
    float_bytes = 4
    offsets = np.cumsum([0, *lengths], dtype=np.int64) * float_bytes
    for name, values in (("logprobs", logprobs), ("elementwise_loss", losses)):
        rows = []
        for row, length in zip(values, lengths, strict=True):
            targets = row[1 : length + 1]
            rows.append(targets.float().numpy())
        field = record.fields[name]
        field.data = np.concatenate(rows).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.offsets = offsets.tobytes()
    output = pb.ForwardBackwardOutput(loss_fn_output_type="TensorDict", loss_fn_outputs=[record])
    # In float64, so that the order of the tokens does not matter.
    total = losses.where(batch.loss_mask, 0.0).sum(dtype=torch.float64)
    output.metrics["loss:sum"] = float(total)
    return bytes(output.SerializeToString())


def sample_result(outputs: Sequence[GenerationOutput], prompt_logprobs: Floats | None) -> bytes:
    """The answer of a sampling request.

    Args:
        prompt_logprobs: NaN where none was computed; None if they were not requested.
    """
    response = pb.SampleResponse()
    for output in outputs:
        stopped = output.finish_reason == "stop"
        response.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if stopped else pb.STOP_REASON_LENGTH,
            tokens=output.token_ids.tobytes(),
            logprobs=output.logprobs.tobytes(),
        )
    if prompt_logprobs is not None:
        response.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    return bytes(response.SerializeToString())
