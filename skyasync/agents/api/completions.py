"""OpenAI's text completions: ``/v1/completions``, of text or of token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from skyasync.agents.api.chat import (
    COMMON,
    IGNORED,
    NEUTRAL,
    CompletionStream,
    common,
    completion,
    openai_error,
)
from skyasync.agents.api.types import (
    AnswerHead,
    Body,
    EpisodeContext,
    ModelReply,
    ModelRequest,
    RequestError,
    SentReply,
    ServerSentEvent,
)
from skyasync.agents.api.validation import check_fields

FIELDS = COMMON | {"prompt", "logprobs"}


class CompletionsApi:
    """See ``Api``."""

    prefix = "cmpl"

    def read(self, body: Body, episode: EpisodeContext) -> ModelRequest:
        check_fields(body, FIELDS, IGNORED, NEUTRAL)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        tokens = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not prompt or not (tokens or isinstance(prompt, str)):
            raise RequestError("prompt must be one text or one list of token ids, not empty", "prompt")
        if (body.get("logprobs") or 0) not in (0, 1):
            problem = f"logprobs={body['logprobs']!r:.100} is not supported here"
            problem = f"{problem}: 0 or 1 gives those of the sampled tokens"
            raise RequestError(problem, "logprobs", "unsupported_parameter")
        logprobs = body.get("logprobs") is not None
        return ModelRequest(**common(body, episode.sampling), logprobs=logprobs, prompt=prompt)

    def answer(self, request: ModelRequest, head: AnswerHead, replies: Sequence[ModelReply]) -> Body:
        return completion(head, TextStream.kind, [_choice(reply) for reply in replies])

    def stream(self, request: ModelRequest) -> TextStream:
        return TextStream(request)

    def error(self, error: RequestError) -> Body:
        return openai_error(error)


class TextStream(CompletionStream):
    kind = "text_completion"

    def update(self, reply: ModelReply) -> Iterator[ServerSentEvent]:
        new = self.sent.setdefault(reply.index, SentReply()).delta(reply)
        if new.text or new.logprobs or new.token_ids or reply.finish_reason:
            yield self.chunk(_choice(replace(reply, text=new.text, logprobs=new.logprobs, token_ids=new.token_ids)))


def _choice(reply: ModelReply) -> Body:
    body = {"index": reply.index, "text": reply.text, "finish_reason": reply.finish_reason or None}
    body["logprobs"] = None
    if reply.logprobs is not None:
        tokens, values = [token for token, _ in reply.logprobs], [value for _, value in reply.logprobs]
        body["logprobs"] = {"tokens": tokens, "token_logprobs": values, "top_logprobs": None, "text_offset": None}
    return body if reply.token_ids is None else {**body, "token_ids": reply.token_ids}
