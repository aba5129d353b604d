"""The policy's ranks with the adapters of several models, of which each call is for the one that is
active.

``PolicyTurns`` decides who computes with the policy: one model at a time, also across the loss of a
rank. Invariant: inside ``run`` the policy has the model's adapters as they are after its last
finished request, whatever has failed before: new ranks, and those in which a request has failed,
load the model's last state and repeat what was done since.

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
"""In place of a model's id: adapters that add nothing, or what is loaded next; they are not
retained."""


class MultiAdapterWorker(PolicyWorker):
    """Attributes: active: the id of the model whose adapters are in the policy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  (the base's)
        super().__init__(*args, **kwargs)
        self.loss = SummedLoss()
        self.active = BASE
        self._states: dict[str, AdapterState] = {}
        self._folder = ""  # that has the adapters which are in the policy; "" if none has

    def activate(self, model: str, rank: int = 0, seed: int = 0) -> None:
        """Put a model's adapters into the policy: new ones of this rank and seed if it is not
        known."""
        if model == self.active and model != BASE:
            return
        backend = self._fsdp
        state = self._states.pop(model, None)
        before = exchange(backend, state)
        if self.active != BASE:
            self._states[self.active] = before
        if state is None:
            assert backend.adapters is not None
            backend.adapters.initialize(seed, rank)
        self.active = model
        self._folder = ""

    def forget(self, model: str) -> None:
        """The model is not used any more."""
        self._states.pop(model, None)
        if self.active == model:
            self.active = BASE

    def forward_backward(self, batch: UpdateBatch) -> Tensor | None:
        """The log-probabilities of the batch, and its gradient unless it is for the forward pass
        alone."""
        assert isinstance(batch, LossBatch)
        if batch.forward_only:
            return self.backend.forward(batch, OutputRequest(plain=True))[LOGPROBS]
        return self.accumulate(batch, self.loss, {LOGPROBS})

    def adam_step(self, adam: Mapping[str, float]) -> dict[str, Any]:
        """One step of AdamW with these settings, and its metrics; ``problem`` if there was none,
        and why."""
        backend = self._fsdp
        first = adam["beta1"]
        self._folder = ""
        backend.trained[MODEL].max_grad_norm = max(0.0, adam["grad_clip_norm"])
        for group in backend.optimizer.param_groups:
            group |= {
                "betas": (first, adam["beta2"]),
                "eps": adam["eps"],
                "weight_decay": adam["weight_decay"],
            }
        problem = backend.examine()
        if problem:
            backend.drop_gradient()
            return {"problem": problem}
        return dict(
            backend.optimizer_step({MODEL: adam["learning_rate"]}, beta1=first).get(MODEL, {})
        )

    def load_adapters(self, folder: str, optimizer: bool) -> None:
        """What ``save`` wrote, into the active model."""
        self.load(folder)
        self.backend.drop_gradient()
        if not optimizer:
            self._fsdp.optimizer.state.clear()
            self._fsdp.step = 0
        self._folder = folder

    def show_adapters(self, folder: str) -> None:
        """Have what ``save`` wrote in the policy: in the active model, if it is unchanged since, or
        in none."""
        if folder != self._folder:
            self.activate(BASE)
            self.load_adapters(folder, optimizer=False)

    def save_adapters(self, folder: str, optimizer: bool) -> SaveResult:
        """Write the active model's adapters, with their optimizer state or without."""
        adamw = self._fsdp.optimizer
        state = self._fsdp.optimizer.state
        adamw.state = state if optimizer else defaultdict(dict)
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
    """This rank's part of a model's adapters, in the order of the parameters that are trained.

    Adapters that come back are bitwise what they were, with their gradient, optimizer state and
    count of steps. So what is computed with them is what would be computed if the others were not
    there.
    """

    weights: list[Tensor]
    gradients: list[Tensor | None]
    optimizer: list[dict[str, Any]]
    totals: Totals
    step: int
    passes: int


def exchange(backend: FSDPBackend, state: AdapterState | None) -> AdapterState:
    """Take a set out of the model, and put ``state`` there.

    Args:
        state: None leaves the weights, without gradient and optimizer state.
    """
    part = backend.trained[MODEL]
    steps = backend.optimizer.state
    parameters = [p for p in backend.model.parameters() if p.requires_grad]
    taken = AdapterState(
        [local(p.detach()).clone() for p in parameters],
        [p.grad for p in parameters],
        [steps.pop(p, {}) for p in parameters],
        part.totals,
        backend.step,
        backend.passes,
    )
    backend.drop_gradient()
    backend.step = 0
    if state is not None:
        rows = zip(parameters, state.weights, state.gradients, state.optimizer, strict=True)
        for parameter, weight, gradient, own in rows:
            local(parameter.detach()).copy_(weight)
            parameter.grad = gradient
            if own:
                steps[parameter] = own
        part.totals = state.totals
        backend.step = state.step
        backend.passes = state.passes
    return taken


T = TypeVar("T")
Replace = Callable[[str, BaseException], Awaitable[Dispatch]]
WATCH_S = 1.0


class PolicyTurns:
    """Args: replace: starts ranks for those of a role that are lost; raises if it may not.

    Attributes:
        restore: brings a model into new ranks; set before the first ``run``.
        ended: has the error after which the policy cannot be used any more.
    """

    restore: Callable[[str, Dispatch], Awaitable[None]]

    def __init__(self, dispatch: Dispatch, replace: Replace) -> None:
        self.dispatch = dispatch
        self._replace = replace
        self._turn = asyncio.Lock()
        self._resident = set[str]()
        self._active = BASE  # the model that is in the policy, if it is known
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, model: str, work: Callable[[Dispatch], Awaitable[T]]) -> T:
        """The result of ``work`` with the model's adapters; it begins again if a rank is lost.

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
                            if not isinstance(
                                error, UserError
                            ):  # it may have changed a part of the model
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
        """Replace ranks that were lost while no model needed them: an engine that starts gets its
        weights from them."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.dispatch.lost is not None and not self._turn.locked():
                await self.run(BASE, lambda dispatch: asyncio.sleep(0))

    def task_ended(self, task: asyncio.Task[None]) -> None:
        """A task that serves for ever has ended."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.end(error)

    def end(self, error: BaseException) -> None:
        """The server cannot go on."""
        if not self.ended.done():
            self.ended.set_exception(error)

    async def _activate(self, model: str) -> None:
        if model != BASE and model == self._active:
            return
        self._active = BASE
        if model in self._resident:
            async with self.dispatch.transfer.changing():
                await self.dispatch.call(POLICY, "activate", model)
        elif model != BASE:
            await self.restore(model, self.dispatch)
            self._resident.add(model)
        self._active = model
