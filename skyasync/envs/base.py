"""The environment of one episode: it frames the prompt, reads each action, answers and rewards.

Invariant: an environment says text only. Tokens, log-probabilities and versions never pass through it; one that asks
for it is shown the tokens of a turn (``sees_tokens``), to judge them.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, NotRequired, TypedDict

from skyasync.envs.tools import answer_to, read_tool_calls

Message = dict[str, str]
Conversation = list[Message]


class BaseTextEnvStepOutput(TypedDict):
    """What a step gives.

    ``observations`` are new messages (may be none; text of its own in an environment with ``raw_text``), ``reward`` is
    a finite number, ``metadata`` stays with the environment. ``sampling_params`` changes how the next action of this
    episode is sampled: names of ``SamplingParams`` and their new values.
    """

    observations: Conversation | str
    reward: float
    done: bool
    metadata: dict[str, Any]
    sampling_params: NotRequired[dict[str, Any]]


class Seen(NamedTuple):
    """What the model read before an action and what it wrote, as the engine had it; texts with their special tokens."""

    read: str
    wrote: str
    prompt_ids: list[int]
    completion_ids: list[int]


class BaseTextEnv:
    """Subclass this and override ``step``.

    ``init``, ``step`` and ``close`` may be ``async def``; those of one class that is not run in threads, so that a
    step that waits holds up no other episode.

    Args:
        env_config: the run's ``environment.env_config``.
        extras: every column of the dataset's row besides the prompt (answer, label, ...).
    """

    #: The prompt comes and observations go as plain text, appended as it is: no chat template, no ends of messages.
    #: Actions then come with their special tokens.
    raw_text: ClassVar[bool] = False

    #: The turn that ``step`` is asked about, where ``sees_tokens``.
    seen: Seen | None = None

    #: The conversation (or text) that the episode starts from, where the class has the ``init`` that stands here.
    opening: Any = ()

    @classmethod
    def instant(cls, env_config: dict[str, Any], extras: dict[str, Any]) -> bool:
        """Whether such an episode costs next to nothing whatever the response is.

        It is then played beside the generator, without a process of its own and without a limit.
        """
        return False

    @classmethod
    def sees_tokens(cls, env_config: dict[str, Any], extras: dict[str, Any]) -> bool:
        """Whether such an episode is shown the tokens of each turn, in ``self.seen``."""
        return False

    @classmethod
    def load(cls, env_config: dict[str, Any]) -> None:
        """Get ready what all episodes share (imports, files, models).

        Called once in every process that runs these environments, before their first episode; no time limit of a step
        holds here.
        """

    def __init__(self, env_config: dict[str, Any] | None = None, extras: dict[str, Any] | None = None) -> None:
        self.env_config = env_config or {}
        self.extras = extras or {}
        self.turns = 0

    def init(self, prompt: Any) -> Any:
        """The conversation (or text) that the episode starts from, and a dictionary of the environment's own."""
        self.opening = prompt
        return prompt, {}

    def step(self, action: str) -> Any:
        """Judge one response of the model; returns a ``BaseTextEnvStepOutput``."""
        raise NotImplementedError(f"{type(self).__name__} must define step(action)")

    def call_tools(self, action: str) -> tuple[str, Conversation]:
        """Carry out the tool calls in an action; returns its text in front of them, and the tools' answers.

        The tools are the methods marked with ``skyasync.envs.tool``, and the model is shown them in its prompt. Without
        calls the answers are empty, and the text is the whole action.
        """
        text, calls = read_tool_calls(action)
        return text, [answer_to(call, self) for call in calls]

    def close(self) -> Any:
        """Release what the episode holds. Called once, also after an error."""

    def get_metrics(self) -> dict[str, float]:
        """Numbers worth averaging over episodes."""
        return {}
