"""What every inference engine offers, and the words it is spoken to in.

Invariant: a request is answered exactly once, with one behaviour log-probability and one policy version
per generated token. Versions are stamped by the engine, at the token, and never changed afterwards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, nextafter
from numbers import Integral, Real
from typing import Any, Literal, Protocol, cast

import numpy as np

from skyasync.arrays import NO_FLOATS, NO_INTS, Experts, Floats, Ints, floats, ints
from skyasync.config.generation import INT32, SamplingConfig
from skyasync.config.keys import Key, Keys
from skyasync.errors import UserError
from skyasync.registry import Registry
from skyasync.weight_sync.update import TakerDiedError, WakePart, WeightUpdate

FinishReason = Literal["stop", "length", "abort", "error"]
PauseMode = Literal["keep", "abort", "wait"]


#: What the numbers of ``SamplingParams`` may be, by their names: the bounds of the settings (of lists, of each member).
LIMITS: dict[str, Key] = {
    "max_tokens" if key.name == "max_generate_length" else key.name: key
    for key in Keys.of(SamplingConfig)
    if key.bounds()
}
_PLAIN: list[tuple[str, Any, float, float]] = [
    (name, key.type, nextafter(key.above or 0.0, inf) if key.low is None else key.low, key.high or 0.0)
    for name, key in LIMITS.items()
]
LARGEST_BIAS = 100


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response; the names and meanings are those of vLLM's ``SamplingParams``.

    ``top_k <= 0`` is off, and so is an empty list. Log-probabilities are reported of the distribution that was really
    sampled from: after bans, bias, penalties, temperature, min-p, top-k and top-p. ``temperature = 0`` is greedy
    (log-probabilities then are those of the untempered, unfiltered distribution).

    ``include_stop_str_in_output`` and ``skip_special_tokens`` are about the text that is made of the response: its
    tokens always hold the stop string. ``structured_outputs`` and ``repetition_detection`` (the fields of vLLM's
    classes of these names) are for vLLM only.

    Whoever says a list, one text, None, or tokens as JSON has them says the same: it is stored in one form, which can
    be compared and be a key.

    Invariant: the numbers are within ``LIMITS``, so that no engine meets one that its int32 or float32 cannot hold.

    Raises:
        TypeError: naming the field, where its members are not texts or tokens, or its value is no number.
        ValueError: naming the field, where a number is out of its bounds or a text is no Unicode.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = True
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    seed: int | None = None
    structured_outputs: dict[str, Any] = field(default_factory=dict)
    repetition_detection: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settle = object.__setattr__  # the class is frozen for everybody else
        for name in ("stop", "bad_words"):
            settle(self, name, _members(name, getattr(self, name), str))
        for name in ("stop_token_ids", "allowed_token_ids"):
            settle(self, name, _members(name, getattr(self, name), Integral))
        bias = self.logit_bias or {}
        settle(self, "logit_bias", {int(token): float(value) for token, value in bias.items()})
        for token, value in self.logit_bias.items():
            if not (0 <= token <= INT32 and abs(value) <= LARGEST_BIAS):
                problem = f"a token's id and a number from -{LARGEST_BIAS} to {LARGEST_BIAS}"
                raise ValueError(f"logit_bias has {token}: {value}, which is not {problem}")
        for name, plain, low, high in _PLAIN:  # what most requests have is seen at once
            value = getattr(self, name)
            kind = type(value)
            if not (low <= value <= high if kind is plain else kind is tuple and not value):
                _check_number(name, LIMITS[name], value)


def _check_number(name: str, limits: Key, value: object) -> None:
    if isinstance(value, tuple):
        for member in value:
            _check_number(name, limits, member)
        return
    if value is None and name == "seed":
        return
    kind = Real if limits.type is float else Integral
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r:.100}, not a {'' if kind is Real else 'whole '}number")
    if not limits.allows(cast(float, value)):
        raise ValueError(f"{name} is {value!r:.100}, not {limits.bounds()}")


def _members(name: str, said: str | Iterable[object] | None, kind: type) -> tuple[Any, ...]:
    members: tuple[Any, ...] = (said,) if isinstance(said, str) else tuple(said or ())
    if not all(isinstance(member, kind) for member in members):
        raise TypeError(f"{name} must be {'texts' if kind is str else 'token ids'}; found {said!r:.200}")
    if kind is str and not all(_is_unicode(member) for member in members):
        raise ValueError(f"{name} has half of a surrogate pair, which is no character")
    return members if kind is str else tuple(int(member) for member in members)


def _is_unicode(text: Any) -> bool:  # noqa: ANN401  (a text)
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One sequence to be continued. ``session_id`` keeps a conversation on the engine that has its cache.

    The prompt is int32 ``[tokens]``; lists become that.
    """

    request_id: str
    prompt_token_ids: Ints
    sampling: SamplingParams
    session_id: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", ints(self.prompt_token_ids))


@dataclass(eq=False)
class GenerationOutput:
    """The response to one request: three arrays of the same length, int32, float32 and int32; lists become that.

    With ``finish_reason == "abort"`` they hold what had been generated before the request was cut.
    A token that ended the response (end-of-sequence, stop token) is part of it.

    ``experts``, from an engine that is asked for them: of each token that it has computed, from the prompt's first to
    the last but one of the response; in ``progress`` of those that are new.

    With ``finish_reason == "error"`` this request alone could not be answered, and ``error`` says why; the engine and
    all other requests go on. The client makes a ``RequestFailedError`` of it.
    """

    request_id: str
    token_ids: Ints = field(default_factory=lambda: NO_INTS)
    logprobs: Floats = field(default_factory=lambda: NO_FLOATS)
    versions: Ints = field(default_factory=lambda: NO_INTS)
    finish_reason: FinishReason | None = None
    experts: Experts | None = None
    error: str = ""

    def __post_init__(self) -> None:
        self.token_ids, self.logprobs, self.versions = ints(self.token_ids), floats(self.logprobs), ints(self.versions)

    def __reduce__(
        self,
    ) -> tuple[Callable[..., GenerationOutput], tuple[str, bytes, FinishReason | None, Experts | None, str]]:
        """Three arrays as one string of bytes: pickling arrays costs as much as pickling hundreds of tokens."""
        parts = (self.token_ids, self.logprobs, self.versions)
        packed = b"".join(part.tobytes() for part in parts)
        return _unpacked, (self.request_id, packed, self.finish_reason, self.experts, self.error)

    def until(self, count: int, finish_reason: FinishReason) -> GenerationOutput:
        """The same, ended behind its first ``count`` tokens."""
        known = None if self.experts is None else self.experts[: len(self.experts) + count - len(self.token_ids)]
        tokens, logprobs, versions = self.token_ids[:count], self.logprobs[:count], self.versions[:count]
        return GenerationOutput(self.request_id, tokens, logprobs, versions, finish_reason, known)


def _unpacked(
    request_id: str, packed: bytes, finish_reason: FinishReason | None, experts: Experts | None, error: str
) -> GenerationOutput:
    token_ids, logprobs, versions = np.frombuffer(packed, dtype=np.int32).reshape(3, -1)
    return GenerationOutput(request_id, token_ids, logprobs.view(np.float32), versions, finish_reason, experts, error)


class RequestFailedError(UserError):
    """One request cannot be answered, through no fault of the engine, which goes on with the others."""


def refusal(request: GenerationRequest, error: Exception) -> GenerationOutput:
    """The answer to a request that cannot be answered."""
    why = str(error) if isinstance(error, RequestFailedError) else f"{type(error).__name__}: {error}"
    name = request.request_id
    return GenerationOutput(name, finish_reason="error", error=f"request {name!r} cannot be answered: {why:.1000}")


class EngineDiedError(TakerDiedError):
    """The engine can answer nothing any more; whatever it was computing is lost."""


@dataclass
class EngineStats:
    """Counters since start: ``busy_s`` is wall time with at least one request running. ``cache_tokens``: those that its
    cache holds, 0 where there is no such number. ``cache_used``: how many of them running requests take now; None where
    nobody knows. ``gone``: the engine has left, and others are counted without it."""

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    paused_s: float = 0.0
    cache_tokens: int = 0
    gone: bool = False
    cache_used: int | None = None


class InferenceEngine(Protocol):
    """One engine. All methods may be called at any time from one event loop; none blocks it."""

    async def start(self) -> None:
        """Load the model. Raises what loading raised."""

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[GenerationOutput]]:
        """Answer each request once, in lists, as they finish. What it raises fails all of them: what is wrong with one
        request alone is that request's answer, with ``finish_reason="error"``."""

    async def progress(self) -> list[GenerationOutput]:
        """What is new of every unanswered request since the last call; ``finish_reason`` is None.

        Answers between two tokens, paused or not: who asks knows that the engine lives. The answer to a request is
        whole, whatever has been told of it before. An engine may leave requests out, and may lack the method: then
        nothing is known of its requests when it dies.
        """

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token after the first under the current weights, temperature 1."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop computing tokens: keep requests with their cache, abort them, or wait until they finish.

        New requests are accepted while paused and start after ``resume``.
        """

    async def resume(self) -> None:
        """Go on with the kept and the new requests."""

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (all of them: None) with ``finish_reason="abort"``; unknown ids are ignored."""

    async def update_weights(self, update: WeightUpdate) -> Sequence[str] | None:
        """Fetch and load the weights; tokens computed afterwards carry ``update.version``.

        Returns the weights of which the engine could never see that it holds what was sent, for the probe to be run
        after every sync; None is of none. The caller has paused the engine or knows it idle.
        """

    async def sleep(self) -> None:
        """Free the memory of cache (and weights, where the engine can). Only when idle."""

    async def wake(self, part: WakePart) -> None:
        """Undo ``sleep`` in two steps: room for the weights, then, once they have been updated, for the cache.

        The next request comes behind both.
        """

    async def stats(self) -> EngineStats: ...

    async def shutdown(self) -> None:
        """Release everything the engine holds. Safe to call twice."""


#: Methods that an engine of one's own may lack: nothing is known of its requests until they are answered.
MAY_LACK = ("progress",)


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with.

    Args:
        model_path: a Hugging Face folder or name, weights as safetensors.
        dtype: "auto", "float32" or "bfloat16"; auto is float32 on a CPU.
        threads: CPU threads for this engine; 0 leaves the library's default.
        max_num_batched_tokens: per step, prompts included; 0 is the engine's own choice.
        version: the policy version of the weights in ``model_path``.
    """

    model_path: str
    dtype: str = "auto"
    max_model_len: int = 1024
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 0
    threads: int = 0
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.8
    seed: int = 0
    version: int = 0
    weight_sync_backend: str = "shared_memory"
    kv_cache_gb: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)


ENGINES = Registry(
    "engine",
    [
        "skyasync.engines.embedded.engine",
        "skyasync.engines.vllm.engine",
        "skyasync.engines.vllm.server",
        "skyasync.engines.sglang.server",
    ],
    capabilities={
        "tensor_parallel": False,  # one engine may take several GPUs
        "weight_sync": ("shared_memory",),  # how weights may reach it
        "computes_on_mapped_weights": False,  # those that lie in memory of the machine, which are swapped under it
        "reads_mapped_weights": False,  # those that lie there, into weights of its own
        "loads_as_files": False,  # wants weights by the names of the model's files, not of transformers' parameters
        "takes_changes": False,  # can be sent what has changed of weights alone
        "takes_adapters": (),  # of "layers" and "head": what adapters alone may be of, which it adds to its weights
        "adaptable": "",  # module:function(config.json, gpus=) that says why it has no adapters of such a model, or ""
        "forgets_asleep": False,  # its weights are gone after ``sleep``
        "hands_back": False,  # says what version it holds (``held_version``), and writes it to a file (``hand_back``)
        "returns_experts": False,  # can say which experts a mixture's routers chose
        "sleeps_on": (),  # of "cpu" and "gpu": where it can give its memory away
        "sampling": (),  # settings of generator.sampling_params that not every engine has
        "lacks": (),  # of those that others have, the ones that it has not
        "elsewhere": False,  # servers of generator.engines, which somebody else has started
        "options": "",  # module:function that says what is wrong with generator.engine_kwargs; none takes none
        "extra": "",  # of this library, that installs what it needs
    },
)
