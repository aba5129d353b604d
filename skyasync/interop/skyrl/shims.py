"""The objects around SkyRL's trainer: settings, tracker, dispatch, timers, training data loader.

Invariant: each is our own part with a few more names; a setting that only SkyRL has is off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from skyasync.config.schema import Config
from skyasync.config.schema.environment import proportions_of
from skyasync.data.prompts import PromptBatch, PromptCursor, PromptStream
from skyasync.envs import Foreign
from skyasync.errors import UserError
from skyasync.interop.skyrl.gym import numbers
from skyasync.rollout.types import Prompt
from skyasync.trainer.context import Progress

if TYPE_CHECKING:
    from skyasync.observability import trackers

log = logging.getLogger("skyrl")

#: Their settings that have no counterpart, off.
THEIRS: dict[str, Any] = {
    "trainer": {
        "hf_save_interval": -1,
        "update_ref_every_epoch": False,
        "dump_data_batch": False,
        "print_example_interval": 0,
        "enable_ray_gpu_monitor": False,
        "num_logger_train_samples": 0,
        "critic": {"model": {"path": None}},
    },
    "generator": {
        "step_wise_trajectories": False,
        "merge_stepwise_output": False,
        "batched": False,
        "inference_engine": {"backend": "vllm", "enable_ray_prometheus_stats": False},
    },
}


class ResumeMode(StrEnum):
    NONE = "none"
    LATEST = "latest"
    FROM_PATH = "from_path"


class SettingsView:
    """The run's settings, and those that only SkyRL has."""

    def __init__(self, ours: Foreign, theirs: Mapping[str, Any] = THEIRS) -> None:
        self._ours, self._theirs = ours, theirs

    def __getattr__(self, name: str) -> Foreign:
        if name.startswith("__"):
            raise AttributeError(name)
        more = self._theirs.get(name)
        try:
            value = getattr(self._ours, name)
        except AttributeError:
            if name not in self._theirs:
                raise
            value = SimpleNamespace() if isinstance(more, Mapping) else more
        return SettingsView(value, more) if isinstance(more, Mapping) else value

    def __reduce__(self) -> tuple[Any, ...]:
        return (SettingsView, (self._ours, self._theirs))


class Delegate:
    """An object with a few more names; all others are the target's."""

    def __init__(self, target: Foreign) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Foreign:
        return getattr(object.__getattribute__(self, "_target"), name)


class LoggedTracker(Delegate):
    """Takes ``commit``, knows ``finish``, and lets callbacks see what is logged."""

    def __init__(self, tracker: trackers.Tracker, seen: Callable[[dict[str, Any]], object]) -> None:
        super().__init__(tracker)
        self._seen = seen

    def log(self, metrics: Mapping[str, Any], step: int, commit: bool = False) -> None:
        logs = dict(metrics)
        self._seen(logs)
        self.add(logs, step)

    def add(self, metrics: Mapping[str, Any], step: int) -> None:
        """More of a step that was logged."""
        self._target.log(numbers(metrics), step=step)

    def finish(self) -> None:
        self._target.close()


class DispatchView(Delegate):
    """Our workers, with the calls that their loops make of them."""

    def __init__(self, dispatch: Foreign, sync: Callable[[], Awaitable[None]]) -> None:
        super().__init__(dispatch)
        self.save_weights_for_sampler = sync

    def get_lcm_dp_size(self) -> int:
        """1: batches of any size are divided among the ranks."""
        return 1

    def _nothing(self, *arguments: object, **named: object) -> None:
        """The weight sync is ready, and saves are complete, without these calls."""

    init_weight_sync_state = empty_cache = finalize_pending_saves = _nothing


class PolicyModel:
    """The policy, for loops that send its weights by themselves."""

    def __init__(self, sync: Callable[[], Awaitable[None]]) -> None:
        self._sync = sync

    async def async_run_method(self, dispatch_type: str, method: str, *more: object) -> None:
        if method != "broadcast_to_inference_engines":
            raise AttributeError(
                f"policy_model has no {method!r} here: models are asked through the trainer's dispatch"
            )
        await self._sync()


class Timer:
    """Adds the seconds of a block to ``update_dict[message]``."""

    def __init__(self, message: str, update_dict: dict[str, float] | None = None) -> None:
        self.message, self.update_dict, self.start_time = message, update_dict, 0.0

    def __enter__(self) -> Timer:
        self.start_time = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        took_s = time.monotonic() - self.start_time
        log.debug("%s: %.2f s", self.message, took_s)
        if self.update_dict is not None:
            self.update_dict[self.message] = self.update_dict.get(self.message, 0.0) + took_s

    async def __aenter__(self) -> Timer:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        self.__exit__(*error)


class TrainDataLoader:
    """Rows of prompts, epoch by epoch.

    Attributes: ``requests``: uid -> prompt, and its batch, whose position the stream has after it.
    """

    def __init__(self, cfg: Config, dataset: Sequence[Prompt], progress: Progress) -> None:
        trainer = cfg.trainer
        if cfg.data.streaming:
            raise UserError("data.streaming=true has no epochs, by which SkyRL's loop goes: set it to false")
        self.batch_size, self._progress = trainer.train_batch_size, progress
        self._steps = max(1, len(dataset) // self.batch_size)
        total = max(trainer.epochs * len(dataset), trainer.epochs * self._steps * self.batch_size)
        shares = proportions_of(cfg.environment.domains)
        self._stream = PromptStream(dataset, self.batch_size, trainer.seed, total, shares)
        self._cursor: PromptCursor | None = None
        self.requests: dict[str, tuple[Prompt, PromptBatch]] = {}

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        if self._cursor is None:
            self._cursor = self._stream.cursor(self._progress.position, self._progress.trained_early)
        for _ in range(self._steps):
            batch = self._cursor.take(self.batch_size)
            if not batch.prompts:
                return
            self.requests |= {str(prompt.id): (prompt, batch) for prompt in batch.prompts}
            yield [
                {"prompt": p.messages, "env_class": p.env_class, "env_extras": p.extras, "uid": str(p.id)}
                for p in batch.prompts
            ]

    def state_dict(self) -> dict[str, int]:
        """The position of training; checkpoints contain it without this call."""
        return {"position": self._progress.position}
