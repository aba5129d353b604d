"""Settings of the engines and of what is asked of them.

Invariant: as of ``schema``, whose part this is.
"""

# ruff: noqa: RUF009  (key() returns a dataclasses.field, with a factory where the default is mutable)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyasync.config.field import inheriting, key
from skyasync.config.frozen import Settings

_AGENTS = "generator.agent_program"
_RESTARTS = "generator.max_engine_restarts"
_OWN = "not generator.engines"

INT32 = 2**31 - 1

BETWEEN_GPUS = ("nccl", "cuda_ipc")
"""Values of ``weight_sync_backend`` by which weights never lie in host memory."""


@dataclass
class SamplingConfig(Settings):
    """The bounds of the numbers hold for whoever samples: ``engines.protocol.SamplingParams`` and the requests of agent
    programs are checked by them. Within them int32 and float32 lose no number, and finite logits stay finite."""

    max_generate_length: int = key(256, "Most tokens per response.", low=1, high=INT32)
    min_tokens: int = key(0, "Fewest tokens per response.", low=0, high=INT32)
    temperature: float = key(1.0, "Sampling temperature; 0 is greedy.", low=0.01, high=100.0, also=(0.0,))
    top_p: float = key(1.0, "Sample from the smallest set of tokens with this probability.", above=0.0, high=1.0)
    top_k: int = key(-1, "Sample from the k likeliest tokens; -1 is off.", low=-1, high=INT32)
    min_p: float = key(0.0, "Leave out tokens less likely than this times the likeliest.", low=0.0, high=1.0)
    presence_penalty: float = key(
        0.0, "Subtracted from the logits of tokens that the response has already.", low=-2.0, high=2.0
    )
    frequency_penalty: float = key(
        0.0, "Subtracted from the logit of a token for each time that the response has it.", low=-2.0, high=2.0
    )
    repetition_penalty: float = key(
        1.0,
        "Divides positive logits of tokens in prompt and response, and multiplies negative ones.",
        low=0.01,
        high=100.0,
    )
    stop: list[str] = key([], "Strings that end a response.")
    stop_token_ids: list[int] = key([], "Tokens that end a response, besides the model's own.", low=0, high=INT32)
    include_stop_str_in_output: bool = key(
        True, "What environments read holds the string that ended the response; its tokens are trained in any case."
    )
    ignore_eos: bool = key(False, "Go on after the model's end-of-sequence token.")
    bad_words: list[str] = key([], "Words that are never generated.")
    logit_bias: dict[str, Any] = key({}, "Added to the logits of these tokens: token id -> bias from -100 to 100.")
    allowed_token_ids: list[int] = key([], "Generate no other tokens than these; empty allows all.", low=0, high=INT32)
    skip_special_tokens: bool = key(True, "What environments and stop strings see leaves out special tokens.")
    seed: int = key(
        -1,
        "Draw each response from this seed and the response's identity alone; -1 is the engine's own.",
        low=-1,
        high=2**62,
    )
    structured_outputs: dict[str, Any] = key(
        {}, "A grammar for the response: json, regex, choice, ... as in vLLM's StructuredOutputsParams (vllm only)."
    )
    repetition_detection: dict[str, Any] = key(
        {}, "End a response that repeats itself, as one cut by its length: max_pattern_size, min_count (vllm only)."
    )


@inheriting
class EvalSamplingConfig(SamplingConfig):
    """What is null is as in ``sampling_params``; read it through ``skyasync.config.sampling.evaluation``."""

    temperature: float | None = key(  # type: ignore[assignment]
        0.0, "Sampling temperature; 0 is greedy, null as in training.", low=0.01, high=100.0, also=(0.0,)
    )


@dataclass
class GeneratorConfig(Settings):
    backend: str = key(
        "auto",
        "Inference engine; auto is vllm where it is installed, else transformers.",
        choices=("auto",),
        registry="skyasync.engines.protocol:ENGINES",
        open_ended=True,
    )
    num_inference_engines: int = key(1, "Engines behind the client.", low=1, when=_OWN)
    inference_engine_tensor_parallel_size: int = key(1, "GPUs per engine.", low=1)
    engines: list[str] = key(
        [],
        "Addresses of vLLM servers (skyasync serve) that generate in place of engines of the run's own, such as "
        "http://127.0.0.1:8000.",
        open_ended=True,
    )
    weight_sync_dir: str = key(
        "",
        "Folder that the policy's machine and those of generator.engines see under this path, for weights on their "
        "way; empty is shared memory, for servers on the policy's machine.",
        open_ended=True,
        when="generator.engines",
    )
    n_samples_per_prompt: int = key(8, "Responses per prompt: a group.", low=1)
    is_num_return_sequences_expand: bool = key(
        True,
        "Ask for each sample on its own, so that a group may spread over the engines; false keeps a group on one, and "
        "asks vLLM once per prompt for all of it, which then ends together.",
    )
    spare_samples_per_prompt: int = key(
        0,
        "Samples of a group that are started besides, so that its slowest need not be waited for: the first "
        "n_samples_per_prompt that are complete are trained, which favours short responses.",
        low=0,
    )
    eval_n_samples_per_prompt: int = key(1, "Responses per prompt in evaluation.", low=1)
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling_params: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    generate_batch_size: int = key(
        0, "Prompts submitted and not yet trained in the fully_async plan; 0 is what max_staleness allows.", low=0
    )
    max_concurrent_rollouts: int = key(
        0, "Prompts generated at once in the fully_async plan; 0 has no such limit.", low=0
    )
    max_turns: int = key(
        0, "Most turns per episode, told to environments as extras['max_turns']; 0 has no such limit.", low=0
    )
    max_concurrent_episodes: int = key(
        0, "Episodes in flight at once, over all prompts; the others wait their turn. 0 has no such limit.", low=0
    )
    episode_timeout_s: float = key(
        0.0,
        "Seconds an episode may take, pauses of the engines included; 0 has no such limit for environments, whose "
        "steps have one, and is 0.9 of trainer.step_timeout_s for agent programs.",
        low=0.0,
    )
    agent_func_path: str = key(
        "", "An OpenRLHF agent's file, played by every row that names no env_class.", open_ended=True
    )
    agent_program: str = key(
        "",
        "Agent program in place of environments, module:function or file.py:function: it is called with data, base_url "
        "and api_key of an OpenAI-compatible endpoint, and returns the score. Or a class with async "
        "run(data, **extra). Or online: programs outside of the run open sessions and score them.",
        open_ended=True,
    )
    turn_discount: float = key(
        1.0,
        "Factor of the reward of each call of an agent program, once for every call before it, where the program gives "
        "rewards call by call.",
        above=0.0,
        high=1.0,
        when=_AGENTS,
    )
    agent_env: list[str] = key(
        [],
        "Environment variables that agent programs may see though their names look secret (KEY, TOKEN, ...).",
        when=_AGENTS,
    )
    endpoint_host: str = key(
        "127.0.0.1",
        "Address that the endpoint listens on; one other than the loopback opens it.",
        open_ended=True,
        when=_AGENTS,
    )
    endpoint_port: int = key(
        0, "Port that the endpoint listens on; 0 is one of the system's choice.", low=0, high=65535, when=_AGENTS
    )
    tool_parser: str = key(
        "hermes",
        "How the model writes calls of tools: a family's form, vllm:NAME for one of vLLM's parsers, or "
        "module:function of your own, text -> (text, calls).",
        registry="skyasync.endpoint.parsers:TOOL_PARSERS",
        open_ended=True,
        when=_AGENTS,
    )
    reasoning_parser: str = key(
        "",
        "How the model writes its thinking, which the endpoint then tells apart from the reply: a family's form, "
        "vllm:NAME, or module:function, text -> (thinking, text); empty leaves it in the text.",
        choices=("",),
        registry="skyasync.endpoint.parsers:REASONING_PARSERS",
        open_ended=True,
        when=_AGENTS,
    )
    max_model_len: int = key(
        0,
        "Most tokens per sequence in the engine, at which an episode ends; 0 is room for max_turns responses (4 where "
        "it is 0) with prompts in front of and between them, or the model's context where that is shorter.",
        low=0,
    )
    max_num_seqs: int = key(1024, "Most sequences an engine computes at once.", low=1, when=_OWN)
    max_num_batched_tokens: int = key(
        0,
        "Most tokens an engine computes per step, prompts included (vllm); 0 is max_num_seqs, at least 8192.",
        low=0,
        when=_OWN,
    )
    gpu_memory_utilization: float = key(
        0.8,
        "Share of a GPU's memory that engines may take; those on one GPU divide it.",
        above=0.0,
        high=1.0,
        when=_OWN,
    )
    kv_cache_gb: float = key(1.0, "KV cache of an engine on a CPU, in GB.", above=0.0, when=_OWN)
    engine_kwargs: dict[str, Any] = key(
        {},
        "More of the engine's own arguments, such as {enforce_eager: true} (vllm); checked before the start.",
    )
    dtype: str = key(
        "auto", "Dtype of the engine's weights; auto follows the policy's.", choices=("auto", "float32", "bfloat16")
    )
    threads: int = key(
        0, "CPU threads per engine; 0 shares the machine's cores according to the plan.", low=0, when=_OWN
    )
    weight_sync_backend: str = key(
        "auto",
        "How weights reach the engines; auto is nccl for vllm on GPUs of its own, cuda_ipc on GPUs that it shares with "
        "the policy (trainer.placement.colocate_all), else shared_memory, and a broadcast over TCP "
        "to engines on other nodes of a cluster.",
        choices=("auto", "shared_memory", "nccl", "cuda_ipc"),
    )
    weight_sync_mode: str = key(
        "full",
        "What a weight sync sends: all weights, or only those that have changed since the last one (delta; not by "
        "nccl or cuda_ipc). Both ends keep a copy for it; where most have changed, or an engine is new, all are sent.",
        choices=("full", "delta"),
    )
    verify_weight_sync: bool = key(True, "Compare probe log-probabilities, trainer against engine, after weight syncs.")
    verify_interval: int = key(
        10,
        "Syncs from one such comparison to the next; digests prove every sync but those by nccl and cuda_ipc.",
        low=1,
    )
    weight_sync_tolerance: float = key(
        0.0,
        "Largest mean gap per token allowed in it, in nats; 0 takes 4 times the gap at start-up.",
        low=0.0,
        when="generator.verify_weight_sync",
    )
    request_timeout_s: float = key(600.0, "Seconds after which an unanswered request is an error.", above=0.0)
    engine_start_timeout_s: float = key(300.0, "Seconds an engine may take to start.", above=0.0)
    max_engine_restarts: int = key(
        3,
        "Engines that may die in an hour and are started again, while the run goes on; at the next death, or with 0 at "
        "the first, the run ends.",
        low=0,
    )
    heartbeat_s: float = key(
        5.0,
        "Seconds from one question for an engine's new tokens to the next; what it told goes on if it dies.",
        above=0.0,
        when=_RESTARTS,
    )
    heartbeat_timeout_s: float = key(
        60.0,
        "Seconds after which an engine that does not answer this question is dead; a busy one answers between two "
        "tokens.",
        above=0.0,
        when=_RESTARTS,
    )
    run_engines_locally: bool = key(True, "Engines are started by the run; false: generator.engines names them.")
    async_engine: bool = key(True, "Engines serve requests asynchronously (the only mode there is).", choices=(True,))
    batched: bool = key(
        False, "Accepted for SkyRL's recipes; requests are always batched by the engine.", choices=(False, True)
    )

    @property
    def own_engines(self) -> int:
        """Engines that the run starts itself."""
        return 0 if self.engines else self.num_inference_engines

    @property
    def devices_per_engine(self) -> int:
        """GPUs of an engine: tensor-parallel ranks in each of its pipeline's stages."""
        stages = self.engine_kwargs.get("pipeline_parallel_size", 1)
        return self.inference_engine_tensor_parallel_size * (stages if isinstance(stages, int) else 1)
