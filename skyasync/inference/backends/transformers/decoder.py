"""The decode loop of the embedded engine: continuous batching, one token for every running request
per step.

Invariant: a request is in exactly one place (waiting, admitted, running) until it is reported
finished, once. Between two calls of ``step`` everything may be changed: weights, version, requests;
the caches stay as they are.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection
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
    """A request of the decoder. ``limit`` is the most tokens it may get; ``owner`` receives its
    outputs."""

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
    shift: int = 0  # of its positions, by images
    reported: int = 0  # tokens that ``progress`` has given
    experts: list[Experts] = field(
        default_factory=list
    )  # the prompt's, then of each token but the newest, if asked

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
        stopped = token in self.stop_ids
        if stops and not stopped and count > self.sampling.min_tokens:
            stopped = stops.completed_by_last(self.token_ids)
        if stopped:
            self.finish_reason = "stop"
        elif count >= self.limit:
            self.finish_reason = "length"

    def fail(self, why: str) -> None:
        self.finish_reason, self.error = (
            "error",
            f"request {self.request.request_id!r} cannot be answered: {why}",
        )

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
        self, model: EmbeddedModel, *, version: int, max_num_seqs: int, cache_bytes: int
    ) -> None:
        self.model = model
        self.version = version
        self.generated_tokens = 0
        self._max_num_seqs = max_num_seqs
        self._cache_bytes = cache_bytes
        self.cache: SlotCache | None = None  # made by the next ``step``
        self.waiting: deque[DecodingRow] = deque()
        self._admitted: list[
            DecodingRow
        ] = []  # the cache has slots for them; sorted by prompt, longest last
        self._running: list[DecodingRow] = []  # row i lives in slot i
        self._changed = False  # the tensors below no longer describe the running rows
        self._sampler: BatchSampler
        self._tokens: Tensor
        self._lengths: np.ndarray
        self._shifts: Tensor | None
        self._positions: np.ndarray

    @property
    def running(self) -> int:
        return len(self._running) + len(self._admitted)

    @property
    def busy(self) -> bool:
        return bool(self._admitted or self.waiting or self._running)

    @torch.inference_mode()
    def abort(self, ids: Collection[str] | None) -> list[DecodingRow]:
        """Take out the requests with these ids (None: all) and return them, their outputs marked as
        aborted."""
        everywhere = [*self._running, *self._admitted, *self.waiting]
        cut = [row for row in everywhere if ids is None or row.request.request_id in ids]
        for row in cut:
            row.finish_reason = "abort"
        self.waiting = deque(row for row in self.waiting if row.finish_reason is None)
        self._admitted = [row for row in self._admitted if row.finish_reason is None]
        self._drop_finished()
        return cut

    @torch.inference_mode()
    def step(self) -> list[DecodingRow]:
        """Prefill some admitted prompts, else decode one token per running row; returns the rows
        that got a token, and those that cannot be sampled: they end alone."""
        if not self._admitted:
            self._admit()
        try:
            rows, tokens, logprobs = self._prefill() if self._admitted else self._decode()
        except Exception:
            failed = []
            for row in [
                *self._running,
                *self._admitted,
            ]:  # which cannot be sampled even alone, from logits of 0?
                logits = torch.zeros(1, self.model.vocabulary, device=self.model.device)
                try:
                    BatchSampler([row], self.model.device)(logits, np.array([len(row.token_ids)]))
                except Exception as error:
                    row.fail(f"{type(error).__name__}: {error}")
                    failed.append(row)
            if not failed:
                raise
            self._admitted = [row for row in self._admitted if row.finish_reason is None]
            self._changed = True
            self._drop_finished()
            return failed
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

    def _admit(self) -> None:
        """Take waiting requests, in order, while slots and cache suffice for all that they may
        become."""
        if self.cache is None:
            prefixes = self.model.prefill([[0]])[1]
            self.cache = SlotCache(prefixes, self._cache_bytes)
        columns = max((row.reserved for row in self._running), default=0)
        while self.waiting and self.running < self._max_num_seqs:
            needed = max(columns, self.waiting[0].reserved)
            if self.running and not self.cache.fits(self.running + 1, needed):
                break
            columns = needed
            self._admitted.append(self.waiting.popleft())
        if self._admitted:
            self.cache.reserve(self.running, columns)
            self._admitted.sort(
                key=lambda row: (
                    len(row.prompt),
                    row.prompt,
                    [image.digest for image in row.request.images],
                )
            )

    def _prefill(self) -> tuple[list[DecodingRow], Tensor, Tensor]:
        """Compute each different prompt once, give all its samples a copy, and sample their first
        tokens.

        Takes the admitted rows with the longest prompts, as many as a forward pass has tokens for.
        """
        rows: list[DecodingRow] = []
        prompts: list[list[int]] = []
        images: list[Images] = []  # of each prompt
        index: list[int] = []  # of each row's prompt
        while self._admitted:
            prompt = self._admitted[-1].prompt
            own = self._admitted[-1].request.images
            if not prompts or prompt != prompts[-1] or own != images[-1]:
                if prompts and (len(prompts) + 1) * len(prompts[0]) > FORWARD_TOKENS:
                    break
                prompts.append(prompt)
                images.append(own)
            rows.append(self._admitted.pop())
            index.append(len(prompts) - 1)
        try:
            sampler = BatchSampler(rows, self.model.device)
            logits, prefixes, shifts = self.model.prefill(prompts, images)
            which = torch.tensor(index, device=self.model.device)
            tokens, logprobs = sampler(logits[which], np.zeros(len(rows), dtype=np.int64))
        except Exception:
            self._admitted += reversed(rows)
            raise
        assert self.cache is not None
        self.cache.fill(len(self._running), prefixes, which)
        for row, shift in zip(rows, shifts[which].tolist(), strict=True):
            row.shift = shift
        self._running += rows
        self._changed = True
        chosen = self.model.chosen()
        if chosen is not None:
            chosen = chosen.reshape(len(prompts), -1, *chosen.shape[1:])
            for row, i in zip(rows, index, strict=True):
                row.experts.append(chosen[i, : len(row.prompt)])
        return rows, tokens, logprobs

    def _decode(self) -> tuple[list[DecodingRow], Tensor, Tensor]:
        """The running rows, their next tokens and the log-probabilities of these, ``[rows]``."""
        rows = self._running
        device = self.model.device
        if self._changed:
            self._sampler = BatchSampler(rows, device)
            self._tokens = torch.tensor([row.token_ids[-1] for row in rows], device=device)
            self._lengths = np.array([row.cached for row in rows])
            self._positions = np.array([len(row.token_ids) for row in rows])
            shifts = [row.shift for row in rows]
            if any(shifts):
                self._shifts = torch.tensor(shifts, device=device)
            else:
                self._shifts = None
            self._changed = False
        assert self.cache is not None
        lengths = torch.from_numpy(self._lengths).to(device)
        logits = self.model.decode(
            self._tokens, lengths, int(self._lengths.max()) + 1, self.cache, self._shifts
        )
        self._tokens, logprobs = self._sampler(logits, self._positions)
        self._lengths = self._lengths + 1
        self._positions = self._positions + 1
        chosen = self.model.chosen()
        if chosen is not None:
            for i, row in enumerate(rows):
                row.experts.append(chosen[i : i + 1])
        return list(rows), self._tokens, logprobs

    def _drop_finished(self) -> None:
        """Keep the running rows in slots 0 to n-1: those beyond the new n move into the holes."""
        rows = self._running
        count = sum(row.finish_reason is None for row in rows)
        if count == len(rows):
            return
        holes = [i for i in range(count) if rows[i].finish_reason is not None]
        movers = [i for i in range(count, len(rows)) if rows[i].finish_reason is None]
        if holes:
            assert self.cache is not None
            self.cache.move(movers, holes, max(rows[i].cached for i in movers) + 1)
            for source, target in zip(movers, holes, strict=True):
                rows[target] = rows[source]
        del rows[count:]
        self._changed = True
