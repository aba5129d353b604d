"""OpenAI's text completions: ``/v1/completions``, of text or of token ids.

Invariant: that of ``fields``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from skyasync.endpoint.forms.chat import (
    COMMON,
    NEUTRAL,
    PASSED_OVER,
    OpenAIStream,
    common,
    head,
    openai_error,
    usage,
    with_prompt,
)
from skyasync.endpoint.forms.fields import refuse_others
from skyasync.endpoint.forms.inner import Answer, Body, Choice, Event, Known, Request, RequestError, Told

FIELDS = COMMON | {"prompt", "logprobs"}


class TextForm:
    """See ``Form``."""

    prefix = "cmpl"

    def read(self, body: Body, known: Known) -> Request:
        refuse_others(body, FIELDS, PASSED_OVER, NEUTRAL)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (tokens or isinstance(prompt, str)):
            raise RequestError("prompt must be one text or one list of token ids, not empty", "prompt")
        if (body.get("logprobs") or 0) not in (0, 1):
            problem = (
                f"logprobs={body['logprobs']!r:.100} is not supported here: 0 or 1 gives those of the sampled tokens"
            )
            raise RequestError(problem, "logprobs", "unsupported_parameter")
        return Request(replace(common(body, known.sampling), logprobs=body.get("logprobs") is not None), prompt=prompt)

    def whole(self, request: Request, answer: Answer, choices: Sequence[Choice]) -> Body:
        body = {
            **head(answer, TextStream.kind),
            "choices": [_choice(choice) for choice in choices],
            "usage": usage(answer),
        }
        return with_prompt(body, answer)

    def stream(self, request: Request) -> TextStream:
        return TextStream(usage=request.asked.include_usage)

    def error(self, error: RequestError) -> Body:
        return openai_error(error)


class TextStream(OpenAIStream):
    """See ``Stream``."""

    kind = "text_completion"

    def go_on(self, choice: Choice) -> Iterator[Event]:
        news = self.told.setdefault(choice.index, Told()).news(choice)
        if news.text or news.logprobs or news.token_ids or choice.finish_reason:
            part = replace(choice, text=news.text, logprobs=news.logprobs, token_ids=news.token_ids)
            yield Event("", {**self.head, "choices": [_choice(part)]})


def _choice(choice: Choice) -> Body:
    body = {"index": choice.index, "text": choice.text, "finish_reason": choice.finish_reason or None}
    body["logprobs"] = None
    if choice.logprobs is not None:
        tokens, values = [token for token, _ in choice.logprobs], [value for _, value in choice.logprobs]
        body["logprobs"] = {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": None}
    return body if choice.token_ids is None else {**body, "token_ids": choice.token_ids}
