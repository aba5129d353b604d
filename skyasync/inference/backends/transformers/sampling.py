"""Sampling of tokens from logits: the settings of many requests applied to one batch.

Invariant: what a request samples depends on its own logits, its own settings and its own stream of
uniform numbers, never on the other rows of the batch. Number t of the stream decides token t of the
response, whatever the prompt was. A request that is cut and sent again as a longer prompt goes on
in the stream of its seed; without a seed it starts a new stream, and needs a new id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from skyasync.algorithms.sampled import addends, likely
from skyasync.arrays import splitmix
from skyasync.inference.interface import SamplingParams

if TYPE_CHECKING:
    from skyasync.inference.backends.transformers.decoder import DecodingRow

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment: 2**64 / golden ratio, odd


def stream_key(
    seed: int | None,
    engine_seed: int,
    request_id: str,
    response_tokens: int = 0,
) -> int:
    """The 64-bit key of a request's stream of random numbers.

    It is a hash of the request's seed; without one, of the engine's seed and the request's id.

    Args:
        response_tokens: numbers that have been used; number 0 of the stream with this key is the
            next one.
    """
    if seed is not None:
        origin = f"seed {seed}"
    else:
        origin = f"engine {engine_seed} request {request_id}"
    digest = hashlib.blake2b(origin.encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little")
    # SplitMix64's state grows by the increment with each number: this skips the used ones.
    return (key + response_tokens * int(_GOLDEN)) % 2**64


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Number ``positions[i]`` of stream ``keys[i]``: float32 in [0, 1), a multiple of 2**-24.

    Output t of SplitMix64 is a function of key and t alone, so nothing is stored.
    """
    steps = positions.astype(np.uint64) + np.uint64(1)
    numbers = splitmix(keys.astype(np.uint64) + steps * _GOLDEN)
    # The upper 24 bits: a float32 has 24, so that no number is rounded up to 1.
    return (numbers >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """``logits`` ``[rows, vocabulary]`` with -inf for tokens that the filters (``likely``) drop."""
    candidates = likely(logits, top_k, top_p, min_p)
    return logits.masked_fill(~candidates, -torch.inf)


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """One token per row by inverse cumulative distribution.

    Tokens are taken in the order of their ids. A token of probability 0 has no width and is never
    sampled.

    Args:
        logprobs: ``[rows, vocabulary]``.
        uniform: ``[rows]``, in [0, 1).

    Returns:
        ``[rows]``, int64.
    """
    cumulative = logprobs.exp().cumsum(dim=1)  # [rows, vocabulary]
    # By the last sum instead of 1, which rounding may miss.
    threshold = uniform[:, None] * cumulative[:, -1:]  # [rows, 1]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


Words = tuple[tuple[int, ...], ...]


class LogitEdits:
    """Changes of logits before temperature and filters: lists of tokens, penalties, bans.

    Invariant: the order is vLLM's (allowed tokens, bad words, ``min_tokens``, bias, penalties).
    Rows without such settings are not changed, and a batch without such rows costs nothing. An
    object is for one batch: it is replaced when the batch gains or loses rows.
    """

    def __init__(self, rows: Sequence[DecodingRow], device: torch.device) -> None:
        self._device = device
        # (position in the batch, row), by the edits that the row needs
        self._with_lists: list[tuple[int, DecodingRow]] = []
        self._with_words: list[tuple[int, DecodingRow]] = []
        self._with_penalties: list[tuple[int, DecodingRow]] = []
        stops: list[tuple[int, int, int]] = []  # (row, stop token, until so many tokens exist)
        for i, row in enumerate(rows):
            if not row.edited:
                continue
            sampling = row.sampling
            word_lengths = [len(word) for word in row.bad_words]
            if sampling.logit_bias or sampling.allowed_token_ids or 1 in word_lengths:
                self._with_lists.append((i, row))
            if max(word_lengths, default=0) > 1:
                self._with_words.append((i, row))
            if _has_penalties(sampling):
                self._with_penalties.append((i, row))
            if sampling.min_tokens:
                stops += [(i, token, sampling.min_tokens) for token in row.stop_ids]
        # Made by the first call, which knows the size of the vocabulary.
        self._addends: tuple[Tensor, Tensor, Tensor] | None = None
        self._penalties: _Penalties | None = None
        self._stops = np.array(stops, dtype=np.int64).reshape(-1, 3)

    def __call__(self, logits: Tensor, positions: np.ndarray) -> None:
        """Edit logits in place.

        Args:
            logits: ``[rows, vocabulary]``.
            positions: ``[rows]``, how many tokens each row's response has.
        """
        if self._with_lists:
            if self._addends is None:
                self._addends = self._make_addends(logits.shape[1])
            rows, addend_rows, table = self._addends
            logits[rows] += table[addend_rows]
        # Forbid the last token of a word whose other tokens end the response so far.
        for i, row in self._with_words:
            for word in row.bad_words:
                if len(word) == 1:
                    continue
                *prefix, token = word
                if list(row.token_ids[-len(prefix) :]) == prefix:
                    logits[i, token] = -torch.inf
        if len(self._stops):
            stop_rows, stop_tokens, until = self._stops.T  # [stops] each
            too_early = positions[stop_rows] < until
            if too_early.any():
                rows = self._index(stop_rows[too_early])
                logits[rows, self._index(stop_tokens[too_early])] = -torch.inf
        if self._with_penalties:
            if self._penalties is None:
                self._penalties = _Penalties(self._with_penalties, logits.shape[1], self._device)
            self._penalties(logits)

    def _make_addends(self, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
        """Addends of bias, allowed tokens and bad words of one token.

        Returns:
            The rows that have any ``[edited]``, for each its row of the table ``[edited]``, and the
            table ``[addends, vocabulary]``.
        """
        table: list[Tensor] = []
        positions: dict[Any, int] = {}  # equal lists share a row, as those of a prompt's samples
        addend_rows = []
        for _, row in self._with_lists:
            allowed_tokens = row.sampling.allowed_token_ids
            bias = row.sampling.logit_bias
            key = (allowed_tokens, tuple(bias.items()), row.bad_words)
            if key not in positions:
                positions[key] = len(table)
                addend = addends(vocabulary, bias, allowed_tokens)
                for word in row.bad_words:
                    if len(word) == 1:
                        addend[word[0]] = -torch.inf
                table.append(addend)
            addend_rows.append(positions[key])
        rows = [i for i, _ in self._with_lists]
        addend_table = torch.stack(table).to(self._device)
        return self._index(rows), self._index(addend_rows), addend_table

    def count(self, tokens: Tensor) -> None:
        """Count the tokens ``[rows]`` that were sampled from the edited logits."""
        if self._penalties is not None:
            self._penalties.count(tokens)

    def _index(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)


class _Penalties:
    """Repetition, frequency and presence penalties, with the counts of tokens that they need.

    Args:
        rows: of each penalised row, its position in the batch, and the row.
        vocabulary: columns of the logits.
    """

    def __init__(
        self,
        rows: Sequence[tuple[int, DecodingRow]],
        vocabulary: int,
        device: torch.device,
    ) -> None:
        self._rows = torch.tensor([i for i, _ in rows], device=device)  # [penalised]
        penalties = []
        for _, row in rows:
            sampling = row.sampling
            penalties.append(
                (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
            )
        columns = torch.tensor(penalties, device=device)[:, :, None]  # [penalised, 3, 1]
        self._repetition, self._frequency, self._presence = columns.unbind(dim=1)
        # [penalised, vocabulary]; in 8 bits a count would end at 127
        self._prompt = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
        self._counts = torch.zeros(len(rows), vocabulary, dtype=torch.int16, device=device)
        for k, (_, row) in enumerate(rows):
            distinct = sorted(set(row.prompt))
            self._prompt[k, torch.tensor(distinct, dtype=torch.int64, device=device)] = True
            tokens = torch.tensor(list(row.token_ids), dtype=torch.int64, device=device)
            self._counts[k].index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int16))
        self._count_rows = torch.arange(len(rows), device=device)

    def __call__(self, logits: Tensor) -> None:
        """Penalise ``logits`` ``[rows, vocabulary]`` in place.

        Source: Keskar et al. 2019 for repetition (prompt and response); the other two are OpenAI's
        (response).
        """
        scores = logits[self._rows]  # [penalised, vocabulary]
        is_generated = self._counts > 0
        repetition_scores = torch.where(
            scores > 0, scores / self._repetition, scores * self._repetition
        )
        scores = torch.where(is_generated | self._prompt, repetition_scores, scores)
        logits[self._rows] = scores - self._frequency * self._counts - self._presence * is_generated

    def count(self, tokens: Tensor) -> None:
        """Count the sampled tokens, ``[rows]`` of the batch."""
        self._counts[self._count_rows, tokens[self._rows]] += 1


def edits_logits(sampling: SamplingParams) -> bool:
    """Whether a row with these settings needs ``LogitEdits``."""
    lists = sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words
    return bool(lists) or bool(sampling.min_tokens) or _has_penalties(sampling)


def tokenised(words: Sequence[str], encode: Callable[[str], list[int]]) -> Words:
    """Bad words as tokens: without a space in front, and with one if that is as many tokens.

    The rule is vLLM's.

    Args:
        encode: adds no special tokens.
    """
    result: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(encode(word.lstrip()))
        if not plain:
            continue
        result.append(plain)
        spaced = tuple(encode(" " + word.lstrip()))
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            result.append(spaced)
    return tuple(result)


def _has_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1 or bool(
        sampling.frequency_penalty or sampling.presence_penalty
    )


class BatchSampler:
    """The settings of a batch's rows as tensors.

    An object is for one batch: it is replaced when the batch gains or loses rows. Steps that no row
    needs are left out.
    """

    def __init__(self, rows: Sequence[DecodingRow], device: torch.device) -> None:
        greedy = []
        temperatures = []
        filtered_rows = []
        filters = []
        for i, row in enumerate(rows):
            sampling = row.sampling
            greedy.append(sampling.temperature == 0)
            temperatures.append(sampling.temperature or 1.0)
            no_filter = sampling.top_k <= 0 and sampling.top_p >= 1 and sampling.min_p <= 0
            if sampling.temperature and not no_filter:
                filtered_rows.append(i)
                filters.append(sampling)

        def tensor(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._keys = np.fromiter((row.key for row in rows), dtype=np.uint64, count=len(rows))
        self._is_greedy: Tensor | None = None  # [rows]
        if any(greedy):
            self._is_greedy = torch.tensor(greedy, device=device)
        self._temperature: Tensor | None = None  # [rows, 1]
        if any(temperature != 1 for temperature in temperatures):
            self._temperature = tensor(temperatures)[:, None]
        self._filtered_rows: Tensor | None = None  # [filtered], as the three below
        if filtered_rows:
            self._filtered_rows = torch.tensor(filtered_rows, device=device)
            self._top_k = torch.tensor([sampling.top_k for sampling in filters], device=device)
            self._top_p = tensor([sampling.top_p for sampling in filters])
            self._min_p = tensor([sampling.min_p for sampling in filters])
        self._edits = LogitEdits(rows, device)

    def __call__(self, logits: Tensor, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Sample token ``positions[i]`` of each row's response.

        Args:
            logits: ``[rows, vocabulary]``, overwritten.
            positions: ``[rows]``.

        Returns:
            The tokens and their log-probabilities (float32) under the distribution that was sampled
            from, both ``[rows]``. For greedy rows it is the untempered, unfiltered one. The
            log-probability of a row whose logits leave no distribution (NaN, infinite, or no token
            allowed) is not finite, and its token means nothing.
        """
        logits = logits.float()
        self._edits(logits, positions)
        if self._temperature is not None:
            logits = logits.div_(self._temperature)
        if self._filtered_rows is not None:
            likely_logits = keep_likely(
                logits[self._filtered_rows],
                self._top_k,
                self._top_p,
                self._min_p,
            )
            logits[self._filtered_rows] = likely_logits
        logprobs = logits.log_softmax(dim=1)  # [rows, vocabulary]
        numbers = uniforms(self._keys, positions)
        uniform = torch.from_numpy(numbers).to(logits.device)
        tokens = draw(logprobs, uniform)
        # In a row of NaN the search ends behind the last token.
        tokens.clamp_(max=logits.shape[1] - 1)
        if self._is_greedy is not None:
            tokens = torch.where(self._is_greedy, logits.argmax(dim=1), tokens)
        self._edits.count(tokens)
        token_logprobs = logprobs.gather(1, tokens[:, None])  # [rows, 1]
        return tokens, token_logprobs[:, 0]
