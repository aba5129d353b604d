"""The environment of one episode, and the checks of its return values.

An environment reads and writes text only. Tokens, log-probabilities and versions never pass through
it. One with ``sees_tokens`` can read the tokens of a turn to reward them.

Invariant: what has passed ``check_prompt``, ``check_step`` and ``check_metrics`` is text of bounded
length, finite rewards and metrics, and ``done`` as a bool; everything else raises
``InvalidEnvOutputError`` with the value found.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import fields
from numbers import Real
from typing import Any, ClassVar, NamedTuple, NotRequired, TypedDict, cast

from skyasync.envs.images import read_messages
from skyasync.envs.tools import answer_to, read_tool_calls
from skyasync.errors import NonFiniteRewardError, UserError, unknown
from skyasync.inference.interface import SamplingParams

FLOAT_BITS = 1023  # a larger integer may not fit into a float: converting it raises OverflowError
MAX_OBSERVATION_CHARS = 200_000  # a longer observation is a mistake: it would fill any context
STEP_FORM = "return a dictionary with observations, reward and done (BaseTextEnvStepOutput)"
_HALF_PAIR = re.compile("[\ud800-\udfff]")  # UTF-16 writes some characters as a pair of these
SAMPLING = frozenset(field.name for field in fields(SamplingParams))

Message = dict[str, str]
Conversation = list[Message]
Metrics = dict[str, float]
EnvConfig = dict[str, Any]  # settings of environments
Row = dict[str, Any]  # columns of a data set's row, without the prompt


class BaseTextEnvStepOutput(TypedDict):
    """The return value of a step.

    ``observations`` are new messages (may be none; text in an environment with ``raw_text``),
    ``reward`` is a finite number, ``metadata`` stays with the environment. ``sampling_params``
    changes how the next action of this episode is sampled: names of ``SamplingParams`` and their
    new values.
    """

    observations: Conversation | str
    reward: float
    done: bool
    metadata: dict[str, Any]
    sampling_params: NotRequired[dict[str, Any]]


class TurnTokens(NamedTuple):
    """The text and tokens that the model read before an action, and those that it wrote.

    They are the engine's; texts have their special tokens.
    """

    read: str
    wrote: str
    prompt_ids: list[int]
    completion_ids: list[int]


class BaseTextEnv:
    """Subclass this and override ``step``.

    ``init``, ``step`` and ``close`` may be ``async def``. They then share an event loop; plain
    methods run in threads. Either way, a step that waits does not hold up other episodes.

    Args:
        env_config: the run's ``environment.env_config``.
        extras: every column of the dataset's row besides the prompt (answer, label, ...).
    """

    #: The prompt and observations are plain text, appended unchanged: no chat template, no ends of
    #: messages. Actions then have their special tokens.
    raw_text: ClassVar[bool] = False

    #: The turn that ``step`` rewards, if ``sees_tokens``.
    seen: TurnTokens | None = None

    #: The conversation (or text) that the episode starts from, if the class has this ``init``.
    opening: Any = ()

    @classmethod
    def as_environment(cls, name: str, kwargs: Mapping[str, object]) -> type[BaseTextEnv]:
        """The class of the environment ``name``, with ``kwargs`` as further arguments."""
        if not kwargs:
            return cls

        def __init__(self: BaseTextEnv, **arguments: object) -> None:
            cls.__init__(self, **arguments, **kwargs)  # type: ignore[arg-type]

        return type(cls.__name__, (cls,), {"__init__": __init__})

    @classmethod
    def instant(cls, env_config: EnvConfig, extras: Row) -> bool:
        """Whether an episode with these settings costs next to nothing for any response.

        It is then played in the process of the generator, without a time limit.
        """
        return False

    @classmethod
    def graded_by(cls, env_config: EnvConfig, extras: Row) -> list[tuple[str, float]]:
        """A row's reward functions with their weights if a judge is among them; else nothing."""
        return []

    @classmethod
    def sees_tokens(cls, env_config: EnvConfig, extras: Row) -> bool:
        """Whether episodes with these settings have the tokens of each turn in ``self.seen``."""
        return False

    @classmethod
    def load(cls, env_config: EnvConfig) -> None:
        """Prepare what all episodes share (imports, files, models).

        Called once in every process that runs these environments, before their first episode,
        without a time limit.
        """

    def __init__(self, env_config: EnvConfig | None = None, extras: Row | None = None) -> None:
        self.env_config = env_config or {}
        self.extras = extras or {}
        self.turns = 0

    def init(self, prompt: Any) -> Any:
        """Returns the conversation (or text) that the episode starts from, and a dictionary."""
        self.opening = prompt
        return prompt, {}

    def step(self, action: str) -> Any:
        """Reward one response of the model; returns a ``BaseTextEnvStepOutput``."""
        raise NotImplementedError(f"{type(self).__name__} must define step(action)")

    def call_tools(self, action: str) -> tuple[str, Conversation]:
        """Carry out the tool calls in an action; returns the text before them, and the answers.

        The tools are the methods marked with ``skyasync.envs.tool``. The model's prompt describes
        them. Without calls the answers are empty, and the text is the complete action.
        """
        text, calls = read_tool_calls(action)
        return text, [answer_to(call, self) for call in calls]

    def close(self) -> Any:
        """Release what the episode holds. Called once, also after an error."""

    def get_metrics(self) -> Metrics:
        """Numbers worth averaging over episodes."""
        return {}


class InvalidEnvOutputError(ValueError):
    """An environment returned an invalid value."""


def check_prompt(start: object, *, raw: bool) -> Conversation | str:
    """The conversation in the return value of ``init``, as messages (or, if ``raw``, as text)."""
    if not isinstance(start, tuple) or len(start) != 2:
        raise InvalidEnvOutputError(
            f"init must return (conversation, info); it returned {reprlib.repr(start)}"
        )
    return _checked_text(start[0], "init's conversation", raw)


def check_step(
    output: object, *, raw: bool, most_chars: int = MAX_OBSERVATION_CHARS
) -> dict[str, Any]:
    """``observations``, ``reward``, ``done`` and ``sampling_params`` of a step, checked.

    Raises:
        InvalidEnvOutputError, NonFiniteRewardError: for an invalid output.
    """
    if not isinstance(output, Mapping):
        raise InvalidEnvOutputError(
            f"step must return a dictionary; it returned {reprlib.repr(output)}: {STEP_FORM}"
        )
    missing = [name for name in ("observations", "reward", "done") if name not in output]
    if missing:
        raise InvalidEnvOutputError(
            f"step's output lacks {', '.join(missing)}; it has: {', '.join(map(str, output))}"
        )
    observations = _checked_text(output["observations"], "step's observations", raw)
    chars = _length(observations)
    reward = _number(output["reward"], "the reward")
    done = output["done"]
    try:
        is_flag = done in (True, False)  # by equality: also numpy's truth values
    except ValueError:  # an array, whose comparison is no truth value
        is_flag = False
    if not is_flag:
        raise InvalidEnvOutputError(f"done is {reprlib.repr(done)}; it must be true or false")
    if chars > most_chars:
        raise InvalidEnvOutputError(
            f"the observation has {chars:,} characters; at most {most_chars:,} are allowed"
        )
    changes: Mapping[str, Any] = output.get("sampling_params") or {}
    return {
        "observations": observations,
        "reward": reward,
        "done": bool(done),
        "sampling_params": _checked_sampling(changes) if changes else {},
    }


def _length(observations: Conversation | str) -> int:
    """The number of characters; a message's content may be a list of parts."""
    if isinstance(observations, str):
        return len(observations)
    chars = 0
    for message in observations:
        content = message["content"]
        if isinstance(content, str):
            chars += len(content)
        else:
            chars += sum(len(str(part)) for part in content)
    return chars


def _checked_sampling(changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changed values as ``SamplingParams`` has them, which checks and converts them."""
    for name in changes:
        if name not in SAMPLING:
            raise InvalidEnvOutputError(
                unknown("name in step's sampling_params", str(name), SAMPLING)
            )
    try:
        # Checked here, so that an invalid value is an error of the environment, not of the engine.
        sampling = SamplingParams(**changes)
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidEnvOutputError(f"step's sampling_params: {error}") from None
    return {name: vars(sampling)[name] for name in changes}


def check_metrics(metrics: object) -> Metrics:
    if not isinstance(metrics, Mapping):
        raise InvalidEnvOutputError(
            f"get_metrics must return a dictionary; it returned {reprlib.repr(metrics)}"
        )
    return {str(name): _number(value, f"the metric {name}") for name, value in metrics.items()}


def _checked_text(messages: object, subject: str, raw: bool) -> Conversation | str:
    if raw:
        if not isinstance(messages, str):
            raise InvalidEnvOutputError(
                f"{subject} must be text, since the environment has raw_text; found {reprlib.repr(messages)}"
            )
        return _without_half_pairs(messages)
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise InvalidEnvOutputError(
            f"{subject} must be a list of messages with a role and a content; found {reprlib.repr(messages)}"
        )
    try:
        # ``Conversation`` has texts; with images a content is a list of parts.
        return cast(Conversation, read_messages(_without_half_pairs(messages)))
    except UserError as error:  # an image of this episode cannot be read: the run continues
        raise InvalidEnvOutputError(f"{subject}: {error}") from error


def _is_message(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return isinstance(value.get("role"), str) and isinstance(value.get("content"), str | list)


def _without_half_pairs(value: Any) -> Any:
    """The value with half surrogate pairs replaced in all text.

    No tokenizer takes them, and a tool may repeat those that a model wrote.
    """
    if isinstance(value, str):
        return _HALF_PAIR.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, Mapping):
        return {name: _without_half_pairs(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_half_pairs(item) for item in value]
    return value


def _number(value: object, subject: str) -> float:
    if isinstance(value, int) and value.bit_length() > FLOAT_BITS:
        raise NonFiniteRewardError(
            f"{subject} is an integer of {value.bit_length()} bits; it must be a finite number"
        )
    kind: type[Exception] = InvalidEnvOutputError
    if isinstance(value, Real) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
        kind = NonFiniteRewardError
    raise kind(f"{subject} is {reprlib.repr(value)}; it must be a finite number")
