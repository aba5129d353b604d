"""What a trainer is made from: the parts that ``BasePPOExp`` builds, by name and type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, Protocol, TypedDict

from skyasync.callbacks import TrainerCallback
from skyasync.config.schema import Config
from skyasync.observe.trackers import Tracker
from skyasync.observe.usage import Engines
from skyasync.rollout.generator_api import Generator
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.rollout.types import Prompt
from skyasync.training import handover


class Client(handover.Client, Engines, Protocol):
    """What a trainer asks of the engines, besides what the generator and the weight sync do."""


class Parts(TypedDict):
    """The keyword arguments of ``RayPPOTrainer.get_trainer``."""

    cfg: Config
    tracker: Tracker
    tokenizer: Tokenizer
    train_dataset: Sequence[Prompt]
    inference_engine_client: Client
    generator: Generator
    colocate_pg: NotRequired[object]
    eval_dataset: NotRequired[Sequence[Prompt] | None]
    callbacks: NotRequired[Sequence[TrainerCallback] | None]
