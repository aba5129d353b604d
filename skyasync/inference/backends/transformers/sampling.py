"""From logits to tokens: the settings of many requests applied to one batch.

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

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def stream_key(seed: int | None, engine_seed: int, request_id: str, drawn: int = 0) -> int:
    """The 64-bit key of a request's stream: from its own seed, else from the engine's seed and the
    request's id.

    Args:
        drawn: so many numbers have been used; number 0 of the stream with this key is the next one.
    """
    if seed is not None:
        origin = f"seed {seed}"
    else:
        origin = f"engine {engine_seed} request {request_id}"
    key = int.from_bytes(hashlib.blake2b(origin.encode(), digest_size=8).digest(), "little")
    return (key + drawn * int(_GOLDEN)) % 2**64


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Number ``positions[i]`` of stream ``keys[i]``: float32 in [0, 1), a multiple of 2**-24.

    Output t of SplitMix64 is a function of key and t alone, so nothing is stored.
    """
    numbers = splitmix(
        keys.astype(np.uint64) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    )
    return (numbers >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """``logits`` ``[rows, vocabulary]`` with -inf for every token that the filters leave out; see
    ``likely``."""
    return logits.masked_fill(~likely(logits, top_k, top_p, min_p), -torch.inf)


def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """One token per row of ``logprobs`` ``[rows, vocabulary]`` by inverse cumulative distribution;
    ``[rows]``.

    Tokens are taken in the order of their ids. A token of probability 0 has no width and is never
    drawn.
    """
    cumulative = logprobs.exp().cumsum(dim=1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


Words = tuple[tuple[int, ...], ...]


class LogitEdits:
    """Changes of logits before temperature and filters: lists of tokens, penalties, bans.

    Invariant: the order is vLLM's (allowed tokens, bad words, ``min_tokens``, bias, penalties).
    Rows without such settings are not changed, and a batch without such rows costs nothing. Made
    again whenever the batch gains or loses rows.
    """

    def __init__(self, rows: Sequence[DecodingRow], device: torch.device) -> None:
        self._device = device
        edited = [(i, row) for i, row in enumerate(rows) if row.edited]
        self._listed = [
            (i, row)
            for i, row in edited
            if row.sampling.logit_bias
            or row.sampling.allowed_token_ids
            or any(len(word) == 1 for word in row.bad_words)
        ]
        self._barred = [(i, row) for i, row in edited if row.sampling.min_tokens and row.stop_ids]
        self._worded = [
            (i, row) for i, row in edited if any(len(word) > 1 for word in row.bad_words)
        ]
        self._penalised = [(i, row) for i, row in edited if _has_penalties(row.sampling)]
        self._added: tuple[Tensor, Tensor, Tensor] | None = None
        self._penalties: _Penalties | None = None
        if self._barred:
            bars = [
                (i, token, row.sampling.min_tokens)
                for i, row in self._barred
                for token in row.stop_ids
            ]
            self._bar_rows, self._bar_tokens, self._bar_until = np.array(bars).T

    def __call__(self, logits: Tensor, positions: np.ndarray) -> None:
        """Edit ``logits`` ``[rows, vocabulary]`` in place; ``positions[i]`` tokens of row i's
        response exist."""
        if (
            self._listed
        ):  # bias, allowed tokens and bad words of one token: equal lists share one row of addends
            if self._added is None:
                distinct: dict[Any, int] = {}
                which = []
                for _, row in self._listed:
                    key = (
                        row.sampling.allowed_token_ids,
                        tuple(row.sampling.logit_bias.items()),
                        row.bad_words,
                    )
                    which.append(distinct.setdefault(key, len(distinct)))
                table = []
                for allowed, bias, words in distinct:
                    table.append(addends(logits.shape[1], dict(bias), allowed))
                    for word in words:
                        if len(word) == 1:
                            table[-1][word[0]] = -torch.inf
                rows = [i for i, _ in self._listed]
                self._added = (
                    self._index(rows),
                    self._index(which),
                    torch.stack(table).to(self._device),
                )
            index, which_row, table_rows = self._added
            logits[index] += table_rows[which_row]
        for (
            i,
            row,
        ) in (
            self._worded
        ):  # forbid the last token of a word whose other tokens end the response so far
            for word in row.bad_words:
                before = len(word) - 1
                if before and tuple(row.token_ids[-before:]) == word[:-1]:
                    logits[i, word[-1]] = -torch.inf
        if self._barred:
            below = positions[self._bar_rows] < self._bar_until
            if below.any():
                logits[
                    self._index(self._bar_rows[below]), self._index(self._bar_tokens[below])
                ] = -torch.inf
        if self._penalised:
            if self._penalties is None:
                self._penalties = _Penalties(self._penalised, logits.shape[1], self._device)
            self._penalties(logits)

    def sampled(self, tokens: Tensor) -> None:
        """Count the tokens ``[rows]`` that were sampled from the edited logits."""
        if self._penalties is not None:
            self._penalties.count(tokens)

    def _index(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)


class _Penalties:
    """Repetition, frequency and presence penalties, with the counts that they need."""

    def __init__(
        self, rows: Sequence[tuple[int, DecodingRow]], vocabulary: int, device: torch.device
    ) -> None:
        settings = [row.sampling for _, row in rows]
        self._rows = torch.tensor([i for i, _ in rows], device=device)
        self._repetition, self._frequency, self._presence = (
            torch.tensor(values, device=device)[:, None]
            for values in zip(
                *(
                    (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
                    for s in settings
                ),
                strict=True,
            )
        )
        self._prompt = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
        self._counts = torch.zeros(len(rows), vocabulary, dtype=torch.int16, device=device)
        for k, (_, row) in enumerate(rows):
            self._prompt[
                k, torch.tensor(sorted(set(row.prompt)), dtype=torch.int64, device=device)
            ] = True
            tokens = torch.tensor(list(row.token_ids), dtype=torch.int64, device=device)
            self._counts[k].index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int16))
        self._every = torch.arange(len(rows), device=device)

    def __call__(self, logits: Tensor) -> None:
        """Source: Keskar et al. 2019 for repetition (prompt and response); the other two are
        OpenAI's (response)."""
        scores = logits[self._rows]
        generated = self._counts > 0
        repeated = torch.where(scores > 0, scores / self._repetition, scores * self._repetition)
        scores = torch.where(generated | self._prompt, repeated, scores)
        logits[self._rows] = scores - self._frequency * self._counts - self._presence * generated

    def count(self, tokens: Tensor) -> None:
        self._counts[self._every, tokens[self._rows]] += 1


def edits_logits(sampling: SamplingParams) -> bool:
    lists = sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words
    return bool(lists) or bool(sampling.min_tokens) or _has_penalties(sampling)


def tokenised(words: Sequence[str], encode: Callable[[str], list[int]]) -> Words:
    """Bad words as tokens: each as it stands, and with a space in front if that is as many tokens.

    ``encode`` adds no special tokens. The rule is vLLM's.
    """
    result: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        result += [plain] if plain else []
        if plain and spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            result.append(spaced)
    return tuple(result)


def _has_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1 or bool(
        sampling.frequency_penalty or sampling.presence_penalty
    )


class BatchSampler:
    """The settings of a batch's rows as tensors; made again whenever the batch gains or loses
    rows."""

    def __init__(self, rows: Sequence[DecodingRow], device: torch.device) -> None:
        settings = [row.sampling for row in rows]
        greedy = [s.temperature == 0 for s in settings]
        filtered = [
            i
            for i, s in enumerate(settings)
            if s.temperature and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)
        ]

        def tensor(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._keys = np.fromiter((row.key for row in rows), dtype=np.uint64, count=len(rows))
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None
        tempered = any(s.temperature not in (0, 1) for s in settings)
        self._temperature = (
            tensor([s.temperature or 1.0 for s in settings])[:, None] if tempered else None
        )
        self._filtered = torch.tensor(filtered, device=device) if filtered else None
        self._top_k = torch.tensor([settings[i].top_k for i in filtered], device=device)
        self._top_p = tensor([settings[i].top_p for i in filtered])
        self._min_p = tensor([settings[i].min_p for i in filtered])
        self._edits = LogitEdits(rows, device)

    def __call__(self, logits: Tensor, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """Sample token ``positions[i]`` of each row's response from ``logits``
        ``[rows, vocabulary]`` (overwritten).

        Returns the tokens and their log-probabilities (float32) under the distribution that was
        sampled from, both ``[rows]``. For greedy rows it is the untempered, unfiltered one. The
        log-probability of a row whose logits leave no distribution (NaN, infinite, or no token
        allowed) is not finite, and its token means nothing.
        """
        logits = logits.float()
        self._edits(logits, positions)
        if self._temperature is not None:
            logits = logits.div_(self._temperature)
        if self._filtered is not None:
            logits[self._filtered] = keep_likely(
                logits[self._filtered], self._top_k, self._top_p, self._min_p
            )
        logprobs = logits.log_softmax(dim=1)
        uniform = torch.from_numpy(uniforms(self._keys, positions)).to(logits.device)
        tokens = draw(logprobs, uniform).clamp_(max=logits.shape[1] - 1)
        if self._greedy is not None:
            tokens = torch.where(self._greedy, logits.argmax(dim=1), tokens)
        self._edits.sampled(tokens)
        return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
