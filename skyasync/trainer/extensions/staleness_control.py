"""The step size of asynchronous training: no larger than keeps the policy near the one that sampled.

Invariant: a factor depends only on what was measured, in the order of the training steps, and its state is in
checkpoints. So a resumed run takes the steps of one that was not interrupted. Samples of staleness 0 give exactly 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from skyasync.callbacks import RunExtension
from skyasync.errors import UserError
from skyasync.trainer.context import RunContext

if TYPE_CHECKING:
    from skyasync.algorithms.off_policy import Drift
    from skyasync.models.batch import UpdateBatch

log = logging.getLogger(__name__)

SCALE, FULL_KL = "staleness_control/lr_scale", "staleness_control/full_step_kl"
KL_LIMIT = 0.02  # nats per token
MEMORY = 0.5  # weight of the earlier estimates in each new one
REMEMBERED = 256  # training steps whose factors are kept; a sample that is older counts the missing ones as 1
NOTED = 0.1  # relative change from which on a decision is logged again


@dataclass
class StepSize:
    """Chooses the factor of the learning rate from the KL divergences of past batches; a pure state machine.

    Over s training steps with factors f the policy moves by their sum, and the KL divergence of tokens that are s
    versions old is quadratic in it: ``KL = noise + speed * (f_1 + ... + f_s)^2``. Both constants are estimated from the
    batches. The factor is the largest that holds the mean KL divergence at ``kl_limit``, between ``1 / (1 + S)``
    and 1. S is the staleness of the batch; in the first steps, which are AdamW's largest, it is at least the bound.
    Before there is an estimate the factor is the least.

    Sources: ``1 / (1 + S)`` divides by the staleness, as Zhang et al. 2016 (1511.05950). 2607.01083 bounds the learning
    rate by ``R / (S G)``: here the update's size G is measured, and the radius R is that of a trust region,
    ``sqrt(kl_limit)`` (Schulman et al. 2015).

    Attributes:
        bound: versions that a sample may be old by the run's settings.
        noise: KL divergence of tokens of staleness 0: what engine and trainer compute differently.
        speed: KL divergence of one full step.
        factors: of the latest training steps, the newest last.
        full_kl: KL divergence that batches like the last would have after full steps, the noise left out.
    """

    bound: int = 0
    kl_limit: float = KL_LIMIT
    noise: float | None = None
    speed: float | None = None
    factors: list[float] = field(default_factory=list)
    full_kl: float = 0.0

    def choose(self, batch: Mapping[int, Drift]) -> float:
        """The factor of the training step on this batch.

        Args:
            batch: by staleness; a KL divergence that is not finite counts as not measured.
        """
        known = {s: drift for s, drift in batch.items() if s >= 0 and math.isfinite(drift.kl)}
        if fresh := known.pop(0, None):
            self.noise = _average(self.noise, fresh.kl)
        if known:
            moved = sum(drift.tokens * self._moved(s) ** 2 for s, drift in known.items())
            kl = sum(drift.tokens * max(drift.kl - (self.noise or 0.0), 0.0) for drift in known.values())
            self.speed = _average(self.speed, kl / moved)
        tokens = sum(drift.tokens for drift in batch.values())
        square = sum(drift.tokens * s**2 for s, drift in batch.items()) / max(tokens, 1)
        if len(self.factors) < self.bound:
            square = max(square, self.bound**2)
        least = 1.0 / (1.0 + math.sqrt(square))
        self.full_kl = (self.speed or 0.0) * square
        factor = least if self.speed is None else 1.0
        if self.full_kl > self.kl_limit:
            factor = max(least, math.sqrt(self.kl_limit / self.full_kl))
        self.factors = [*self.factors, factor][-REMEMBERED:]
        return factor

    def _moved(self, staleness: int) -> float:
        """Full steps by which the policy has moved in so many training steps."""
        latest = self.factors[-staleness:]
        return sum(latest) + (staleness - len(latest))


def _average(before: float | None, value: float) -> float:
    return value if before is None else MEMORY * before + (1 - MEMORY) * value


class StalenessControl(RunExtension):
    """Scales the policy's learning rate in each training step (``trainer.staleness_control=auto``)."""

    def __init__(self, context: RunContext, bound: int) -> None:
        self._phases = context.phases
        self._rule = StepSize(bound)
        self._noted = 1.0  # the factor that was logged last

    def choose(self, parts: Sequence[UpdateBatch], step: int) -> float:
        """The factor of the learning rate of a training step, from the batches of its first optimizer step.

        Args:
            step: training steps done.

        Raises:
            UserError: if samples are stale and their log-probabilities by the engine are not known.
        """
        from skyasync.algorithms.off_policy import drift_by_staleness

        batch = drift_by_staleness(parts, step)
        if any(s > 0 and math.isnan(drift.kl) for s, drift in batch.items()):
            raise UserError(
                "trainer.staleness_control=auto compares the trained policy with the one that sampled, and the "
                "generator's output lacks rollout_logprobs: return them, or set trainer.staleness_control=none"
            )
        rule, factor = self._rule, self._rule.choose(batch)
        self._phases.metrics |= {SCALE: factor, FULL_KL: rule.full_kl}
        if abs(factor - self._noted) > NOTED * self._noted:
            self._noted, tokens = factor, sum(drift.tokens for drift in batch.values())
            estimate = f"they would be {rule.full_kl:.2g} nats per token from the policy after full steps"
            log.info(
                "step %d: the learning rate is multiplied by %.2g (trainer.staleness_control): samples are %.1f "
                "versions old, %s, and the limit is %.2g",
                step + 1,
                factor,
                sum(s * drift.tokens for s, drift in batch.items()) / max(tokens, 1),
                "nothing is known yet of the size of steps" if rule.speed is None else estimate,
                rule.kl_limit,
            )
        return factor

    def state_dict(self) -> Mapping[str, Any]:
        return asdict(self._rule)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._rule = StepSize(**{**state, "bound": self._rule.bound})
