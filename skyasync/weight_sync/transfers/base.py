"""One way by which weights travel from the policy's ranks to engines.

```
controller   publish ──▶ (send  ∥  engines load each of ``parts``) ──▶ release          a weight sync
             for_late_engine ──▶ one engine loads ──▶ release                           between two syncs
```

Every way is one file with three parts: the object of the controller (a ``WeightTransfer`` in
``TRANSFERS``), the sender on each policy rank, made by ``WeightSender``, and the reader of an
engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, Self

from skyasync.weight_sync.update import WeightUpdate

if TYPE_CHECKING:
    from skyasync.config.schema import Config
    from skyasync.weight_sync.full_tensors import FullTensors


class PolicyRanks(Protocol):
    """The policy's processes; ``skyasync.workers.ranks.RankGroup`` says what each method does."""

    async def call(self, method: str, *args: object) -> list[Any]: ...
    async def call_first(self, method: str, *args: object) -> Any: ...  # noqa: ANN401


class WeightTransfer(ABC):
    """The controller's object of a transfer.

    Every update of ``publish``, ``publish_whole`` and ``for_late_engine`` is released once.

    Attributes:
        proves_content: digests prove after every sync what the engines have; else the verification
            prompts do.
        expects_late_engines: ``for_late_engine`` may be called; set before the first ``publish``.
    """

    proves_content = False
    sender = ""  # the key of ``WeightSender.senders``
    expects_late_engines = False

    def __init__(self, policy: PolicyRanks) -> None:
        self._policy = policy

    @classmethod
    def of_run(
        cls,
        policy: Any,  # noqa: ANN401
        cfg: Config,
        engines: Callable[[], Sequence[int]],
        *,
        gpus: bool,
    ) -> Self:
        """The transfer of a run.

        Args:
            policy: the ``RankGroup``.
            engines: those that take part in the next sync, by their indices.
            gpus: the policy is on GPUs.
        """
        del cfg, engines, gpus
        return cls(policy)

    @classmethod
    def new_sender(cls, weights: Callable[[], FullTensors], rank: int) -> object:
        """The sender on a rank of the policy, made at its first call, if ``WeightSender`` has none.

        ``sender`` is then the name in ``TRANSFERS``.
        """
        raise NotImplementedError(f"{cls.__name__} has no sender")

    @abstractmethod
    async def publish(self, version: int) -> WeightUpdate:
        """Make the weights available to the engines, or ready to be sent."""

    async def send(self, update: WeightUpdate) -> None:
        """Send the update while the engines load it."""
        return

    async def parts(self, update: WeightUpdate) -> AsyncGenerator[WeightUpdate]:
        """The parts that the engines load, one after the other."""
        yield update

    @abstractmethod
    async def release(self, update: WeightUpdate) -> None:
        """Release an update, which no engine loads any more."""

    @abstractmethod
    async def for_late_engine(self, version: int) -> WeightUpdate:
        """All weights of the version that was published last, for an engine that joins late.

        Raises:
            WeightsMovedError: if they are not available before the next sync.
        """

    async def publish_whole(self, update: WeightUpdate) -> WeightUpdate:
        """All weights of the version once more, for all engines: one could not load the update."""
        return await self.publish(update.version)

    def engine_failed(self, cause: BaseException) -> bool:
        """Note an engine's failure during the loading; whether the policy's ranks are lost too."""
        return False

    def changing(self) -> AbstractAsyncContextManager[None]:
        """A context for every change of the policy's weights."""
        return nullcontext()

    async def release_retained(self) -> None:
        """Free the weights that are retained for late engines: none will join any more."""
        return

    async def _ranks(self, method: str, *args: object) -> list[Any]:
        return await self._policy.call("transfer_weights", self.sender, method, *args)

    async def _rank_0(self, method: str, *args: object) -> Any:  # noqa: ANN401  (what the method returns)
        return await self._policy.call_first("transfer_weights", self.sender, method, *args)
