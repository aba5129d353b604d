"""The decode loop of the embedded engine: continuous batching, a token per request and step.

Invariant: a request is in exactly one place (waiting, admitted, running) until it is reported
finished, once. Between two calls of ``step`` everything may be changed: weights, version, requests;
the caches stay as they are.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyasync.arrays import Experts, joined_experts
from skyasync.inference.backends.transformers.kv_cache import SlotCache
from skyasync.inference.backends.transformers.model import FORWARD_TOKENS, EmbeddedModel
from skyasync.inference.backends.transformers.sampling import BatchSampler, edits_logits
from skyasync.inference.interface import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    SamplingParams,
)
from skyasync.inference.stop_strings import StopStrings
from skyasync.models.images import Images


@dataclass(eq=False)
class DecodingRow:
    """A request of the decoder.

    Args:
        key: of its stream of random numbers (``stream_key``).
        limit: the most tokens that its response may have.
        owner: receives its outputs.
        shift: of its tokens' positions, by images.
        reported: tokens that ``progress`` has returned.
        experts: of the prompt, then of each token but the newest, if they are recorded; each
            ``[tokens, layers, experts per token]``.
    """

    request: GenerationRequest
    prompt: list[int]
    key: int
    limit: int
    stop_ids: frozenset[int]
    stop_strings: StopStrings | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    owner: Any = None
    finish_reason: FinishReason | None = None
    error: str = ""
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    _logprobs: array[float] = field(default_factory=lambda: array("f"))
    _versions: array[int] = field(default_factory=lambda: array("i"))
    shift: int = 0
    reported: int = 0
    experts: list[Experts] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sampling: SamplingParams = self.request.sampling
        self.edited = edits_logits(self.sampling)

    @property
    def reserved(self) -> int:
        """The most tokens it can have in the cache."""
        return len(self.prompt) + self.limit

    @property
    def cached(self) -> int:
        """Tokens in the cache while running: the newest token is not in it yet."""
        return len(self.prompt) + len(self.token_ids) - 1

    def record(self, token: int, logprob: float, version: int) -> None:
        self.token_ids.append(token)
        self._logprobs.append(logprob)
        self._versions.append(version)
        count = len(self.token_ids)
        stops = self.stop_strings
        is_stop = token in self.stop_ids
        # Stop tokens before ``min_tokens`` are not sampled (``LogitEdits``); stop strings can be.
        if stops and not is_stop and count > self.sampling.min_tokens:
            is_stop = stops.completed_by_last(self.token_ids)
        if is_stop:
            self.finish_reason = "stop"
        elif count >= self.limit:
            self.finish_reason = "length"

    def fail(self, reason: str) -> None:
        self.finish_reason = "error"
        self.error = f"request {self.request.request_id!r} cannot be answered: {reason}"

    def progress(self) -> GenerationOutput:
        """The new tokens since the last call."""
        start = self.reported
        self.reported = len(self.token_ids)
        return self.output(start)

    def output(self, start: int = 0) -> GenerationOutput:
        """The tokens from ``start`` on."""
        return GenerationOutput(
            self.request.request_id,
            np.array(self.token_ids[start:]),
            np.array(self._logprobs[start:]),
            np.array(self._versions[start:]),
            self.finish_reason,
            joined_experts(self.experts[start:]),
            self.error,
        )


class Decoder:
    """Append rows to ``waiting``, then call ``step`` until ``busy`` is false. Not thread-safe."""

    def __init__(
        self,
        model: EmbeddedModel,
        *,
        version: int,
        max_num_seqs: int,
        cache_bytes: int,
    ) -> None:
        self.model = model
        self.version = version
        self.generated_tokens = 0
        self._max_num_seqs = max_num_seqs
        self._cache_bytes = cache_bytes
        self.cache: SlotCache | None = None  # made by the next ``step``
        self.waiting: deque[DecodingRow] = deque()
        # The cache has slots for these; sorted by prompt, longest last.
        self._admitted_rows: list[DecodingRow] = []
        self._running_rows: list[DecodingRow] = []  # row i is in slot i
        self._rows_changed = False  # the tensors below no longer describe the running rows
        self._sampler: BatchSampler
        self._tokens: Tensor  # [rows], the newest token
        self._lengths: np.ndarray  # [rows], tokens in the cache
        self._shifts: Tensor | None  # [rows]
        self._positions: np.ndarray  # [rows], tokens of the response

    @property
    def running(self) -> int:
        return len(self._running_rows) + len(self._admitted_rows)

    @property
    def busy(self) -> bool:
        return bool(self._admitted_rows or self.waiting or self._running_rows)

    @torch.inference_mode()
    def abort(self, ids: Collection[str] | None) -> list[DecodingRow]:
        """Remove the requests with these ids (None: all) and return their rows, as aborted."""
        aborted_rows = []
        for row in (*self._running_rows, *self._admitted_rows, *self.waiting):
            if ids is None or row.request.request_id in ids:
                row.finish_reason = "abort"
                aborted_rows.append(row)
        self.waiting = deque(_unfinished(self.waiting))
        self._admitted_rows = _unfinished(self._admitted_rows)
        self._drop_finished()
        return aborted_rows

    @torch.inference_mode()
    def step(self) -> list[DecodingRow]:
        """Prefill some admitted prompts, else decode one token per running row.

        Returns the rows that got a token, and those that cannot be sampled: they end alone.
        """
        if not self._admitted_rows:
            self._admit()
        try:
            if self._admitted_rows:
                rows, tokens, logprobs = self._prefill()
            else:
                rows, tokens, logprobs = self._decode()
        except Exception:
            failed_rows = self._fail_unsampled()
            if not failed_rows:  # the model failed, and not the settings of a request
                raise
            self._admitted_rows = _unfinished(self._admitted_rows)
            self._rows_changed = True
            self._drop_finished()
            return failed_rows
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if not isfinite(logprob):
                row.fail(
                    "its logits are NaN or infinite, or its sampling allows no token: are the model's weights finite?"
                )
                continue
            try:
                row.record(token, logprob, self.version)
            except Exception as error:
                row.fail(f"{type(error).__name__}: {error}")
        self.generated_tokens += len(rows)
        self._drop_finished()
        return rows

    def _fail_unsampled(self) -> list[DecodingRow]:
        """End the rows that cannot be sampled even alone, from logits of 0; returns them."""
        device = self.model.device
        failed_rows = []
        for row in (*self._running_rows, *self._admitted_rows):
            logits = torch.zeros(1, self.model.vocabulary, device=device)
            positions = np.array([len(row.token_ids)])
            try:
                sampler = BatchSampler([row], device)
                sampler(logits, positions)
            except Exception as error:
                row.fail(f"{type(error).__name__}: {error}")
                failed_rows.append(row)
        return failed_rows

    def _admit(self) -> None:
        """Admit waiting requests in order while the cache has room for their longest responses."""
        if self.cache is None:
            prefixes = self.model.prefill([[0]])[1]
            self.cache = SlotCache(prefixes, self._cache_bytes)
        columns = max((row.reserved for row in self._running_rows), default=0)
        while self.waiting and self.running < self._max_num_seqs:
            needed_columns = max(columns, self.waiting[0].reserved)
            # A request that is larger than the budget runs alone: else it would wait for ever.
            if self.running and not self.cache.fits(self.running + 1, needed_columns):
                break
            columns = needed_columns
            self._admitted_rows.append(self.waiting.popleft())
        if self._admitted_rows:
            self.cache.reserve(self.running, columns)
            self._admitted_rows.sort(key=_prompt_order)

    def _prefill(self) -> tuple[list[DecodingRow], Tensor, Tensor]:
        """Compute prompts, and sample the first token of each of their rows.

        Takes the admitted rows with the longest prompts, as many as a forward pass has tokens for.
        A prompt is computed once for all its samples. Returns as ``_decode``.
        """
        rows: list[DecodingRow] = []
        prompts: list[list[int]] = []
        images: list[Images] = []  # of each prompt
        index: list[int] = []  # number of each row's prompt
        while self._admitted_rows:
            row = self._admitted_rows[-1]
            row_images = row.request.images
            # Rows are sorted by prompt: samples of one prompt follow each other.
            if not prompts or row.prompt != prompts[-1] or row_images != images[-1]:
                # The first prompt is the longest, to which the others are padded.
                longest = len(prompts[0]) if prompts else 0
                if (len(prompts) + 1) * longest > FORWARD_TOKENS:
                    break
                prompts.append(row.prompt)
                images.append(row_images)
            rows.append(self._admitted_rows.pop())
            index.append(len(prompts) - 1)
        try:
            sampler = BatchSampler(rows, self.model.device)
            logits, prefixes, shifts = self.model.prefill(prompts, images)
            prompt_rows = torch.tensor(index, device=self.model.device)  # [rows]
            positions = np.zeros(len(rows), dtype=np.int64)
            tokens, logprobs = sampler(logits[prompt_rows], positions)
        except Exception:
            self._admitted_rows += reversed(rows)  # ``step`` looks for the row that failed
            raise
        assert self.cache is not None
        self.cache.fill(len(self._running_rows), prefixes, prompt_rows)
        for row, shift in zip(rows, shifts[prompt_rows].tolist(), strict=True):
            row.shift = shift
        self._running_rows += rows
        self._rows_changed = True
        experts = self.model.chosen()
        if experts is not None:
            # [prompts, padded length, layers, experts per token]
            experts = experts.reshape(len(prompts), -1, *experts.shape[1:])
            for row, i in zip(rows, index, strict=True):
                row.experts.append(experts[i, : len(row.prompt)])
        return rows, tokens, logprobs

    def _decode(self) -> tuple[list[DecodingRow], Tensor, Tensor]:
        """The running rows, their next tokens and the log-probabilities of these, ``[rows]``."""
        rows = self._running_rows
        device = self.model.device
        if self._rows_changed:
            self._sampler = BatchSampler(rows, device)
            newest = [row.token_ids[-1] for row in rows]
            self._tokens = torch.tensor(newest, device=device)
            self._lengths = np.array([row.cached for row in rows])
            self._positions = np.array([len(row.token_ids) for row in rows])
            shifts = [row.shift for row in rows]
            self._shifts = torch.tensor(shifts, device=device) if any(shifts) else None
            self._rows_changed = False
        assert self.cache is not None
        lengths = torch.from_numpy(self._lengths).to(device)
        # From the array on the CPU: the maximum of a tensor on the GPU would wait for the GPU.
        width = int(self._lengths.max()) + 1
        logits = self.model.decode(self._tokens, lengths, width, self.cache, self._shifts)
        self._tokens, logprobs = self._sampler(logits, self._positions)
        # New arrays: on a CPU ``lengths`` shares the memory of the old one.
        self._lengths = self._lengths + 1
        self._positions = self._positions + 1
        experts = self.model.chosen()
        if experts is not None:
            for i, row in enumerate(rows):
                row.experts.append(experts[i : i + 1])
        return list(rows), self._tokens, logprobs

    def _drop_finished(self) -> None:
        """Keep the running rows in slots 0 to n-1: those beyond the new n move into the holes."""
        rows = self._running_rows
        count = len(_unfinished(rows))
        if count == len(rows):
            return
        holes = []
        movers = []
        for i, row in enumerate(rows):
            if i < count and row.finish_reason is not None:
                holes.append(i)
            elif i >= count and row.finish_reason is None:
                movers.append(i)
        if holes:
            assert self.cache is not None
            width = max(rows[i].cached for i in movers) + 1
            self.cache.move(movers, holes, width)
            for source, target in zip(movers, holes, strict=True):
                rows[target] = rows[source]
        del rows[count:]
        self._rows_changed = True


def _unfinished(rows: Iterable[DecodingRow]) -> list[DecodingRow]:
    return [row for row in rows if row.finish_reason is None]


def _prompt_order(row: DecodingRow) -> tuple[int, list[int], list[str]]:
    """Sorts by length, and rows of equal prompt and images next to each other."""
    digests = [image.digest for image in row.request.images]
    return len(row.prompt), row.prompt, digests
