"""What every inference engine offers, and the words it is spoken to in.

Invariant: a request is answered exactly once, with one behaviour log-probability and one policy version
per generated token. Versions are stamped by the engine, at the token, and never changed afterwards.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from skyasync.registry import Registry
from skyasync.weight_sync.update import WeightUpdate

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["keep", "abort", "wait"]


@dataclass(frozen=True)
class SamplingParams:
    """How to sample one response; the names and meanings are those of vLLM's ``SamplingParams``.

    ``top_k <= 0`` is off, and so is an empty list. Log-probabilities are reported of the distribution that was really
    sampled from: after bans, bias, penalties, temperature, min-p, top-k and top-p. ``temperature = 0`` is greedy
    (log-probabilities then are those of the untempered, unfiltered distribution).

    ``include_stop_str_in_output`` and ``skip_special_tokens`` are about the text that is made of the response: its
    tokens always hold the stop string. ``structured_outputs`` and ``repetition_detection`` (the fields of vLLM's
    classes of these names) are for vLLM only.
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


@dataclass(frozen=True)
class GenerationRequest:
    """One sequence to be continued. ``session_id`` keeps a conversation on the engine that has its cache."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    session_id: str | None = None


@dataclass
class GenerationOutput:
    """The response to one request; the three lists have the same length.

    With ``finish_reason == "abort"`` they hold what had been generated before the request was cut.
    A token that ended the response (end-of-sequence, stop token) is part of it.
    """

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass
class EngineStats:
    """Counters since start: ``busy_s`` is wall time with at least one request running."""

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    busy_s: float = 0.0
    paused_s: float = 0.0


class InferenceEngine(Protocol):
    """One engine. All methods may be called at any time from one event loop; none blocks it."""

    async def start(self) -> None:
        """Load the model. Raises what loading raised."""

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[list[GenerationOutput]]:
        """Answer each request once, in lists, as they finish."""

    def stream(self, request: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        """Yield what is new since the last yield; only the last one has a ``finish_reason``."""

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

    async def update_weights(self, update: WeightUpdate) -> None:
        """Fetch and load the weights; tokens computed afterwards carry ``update.version``.

        The caller has paused the engine or knows it idle.
        """

    async def sleep(self) -> None:
        """Free the memory of cache (and weights, where the engine can). Only when idle."""

    async def wake(self) -> None:
        """Undo ``sleep``; weights must be updated before the next request."""

    async def stats(self) -> EngineStats: ...

    async def shutdown(self) -> None:
        """Release everything the engine holds. Safe to call twice."""


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with.

    Args:
        model_path: a Hugging Face folder or name, weights as safetensors.
        dtype: "auto", "float32" or "bfloat16"; auto is float32 on a CPU.
        threads: CPU threads for this engine; 0 leaves the library's default.
        version: the policy version of the weights in ``model_path``.
    """

    model_path: str
    dtype: str = "auto"
    max_model_len: int = 1024
    max_num_seqs: int = 1024
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
    ["skyasync.engines.transformers_engine", "skyasync.engines.vllm_engine"],
    capabilities={
        "tensor_parallel": False,  # one engine may take several GPUs
        "weight_sync": ("shared_memory",),  # how weights may reach it
        "sleeps_on": (),  # of "cpu" and "gpu": where it can give its memory away
        "sampling": (),  # settings of generator.sampling_params that not every engine has
        "extra": "",  # of this library, that installs what it needs
    },
)
