"""What code of SkyRL's reads and calls around its trainer: settings, tracker, dispatch, timers, training data loader.

Invariant: each of these is our own part with a few names more; a setting that only they have has the value that leaves
its feature off.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from skyasync.config.schema import Config
from skyasync.config.schema.environment import proportions_of
from skyasync.data.prompts import PromptBatch, PromptCursor, PromptStream
from skyasync.envs.registry import Foreign
from skyasync.errors import UserError
from skyasync.rollout.types import Prompt
from skyasync.trainer.context import Progress

if TYPE_CHECKING:
    from skyasync.observability import trackers

log = logging.getLogger("skyrl")

#: Their settings that have no counterpart, off.
THEIRS: dict[str, Any] = {
    "trainer": {
        "hf_save_interval": -1, "update_ref_every_epoch": False, "dump_data_batch": False, "print_example_interval": 0,
        "enable_ray_gpu_monitor": False, "num_logger_train_samples": 0, "critic": {"model": {"path": None}},
    },
    "generator": {
        "step_wise_trajectories": False, "merge_stepwise_output": False, "batched": False,
        "inference_engine": {"backend": "vllm", "enable_ray_prometheus_stats": False},
    },
}  # fmt: skip


class ResumeMode(StrEnum):
    NONE = "none"
    LATEST = "latest"
    FROM_PATH = "from_path"


class SettingsView:
    """The run's settings, and behind them those that only SkyRL has."""

    def __init__(self, ours: Foreign, theirs: Mapping[str, Any] = THEIRS) -> None:
        self._ours, self._theirs = ours, theirs

    def __getattr__(self, name: str) -> Foreign:
        if name.startswith("__"):
            raise AttributeError(name)
        more = self._theirs.get(name)
        if not hasattr(self._ours, name) and name in self._theirs:
            return SettingsView(SimpleNamespace(), more) if isinstance(more, Mapping) else more
        found = getattr(self._ours, name)
        return SettingsView(found, more) if isinstance(more, Mapping) else found

    def __reduce__(self) -> tuple[Any, ...]:
        return (SettingsView, (self._ours, self._theirs))


class LoggedTracker:
    """Takes ``commit``, knows ``finish``, and lets callbacks see what is logged."""

    def __init__(self, tracker: trackers.Tracker, seen: Callable[[dict[str, Any]], None]) -> None:
        self._tracker, self._seen = tracker, seen

    def log(self, metrics: Mapping[str, Any], step: int, commit: bool = False) -> None:
        logs = dict(metrics)
        self._seen(logs)
        self.add(logs, step)

    def add(self, metrics: Mapping[str, Any], step: int) -> None:
        """More of a step that was logged."""
        self._tracker.log(numbers(metrics), step=step)

    def close(self) -> None:
        self._tracker.close()

    finish = close

    def __getattr__(self, name: str) -> Foreign:
        return getattr(object.__getattribute__(self, "_tracker"), name)


class DispatchView:
    """Our workers, with the calls that their loops make of them."""

    def __init__(self, dispatch: Foreign, sync: Callable[[], Awaitable[None]]) -> None:
        self._dispatch, self._sync = dispatch, sync

    async def save_weights_for_sampler(self) -> None:
        """Hand the newest weights to the engines."""
        await self._sync()

    def get_lcm_dp_size(self) -> int:
        """1: batches of any size are divided among the ranks."""
        return 1

    def init_weight_sync_state(self, inference_engine_client: object) -> None:
        """Nothing: the way of the weights is there."""

    def empty_cache(self, model: str = "") -> None: ...

    def finalize_pending_saves(self, model: str) -> None: ...

    def __getattr__(self, name: str) -> Foreign:
        return getattr(object.__getattribute__(self, "_dispatch"), name)


class PolicyModel:
    """The policy, as far as loops hand its weights over by themselves."""

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


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Those that are numbers, arrays and tensors of one among them."""
    found = {str(name): value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return {name: float(value) for name, value in found.items() if isinstance(value, bool | int | float)}


def with_epochs(cfg: Config, rows: int) -> Config:
    """Settings with a number of epochs, by which SkyRL's loops go: with ours, 0, as many as the steps take."""
    trainer = cfg.trainer
    if trainer.epochs:
        return cfg
    epochs = -(-trainer.max_training_steps // max(1, rows // trainer.train_batch_size))
    return replace(cfg, trainer=replace(trainer, epochs=max(1, epochs)))


class TrainDataLoader:
    """Attributes: ``asked``: uid -> prompt, and where the stream stands behind its batch."""

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
        self.asked: dict[str, tuple[Prompt, PromptBatch]] = {}

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        if self._cursor is None:
            self._cursor = self._stream.cursor(self._progress.position, self._progress.ahead)
        for _ in range(self._steps):
            batch = self._cursor.take(self.batch_size)
            if not batch.prompts:
                return
            self.asked |= {str(prompt.id): (prompt, batch) for prompt in batch.prompts}
            yield [_row(prompt) for prompt in batch.prompts]

    def state_dict(self) -> dict[str, int]:
        """Where training stands; checkpoints know it without this."""
        return {"position": self._progress.position}

    def forget(self, uids: Sequence[str]) -> None:
        """These have been trained."""
        for uid in uids:
            self.asked.pop(uid, None)


def _row(prompt: Prompt) -> dict[str, Any]:
    columns = {"prompt": prompt.messages, "env_class": prompt.env_class, "env_extras": prompt.extras}
    return {**columns, "uid": str(prompt.id)}
