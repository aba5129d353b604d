"""How fast a run can be at most: a roofline by a card's published peak and bandwidths.

No prediction: real runs reach a part of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from skyasync.config.schema import Config
from skyasync.inference.settings import engine_config
from skyasync.planning.memory import Lengths
from skyasync.planning.plan import MemoryPlan
from skyasync.run.placement import ENGINES

USUAL_FRACTIONS = (0.15, 0.45)
"""Fractions of the peak that training usually reaches: small models without and large models with
compiled layers. One H100 trained models of 0.6B and 1.7B at 0.14 and 0.22 (docs/benchmarks.md)."""


@dataclass(frozen=True)
class Card:
    """By the maker's data sheet.

    Args:
        memory: GiB, as NVIDIA's tool says it.
        flops: floating-point operations per second, of dense bfloat16.
        bandwidth: bytes per second of its memory.
        links: bytes per second that it sends to others of its host.
    """

    memory: float
    flops: float
    bandwidth: float
    links: float


CARDS = {
    "A100": Card(80.0, 312e12, 2.04e12, 300e9),
    "H100": Card(79.6, 989e12, 3.35e12, 450e9),
    "H200": Card(140.4, 989e12, 4.8e12, 450e9),
    "B200": Card(179.1, 2250e12, 8.0e12, 900e9),
    "L40S": Card(45.0, 362e12, 0.864e12, 32e9),
    "L4": Card(22.5, 121e12, 0.3e12, 32e9),
}


def card_of(name: str) -> Card | None:
    """Of what NVIDIA's tool calls it, ``NVIDIA H100 80GB HBM3``; None if it is not known."""
    return next((card for key, card in CARDS.items() if re.search(rf"\b{key}\b", name)), None)


@dataclass(frozen=True)
class Speed:
    """Seconds at least, and tokens per second at most.

    Args:
        update: of an optimizer step's arithmetic, with the time in which stages of a pipeline have
            none.
        collectives: of what it sends, if all of it goes over the links within a host.
        tokens: per second and engine, with as many sequences as its cache holds.
        generation: of a training batch whose responses are as long as they may be.
    """

    update: float
    collectives: float
    tokens: float
    generation: float


def roofline(cfg: Config, plan: MemoryPlan, card: Card) -> Speed:
    """The time of an update and of a batch, if nothing but arithmetic or bandwidth limits them."""
    engine = plan.engine
    shape = plan.model
    lengths = Lengths.of(cfg)
    engines = plan.processes[ENGINES]
    settings = engine_config(cfg, gpus=True)
    # As many as its cache holds at full length.
    sequences = max(1, min(settings.max_num_seqs, engine.tokens // lengths.total))
    # Of each sequence, half the response on average.
    cached_tokens = sequences * (lengths.prompt + lengths.response / 2)
    cached = cached_tokens * engine.least_cache / settings.max_model_len
    idle_experts = shape.experts - shape.experts_per_token
    idle = shape.expert_parameters * idle_experts // max(1, shape.experts)
    operations = 2 * (shape.parameters - idle) * sequences / cfg.generator.devices_per_engine
    # A step of decoding reads all weights and the cache, and computes with each active parameter.
    step = max((engine.weights + cached) / card.bandwidth, operations / card.flops)
    tokens = sequences / step
    batch = cfg.trainer.train_batch_size * lengths.samples * lengths.response
    # Stages of a pipeline wait for one micro-batch each (1F1B).
    waits = (cfg.trainer.parallel.pipeline - 1) / max(1, plan.rank.micro_batches)
    return Speed(
        update=plan.rank.flops / card.flops * (1 + waits),
        collectives=sum(plan.rank.sent.values()) / card.links,
        tokens=tokens,
        generation=batch / (tokens * engines) if engines else 0.0,
    )
