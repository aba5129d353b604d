"""Settings of the engines and of what is asked of them.

Invariant: no engine's name stands in a check; a user's engine is judged by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyasync.config.keys import key
from skyasync.config.parts import engines_with
from skyasync.config.schema.agents import AgentsConfig
from skyasync.config.schema.sampling import EvalSamplingConfig, SamplingConfig, backend
from skyasync.config.schema.weight_sync import WeightSyncConfig
from skyasync.config.values import written
from skyasync.registry import resolve_reference

if TYPE_CHECKING:
    from skyasync.config.schema import Config


@dataclass
class GeneratorConfig(AgentsConfig, WeightSyncConfig):
    backend: str = key("auto", choices=("auto",), registry="skyasync.inference.interface:ENGINES", open_ended=True)
    """Inference engine; auto is vllm where it is installed, else transformers."""
    num_inference_engines: int = key(1, low=1, when="not generator.engines")
    """Engines behind the client."""
    inference_engine_tensor_parallel_size: int = key(1, low=1)
    """GPUs per engine."""
    engines: list[str] = key([], open_ended=True)
    """Addresses of vLLM servers (skyasync serve) that generate in place of engines of the run's own, such as
    http://127.0.0.1:8000."""
    n_samples_per_prompt: int = key(8, low=1)
    """Responses per prompt: a group."""
    is_num_return_sequences_expand: bool = key(True)
    """Ask for each sample on its own, so that a group may spread over the engines; false keeps a group on one, and asks
    vLLM once per prompt for all of it, which then ends together."""
    oversample_per_prompt: int = key(0, low=0)
    """Oversampling: further samples of a group that are started, so that its stragglers need not be waited for. The
    first n_samples_per_prompt that are complete are trained, which favours short responses."""
    eval_n_samples_per_prompt: int = key(1, low=1)
    """Responses per prompt in evaluation."""
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling_params: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    generate_batch_size: int = key(0, low=0)
    """Prompts submitted and not yet trained in fully_async and its variants; 0 is what max_staleness allows."""
    max_concurrent_rollouts: int = key(0, low=0)
    """Prompts generated at once in fully_async and its variants; 0 has no such limit."""
    max_turns: int = key(0, low=0)
    """Most turns per episode, which environments read as extras['max_turns']; 0 has no such limit."""
    max_concurrent_episodes: int = key(0, low=0)
    """Episodes in flight at once, over all prompts; the others wait their turn. 0 has no such limit."""
    episode_timeout_s: float = key(0.0, low=0.0)
    """Seconds an episode may take, pauses of the engines included; 0 has no such limit for environments, whose steps
    have one, and is 0.9 of trainer.step_timeout_s for agent programs."""
    max_model_len: int = key(0, low=0)
    """Maximum number of tokens of a sequence in the engine, at which an episode ends. 0 is room for max_turns responses
    (4 if it is 0) with their prompts, at most the model's context."""
    hybrid_engines: int = key(0, low=0, when="not generator.engines")
    """Engines on the policy's devices, besides num_inference_engines on others: they compute while the policy waits for
    a batch, in a plan that has them (hybrid_async)."""
    max_num_seqs: int = key(1024, low=1, when="not generator.engines")
    """Maximum number of sequences that an engine computes at once."""
    max_num_batched_tokens: int = key(0, low=0, when="not generator.engines")
    """Maximum number of tokens that an engine computes per step, with prompts (vllm); 0 is max_num_seqs, at least
    8192."""
    gpu_memory_utilization: float = key(0.8, above=0.0, high=1.0, when="not generator.engines")
    """Share of a GPU's memory that engines may take; those on one GPU divide it."""
    kv_cache_gb: float = key(1.0, above=0.0, when="not generator.engines")
    """KV cache of an engine on a CPU, in GB."""
    engine_kwargs: dict[str, Any] = key({})
    """More of the engine's own arguments, such as {enforce_eager: true} (vllm); checked before the start."""
    dtype: str = key("auto", choices=("auto", "float32", "bfloat16"))
    """Dtype of the engine's weights; auto follows the policy's."""
    threads: int = key(0, low=0, when="not generator.engines")
    """CPU threads per engine; 0 shares the machine's cores according to the plan."""
    request_timeout_s: float = key(600.0, above=0.0)
    """Seconds after which an unanswered request is an error."""
    engine_start_timeout_s: float = key(300.0, above=0.0)
    """Seconds an engine may take to start."""
    max_engine_restarts: int = key(3, low=0)
    """Engine failures in an hour after which an engine is started again, while the run continues; at the next failure,
    or with 0 at the first, the run ends."""
    heartbeat_s: float = key(5.0, above=0.0, when="generator.max_engine_restarts")
    """Seconds from one request for an engine's new tokens to the next; responses continue from these tokens if it
    fails. At most 50 engines a second are asked for tokens; the other requests are heartbeats alone."""
    heartbeat_timeout_s: float = key(60.0, above=0.0, when="generator.max_engine_restarts")
    """Seconds after which an engine that does not answer this request counts as failed; a busy one answers between two
    tokens."""

    @property
    def own_engines(self) -> int:
        """Engines that the run starts itself."""
        return 0 if self.engines else self.num_inference_engines + self.hybrid_engines

    @property
    def devices_per_engine(self) -> int:
        """GPUs of an engine: tensor-parallel ranks in each of its pipeline's stages."""
        stages = self.engine_kwargs.get("pipeline_parallel_size", 1)
        return self.inference_engine_tensor_parallel_size * (stages if isinstance(stages, int) else 1)


def check_generator(cfg: Config) -> Iterator[str]:
    """What the chosen engine cannot do, and what is never read."""
    from skyasync.inference.interface import ENGINES

    generator, policy, engine = cfg.generator, cfg.trainer.policy, backend(cfg)
    can = ENGINES.about(engine).can
    servers = [name for name, about in ENGINES.builtins().items() if about.can["elsewhere"]]
    if generator.engines and generator.backend not in ("auto", *servers):
        yield (
            f"generator.backend={generator.backend} is for engines of the run's own, and generator.engines names "
            f"servers: remove one of them"
        )
    if generator.backend in servers and not generator.engines:
        yield (
            f"generator.backend={generator.backend} needs generator.engines=[http://host:port, ...]: where its "
            f"servers are"
        )
    size = generator.inference_engine_tensor_parallel_size
    if size > 1 and not can["tensor_parallel"]:
        yield (
            f"generator.inference_engine_tensor_parallel_size={size} needs {engines_with('tensor_parallel')}: an "
            f"engine of generator.backend={engine} runs on one device"
        )
    if policy.router_replay != "none":
        key = f"trainer.policy.router_replay={policy.router_replay}"
        if not can["returns_experts"]:
            yield (
                f"{key} needs {engines_with('returns_experts')}: generator.backend={engine} does not say which experts "
                f"it chose (returns_experts): set trainer.policy.router_replay=none"
            )
        if generator.engine_kwargs.get("pipeline_parallel_size", 1) != 1:
            yield (
                f"{key} is not supported with generator.engine_kwargs.pipeline_parallel_size: vLLM does not report the "
                f"experts of pipeline stages; set generator.inference_engine_tensor_parallel_size instead"
            )
        if policy.torch_compile:
            yield (
                f"{key} is not supported with trainer.policy.torch_compile=true: compiled layers ignore the replayed "
                f"routing; remove one of them"
            )
    options, judge = generator.engine_kwargs, can["options"]
    if options and judge:
        yield from resolve_reference(judge, kind="check of generator.engine_kwargs")(options)
    elif options:
        yield (
            f"generator.engine_kwargs={written(options)} has no effect: generator.backend={engine} takes no arguments "
            f"of its own, as {engines_with('options')} does"
        )
    key = f"generator.oversample_per_prompt={generator.oversample_per_prompt}"
    if generator.oversample_per_prompt and generator.agent_program:
        yield f"{key} is for environments, and generator.agent_program plays programs: remove one of them"
    if generator.oversample_per_prompt and not generator.is_num_return_sequences_expand:
        yield (
            f"{key} takes the samples of a group that are complete first, and "
            f"generator.is_num_return_sequences_expand=false lets them end together: remove one of them"
        )
    if generator.oversample_per_prompt and cfg.trainer.algorithm.dynamic_sampling.early_end:
        yield (
            f"{key} starts more samples than a group has, and trainer.algorithm.dynamic_sampling.early_end=true "
            f"decides by those that it has: remove one of them"
        )
