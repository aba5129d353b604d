"""Refusals that follow from what the chosen engine says of itself, and from the ways by which weights reach it.

Invariant: no engine's name stands here; a user's engine is judged by the same rules. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from skyasync.config.generation import BETWEEN_GPUS
from skyasync.config.sampling import backend, supported
from skyasync.config.schema import Config
from skyasync.config.values import written
from skyasync.registry import resolve_reference


def check_engine(cfg: Config) -> Iterator[str]:
    """What is asked of the chosen engine and it cannot do."""
    from skyasync.engines.protocol import ENGINES

    generator, engine = cfg.generator, backend(cfg)
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
    if not generator.run_engines_locally and not generator.engines:
        yield (
            "generator.run_engines_locally=false needs generator.engines=[http://host:port, ...], the servers that "
            "generate: name them, or leave it at true"
        )
    can = ENGINES.about(engine).can
    size, way = generator.inference_engine_tensor_parallel_size, generator.weight_sync_backend
    if size > 1 and not can["tensor_parallel"]:
        able = _with("tensor_parallel")
        yield (
            f"generator.inference_engine_tensor_parallel_size={size} needs {able}: an "
            f"engine of generator.backend={engine} runs on one device"
        )
    if generator.weight_sync_mode == "delta" and not can["takes_changes"]:
        able = _with("takes_changes")
        yield (
            f"generator.weight_sync_mode=delta needs {able}: generator.backend={engine} "
            f"does not say that it takes changes alone (takes_changes)"
        )
    elif generator.weight_sync_mode == "delta" and way in BETWEEN_GPUS:
        yield (
            f"generator.weight_sync_mode=delta goes by a file, generator.weight_sync_backend={way} sends all weights: "
            f"remove one of them"
        )
    if way not in ("auto", *can["weight_sync"]):
        able = _with("weight_sync", way)
        yield (
            f"generator.weight_sync_backend={way} needs {able}: with generator.backend="
            f"{engine} use generator.weight_sync_backend={'|'.join(can['weight_sync'])}"
        )


def check_adapters(cfg: Config) -> Iterator[str]:
    """Adapters that are sent alone to engines that cannot take them, or have no weights to add them to."""
    from skyasync.engines.protocol import ENGINES

    generator, lora, engine = cfg.generator, cfg.trainer.policy.lora, backend(cfg)
    yield from _check_base(cfg)
    if not lora.rank or lora.sync != "adapter":
        return
    key, can = "trainer.policy.lora.sync=adapter", ENGINES.about(engine).can
    if not can["takes_adapters"]:
        able = _with("takes_adapters")
        yield f"{key} needs {able}; found {engine}: set trainer.policy.lora.sync=merged"
    elif "lm_head" in lora.target_modules and "head" not in can["takes_adapters"]:
        yield (
            f"{key} sends an adapter of lm_head (trainer.policy.lora.target_modules), which generator.backend={engine} "
            f"cannot compute with: leave lm_head out, or set trainer.policy.lora.sync=merged"
        )
    if (way := generator.weight_sync_backend) in BETWEEN_GPUS:
        yield f"{key} goes by a file, generator.weight_sync_backend={way} sends all weights: remove one of them"
    if generator.weight_sync_mode == "delta":
        yield f"{key} and generator.weight_sync_mode=delta both send less than all weights: remove one of them"
    if cfg.trainer.placement.colocate_all and can["forgets_asleep"]:
        yield (
            f"{key} adds to weights that the engine keeps, and trainer.placement.colocate_all=true has generator."
            f"backend={engine} give them away while it sleeps: set trainer.policy.lora.sync=merged"
        )


def _check_base(cfg: Config) -> Iterator[str]:
    """A base in few bits, whose numbers nobody else has."""
    lora, tensor = cfg.trainer.policy.lora, cfg.trainer.parallel.tensor
    key = f"trainer.policy.lora.base_dtype={lora.base_dtype}"
    if not (lora.rank and lora.base_dtype):
        return
    for way in ("sync", "export"):
        if getattr(lora, way) == "adapter":
            yield (
                f"{key} trains adapters beside rounded weights, and trainer.policy.lora.{way}=adapter leaves them to "
                f"whoever has the weights of the files: set trainer.policy.lora.{way}=merged"
            )
    if cfg.trainer.policy.cpu_offload == "parameters":
        yield f"{key} holds codes, which trainer.policy.cpu_offload=parameters cannot move: remove one of them"
    if tensor > 1:
        yield f"{key} holds whole rows as codes, and trainer.parallel.tensor={tensor} splits matrices: set it to 1"


def check_router_replay(cfg: Config) -> Iterator[str]:
    """Experts that are to be replayed, and nobody says which, or nothing could listen."""
    from skyasync.engines.protocol import ENGINES

    policy, engine = cfg.trainer.policy, backend(cfg)
    if policy.router_replay == "none":
        return
    key = f"trainer.policy.router_replay={policy.router_replay}"
    if not ENGINES.about(engine).can["returns_experts"]:
        able = _with("returns_experts")
        yield (
            f"{key} needs {able}: generator.backend={engine} does not say which experts it "
            f"chose (returns_experts): set trainer.policy.router_replay=none"
        )
    if policy.torch_compile:
        yield (
            f"{key} is not supported with trainer.policy.torch_compile=true: compiled layers ignore the replayed "
            f"routing; remove one of them"
        )


def check_engine_kwargs(cfg: Config) -> Iterator[str]:
    """Arguments of the engine's own, which it judges itself (``options`` of its catalogue entry)."""
    from skyasync.engines.protocol import ENGINES

    options, engine = cfg.generator.engine_kwargs, backend(cfg)
    judge = ENGINES.about(engine).can["options"]
    if options and judge:
        yield from resolve_reference(judge, kind="check of generator.engine_kwargs")(options)
    elif options:
        able = _with("options")
        yield (
            f"generator.engine_kwargs={written(options)} has no effect: generator.backend={engine} takes no arguments "
            f"of its own, as {able} does"
        )


def _with(capability: str, among: str = "") -> str:
    """The built-in engines that have it (or ``among`` what they have of it), for a message."""
    from skyasync.engines.protocol import ENGINES

    has = {name: about.can[capability] for name, about in ENGINES.builtins().items()}
    return supported([name for name, found in has.items() if (among in found if among else found)])
