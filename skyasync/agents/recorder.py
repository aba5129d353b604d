"""Calls of one episode: recorded, continued, and as training sequences.

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
from numpy.typing import NDArray

from skyasync.agents.api import Message
from skyasync.arrays import Ints, ints, joined, splitmix
from skyasync.models.images import Images
from skyasync.rollout.chat import Tools, knows_tools, template_tokens, tokens_after
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Segment

#: In front of a reply whose tokens are counted: templates expect a message of the user there.
_QUESTION: Message = {"role": "user", "content": "x"}


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One answered request, as the engine has read and written it."""

    prompt: Ints  # [prompt length]
    action: Segment
    stop_reason: str = "stop"
    id: str = ""  # of the answer
    images: Images = ()  # of the prompt

    @cached_property
    def tokens(self) -> Ints:
        """Tokens of the prompt and the reply: ``[prompt length + reply length]``."""
        return joined(self.prompt, self.action.tokens)


Thoughts = Mapping[int, str]  # place in a conversation -> the reasoning of the message there
NO_THOUGHTS: Thoughts = MappingProxyType({})


@dataclass
class Recorder:
    """The calls in the order of their answers, and the conversation that each of them leads to."""

    calls: list[RecordedCall] = field(default_factory=list)
    #: By a digest of the conversation that ends with the reply.
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
        """The call whose conversation is the longest prefix of this one.

        Reasoning may be left out of a later request; if it is sent back, it must be the same.

        Returns:
            The call and the length of the prefix, or None.
        """
        digests = list(_digests(conversation))
        for length in range(len(conversation), 0, -1):
            # The newest first: equal texts may have been sampled as different tokens.
            for call, recorded in reversed(self._led_to.get(digests[length - 1], [])):
                if _agree(recorded, thoughts, length):
                    return call, length
        return None


def _agree(recorded: Thoughts, sent: Thoughts, length: int) -> bool:
    """Whether the reasoning that was sent back in a prefix is that which was recorded."""
    return all(
        recorded.get(position, "") == thought
        for position, thought in sent.items()
        if position < length
    )


def _digests(conversation: Iterable[str]) -> Iterator[bytes]:
    """A digest of each prefix of a conversation, in time and memory linear in its length."""
    digest = b""
    for item in conversation:
        digest = sha256(digest + item.encode()).digest()
        yield digest


# ---------------------------------------------------------------- conversations


def conversation(messages: list[Message], tools: Tools) -> list[str]:
    """The conversation of a template as comparable items: the tools, then the messages.

    Ids of tool calls and reasoning are left out: programs need not send them back.
    """
    return [json.dumps(tools, sort_keys=True), *(comparable(message) for message in messages)]


def thoughts(messages: list[Message], start: int = 1) -> dict[int, str]:
    """Digests of the reasoning of the messages, by their positions in the conversation.

    Args:
        start: position of the first message; by default after the tools, which are the first item.
    """
    digests = {}
    for position, message in enumerate(messages, start):
        reasoning = message.get("reasoning_content")
        if reasoning:
            digests[position] = sha256(json.dumps(reasoning).encode()).hexdigest()
    return digests


def comparable(message: Message) -> str:
    """The message as text that is equal if templates read it alike."""
    compared = dict(message)
    compared.pop("tool_call_id", None)
    compared.pop("reasoning_content", None)
    calls = compared.get("tool_calls")
    if calls:
        compared["tool_calls"] = [call["function"] for call in calls]
    return json.dumps(compared, sort_keys=True, default=repr)  # an image by its digest


class AgentChat:
    """A tokenizer's chat template for conversations with tools.

    Messages are as templates read them: ``content`` is text, or parts; the ``arguments`` of tool
    calls are values.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.knows_tools = knows_tools(tokenizer)

    def prompt(self, messages: list[Message], tools: Tools, recorder: Recorder) -> Ints:
        """The tokens that the model continues, ``[prompt length]``.

        They begin with the tokens of the recorded call that the conversation extends, if any.
        """
        extended = recorder.extended_by(conversation(messages, tools), thoughts(messages))
        if extended is not None:
            call, length = extended
            # The tools are the first item of the conversation: messages[length - 2] is the reply.
            reply = messages[length - 2]
            framed_reply = template_tokens(
                self.tokenizer, [_QUESTION, reply], None, generation=False
            )
            framed = template_tokens(
                self.tokenizer, [_QUESTION, *messages[length - 2 :]], None, generation=True
            )
            # The new tokens are those after the end-of-sequence token of the reply. A template that
            # ends messages in another way, or drops the reply, gives no place to continue at.
            eos = self.tokenizer.eos_token_id
            count = framed_reply.count(eos)
            if count and framed.count(eos) >= count:
                new_tokens = tokens_after(framed, eos, count)
                complete = len(call.action.tokens) > 0 and call.action.tokens[-1] == eos
                if not complete:  # cut by its length, or by a stop string
                    new_tokens = [eos, *new_tokens]
                return joined(call.tokens, ints(new_tokens))
        return ints(template_tokens(self.tokenizer, messages, tools, generation=True))


# ---------------------------------------------------------------- sequences

_SECRET = secrets.randbits(64)  # of this process


def sequences(calls: Sequence[RecordedCall]) -> list[list[Segment]]:
    """The training sequences, in the order in which they ended: the last one has the last call.

    A call's prompt is compared with all sequences at once, by a hash of each beginning of its
    tokens. The hash is a sum of pseudo-random numbers, one for each token at its position, which a
    secret keeps from being predicted. It is wrong with probability 2**-64.
    """
    chains: list[list[RecordedCall]] = []
    ended: list[int] = []  # [chains]: the number of the newest call
    # At most one chain for each call.
    lengths = np.zeros(len(calls), np.int64)  # [calls]: tokens of a chain
    hashes = np.zeros(len(calls), np.uint64)  # [calls]: of all these tokens
    for number, call in enumerate(calls):
        prefixes = _prefix_hashes(call.tokens)  # [length + 1]
        count = len(chains)
        shorter = np.flatnonzero(lengths[:count] <= len(call.prompt))  # [candidates]
        equal = shorter[prefixes[lengths[shorter]] == hashes[shorter]]  # [candidates]
        # Images have equal placeholder tokens.
        extended = [index for index in equal.tolist() if _begins_with(call, chains[index][-1])]
        # The longest, and of equal ones the chain that ended first.
        chain = min(extended, key=lambda index: (-lengths[index], ended[index]), default=count)
        if chain == count:
            chains.append([])
            ended.append(number)
        chains[chain].append(call)
        ended[chain] = number
        lengths[chain] = len(call.tokens)
        hashes[chain] = prefixes[-1]
    order = sorted(range(len(chains)), key=ended.__getitem__)
    return [_segments(chains[index]) for index in order]


def _prefix_hashes(tokens: Ints) -> NDArray[np.uint64]:
    """Hashes of the prefixes of ``[length]`` tokens, from the empty one on: ``[length + 1]``."""
    positions = np.arange(len(tokens), dtype=np.uint64)
    # A token id has at most 32 bits, and so has its position.
    states = (tokens.astype(np.uint64) << np.uint64(32)) + positions  # [length], all different
    sums = np.cumsum(splitmix(states ^ np.uint64(_SECRET)), dtype=np.uint64)  # modulo 2**64
    return np.concatenate([np.zeros(1, np.uint64), sums])


def _begins_with(call: RecordedCall, earlier: RecordedCall) -> bool:
    """Whether the images of a call begin with those of an earlier one."""
    return call.images[: len(earlier.images)] == earlier.images


def _segments(chain: list[RecordedCall]) -> list[Segment]:
    """The sequence of calls that extend each other: prompt, action, observation, action, ..."""
    segments: list[Segment] = []
    length = 0  # tokens of the sequence
    routed = 0  # tokens of the sequence whose experts are recorded
    images = 0  # images of the sequence
    for call in chain:
        new_tokens = call.prompt[length:]
        if len(new_tokens):
            kind: Literal["prompt", "observation"] = "observation" if segments else "prompt"
            segments.append(Segment(kind, new_tokens, images=call.images[images:]))
        action = call.action
        if action.experts is not None and routed:
            # An engine reports the experts from the first token of the prompt on.
            action = replace(action, experts=action.experts[routed:])
        segments.append(action)
        if action.experts is not None:
            routed += len(action.experts)
        length = len(call.tokens)
        images = len(call.images)
    return segments
