"""Does this token complete a stop string?

Invariant: only text that the newest token added can complete a stop string, so a match is found exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer gives for bytes that are no character yet
_CONTEXT = 8  # tokens decoded ahead of the longest possible match, so that it is decoded as in its place


class StopStrings:
    """The stop strings of one request. Most tokens are ruled out by their own text alone, without decoding."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._strings = [s for s in strings if s]
        self._ends = {s[-1] for s in self._strings}
        self._window = max((len(s.encode()) for s in self._strings), default=0) + _CONTEXT
        self._may_end: dict[int, bool] = {}

    def completed_by_last(self, tokens: Sequence[int]) -> bool:
        """Whether the last of ``tokens`` (a response so far) ends or contains the end of a stop string."""
        if not self._may_complete(tokens[-1]):
            return False
        window = list(tokens[-self._window :])
        text = self._decode(window)
        before = len(self._decode(window[:-1]).rstrip(_INCOMPLETE))
        return any(text.find(s, max(0, before - len(s) + 1)) >= 0 for s in self._strings)

    def _may_complete(self, token: int) -> bool:
        if token not in self._may_end:
            text = self._decode([token])
            self._may_end[token] = _INCOMPLETE in text or any(end in text for end in self._ends)
        return self._may_end[token]

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
