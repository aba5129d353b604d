"""From logits to tokens: the settings of many requests applied to one batch.

Invariant: what a request samples depends on its own logits, its own settings and its own stream of uniform
numbers, never on the other rows of the batch. Number t of the stream decides token t of the response (t counts
from the start of the response, whatever the prompt was), so a request that is cut and resubmitted as a longer
prompt starts a new stream and should bear a new id or seed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from skyasync.algorithms.sampled import likely
from skyasync.engines.embedded.logit_edits import LogitEdits
from skyasync.engines.protocol import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream_key(seed: int | None, engine_seed: int, request_id: str) -> int:
    """The 64-bit key of a request's stream: from its own seed, else from the engine's seed and the request's id."""
    origin = f"seed {seed}" if seed is not None else f"engine {engine_seed} request {request_id}"
    return int.from_bytes(hashlib.blake2b(origin.encode(), digest_size=8).digest(), "little")


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Number ``positions[i]`` of stream ``keys[i]``: float32 in [0, 1), a multiple of 2**-24.

    Output t of SplitMix64 (Steele, Lea, Flood 2014) is a function of key and t alone, so nothing is stored.
    """
    state = keys.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    return (state >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """``logits`` ``[rows, vocabulary]`` with -inf for every token that the filters leave out; see ``likely``."""
    return logits.masked_fill(~likely(logits, top_k, top_p, min_p), -torch.inf)


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of ``logprobs`` ``[rows, vocabulary]`` by inverse cumulative distribution; ``[rows]``.

    Tokens are taken in the order of their ids. A token of probability 0 has no width and is never drawn.
    """
    cumulative = logprobs.exp().cumsum(dim=1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


class SampledRow(Protocol):
    """What the sampler reads of a request; ``token_ids`` and ``stop_ids`` may only be looked at, not changed."""

    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def key(self) -> int: ...
    @property
    def prompt(self) -> Sequence[int]: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def stop_ids(self) -> frozenset[int]: ...
    @property
    def bad_words(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def edited(self) -> bool: ...


class BatchSampler:
    """The settings of a batch's rows as tensors; made anew whenever the batch gains or loses rows."""

    def __init__(self, rows: Sequence[SampledRow], device: torch.device) -> None:
        settings = [row.sampling for row in rows]
        greedy = [s.temperature == 0 for s in settings]
        filtered = [i for i, s in enumerate(settings) if s.temperature and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)]

        def tensor(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._keys = np.fromiter((row.key for row in rows), dtype=np.uint64, count=len(rows))
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        tempered = any(s.temperature not in (0, 1) for s in settings)
        self._temperature = tensor([s.temperature or 1.0 for s in settings])[:, None] if tempered else None
        self._filtered = torch.tensor(filtered, device=device) if filtered else None
        self._top_k = torch.tensor([settings[i].top_k for i in filtered], device=device)
        self._top_p = tensor([settings[i].top_p for i in filtered])
        self._min_p = tensor([settings[i].min_p for i in filtered])
        self._edits = LogitEdits(rows, device)

    def __call__(self, logits: Tensor, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Sample token ``positions[i]`` of each row's response from ``logits`` ``[rows, vocabulary]`` (overwritten).

        Returns the tokens and their log-probabilities (float32) under the distribution that was sampled from,
        both ``[rows]``. For greedy rows it is the untempered, unfiltered one. The log-probability of a row whose logits
        leave no distribution (NaN, infinite, or no token allowed) is not finite, and its token means nothing.
        """
        logits = self._warp(logits.float(), positions)
        logprobs = logits.log_softmax(dim=1)
        uniform = torch.from_numpy(uniforms(self._keys, positions)).to(logits.device)
        tokens = draw(logprobs, uniform).clamp_(max=logits.shape[1] - 1)
        if self._greedy is not None:
            tokens = torch.where(self._greedy, logits.argmax(dim=1), tokens)
        self._edits.sampled(tokens)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]

    def _warp(self, logits: Tensor, positions: np.ndarray) -> Tensor:
        self._edits(logits, positions)
        if self._temperature is not None:
            logits = logits.div_(self._temperature)
        if self._filtered is not None:
            logits[self._filtered] = keep_likely(logits[self._filtered], self._top_k, self._top_p, self._min_p)
        return logits
