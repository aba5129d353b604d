"""Stop strings in a response that is generated token by token, or in several pieces.

Invariant: only text that the newest token added can complete a stop string, so a match is found
exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from skyasync.errors import UserError
from skyasync.inference.interface import GenerationOutput, GenerationRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's text for an incomplete character
# Tokens that are decoded before the longest possible match: some tokenizers decode a token
# differently at the beginning of a text.
_CONTEXT = 8


class StopStrings:
    """The stop strings of one request.

    Most tokens are ruled out by their own text, without decoding others.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        strings: Sequence[str],
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._strings = [s for s in strings if s]
        self._last_characters = {s[-1] for s in self._strings}
        # A token has at least one byte, so that a string of n bytes ends within n tokens.
        longest = max((len(string.encode()) for string in self._strings), default=0)
        self._window = longest + _CONTEXT
        self._may_end: dict[int, bool] = {}

    def completed_by_last(self, tokens: Sequence[int]) -> bool:
        """Whether the last of ``tokens`` (a response so far) has the end of a stop string."""
        newest = tokens[-1]
        if newest not in self._may_end:
            text = self._decode([newest])
            has_end = any(character in text for character in self._last_characters)
            self._may_end[newest] = has_end or _INCOMPLETE in text
        if not self._may_end[newest]:
            return False
        window = list(tokens[-self._window :])
        text = self._decode(window)
        earlier_text = self._decode(window[:-1]).rstrip(_INCOMPLETE)
        for string in self._strings:
            # A match that ends before the newest token was found at an earlier one.
            start = max(0, len(earlier_text) - len(string) + 1)
            if text.find(string, start) >= 0:
                return True
        return False

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text


def cut_at_stop_string(
    request: GenerationRequest,
    answer: GenerationOutput,
    seen_tokens: int,
    tokenizer: Callable[[], Any] | None,
) -> GenerationOutput:
    """The answer up to the first stop string that ends after its first ``seen`` tokens.

    A stop string that begins in one piece of an answer and ends in the next is seen by no engine.

    Args:
        tokenizer: gives the model's.
    """
    sampling = request.sampling
    if not sampling.stop:
        return answer
    if tokenizer is None:
        raise UserError(
            f"request {request.request_id} has stop strings and was cut by a weight sync or an engine's failure: the "
            f"inference client needs the model's tokenizer to find one that spans the cut, or set "
            f"trainer.partial_rollout=keep and generator.max_engine_restarts=0"
        )
    tokens: Sequence[int] = answer.token_ids.tolist()
    stops = StopStrings(tokenizer(), sampling.stop, sampling.skip_special_tokens)
    checked_count = max(seen_tokens, sampling.min_tokens)
    for count in range(checked_count + 1, len(tokens) + 1):
        if stops.completed_by_last(tokens[:count]):
            return answer.until(count, "stop")
    return answer
