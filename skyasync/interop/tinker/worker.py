"""The policy's ranks with the adapters of several models; a call is for the active model.

``PolicyTurns`` lets one model at a time compute with the policy, also across the loss of a rank.
Invariant: inside ``run`` the policy has the model's adapters after its last finished request. New
ranks, and ranks in which a request has failed, load the model's last state and repeat the requests
since.

| who waits      | for what                        | woken by                                          |
|----------------|---------------------------------|---------------------------------------------------|
| ``run``        | the work of other models        | its end; each takes its turn in order             |
| ``watch``      | ranks that are lost             | nothing: it looks every ``WATCH_S``               |
| ``run``        | new ranks, if one was lost      | ``replace``; the limits of the ranks' own start   |
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from skyasync.errors import UserError
from skyasync.interop.tinker.losses import LossBatch, SummedLoss
from skyasync.models.backend import LOGPROBS, MODEL, OutputRequest, SaveResult, Totals
from skyasync.models.batch import UpdateBatch
from skyasync.models.fsdp.backend import FSDPBackend
from skyasync.models.fsdp.sharding import local
from skyasync.workers.dispatch import Dispatch
from skyasync.workers.policy import PolicyWorker
from skyasync.workers.roles import POLICY

BASE = ""
"""In place of a model's id: adapters that add nothing, or a snapshot; they are not retained."""


class MultiAdapterWorker(PolicyWorker):
    """Attributes: active: the id of the model whose adapters are in the policy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (the base's)
        super().__init__(*args, **kwargs)
        self.loss = SummedLoss()
        self.active = BASE
        self._states: dict[str, AdapterState] = {}
        self._folder = ""  # the folder with the adapters that are in the policy; "" if none has

    def activate(self, model: str, rank: int = 0, seed: int = 0) -> None:
        """Put a model's adapters into the policy.

        A new model has new adapters of this rank and seed.
        """
        if model == self.active and model != BASE:
            return
        backend = self._fsdp
        state = self._states.pop(model, None)
        previous_state = exchange(backend, state)
        if self.active != BASE:
            self._states[self.active] = previous_state
        if state is None:
            assert backend.adapters is not None
            # The weights in the policy are those of the previous model.
            backend.adapters.initialize(seed, rank)
        self.active = model
        self._folder = ""

    def forget(self, model: str) -> None:
        """Release the adapters of a model."""
        self._states.pop(model, None)
        if self.active == model:
            self.active = BASE

    def forward_backward(self, batch: UpdateBatch) -> Tensor | None:
        """The log-probabilities of the batch, and its gradient unless it is for forward alone."""
        assert isinstance(batch, LossBatch)
        if batch.forward_only:
            return self.backend.forward(batch, OutputRequest(plain=True))[LOGPROBS]
        return self.accumulate(batch, self.loss, {LOGPROBS})

    def adam_step(self, adam: Mapping[str, float]) -> dict[str, Any]:
        """One step of AdamW with these settings.

        Returns its metrics, or under ``problem`` why there was no step.
        """
        backend = self._fsdp
        beta1 = adam["beta1"]
        self._folder = ""  # the adapters change
        backend.trained[MODEL].max_grad_norm = max(0.0, adam["grad_clip_norm"])
        for group in backend.optimizer.param_groups:
            group["betas"] = (beta1, adam["beta2"])
            group["eps"] = adam["eps"]
            group["weight_decay"] = adam["weight_decay"]
        problem = backend.examine()
        if problem:
            backend.drop_gradient()
            return {"problem": problem}
        metrics = backend.optimizer_step({MODEL: adam["learning_rate"]}, beta1=beta1)
        return dict(metrics.get(MODEL, {}))

    def load_adapters(self, folder: str, optimizer: bool) -> None:
        """Load adapters that ``save_adapters`` wrote into the active model.

        Args:
            optimizer: load the optimizer state as well; otherwise it is cleared.
        """
        self.load(folder)
        self.backend.drop_gradient()
        if not optimizer:
            self._fsdp.optimizer.state.clear()
            self._fsdp.step = 0
        self._folder = folder

    def show_adapters(self, folder: str) -> None:
        """Load adapters that ``save_adapters`` wrote for a weight sync.

        If the active model has them unchanged, it stays active; otherwise no model is.
        """
        if folder != self._folder:
            self.activate(BASE)
            self.load_adapters(folder, optimizer=False)

    def save_adapters(self, folder: str, optimizer: bool) -> SaveResult:
        """Write the active model's adapters, with their optimizer state or without."""
        adamw = self._fsdp.optimizer
        state = adamw.state
        if not optimizer:
            adamw.state = defaultdict(dict)  # save() writes an empty state
        try:
            saved = self.save(folder)
        finally:
            adamw.state = state
        self._folder = folder
        return saved

    @property
    def _fsdp(self) -> FSDPBackend:
        assert isinstance(self.backend, FSDPBackend)
        return self.backend


@dataclass
class AdapterState:
    """This rank's part of a model's adapters, in the order of the trained parameters.

    Adapters that are put back are bitwise what they were, with gradient, optimizer state and
    counters. So a model's results do not depend on the other models.
    """

    weights: list[Tensor]
    gradients: list[Tensor | None]
    optimizer: list[dict[str, Any]]
    totals: Totals
    step: int
    passes: int


def exchange(backend: FSDPBackend, state: AdapterState | None) -> AdapterState:
    """Take the adapters out of the model, and put ``state`` there.

    Args:
        state: None keeps the weights, without gradient and optimizer state.
    """
    trained = backend.trained[MODEL]
    optimizer_states = backend.optimizer.state
    parameters = [p for p in backend.model.parameters() if p.requires_grad]
    previous_state = AdapterState(
        weights=[local(p.detach()).clone() for p in parameters],
        gradients=[p.grad for p in parameters],
        optimizer=[optimizer_states.pop(p, {}) for p in parameters],
        totals=trained.totals,
        step=backend.step,
        passes=backend.passes,
    )
    backend.drop_gradient()
    backend.step = 0
    if state is not None:
        rows = zip(parameters, state.weights, state.gradients, state.optimizer, strict=True)
        for parameter, weight, gradient, optimizer_state in rows:
            shard = local(parameter.detach())
            shard.copy_(weight)
            parameter.grad = gradient
            if optimizer_state:  # AdamW has none for a parameter before its first step
                optimizer_states[parameter] = optimizer_state
        trained.totals = state.totals
        backend.step = state.step
        backend.passes = state.passes
    return previous_state


T = TypeVar("T")
Replace = Callable[[str, BaseException], Awaitable[Dispatch]]
WATCH_S = 1.0  # a look costs nothing; the start of a rank takes seconds


class PolicyTurns:
    """One model at a time computes with the policy.

    Args:
        replace: starts ranks for lost ones of a role; raises if there were too many restarts.

    Attributes:
        restore: loads a model into new ranks; set before the first ``run``.
        ended: has the error after which the policy cannot be used any more.
    """

    restore: Callable[[str, Dispatch], Awaitable[None]]

    def __init__(self, dispatch: Dispatch, replace: Replace) -> None:
        self.dispatch = dispatch
        self._replace = replace
        self._turn = asyncio.Lock()
        self._resident: set[str] = set()  # models whose adapters the ranks have
        self._active = BASE  # the model whose adapters are in the policy; BASE if not known
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, model: str, work: Callable[[Dispatch], Awaitable[T]]) -> T:
        """The result of ``work`` with the model's adapters; it is repeated if a rank is lost.

        Args:
            model: ``BASE`` is work that chooses the adapters by itself.
        """
        async with self._turn:
            while True:
                lost = self.dispatch.lost
                if lost is None:
                    try:
                        await self._activate(model)
                        return await work(self.dispatch)
                    except Exception as error:
                        lost = self.dispatch.lost
                        if lost is None:
                            # A UserError is raised before a rank computes. Any other error may
                            # leave the adapters half changed: they are restored before the next
                            # request.
                            if not isinstance(error, UserError):
                                self._resident.discard(model)
                                self._active = BASE
                            raise
                try:
                    self.dispatch = await self._replace(*lost)
                except Exception as error:
                    self.end(error)
                    raise
                self._resident.clear()
                self._active = BASE

    async def watch(self) -> None:
        """Replace ranks that are lost while no model needs them.

        An engine that starts gets its weights from the ranks.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            if self.dispatch.lost is not None and not self._turn.locked():
                await self.run(BASE, lambda dispatch: asyncio.sleep(0))

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """The callback of tasks that serve as long as the server: an error ends the server."""
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.end(error)

    def end(self, error: BaseException) -> None:
        """End the server with an error; the first one counts."""
        if not self.ended.done():
            self.ended.set_exception(error)

    async def _activate(self, model: str) -> None:
        """Put the model's adapters into the policy, from the ranks' memory or from its last state."""
        if model != BASE and model == self._active:
            return
        self._active = BASE  # an error below leaves it unknown
        if model in self._resident:
            async with self.dispatch.transfer.changing():
                await self.dispatch.call(POLICY, "activate", model)
        elif model != BASE:
            await self.restore(model, self.dispatch)
            self._resident.add(model)
        self._active = model
