"""A run that has workers and no engines.

Invariant: nothing is generated, and weights are sent nowhere; all else is as in a run with engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar, cast

from skyasync.config.schema import Config
from skyasync.rollout.generator_api import TrajectoryGenerator
from skyasync.rollout.types import GeneratorInput, Trajectory
from skyasync.run.experiment import BasePPOExp

if TYPE_CHECKING:
    from skyasync.inference.client import InferenceClient
    from skyasync.inference.interface import EngineStats
    from skyasync.rollout.generator_api import Generator
    from skyasync.rollout.tokenizer import Tokenizer
    from skyasync.weight_sync.sync import Destination, Paused, Source, WeightSync


class EnginelessExperiment(BasePPOExp):
    """Its settings of engines are replaced: they have no effect."""

    def __init__(self, cfg: Config) -> None:
        super().__init__(cfg)
        generator = cfg.generator
        generator.num_inference_engines, generator.weight_sync_backend = 0, "shared_memory"
        generator.max_engine_restarts = 0
        generator.backend = "transformers"  # which needs nothing installed
        cfg.trainer.placement.colocate_all = False

    def get_inference_client(self) -> InferenceClient:
        return cast("InferenceClient", NoEngines())

    def get_generator(self, cfg: Config, tokenizer: Tokenizer, inference_engine_client: InferenceClient) -> Generator:
        return NoGenerator()

    def get_judges(self, cfg: Config, tokenizer: Tokenizer, inference_engine_client: InferenceClient) -> None:
        """None: nothing is played."""

    def get_weight_sync(
        self, dispatch: Source, inference_engine_client: Destination, probe: Sequence[Sequence[int]]
    ) -> WeightSync:
        return cast("WeightSync", NoSync())


class NoEngines:
    """Replaces the inference client."""

    engines: ClassVar[list[object]] = []

    async def start(self) -> None: ...
    async def cut(self) -> None: ...
    async def pause(self, mode: str = "keep") -> None: ...
    async def resume(self) -> None: ...
    async def shutdown(self) -> None: ...
    async def stats(self) -> list[EngineStats]:
        return []


class NoGenerator(TrajectoryGenerator):
    async def roll_out(self, input_batch: GeneratorInput) -> list[Trajectory]:
        raise AssertionError("a run without engines generates nothing")


class NoSync:
    """Replaces the weight sync."""

    async def measure_floor(self) -> None: ...
    async def sync(self, version: int, paused: Paused = nullcontext) -> None: ...
    async def verify(self, version: int) -> dict[str, float]:
        return {}
