"""The engine interface: requests, answers, the base class of engines and the table of backends.

Invariant: a request is answered exactly once, with one behaviour log-probability and one policy
version per generated token. The engine records the version with the token, and it never changes
afterwards.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, nextafter
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, cast

import numpy as np

from skyasync.arrays import NO_FLOATS, NO_INTS, Experts, Floats, Ints, floats, ints
from skyasync.config.keys import Key, Keys
from skyasync.config.schema.sampling import INT32, LARGEST_BIAS, SamplingConfig
from skyasync.errors import UserError
from skyasync.models.images import Images
from skyasync.registry import About, Registry, resolve_reference
from skyasync.weight_sync.update import WakePart, WeightReceiverFailedError, WeightUpdate

FinishReason = Literal["stop", "length", "abort", "error"]
PauseMode = Literal["keep", "abort", "wait"]


#: Bounds of the numbers of ``SamplingParams`` by their names; in lists, of each member.
LIMITS: dict[str, Key] = {}
# (name, type, smallest, largest): what most requests satisfy, in a form that is quick to compare.
_PLAIN: list[tuple[str, Any, float, float]] = []
for _key in Keys.of(SamplingConfig):
    if _key.bounds():
        _name = "max_tokens" if _key.name == "max_generate_length" else _key.name
        LIMITS[_name] = _key
        _low = nextafter(_key.above or 0.0, inf) if _key.low is None else _key.low
        _PLAIN.append((_name, _key.type, _low, _key.high or 0.0))
_SEQUENCES: dict[str, type] = {
    "stop": str,
    "bad_words": str,
    "stop_token_ids": Integral,
    "allowed_token_ids": Integral,
}


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one response's sampling, with the names and meanings of vLLM's class.

    ``top_k <= 0`` is off, and so is an empty list. Log-probabilities are reported of the
    distribution that was really sampled from: after bans, bias, penalties, temperature, min-p,
    top-k and top-p. ``temperature = 0`` is greedy (log-probabilities then are those of the
    untempered, unfiltered distribution).

    ``include_stop_str_in_output`` and ``skip_special_tokens`` affect the text of the response: its
    tokens always contain the stop string. ``structured_outputs`` and ``repetition_detection`` (the
    fields of vLLM's classes of these names) are for vLLM only.

    A list, one text, None, and the keys of JSON are accepted. They are stored in one form, which
    can be compared and be the key of a dict.

    Invariant: the numbers are within ``LIMITS``, so that no engine meets one that its int32 or
    float32 cannot hold.

    Raises:
        TypeError: naming the field, where its members are not texts or tokens, or its value is no
            number.
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
        store = object.__setattr__  # the class is frozen for its users
        values = vars(self)
        for name, kind in _SEQUENCES.items():
            value: Any = values[name]
            members = (value,) if isinstance(value, str) else tuple(value or ())
            if not all(isinstance(member, kind) for member in members):
                expected = "texts" if kind is str else "token ids"
                raise TypeError(f"{name} must be {expected}; found {value!r:.200}")
            if kind is str:
                try:
                    "".join(members).encode()
                except UnicodeEncodeError:
                    raise ValueError(
                        f"{name} has half of a surrogate pair, which is not a character"
                    ) from None
                store(self, name, members)
            else:
                store(self, name, tuple(map(int, members)))
        biases = self.logit_bias or {}
        biases = {int(token): float(bias) for token, bias in biases.items()}
        store(self, "logit_bias", biases)
        for token, bias in biases.items():
            if not (0 <= token <= INT32 and abs(bias) <= LARGEST_BIAS):
                problem = f"a token's id and a number from -{LARGEST_BIAS} to {LARGEST_BIAS}"
                raise ValueError(f"logit_bias has {token}: {bias}, which is not {problem}")
        for name, plain, low, high in _PLAIN:
            value = values[name]
            kind = type(value)
            if kind is plain:
                if low <= value <= high:
                    continue  # so it is in most requests
            elif kind is tuple and not value:
                continue
            limits = LIMITS[name]
            number = Real if limits.type is float else Integral
            for member in value if kind is tuple else (value,):
                if member is None and name == "seed":
                    continue
                if not isinstance(member, number) or isinstance(member, bool):
                    expected = "a number" if number is Real else "a whole number"
                    raise TypeError(f"{name} is {member!r:.100}, not {expected}")
                if not limits.allows(cast(float, member)):
                    raise ValueError(f"{name} is {member!r:.100}, not {limits.bounds()}")

    def with_seed(self, seed: int | None) -> SamplingParams:
        """A copy with another seed; the other values are not checked again."""
        sampling = copy(self)
        object.__setattr__(sampling, "seed", seed)
        return sampling


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """One sequence to be continued.

    Args:
        prompt_token_ids: int32 ``[tokens]``; lists become arrays. It has the placeholders of its
            ``images`` as the model reads them (``ImageProcessor.expand``).
        session_id: all requests of a conversation go to the engine that has its cache.
        continues: it is the rest of a response: an engine that can computes it before other
            requests that wait.
        response_tokens: number of tokens at the prompt's end that belong to the response. The
            stream of random numbers of a seed goes on after them. An engine that begins a stream
            with each request takes ``fresh_sampling``.
    """

    request_id: str
    prompt_token_ids: Ints
    sampling: SamplingParams
    session_id: str | None = None
    images: Images = ()
    continues: bool = False
    response_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_token_ids", ints(self.prompt_token_ids))

    @property
    def fresh_sampling(self) -> SamplingParams:
        """The sampling; a continued request has another seed, so that no number is used twice."""
        if not self.continues or self.sampling.seed is None:
            return self.sampling
        seed = hash((self.sampling.seed, self.response_tokens)) % 2**62
        return replace(self.sampling, seed=seed)


@dataclass(eq=False)
class GenerationOutput:
    """The response to one request.

    With ``finish_reason == "abort"`` it has the tokens from before the request was cut. A token
    that ended the response (end-of-sequence, stop token) is part of it.

    With ``finish_reason == "error"`` this request alone could not be answered; the engine and all
    other requests continue. The client makes a ``RequestFailedError`` of it.

    Args:
        token_ids: int32 ``[response]``; here and below lists become arrays.
        logprobs: float32 ``[response]``.
        versions: int32 ``[response]``, the policy version of each token.
        experts: ``[tokens, layers, experts per token]``, if they are requested: of each token that
            the engine has computed, from the prompt's first to the last but one of the response;
            in ``progress`` of the new tokens.
        error: why the request could not be answered.
    """

    request_id: str
    token_ids: Ints = field(default_factory=lambda: NO_INTS)
    logprobs: Floats = field(default_factory=lambda: NO_FLOATS)
    versions: Ints = field(default_factory=lambda: NO_INTS)
    finish_reason: FinishReason | None = None
    experts: Experts | None = None
    error: str = ""

    def __post_init__(self) -> None:
        self.token_ids = ints(self.token_ids)
        self.logprobs = floats(self.logprobs)
        self.versions = ints(self.versions)

    def __reduce__(self) -> tuple[Callable[..., GenerationOutput], tuple[Any, ...]]:
        """Pickle the three arrays as one string of bytes.

        An array's own pickle costs as much as hundreds of tokens.
        """
        arrays = (self.token_ids, self.logprobs, self.versions)
        packed_arrays = b"".join(array.tobytes() for array in arrays)
        return _unpacked, (
            self.request_id,
            packed_arrays,
            self.finish_reason,
            self.experts,
            self.error,
        )

    def until(self, count: int, finish_reason: FinishReason) -> GenerationOutput:
        """The response ended after its first ``count`` tokens."""
        experts = self.experts
        if experts is not None:
            experts = experts[: len(experts) + count - len(self.token_ids)]
        tokens = self.token_ids[:count]
        logprobs = self.logprobs[:count]
        versions = self.versions[:count]
        return GenerationOutput(self.request_id, tokens, logprobs, versions, finish_reason, experts)


def _unpacked(
    request_id: str,
    packed_arrays: bytes,
    finish_reason: FinishReason | None,
    experts: Experts | None,
    error: str,
) -> GenerationOutput:
    # All three arrays have 4 bytes per token: [3, tokens].
    token_ids, logprobs, versions = np.frombuffer(packed_arrays, dtype=np.int32).reshape(3, -1)
    return GenerationOutput(
        request_id,
        token_ids,
        logprobs.view(np.float32),
        versions,
        finish_reason,
        experts,
        error,
    )


class RequestFailedError(UserError):
    """One request cannot be answered; the engine continues with the others."""


def refusal(request: GenerationRequest, error: Exception) -> GenerationOutput:
    """The answer to a request that cannot be answered."""
    if isinstance(error, RequestFailedError):
        reason = str(error)
    else:
        reason = f"{type(error).__name__}: {error}"
    name = request.request_id
    # Cut: some libraries print whole tensors in their errors.
    message = f"request {name!r} cannot be answered: {reason:.1000}"
    return GenerationOutput(name, finish_reason="error", error=message)


class EngineFailedError(WeightReceiverFailedError):
    """The engine has failed; the requests that it was computing are lost."""


@dataclass
class EngineStats:
    """Counters since the engine's start.

    Args:
        busy_s: wall time with at least one request running.
        paused_s: wall time in which the engine was paused.
        cache_tokens: capacity of its cache; 0 if there is no such number.
        gone: the engine has left, and is not counted.
        cache_used: tokens of the cache that running requests take now; None if unknown.
    """

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    paused_s: float = 0.0
    cache_tokens: int = 0
    gone: bool = False
    cache_used: int | None = None


class Stopwatch:
    """A clock that can be stopped.

    Attributes:
        on: it is running, which ``switch`` changes.
        seconds: the time for which it was on.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def on(self) -> bool:
        return self._since is not None

    @property
    def seconds(self) -> float:
        since = self._since  # read once: another thread may switch it
        if since is None:
            return self._seconds
        return self._seconds + (time.perf_counter() - since)

    def switch(self, on: bool) -> None:
        if on != self.on:
            self._seconds = self.seconds
            self._since = time.perf_counter() if on else None


class NotSupportedError(UserError):
    """The engine does not have the method that was called."""


class InferenceEngine:
    """One engine: the base class of all backends, and of handles of engines in other processes.

    A backend overrides ``REQUIRED``; other methods that it does not override are not supported. All
    methods may be called at any time from one event loop; none blocks it.

    Attributes:
        config: of the constructor.
        node: Ray's id of the node that it runs on; empty if unknown.
        proves_weights: it compares the weights it holds with digests of what was sent.
        restartable: ``successor`` makes a replacement after a failure.
    """

    proves_weights: ClassVar[bool] = True
    restartable: ClassVar[bool] = False
    node: str = ""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    def set_threads(self, threads: int) -> None:
        """CPU threads of the engine; call before ``start``."""

    async def start(self) -> None:
        """Load the model. Raises what loading raised."""
        raise self.unsupported("start")

    def generate(
        self,
        requests: Sequence[GenerationRequest],
    ) -> AsyncIterator[list[GenerationOutput]]:
        """Answer each request once, in lists, as they finish.

        What it raises fails all of them. An error of one request is that request's answer
        (``finish_reason="error"``).
        """
        raise self.unsupported("generate")

    async def progress(self) -> list[GenerationOutput]:
        """New tokens of unanswered requests since the last call, between two steps.

        It is a heartbeat too. ``finish_reason`` is None. The final answer repeats these tokens.
        Requests may be left out; by default all are.
        """
        await self.heartbeat()
        return []

    async def heartbeat(self) -> None:
        """Return between two steps, which an engine that hangs does not."""
        await self.stats()

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each token after the first under the current weights, temperature 1.

        Tokens that stand for images (``ImageTokens``) have 0.
        """
        raise self.unsupported("score")

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop computing tokens: keep requests with their cache, abort them, or wait for them.

        New requests are accepted while paused and start after ``resume``.
        """
        raise self.unsupported("pause")

    async def resume(self) -> None:
        """Continue with the earlier and the new requests."""
        raise self.unsupported("resume")

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End these requests (None: all) with ``finish_reason="abort"``; ignore unknown ids."""
        raise self.unsupported("abort")

    async def update_weights(self, update: WeightUpdate) -> Sequence[str] | None:
        """Fetch and load the weights; tokens computed afterwards carry ``update.version``.

        Returns the weights that could not be compared with what was sent: verification prompts then
        run after every sync. None means none. The caller has paused the engine or knows that it is
        idle.
        """
        raise self.unsupported("update_weights")

    async def sleep(self) -> None:
        """Free the memory of cache and, where possible, weights. Only when idle."""
        raise self.unsupported("sleep")

    async def wake(self, part: WakePart) -> None:
        """Undo ``sleep``: first memory for the weights and, after their update, for the cache."""
        raise self.unsupported("wake")

    async def stats(self) -> EngineStats:
        raise self.unsupported("stats")

    async def shutdown(self) -> None:
        """Release everything the engine holds. Safe to call twice."""

    def kill(self) -> None:
        """End the engine at once, also if it does not answer. Safe to call twice."""

    def successor(self) -> InferenceEngine:
        """A replacement after a failure, not started: same configuration, same place."""
        raise self.unsupported("successor")

    def unsupported(self, method: str) -> NotSupportedError:
        return NotSupportedError(f"{type(self).__name__} does not support {method}")


#: Methods that every backend overrides.
REQUIRED = (
    "start",
    "generate",
    "score",
    "pause",
    "resume",
    "abort",
    "update_weights",
    "stats",
    "shutdown",
)


@dataclass(frozen=True)
class EngineConfig:
    """The settings of an engine's start.

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


#: Capabilities of engines, which the configuration reads: name -> default. Engines of users set
#: class attributes.
CAPABILITIES: dict[str, Any] = {
    "tensor_parallel": False,  # one engine may take several GPUs
    # how weights may reach it (TRANSFERS); the first one without GPUs
    "weight_sync": ("shared_memory",),
    # it maps weights in the machine's shared memory and computes on them
    "computes_on_mapped_weights": False,
    "reads_mapped_weights": False,  # it copies weights out of the machine's shared memory
    # it loads weights by the names of the model's files, not of transformers' parameters
    "loads_as_files": False,
    "takes_changes": False,  # it accepts a delta of weights
    "takes_adapters": (),  # of "layers" and "head": which adapters it adds to its weights
    "forgets_asleep": False,  # ``sleep`` drops its weights
    "reads_images": False,  # requests may have images
    "float32_head": False,  # it computes logits in float32 if told so, whatever the model's dtype
    "returns_experts": False,  # it reports the experts that a mixture's routers chose
    "sleeps_on": (),  # of "cpu" and "gpu": where it can give its memory away
    "fills_memory": False,  # its cache takes all memory that it may have
    "processes": 1,  # of one engine
    "sampling": (),  # settings of generator.sampling_params that not every engine has
    "lacks": (),  # settings of generator.sampling_params that other engines have
    "elsewhere": False,  # a server of generator.engines, which the run does not start
    # module:function that yields problems of generator.engine_kwargs; "" takes none
    "options": "",
    "cpu_limits": "",  # module:function(configuration) that yields its limits without GPUs
    "gpu_limits": "",  # the same for its limits on GPUs
    "extra": "",  # the extra of this library that installs its packages
}

#: Backend -> its class and its capabilities, which are read before torch or vLLM is imported.
BACKENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": (
        "skyasync.inference.backends.transformers.engine:TransformersEngine",
        {
            "computes_on_mapped_weights": True,
            "takes_changes": True,
            "takes_adapters": ("layers", "head"),
            "reads_images": True,
            "float32_head": True,
            "returns_experts": True,
            "sleeps_on": ("cpu", "gpu"),
        },
    ),
    "vllm": (
        "skyasync.inference.backends.vllm.engine:VLLMEngine",
        {
            "tensor_parallel": True,
            "weight_sync": ("shared_memory", "nccl", "cuda_ipc"),
            "reads_mapped_weights": True,
            "loads_as_files": True,
            "takes_changes": True,
            "takes_adapters": ("layers",),
            "forgets_asleep": True,
            "reads_images": True,
            "float32_head": True,
            "returns_experts": True,
            "sleeps_on": ("gpu",),
            "fills_memory": True,
            "processes": 2,  # an actor, and the core's process
            "sampling": ("structured_outputs", "repetition_detection"),
            "options": "skyasync.inference.backends.vllm.options:reserved_options",
            "cpu_limits": "skyasync.inference.backends.vllm.options:cpu_limits",
            "gpu_limits": "skyasync.inference.backends.vllm.options:gpu_limits",
            "extra": "vllm",
        },
    ),
    "vllm_server": (
        "skyasync.inference.backends.vllm.server:VLLMServerEngine",
        {
            "elsewhere": True,
            "loads_as_files": True,
            "takes_changes": True,
            "reads_images": True,
            "sampling": ("structured_outputs", "repetition_detection"),
        },
    ),
    "sglang_server": (
        "skyasync.inference.backends.sglang.server:SGLangServerEngine",
        {
            "elsewhere": True,
            "loads_as_files": True,
            "lacks": (
                "top_p",
                "top_k",
                "min_p",
                "bad_words",
                "allowed_token_ids",
                "structured_outputs",
                "repetition_detection",
            ),
        },
    ),
}


class EngineRegistry(Registry):
    """``BACKENDS``, and engines of users: any class with the methods of ``REQUIRED``."""

    @cached_property
    def _builtins(self) -> dict[str, tuple[str, About]]:
        builtins = {}
        for name, (reference, capabilities) in BACKENDS.items():
            builtins[name] = (reference, About(can=CAPABILITIES | capabilities))
        return builtins

    def __missing__(self, name: str) -> Any:  # noqa: ANN401  (a class)
        if name not in BACKENDS:
            return super().__missing__(name)
        reference, capabilities = BACKENDS[name]
        return self.register(name, **capabilities)(resolve_reference(reference, kind="engine"))

    def make(self, backend: str, config: EngineConfig) -> InferenceEngine:
        """An engine, not started.

        A class that is no subclass of ``InferenceEngine`` gets the defaults of its methods.
        """
        factory: Any = self.find(backend)
        if isinstance(factory, type) and not issubclass(factory, InferenceEngine):
            factory = type(factory.__name__, (factory, InferenceEngine), {})
        engine: InferenceEngine = factory(config)
        return engine


ENGINES = EngineRegistry("engine", capabilities=CAPABILITIES)
