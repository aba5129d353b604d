"""What requests ask of their logits before temperature and filters: lists of tokens, penalties, bans.

Invariant: the order is vLLM's (allowed tokens, bad words, ``min_tokens``, bias, penalties), rows that ask for nothing
are not touched, and a batch in which none does costs nothing. Everything is batched but words of several tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from skyasync.algorithms.sampled import addends
from skyasync.engines.protocol import SamplingParams

if TYPE_CHECKING:
    from skyasync.engines.embedded.decoder import Row

Words = tuple[tuple[int, ...], ...]


class LogitEdits:
    """The edits of a batch's rows; made anew whenever the batch gains or loses rows.

    Args:
        rows: as in ``sampling.SampledRow``.
    """

    def __init__(self, rows: Sequence[Any], device: torch.device) -> None:
        self._device = device
        edited = [(i, row) for i, row in enumerate(rows) if row.edited]
        self._listed = [(i, row) for i, row in edited if _has_lists(row)]
        self._barred = [(i, row) for i, row in edited if row.sampling.min_tokens and row.stop_ids]
        self._worded = [(i, row) for i, row in edited if any(len(word) > 1 for word in row.bad_words)]
        self._penalised = [(i, row) for i, row in edited if _has_penalties(row.sampling)]
        self._added: tuple[Tensor, Tensor, Tensor] | None = None
        self._penalties: _Penalties | None = None
        if self._barred:
            places = [(i, token, row.sampling.min_tokens) for i, row in self._barred for token in row.stop_ids]
            self._bar_rows, self._bar_tokens, self._bar_until = np.array(places).T

    def __call__(self, logits: Tensor, positions: np.ndarray) -> None:
        """Edit ``logits`` ``[rows, vocabulary]`` in place; ``positions[i]`` tokens of row i's response exist."""
        if self._listed:
            self._add_lists(logits)
        if self._worded:
            self._ban_words(logits)
        if self._barred:
            below = positions[self._bar_rows] < self._bar_until
            if below.any():
                logits[self._index(self._bar_rows[below]), self._index(self._bar_tokens[below])] = -torch.inf
        if self._penalised:
            if self._penalties is None:
                self._penalties = _Penalties(self._penalised, logits.shape[1], self._device)
            self._penalties(logits)

    def sampled(self, tokens: Tensor) -> None:
        """Take note of the tokens ``[rows]`` that were sampled from the edited logits."""
        if self._penalties is not None:
            self._penalties.count(tokens)

    def _index(self, values: object) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self._device)

    def _add_lists(self, logits: Tensor) -> None:
        """Bias, allowed tokens and bad words of one token: rows with the same lists share one row of addends."""
        if self._added is None:
            rows, which = [], []
            distinct: dict[Any, int] = {}
            for i, row in self._listed:
                key = (row.sampling.allowed_token_ids, tuple(row.sampling.logit_bias.items()), row.bad_words)
                rows.append(i)
                which.append(distinct.setdefault(key, len(distinct)))
            table = [self._addends(logits.shape[1], *key) for key in distinct]
            self._added = self._index(rows), self._index(which), torch.stack(table).to(self._device)
        index, which_row, table_rows = self._added
        logits[index] += table_rows[which_row]

    @staticmethod
    def _addends(
        vocabulary: int, allowed: tuple[int, ...], bias: tuple[tuple[int, float], ...], words: Words
    ) -> Tensor:
        added = addends(vocabulary, dict(bias), allowed)
        for word in words:
            if len(word) == 1:
                added[word[0]] = -torch.inf
        return added

    def _ban_words(self, logits: Tensor) -> None:
        """Forbid the last token of a word whose other tokens end the response so far."""
        for i, row in self._worded:
            for word in row.bad_words:
                before = len(word) - 1
                if before and tuple(row.token_ids[-before:]) == word[:-1]:
                    logits[i, word[-1]] = -torch.inf


class _Penalties:
    """Repetition, frequency and presence penalties, with the counts that they need."""

    def __init__(self, rows: Sequence[tuple[int, Any]], vocabulary: int, device: torch.device) -> None:
        settings = [row.sampling for _, row in rows]
        self._rows = torch.tensor([i for i, _ in rows], device=device)
        self._repetition, self._frequency, self._presence = (
            torch.tensor([getattr(s, f"{name}_penalty") for s in settings], device=device)[:, None]
            for name in ("repetition", "frequency", "presence")
        )
        self._prompt = torch.zeros(len(rows), vocabulary, dtype=torch.bool, device=device)
        self._counts = torch.zeros(len(rows), vocabulary, dtype=torch.int16, device=device)
        for k, (_, row) in enumerate(rows):
            self._prompt[k, torch.tensor(sorted(set(row.prompt)), dtype=torch.int64, device=device)] = True
            tokens = torch.tensor(list(row.token_ids), dtype=torch.int64, device=device)
            self._counts[k].index_add_(0, tokens, torch.ones_like(tokens, dtype=torch.int16))
        self._every = torch.arange(len(rows), device=device)

    def __call__(self, logits: Tensor) -> None:
        """Source: Keskar et al. 2019 for repetition (prompt and response); the other two are OpenAI's (response)."""
        scores, generated = logits[self._rows], self._counts > 0
        repeated = torch.where(scores > 0, scores / self._repetition, scores * self._repetition)
        scores = torch.where(generated | self._prompt, repeated, scores)
        logits[self._rows] = scores - self._frequency * self._counts - self._presence * generated

    def count(self, tokens: Tensor) -> None:
        self._counts[self._every, tokens[self._rows]] += 1


def asks_for_edits(sampling: SamplingParams) -> bool:
    lists = sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words
    return bool(lists) or bool(sampling.min_tokens) or _has_penalties(sampling)


def tokenised(words: Sequence[str], encode: Callable[[str], list[int]]) -> Words:
    """Bad words as tokens: each as it stands, and with a space in front where that is one token as well.

    ``encode`` adds no special tokens. The rule is vLLM's.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        plain, spaced = tuple(encode(word.lstrip())), tuple(encode(" " + word.lstrip()))
        found += [plain] if plain else []
        if plain and spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return tuple(found)


def _has_lists(row: Row) -> bool:
    sampling: SamplingParams = row.sampling
    return bool(sampling.logit_bias or sampling.allowed_token_ids or any(len(word) == 1 for word in row.bad_words))


def _has_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1 or bool(sampling.frequency_penalty or sampling.presence_penalty)
