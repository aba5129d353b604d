"""SkyRL's generators: ``GeneratorInterface``, its input and output, and the inference client that they are made with.

Invariant: a generator of theirs has requests in SkyRL's form and answers in ours. Its tokens count as written by the
policy that the engines had at the time of the request. A generator can return more exact versions: the client's
``response_versions`` as ``rollout_versions``.
Sources: ``skyrl/train/generators/base.py``, ``skyrl/train/generators/utils.py``, the inference client's interface.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias, TypedDict

from aiohttp import web

from skyasync.agents.calls import Session
from skyasync.agents.server import LOOPBACK, Endpoint
from skyasync.arrays import ints
from skyasync.envs import Foreign
from skyasync.envs.base import SAMPLING, Conversation
from skyasync.errors import UserError, unknown
from skyasync.inference.interface import GenerationRequest, SamplingParams
from skyasync.interop.skyrl.gym import numbers
from skyasync.interop.skyrl.shims import Delegate
from skyasync.rollout.generator_api import request_seed
from skyasync.rollout.types import PromptId, TrajectoryId

#: Entries of an output that are not lists per trajectory, or have no part in training here.
_NOT_TRAINED = frozenset(
    {
        "rollout_metrics",
        "is_last_step",
        "env_metrics",
        "trajectory_generation_times",
        "trajectory_time_splits",
        "rollout_expert_indices",
    }
)


@dataclass(frozen=True)
class TrajectoryID:
    """Which sample of which prompt."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass
class BatchMetadata:
    global_step: int
    training_phase: str


class SkyRLGeneratorInput(TypedDict, total=False):
    prompts: list[Conversation]
    env_classes: list[str]
    env_extras: list[dict[str, Any]]
    sampling_params: dict[str, Any]
    trajectory_ids: list[Any]
    batch_metadata: BatchMetadata


class SkyRLGeneratorOutput(TypedDict, total=False):
    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float] | list[list[float]]
    loss_masks: list[list[int]]
    stop_reasons: list[str] | None
    rollout_metrics: dict[str, Any] | None
    rollout_logprobs: list[list[float]] | None
    trajectory_ids: list[Any] | None


class InferenceEngineInput(TypedDict, total=False):
    prompts: list[Conversation] | None
    prompt_token_ids: list[list[int]] | None
    sampling_params: dict[str, Any] | None
    session_ids: list[Hashable] | None


class InferenceEngineOutput(TypedDict):
    responses: list[str]
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]] | None


GeneratorInput: TypeAlias = SkyRLGeneratorInput
GeneratorOutput: TypeAlias = SkyRLGeneratorOutput


class GeneratorInterface:
    """Subclass it and define ``async def generate(self, input_batch)``."""

    inference_engine_client: Foreign = None

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if "generate" in vars(cls):
            cls.generate = _for_both_callers(cls.generate)  # type: ignore[method-assign,assignment]

    async def generate(self, input_batch: Foreign) -> Foreign:
        raise NotImplementedError(f"{type(self).__name__} must define generate(input_batch)")


def _for_both_callers(theirs: Callable[[Foreign, Foreign], Awaitable[Foreign]]) -> Callable[..., Awaitable[Foreign]]:
    """A ``generate`` of theirs that is also called with requests of ours, which have ``is_eval``."""

    async def generate(self: GeneratorInterface, input_batch: Foreign) -> Foreign:
        if "is_eval" not in input_batch:  # a loop of theirs, or super().generate
            return await theirs(self, input_batch)
        ids, sampling = input_batch["trajectory_ids"], input_batch["sampling_params"]
        if isinstance(client := self.inference_engine_client, InferenceEngineClient):
            await client.open_endpoint(sampling)
        phase = "eval" if input_batch["is_eval"] else "train"
        metadata = BatchMetadata(max((t.prompt.epoch for t in ids), default=0), phase)
        request = {name: value for name, value in input_batch.items() if name != "is_eval"}
        output = await theirs(self, request | {"sampling_params": as_dictionary(sampling), "batch_metadata": metadata})
        if output.get("pixel_values") is not None:
            raise UserError("the generator returned pixel_values: only the run's own generator reads images")
        result = {name: value for name, value in output.items() if value is not None and name not in _NOT_TRAINED}
        result.setdefault("stop_reasons", ["stop"] * len(result.get("response_ids", ())))
        if metrics := output.get("rollout_metrics"):
            result["rollout_metrics"] = numbers(metrics)
        if "trajectory_ids" in result:
            known = {(t.instance_id, t.repetition_id): t for t in ids}
            result["trajectory_ids"] = [known[t.instance_id, t.repetition_id] for t in result["trajectory_ids"]]
        return result

    generate.__doc__ = theirs.__doc__
    return generate


def as_dictionary(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters in SkyRL's form."""
    return {**asdict(sampling), "logprobs": 1, "max_generate_length": sampling.max_tokens}


def as_sampling(given: Mapping[str, Any] | SamplingParams | None, usual: SamplingParams) -> SamplingParams:
    """The run's sampling with these changes.

    Raises:
        UserError: for a name that vLLM does not have.
    """
    if isinstance(given, SamplingParams):
        return given
    changes = dict(given or {})
    if changes.pop("n", 1) != 1:
        raise UserError("sampling_params.n must be 1: generator.n_samples_per_prompt sets the number of samples")
    changes.pop("logprobs", None)
    length = changes.pop("max_generate_length", None)
    if length is not None:
        changes.setdefault("max_tokens", length)
    for name in changes:
        if name not in SAMPLING:
            raise UserError(unknown("name in sampling_params", name, SAMPLING))
    return SamplingParams(**{**asdict(usual), **{k: v for k, v in changes.items() if v is not None}})


class InferenceEngineClient(Delegate):
    """The run's inference client, which also answers batches as SkyRL's does; everything else is the client's own.

    Args:
        client: ``skyasync.inference.client.InferenceClient``.
        tokenizer: gives the model's tokenizer.
        sampling: the run's, for what a request leaves out.
        max_model_len: most tokens of a sequence.
    """

    def __init__(
        self,
        client: Foreign,
        tokenizer: Callable[[], Foreign],
        sampling: SamplingParams,
        max_model_len: int,
        model_name: str = "policy",
    ) -> None:
        super().__init__(client)
        self._client, self._tokenizer, self._sampling, self._max_model_len = client, tokenizer, sampling, max_model_len
        self.model_name = model_name
        self._numbers = itertools.count()
        self._endpoint: OpenEndpoint | None = None

    async def generate(self, request: Foreign, model: str | None = None) -> Foreign:
        """One ``GenerationRequest``, or a batch in SkyRL's form."""
        if isinstance(request, GenerationRequest):
            return await self._client.generate(request)
        if request.get("mm_features"):
            raise UserError("the request has mm_features: only text is supported here")
        prompts, tokenizer = request.get("prompt_token_ids"), self._tokenizer()
        if prompts is None:
            prompts = [
                tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
                for messages in request.get("prompts") or ()
            ]
        given = request.get("sampling_params") or {}
        sampling = as_sampling(given, self._sampling)
        sessions = list(request.get("session_ids") or [])
        requests = []
        for index, prompt in enumerate(prompts):
            free = self._max_model_len - len(prompt)
            if free < 1:
                raise UserError(
                    f"a prompt of {len(prompt)} tokens leaves no room for a response: raise generator.max_model_len="
                    f"{self._max_model_len}"
                )
            request_id = f"skyrl-{next(self._numbers)}"
            session = str(sessions[index]) if index < len(sessions) else f"skyrl-session-{next(self._numbers)}"
            most, seed = min(sampling.max_tokens, free), request_seed(sampling.seed, request_id)
            limited = replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most), seed=seed)
            requests.append(GenerationRequest(request_id, ints(list(prompt)), limited, session_id=session))
        answers = await asyncio.gather(*(self._client.generate(request) for request in requests))
        ids = [answer.token_ids.tolist() for answer in answers]
        with_logprobs = "logprobs" not in given or given["logprobs"] is not None
        return {
            "responses": [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in ids],
            "response_ids": ids,
            "stop_reasons": [answer.finish_reason or "stop" for answer in answers],
            "response_logprobs": [answer.logprobs.tolist() for answer in answers] if with_logprobs else None,
            "response_versions": [answer.versions.tolist() for answer in answers],
        }

    def get_endpoint_url(self) -> str:
        """The address of an OpenAI-compatible endpoint (without ``/v1``), on the loopback, open to any key.

        It answers from the generator's first batch on. Its requests are not recorded.
        """
        if self._endpoint is None:
            self._endpoint = OpenEndpoint(self, self._tokenizer(), self._max_model_len)
        return self._endpoint.address

    async def open_endpoint(self, sampling: SamplingParams) -> None:
        """Answer at that address, if ``get_endpoint_url`` has given it."""
        if self._endpoint is not None:
            self._endpoint.sampling = sampling
            await self._endpoint.start()

    async def shutdown(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.close()
        await self._client.shutdown()


def get_sampling_params_for_backend(backend: str, sampling_params: Foreign) -> dict[str, Any]:
    """The configuration's sampling settings, as generators take them."""
    from skyasync.rollout.generator_api import sampling_params as settled

    return as_dictionary(settled(sampling_params))


def prepare_generator_input(
    prompts: Sequence[Mapping[str, Any]],
    n_samples_per_prompt: int,
    sampling_params: dict[str, Any],
    default_env_class: str,
    training_phase: str,
    global_step: int,
) -> tuple[GeneratorInput, list[str]]:
    """A generator's input for a batch of the data loader, and each trajectory's uid."""
    pairs = [(prompt, repetition) for prompt in prompts for repetition in range(n_samples_per_prompt)]
    return {
        "prompts": [prompt["prompt"] for prompt, _ in pairs],
        "env_classes": [prompt["env_class"] or default_env_class for prompt, _ in pairs],
        "env_extras": [deepcopy(prompt["env_extras"]) for prompt, _ in pairs],
        "sampling_params": sampling_params,
        "trajectory_ids": [TrajectoryID(prompt["uid"], repetition) for prompt, repetition in pairs],
        "batch_metadata": BatchMetadata(global_step, training_phase),
    }, [prompt["uid"] for prompt, _ in pairs]


class OpenEndpoint(Endpoint):
    """Its port is taken when it is made, so that the address is known before anything runs."""

    sampling = SamplingParams()

    def __init__(self, client: Foreign, tokenizer: Foreign, max_model_len: int) -> None:
        super().__init__(client, tokenizer, max_model_len)
        self.listen_socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.listen_socket.bind((LOOPBACK, 0))
        self.address = f"http://{LOOPBACK}:{self.listen_socket.getsockname()[1]}"
        self._numbers = itertools.count()

    @contextmanager
    def entered(self, request: web.Request) -> Iterator[Session]:
        """A session for this request alone."""
        yield Session(TrajectoryId(PromptId(0, next(self._numbers)), 0), self.sampling, "endpoint")
