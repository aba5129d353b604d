"""The calls of one episode: recorded, continued, and as training sequences.

Invariant: what is trained is what was sampled. The tokens, log-probabilities and versions of every
call are in exactly one sequence, as one action, after exactly the tokens that the engine had read;
nothing is made again from text. A conversation that extends a recorded call begins with exactly the
tokens of that call: only what is new is tokenised. Any other conversation is tokenised from its
text.

    calls (prompt | reply)           sequences
    p | a                            p a o b             a call that begins with all of an earlier one extends it;
    p a o | b                        p a o q c d         the first to do so continues its sequence. Any other call
    p a o q | c                        (p a o q is       begins a sequence of its own, in which it learns from its
    p a o q c | d                       context here)    own tokens alone
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from types import MappingProxyType
from typing import Literal

import numpy as np

from skyasync.agents.api import Message
from skyasync.arrays import Ints, ints, joined, splitmix
from skyasync.models.images import Images
from skyasync.rollout.chat import Tools, knows_tools, template_tokens, tokens_after
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Segment

_QUESTION: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One answered request: what the engine read (tokens and the images in them), what it wrote,
    why it stopped, and the ``id`` of the answer."""

    prompt: Ints
    action: Segment
    stop_reason: str = "stop"
    id: str = ""
    images: Images = ()

    @cached_property
    def tokens(self) -> Ints:
        return joined(self.prompt, self.action.tokens)


Thoughts = Mapping[int, str]  # place in a conversation -> the reasoning of the message there
NO_THOUGHTS: Thoughts = MappingProxyType({})


@dataclass
class Recorder:
    """The calls in the order of their answers, and the conversation that each of them leads to."""

    calls: list[RecordedCall] = field(default_factory=list)
    #: By a digest of the conversation.
    _led_to: dict[bytes, list[tuple[RecordedCall, Thoughts]]] = field(default_factory=dict)

    def record(
        self, call: RecordedCall, conversation: Sequence[str] = (), thoughts: Thoughts = NO_THOUGHTS
    ) -> None:
        """Add a call.

        Args:
            conversation: the messages of the request and the reply; empty for a request without
                messages.
            thoughts: the reasoning of those that have any.
        """
        self.calls.append(call)
        if conversation:
            *_, digest = _digests(conversation)
            self._led_to.setdefault(digest, []).append((call, thoughts))

    def extended_by(
        self, conversation: Sequence[str], thoughts: Thoughts = NO_THOUGHTS
    ) -> tuple[RecordedCall, int] | None:
        """The call whose conversation is the longest beginning of this one, and the length of that
        beginning.

        Reasoning may be left out of a later request; if it is sent back, it must be the same.
        """
        digests = list(_digests(conversation))
        for length in range(len(conversation), 0, -1):
            for call, known in reversed(self._led_to.get(digests[length - 1], [])):
                if all(
                    known.get(place, "") == thought
                    for place, thought in thoughts.items()
                    if place < length
                ):
                    return call, length
        return None


def _digests(conversation: Iterable[str]) -> Iterator[bytes]:
    """A digest of each prefix of a conversation, in time and memory that grow linearly with its
    length."""
    digest = b""
    for item in conversation:
        digest = sha256(digest + item.encode()).digest()
        yield digest


# ---------------------------------------------------------------- conversations


def conversation(messages: list[Message], tools: Tools) -> list[str]:
    """What a template reads, as comparable items: the tools, then each message.

    Ids of tool calls and reasoning are left out: programs need not send them back.
    """
    return [json.dumps(tools, sort_keys=True), *(comparable(message) for message in messages)]


def thoughts(messages: list[Message], first: int = 1) -> dict[int, str]:
    """Digests of the reasoning of the messages, by their places in the conversation, whose first
    item is the tools."""
    return {
        place: sha256(json.dumps(message["reasoning_content"]).encode()).hexdigest()
        for place, message in enumerate(messages, first)
        if message.get("reasoning_content")
    }


def comparable(message: Message) -> str:
    seen = {
        name: value
        for name, value in message.items()
        if name not in ("tool_call_id", "reasoning_content")
    }
    calls = seen.get("tool_calls")
    if calls:
        seen["tool_calls"] = [call["function"] for call in calls]
    return json.dumps(seen, sort_keys=True, default=repr)  # an image by its digest


class AgentChat:
    """A tokenizer's chat template for conversations with tools.

    Messages are as templates read them: ``content`` is text, or parts; the ``arguments`` of tool
    calls are values.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.knows_tools = knows_tools(tokenizer)

    def prompt(self, messages: list[Message], tools: Tools, recorder: Recorder) -> Ints:
        """The tokens that the model continues, from the recorded ones as far as those go."""
        earlier = recorder.extended_by(conversation(messages, tools), thoughts(messages))
        if earlier is not None:
            call, known = earlier  # the tools are the first item, so that ``known`` counts them too
            # The reply of the call ends with an end-of-sequence token, if the template ends
            # messages with one.
            eos = self.tokenizer.eos_token_id
            reply = messages[known - 2]
            further = messages[known - 1 :]
            count = template_tokens(
                self.tokenizer, [_QUESTION, reply], None, generation=False
            ).count(eos)
            framed = template_tokens(
                self.tokenizer, [_QUESTION, reply, *further], None, generation=True
            )
            if count and framed.count(eos) >= count:
                new = tokens_after(framed, eos, count)
                complete = len(call.action.tokens) > 0 and call.action.tokens[-1] == eos
                return joined(call.tokens, ints(new if complete else [eos, *new]))
        return ints(template_tokens(self.tokenizer, messages, tools, generation=True))


# ---------------------------------------------------------------- sequences

_SECRET = secrets.randbits(64)


def sequences(calls: Sequence[RecordedCall]) -> list[list[Segment]]:
    """The training sequences, in the order in which they ended: the last one has the last call.

    A call's prompt is compared with all sequences at once, by a hash of each beginning of its
    tokens. The hash is a sum of pseudo-random numbers, one for each token at its position, which a
    secret keeps from being predicted. It is wrong with probability 2**-64.
    """
    chains: list[list[RecordedCall]] = []
    ended: list[int] = []  # at which call
    # of the chains' tokens
    lengths = np.zeros(len(calls), np.int64)
    sums = np.zeros(len(calls), np.uint64)
    for number, call in enumerate(calls):
        positions = np.arange(len(call.tokens), dtype=np.uint64)
        numbers = splitmix(
            (call.tokens.astype(np.uint64) << np.uint64(32)) + positions ^ np.uint64(_SECRET)
        )
        prefixes = np.concatenate([np.zeros(1, np.uint64), np.cumsum(numbers, dtype=np.uint64)])
        count = len(chains)
        within = np.flatnonzero(lengths[:count] <= len(call.prompt))
        equal = within[prefixes[lengths[within]] == sums[within]].tolist()
        shown = [chains[index][-1].images for index in equal]
        extended = [
            index
            for index, images in zip(equal, shown, strict=True)
            if call.images[: len(images)] == images
        ]
        chain = min(extended, key=lambda index: (-lengths[index], ended[index]), default=count)
        if chain == count:
            chains.append([])
            ended.append(number)
        chains[chain].append(call)
        ended[chain] = number
        lengths[chain] = len(call.tokens)
        sums[chain] = prefixes[-1]
    return [_segments(chains[index]) for index in sorted(range(len(chains)), key=ended.__getitem__)]


def _segments(chain: list[RecordedCall]) -> list[Segment]:
    segments: list[Segment] = []
    done = known = shown = 0  # tokens of the sequence; those whose experts are known; its images
    for call in chain:
        between = call.prompt[done:]
        if len(between):
            kind: Literal["prompt", "observation"] = "observation" if segments else "prompt"
            segments.append(Segment(kind, between, images=call.images[shown:]))
        if call.action.experts is None:
            experts = None
        else:
            experts = call.action.experts[known:]
        segments.append(replace(call.action, experts=experts) if known else call.action)
        known += 0 if experts is None else len(experts)
        done = len(call.tokens)
        shown = len(call.images)
    return segments
