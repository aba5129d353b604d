"""Conversations with tools to tokens, going on from the tokens that were recorded.

Invariant: a conversation that extends a recorded call begins with exactly that call's tokens; only what was said
since is tokenised. Any other conversation is tokenised from its text.
"""

from __future__ import annotations

import json
from hashlib import sha256

from skyasync.arrays import Ints, ints, joined
from skyasync.endpoint.forms.inner import Message
from skyasync.endpoint.recorder import Call, Recorder
from skyasync.rollout.chat import Tools, knows_tools
from skyasync.rollout.tokenizer import Tokenizer

_QUESTION: Message = {"role": "user", "content": "x"}


class AgentChat:
    """A tokenizer's chat template, in the forms that agents need.

    Messages are in the form of templates: ``content`` is text, the ``arguments`` of tool calls are values, not JSON.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.knows_tools = knows_tools(tokenizer)

    def prompt(self, messages: list[Message], tools: Tools, recorder: Recorder) -> Ints:
        """The tokens that the model continues, from the recorded ones as far as those go."""
        found = recorder.extended_by(conversation(messages, tools), thoughts(messages))
        if found is not None:
            call, known = found  # the tools are the first item, so that ``known`` counts them too
            since = self._since(messages[known - 2], messages[known - 1 :], call)
            if since is not None:
                return joined(call.tokens, ints(since))
        return ints(self._frame(messages, tools, generation=True))

    def _since(self, reply: Message, messages: list[Message], call: Call) -> list[int] | None:
        """The tokens behind a call's reply, up to the model's next message; None if the template does not tell.

        A template ends each message with the end-of-sequence token, and counting these finds the place behind the reply
        even if the template frames earlier messages anew (an emptied thinking part).
        """
        eos = self.tokenizer.eos_token_id
        ends = self._frame([_QUESTION, reply], None, generation=False).count(eos)
        framed = self._frame([_QUESTION, reply, *messages], None, generation=True)
        places = [t for t, token in enumerate(framed) if token == eos]
        if not ends or len(places) < ends:
            return None
        tail = framed[places[ends - 1] + 1 :]
        ended = len(call.action.tokens) > 0 and call.action.tokens[-1] == eos
        return tail if ended else [eos, *tail]  # a reply that was cut is ended first

    def _frame(self, messages: list[Message], tools: Tools, *, generation: bool) -> list[int]:
        return self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, add_generation_prompt=generation, return_dict=False
        )


def conversation(messages: list[Message], tools: Tools) -> list[str]:
    """What a template sees, as comparable items: the tools, then each message. Ids of tool calls are left out, and
    reasoning: programs need not send it back."""
    return [json.dumps(tools, sort_keys=True), *(comparable(message) for message in messages)]


def thoughts(messages: list[Message], first: int = 1) -> dict[int, str]:
    """Digests of the reasoning of the messages, by their places in the conversation, where the tools are in front."""
    said = {place: m["reasoning_content"] for place, m in enumerate(messages, first) if m.get("reasoning_content")}
    return {place: sha256(json.dumps(thought).encode()).hexdigest() for place, thought in said.items()}


def comparable(message: Message) -> str:
    seen = {name: value for name, value in message.items() if name not in ("tool_call_id", "reasoning_content")}
    if calls := seen.get("tool_calls"):
        seen["tool_calls"] = [call["function"] for call in calls]
    return json.dumps(seen, sort_keys=True)
