"""Settings of the engines: what is asked of them, how new weights reach them, and agent programs.

Invariant: no engine's name stands in a check; a user's engine is judged by the same rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skyasync.config.frozen import SettingsGroup
from skyasync.config.keys import key
from skyasync.config.parts import engines, engines_with
from skyasync.config.schema.sampling import SamplingConfig, backend
from skyasync.config.values import written
from skyasync.other_frameworks import other_frameworks
from skyasync.registry import resolve_reference

if TYPE_CHECKING:
    from skyasync.config.schema import Config


#: What ``generator.agent_program`` says where programs outside of the run play the episodes.
ONLINE = "online"


@dataclass
class AgentsConfig(SettingsGroup):
    """The part of ``GeneratorConfig`` that is about agent programs."""

    agent_func_path: str = key("", open_ended=True)
    """File of an OpenRLHF agent, for all rows without an env_class."""
    agent_program: str = key("", open_ended=True)
    """Agent program instead of environments, module:function or file.py:function. It receives data,
    and base_url and api_key of an OpenAI-compatible endpoint, and returns the reward. Also a class
    with async run(data, **extra), or online: external programs open sessions and send rewards."""
    turn_discount: float = key(1.0, above=0.0, high=1.0, when="generator.agent_program")
    """Discount of rewards per call of an agent program: a reward is multiplied by it once for each
    earlier call."""
    agent_env: list[str] = key([], when="generator.agent_program")
    """Environment variables with secret-looking names (KEY, TOKEN, ...) that agent programs may
    read."""
    endpoint_host: str = key("127.0.0.1", open_ended=True, when="generator.agent_program")
    """Address that the endpoint binds to; any other than 127.0.0.1 opens it to other machines."""
    endpoint_port: int = key(0, low=0, high=65535, when="generator.agent_program")
    """Port that the endpoint binds to; 0 is a free one."""
    tool_parser: str = key(
        "hermes",
        registry="skyasync.agents.parsers:TOOL_PARSERS",
        open_ended=True,
        when="generator.agent_program",
    )
    """Format in which the model writes tool calls: a model family, vllm:NAME for a parser of vLLM,
    or module:function of your own, text -> (text, calls)."""
    reasoning_parser: str = key(
        "",
        choices=("",),
        registry="skyasync.agents.parsers:REASONING_PARSERS",
        open_ended=True,
        when="generator.agent_program",
    )
    """Format in which the model writes its thinking, which the endpoint then separates from the
    reply: a model family, vllm:NAME, or module:function, text -> (thinking, text). Empty leaves it
    in the text."""


def check_agents(cfg: Config) -> Iterator[str]:
    """Settings that would reward what the program rewards, or leave an episode without an end."""
    generator = cfg.generator
    env_class = cfg.environment.env_class
    file = generator.agent_func_path
    program = generator.agent_program
    if program == ONLINE and not generator.episode_timeout_s:
        yield (
            "generator.agent_program=online needs generator.episode_timeout_s: a session whose program never ends it "
            "would hold up the run"
        )
    if program == ONLINE and cfg.environment.on_error == "raise":
        yield (
            "generator.agent_program=online needs environment.on_error=mask or keep: with raise, a program outside "
            "that goes away without ending its session would end the run"
        )
    # not chosen, but settled in an earlier run
    if file and program == other_frameworks().agent_file_program:
        program = ""
    unread_settings = {
        "environment.env_class": env_class,
        "environment.reward_funcs": ",".join(cfg.environment.reward_funcs),
        "generator.agent_func_path": file,
    }
    for name, value in unread_settings.items():
        if program and value:
            yield (
                f"generator.agent_program={program} plays the episodes and returns their rewards; {name}={value} would "
                f"not be used: leave one of them empty"
            )
    if file and env_class not in ("", other_frameworks().agent_file_environment):
        yield (
            f"generator.agent_func_path={file} plays the rows that name no environment, and environment.env_class="
            f"{env_class} those too: leave one of them empty"
        )


BETWEEN_GPUS = ("nccl", "cuda_ipc")
"""Values of ``weight_sync_backend`` by which weights never lie in host memory."""

_TRANSFERS = "skyasync.weight_sync.transfers:TRANSFERS"


@dataclass
class WeightSyncConfig(SettingsGroup):
    """The part of ``GeneratorConfig`` that is about new weights."""

    weight_sync_backend: str = key("auto", choices=("auto",), registry=_TRANSFERS)
    """How weights reach the engines. auto is nccl for vllm on separate GPUs, cuda_ipc on GPUs that
    engines share with the policy (trainer.placement.colocate_all), otherwise shared_memory; engines
    on other nodes then receive a broadcast over TCP."""
    weight_sync_senders: int = key(1, low=1, when="generator.weight_sync_backend=nccl")
    """Number of policy ranks that send, each a share of the weights, on as many nodes as possible.
    Each adds the bandwidth of its GPU's network card."""
    weight_sync_mode: str = key("full", choices=("full", "delta"))
    """What a weight sync sends: full, all weights; delta, only weights that changed since the last
    sync (not with nccl or cuda_ipc). For delta both sides keep a copy. All weights are sent if most
    have changed, and to a new engine."""
    weight_sync_dir: str = key("", open_ended=True, when="generator.engines")
    """Folder for weights on their way to generator.engines, which both sides see under this path;
    empty uses shared memory, for servers on the policy's machine."""
    verify_weight_sync: bool = key(True)
    """Compare log-probabilities of verification prompts between trainer and engine after weight
    syncs."""
    verify_interval: int = key(10, low=1)
    """Number of weight syncs between two such comparisons. Checksums verify every sync, except with
    nccl and cuda_ipc."""
    weight_sync_tolerance: float = key(0.0, low=0.0, when="generator.verify_weight_sync")
    """Maximum mean log-probability difference per token in such a comparison, in nats; 0 is 4 times
    the difference at the start, from 2e-5 to 0.001 in float32 and from 0.02 to 0.5 in bfloat16."""


def check_weight_sync(cfg: Config) -> Iterator[str]:
    """Transfers that the chosen engine does not support, or that contradict its devices or the
    trained weights."""
    generator = cfg.generator
    engine = backend(cfg)
    way = generator.weight_sync_backend
    can = engines().about(engine).can
    if generator.weight_sync_mode == "delta" and not can["takes_changes"]:
        yield (
            f"generator.weight_sync_mode=delta needs {engines_with('takes_changes')}: generator.backend={engine} "
            f"does not declare that it accepts deltas (takes_changes)"
        )
    elif generator.weight_sync_mode == "delta" and way in BETWEEN_GPUS:
        yield (
            f"generator.weight_sync_mode=delta goes by a file, generator.weight_sync_backend={way} sends all weights: "
            f"remove one of them"
        )
    if way not in ("auto", *can["weight_sync"]):
        yield (
            f"generator.weight_sync_backend={way} needs {engines_with('weight_sync', way)}: with generator.backend="
            f"{engine} use generator.weight_sync_backend={'|'.join(can['weight_sync'])}"
        )
    ranks = cfg.trainer.placement.policy_ranks
    senders = generator.weight_sync_senders
    if way == "nccl" and senders > ranks:
        yield (
            f"generator.weight_sync_senders={senders} is more than the {ranks} policy ranks "
            f"(trainer.placement.policy_num_nodes times policy_num_gpus_per_node): set it to {ranks} or less"
        )
    lora = cfg.trainer.policy.lora
    if cfg.trainer.policy.head_dtype == "float32":
        if lora.rank and "lm_head" in lora.target_modules:
            yield (
                "trainer.policy.head_dtype=float32 computes with the weights of lm_head, which has an adapter "
                "(trainer.policy.lora.target_modules): leave lm_head out, or set head_dtype=model"
            )
        # A server is started by hand, perhaps with such a head: the comparison of log-probabilities tells.
        elif not can["float32_head"] and not can["elsewhere"]:
            yield (
                f"trainer.policy.head_dtype=float32 needs {engines_with('float32_head')}; found {engine}: "
                f"set it to model"
            )
    key = "trainer.policy.lora.sync=adapter"
    if lora.rank and lora.sync == "adapter":
        if not can["takes_adapters"]:
            yield f"{key} needs {engines_with('takes_adapters')}; found {engine}: set trainer.policy.lora.sync=merged"
        elif "lm_head" in lora.target_modules and "head" not in can["takes_adapters"]:
            yield (
                f"{key} sends an adapter of lm_head (trainer.policy.lora.target_modules), which generator.backend="
                f"{engine} cannot compute with: leave lm_head out, or set trainer.policy.lora.sync=merged"
            )
        if way in BETWEEN_GPUS:
            yield f"{key} goes by a file, generator.weight_sync_backend={way} sends all weights: remove one of them"
        if generator.weight_sync_mode == "delta":
            yield f"{key} and generator.weight_sync_mode=delta both send less than all weights: remove one of them"
        if cfg.trainer.placement.colocate_all and can["forgets_asleep"]:
            yield (
                f"{key} adds to weights that the engine keeps, and trainer.placement.colocate_all=true has generator."
                f"backend={engine} give them away while it sleeps: set trainer.policy.lora.sync=merged"
            )
    if cfg.generator.hybrid_engines and generator.weight_sync_backend in BETWEEN_GPUS:
        yield (
            f"generator.weight_sync_backend={generator.weight_sync_backend} reaches engines that are awake at a weight "
            f"sync, and generator.hybrid_engines={generator.hybrid_engines} sleep then: use "
            f"generator.weight_sync_backend=shared_memory"
        )
    if not cfg.trainer.placement.colocate_all:
        if generator.weight_sync_backend == "cuda_ipc":
            yield (
                "generator.weight_sync_backend=cuda_ipc has engines read on the policy's own GPUs, and "
                "trainer.placement.colocate_all=false gives them others: use generator.weight_sync_backend=nccl, or "
                "set trainer.placement.colocate_all=true"
            )
        return
    if generator.weight_sync_backend == "nccl":
        yield (
            "generator.weight_sync_backend=nccl broadcasts from one GPU to others, and "
            "trainer.placement.colocate_all=true puts policy and engines on the same: use "
            "generator.weight_sync_backend=cuda_ipc or shared_memory, or set trainer.placement.colocate_all=false"
        )
    if generator.devices_per_engine > 1:
        size = generator.inference_engine_tensor_parallel_size
        if size > 1:
            key = f"generator.inference_engine_tensor_parallel_size={size}"
        else:
            key = "pipeline_parallel_size"
        yield (
            f"{key} needs as many GPUs per engine, and trainer.placement.colocate_all=true gives it a share of one: "
            f"set the size to 1, or trainer.placement.colocate_all=false"
        )


@dataclass
class GeneratorConfig(AgentsConfig, WeightSyncConfig):
    backend: str = key(
        "auto", choices=("auto",), registry="skyasync.inference.interface:ENGINES", open_ended=True
    )
    """Inference engine; auto is vllm if it is installed, otherwise transformers."""
    num_inference_engines: int = key(1, low=1, when="not generator.engines")
    """Number of inference engines."""
    inference_engine_tensor_parallel_size: int = key(1, low=1)
    """Number of GPUs per engine."""
    engines: list[str] = key([], open_ended=True)
    """Addresses of servers that generate instead of engines of the run (skyasync serve), such as
    http://127.0.0.1:8000."""
    n_samples_per_prompt: int = key(8, low=1)
    """Number of responses per prompt, which form a group."""
    is_num_return_sequences_expand: bool = key(True)
    """true: each sample is a separate request, so a group may spread over the engines. false: a
    group is one request to one engine, and ends as a whole (vllm)."""
    oversample_per_prompt: int = key(0, low=0)
    """Number of extra samples per group that are started. The first n_samples_per_prompt that
    finish are trained, which favours short responses."""
    eval_n_samples_per_prompt: int = key(1, low=1)
    """Number of responses per prompt in evaluation."""
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    eval_sampling_params: dict[str, Any] = key({})
    """Settings of sampling_params that evaluation has instead, by name. Without a temperature
    evaluation is greedy (0); null is the value of training."""
    generate_batch_size: int = key(0, low=0)
    """Maximum number of prompts that are submitted and not yet trained, in fully_async and its
    variants; 0 is what max_staleness allows."""
    max_concurrent_rollouts: int = key(0, low=0)
    """Maximum number of prompts that are generated at once, in fully_async and its variants; 0 is
    no limit."""
    max_turns: int = key(0, low=0)
    """Maximum number of turns per episode; environments read it as extras['max_turns']. 0 is no
    limit."""
    max_concurrent_episodes: int = key(0, low=0)
    """Maximum number of episodes in flight over all prompts; others wait. 0 is no limit."""
    adaptive_concurrency: bool = key(False, when="generator.max_engine_restarts")
    """Limit the requests in flight at each engine to slightly more than it computes at once.
    Further requests wait in the run, and go to the first engine with room. By default they are sent
    to the engines and wait there."""
    episode_timeout_s: float = key(0.0, low=0.0)
    """Maximum duration of an episode in seconds, including pauses of the engines. 0 is no limit for
    environments, whose steps have one, and 0.9 of trainer.step_timeout_s for agent programs."""
    max_model_len: int = key(0, low=0)
    """Maximum number of tokens of a sequence in the engine; an episode ends there. 0 is enough for
    the prompt and max_turns responses (4 if max_turns is 0), at most the model's context length."""
    hybrid_engines: int = key(0, low=0, when="not generator.engines")
    """Number of engines on the policy's devices, in addition to num_inference_engines: they
    generate while the policy waits for a batch (trainer.plan=hybrid_async)."""
    max_num_seqs: int = key(1024, low=1, when="not generator.engines")
    """Maximum number of sequences that an engine computes at once."""
    max_num_batched_tokens: int = key(0, low=0, when="not generator.engines")
    """Maximum number of tokens that an engine computes per step, with prompts (vllm); 0 is
    max_num_seqs, at least 8192."""
    gpu_memory_utilization: float = key(0.8, above=0.0, high=1.0, when="not generator.engines")
    """Share of a GPU's memory for engines; several on one GPU divide it."""
    kv_cache_gb: float = key(1.0, above=0.0, when="not generator.engines")
    """KV cache of an engine on a CPU, in GB."""
    engine_kwargs: dict[str, Any] = key({})
    """Further arguments of the engine, such as {enforce_eager: true} (vllm); checked before the
    start."""
    dtype: str = key("auto", choices=("auto", "float32", "bfloat16"))
    """Dtype of the engine's weights; auto follows the policy's."""
    threads: int = key(0, low=0, when="not generator.engines")
    """CPU threads per engine; 0 shares the machine's cores according to the plan."""
    request_timeout_s: float = key(600.0, above=0.0)
    """Seconds without progress of its engine after which an unanswered request is an error. Time in
    queues does not count while the engine generates."""
    engine_start_timeout_s: float = key(300.0, above=0.0)
    """Maximum duration of an engine's start in seconds. Without GPUs it is multiplied by the ranks
    and engines per core of this machine, which start at the same time."""
    max_engine_restarts: int = key(3, low=0)
    """Maximum number of engine restarts per hour; the run continues meanwhile. After one more
    failure, or with 0 after the first, the run ends."""
    heartbeat_s: float = key(5.0, above=0.0, when="generator.max_engine_restarts")
    """Seconds between two heartbeats of an engine. A heartbeat also fetches new tokens (from at
    most 50 engines a second), from which responses continue if the engine fails."""
    heartbeat_timeout_s: float = key(60.0, above=0.0, when="generator.max_engine_restarts")
    """Seconds without an answer to a heartbeat after which an engine counts as failed; a busy
    engine answers between two tokens."""

    @property
    def own_engines(self) -> int:
        """Engines that the run starts itself."""
        if self.engines:
            return 0
        return self.num_inference_engines + self.hybrid_engines

    @property
    def devices_per_engine(self) -> int:
        """GPUs of an engine: tensor-parallel ranks in each of its pipeline's stages."""
        stages = self.engine_kwargs.get("pipeline_parallel_size", 1)
        return self.inference_engine_tensor_parallel_size * (
            stages if isinstance(stages, int) else 1
        )


def check_generator(cfg: Config) -> Iterator[str]:
    """Settings that the chosen engine does not support, and settings that are never read."""
    generator = cfg.generator
    policy = cfg.trainer.policy
    engine = backend(cfg)
    can = engines().about(engine).can
    servers = [
        name for name, declaration in engines().builtins().items() if declaration.can["elsewhere"]
    ]
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
    options = generator.engine_kwargs
    judge = can["options"]
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
