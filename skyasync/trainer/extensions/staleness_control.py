"""Step size, correction and staleness bound of asynchronous training, by how far samples are from
the trained policy.

    momentum     AdamW's first decay rate is divided by 1 + staleness
    step size    no larger than keeps the KL divergence at its limit
    correction   if its factors differ so much that few tokens carry the gradient: they are smoothed
    bound        if all that is not enough for many steps: fewer prompts are in flight; later as many as before

Invariant: a decision depends only on what was measured, in the order of the training steps, and its
state is in checkpoints. So a resumed run decides as one that was not interrupted. Samples of
staleness 0 change nothing.
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
    from torch import Tensor

    from skyasync.algorithms.off_policy import Drift
    from skyasync.models.batch import UpdateBatch

log = logging.getLogger(__name__)

SCALE = "staleness_control/lr_scale"
FULL_KL = "staleness_control/full_step_kl"
BETA1 = "staleness_control/adam_beta1"
EXPONENT = "staleness_control/correction_exponent"
BOUND = "staleness_control/max_staleness"
KL_LIMIT = 0.02  # nats per token
MEMORY = 0.5  # weight of the earlier estimates in each new one
# training steps whose factors are kept; a sample that is older counts the missing ones as 1
REMEMBERED = 256
NOTED = 0.1  # relative change from which on a decision is logged again
# effective sample size: of the alarm, and of a healthy run (docs/staleness.md)
LEAST_SAMPLES = 0.5
GOOD_SAMPLES = 0.9
WINDOW = 8  # steps, and the bound's, in which all batches must agree on it


@dataclass
class StepSize:
    """Chooses the factor of the learning rate from the KL divergences of past batches; a pure state
    machine.

    Over s training steps with factors f the policy moves by their sum, and the KL divergence of
    tokens that are s versions old is quadratic in it: ``KL = noise + speed * (f_1 + ... + f_s)^2``.
    Both constants are estimated from the batches. The factor is the largest that holds the mean KL
    divergence at ``kl_limit``, between ``1 / (1 + S / 2)`` and 1. S is the staleness of the batch;
    in the first steps, which are AdamW's largest, it is at least the bound. Before there is an
    estimate the factor is the least.

    Sources: Zhang et al. 2016 (1511.05950) divide the learning rate by the staleness; with the
    momentum lowered too, half of it was better in our benchmark. 2607.01083 bounds the learning
    rate by ``R / (S G)``: here the update's size G is measured, and the radius R is that of a trust
    region, ``sqrt(kl_limit)`` (Schulman et al. 2015).

    Attributes:
        bound: versions that a sample may be old by the run's settings.
        noise: KL divergence of tokens of staleness 0: what engine and trainer compute differently.
        speed: KL divergence of one full step.
        factors: of the latest training steps, the newest last; 0 if the policy was not trained.
        full_kl: KL divergence that batches like the last would have after full steps, the noise
            left out.
        staleness: S of the last batch.
    """

    bound: int = 0
    kl_limit: float = KL_LIMIT
    noise: float | None = None
    speed: float | None = None
    factors: list[float] = field(default_factory=list)
    full_kl: float = 0.0
    staleness: float = 0.0

    def choose(self, batch: Mapping[int, Drift]) -> float:
        """The factor of the training step on this batch.

        Args:
            batch: by staleness; a KL divergence that is not finite counts as not measured.
        """
        known = {s: drift for s, drift in batch.items() if s >= 0 and math.isfinite(drift.kl)}
        fresh = known.pop(0, None)
        if fresh:
            self.noise = _average(self.noise, fresh.kl)
        moved = sum(drift.tokens * self._moved(s) ** 2 for s, drift in known.items())
        if moved:
            kl = sum(
                drift.tokens * max(drift.kl - (self.noise or 0.0), 0.0) for drift in known.values()
            )
            self.speed = _average(self.speed, kl / moved)
        tokens = sum(drift.tokens for drift in batch.values())
        square = sum(drift.tokens * s**2 for s, drift in batch.items()) / max(tokens, 1)
        if sum(factor > 0 for factor in self.factors) < self.bound:
            square = max(square, self.bound**2)
        self.staleness = math.sqrt(square)
        least = 1.0 / (1.0 + self.staleness / 2)
        self.full_kl = (self.speed or 0.0) * square
        factor = least if self.speed is None else 1.0
        if self.full_kl > self.kl_limit:
            factor = max(least, math.sqrt(self.kl_limit / self.full_kl))
        self.factors = [*self.factors, factor][-REMEMBERED:]
        return factor

    def stand(self) -> None:
        """The policy was not trained in this training step."""
        self.factors = [*self.factors, 0.0][-REMEMBERED:]

    def _moved(self, staleness: int) -> float:
        """Full steps by which the policy has moved in so many training steps."""
        latest = self.factors[-staleness:]
        return sum(latest) + (staleness - len(latest))


@dataclass
class StalenessBound:
    """Chooses how many versions samples may be old, within the user's limit; a pure state machine.

    It reads the effective sample size that staleness alone leaves. If log-ratios are normal with
    variance v, their effective sample size is ``exp(-v)`` (Kong 1992) and their KL divergence
    ``v / 2``: it is ``exp(-2 KL)``, with the divergence of tokens of staleness 0 subtracted, which
    a lower bound would not change.

    Below ``LEAST_SAMPLES`` in every step of a window the bound is halved; above ``GOOD_SAMPLES`` it
    grows by 1. This is additive increase, multiplicative decrease (Chiu and Jain 1989). A window is
    longer than the bound: after a decision, samples of the former bound come first.

    Attributes:
        most: the user's limit.
        least: that the plan can keep.
        bound: of prompts that are submitted from now on.
        low, good: latest steps in a row with so small, or so large, a sample size.
    """

    most: int
    least: int = 1
    bound: int = -1
    low: int = 0
    good: int = 0

    def __post_init__(self) -> None:
        if self.bound >= 0:
            self.bound = min(self.bound, self.most)
        else:
            self.bound = self.most

    def choose(self, excess_kl: float) -> int:
        """The bound after a training step on a batch with this KL divergence, noise left out."""
        sample_size = math.exp(-2 * max(excess_kl, 0.0))
        self.low = self.low + 1 if sample_size < LEAST_SAMPLES else 0
        self.good = self.good + 1 if sample_size > GOOD_SAMPLES else 0
        bound = self.bound
        if self.low >= WINDOW + bound:
            self.bound = max(bound // 2, min(self.least, self.most))
        elif self.good >= WINDOW + bound:
            self.bound = min(bound + 1, self.most)
        if self.bound != bound:
            self.low = self.good = 0
        return self.bound


def _average(before: float | None, value: float) -> float:
    if before is None:
        return value
    return MEMORY * before + (1 - MEMORY) * value


class StalenessControl(RunExtension):
    """Decides after each batch how the next is trained (``trainer.staleness_control=auto``).

    Args:
        bound: versions that a sample may be old by the run's settings.
        least: the least bound that the plan can keep. None: it has no bound that could be changed.

    Attributes:
        exponent: of the correction's factors from the next optimizer step on.
        beta1: AdamW's first decay rate in this training step; None: the settings'.
    """

    def __init__(self, context: RunContext, bound: int, least: int | None = None) -> None:
        self._phases = context.phases
        self._rule = StepSize(bound)
        if least is None or not bound:
            self._bound = None
        else:
            self._bound = StalenessBound(bound, least)
        self.exponent, self.beta1 = 1.0, None  # type: float, float | None
        self._decay = context.cfg.trainer.policy.optimizer_config.adam_betas[0]
        self._noted = {
            "factor": 1.0,
            "exponent": 1.0,
            "newest": 1.0 - self._decay,
        }  # what was logged last

    @property
    def staleness_bound(self) -> int | None:
        """Versions that a prompt may be old which is submitted from now on; None: as many as the
        settings say."""
        if self._bound:
            return self._bound.bound
        return None

    def stand(self) -> None:
        """The policy was not trained in this training step."""
        self._rule.stand()

    def choose(
        self, parts: Sequence[UpdateBatch], step: int, weights: Sequence[Tensor] = ()
    ) -> float:
        """The factor of the learning rate of a training step, from the batches of its first
        optimizer step.

        Args:
            step: training steps done.
            weights: the correction's factors of these batches, each ``[batch, length]``.

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
        rule = self._rule
        factor = self._rule.choose(batch)
        # Staleness acts as momentum (Mitliagkas et al. 2016, 1605.09774). The divisor is ours:
        # rates that keep the mean age of gradients were worse in our benchmark.
        decay = self._decay / (1.0 + rule.staleness)
        self.beta1 = decay if decay < self._decay else None
        self._phases.metrics |= {SCALE: factor, FULL_KL: rule.full_kl, BETA1: decay}
        if self._changed("newest", 1.0 - decay):
            log.info(
                "step %d: AdamW's first decay rate is %.2g, and %.2g by the settings (trainer.staleness_control): "
                "samples are %.1f versions old, which acts as momentum",
                step + 1,
                decay,
                self._decay,
                rule.staleness,
            )
        if self._changed("factor", factor):
            tokens = sum(drift.tokens for drift in batch.values())
            estimate = (
                f"they would be {rule.full_kl:.2g} nats per token from the policy after full steps"
            )
            log.info(
                "step %d: the learning rate is multiplied by %.2g (trainer.staleness_control): samples are %.1f "
                "versions old, %s, and the limit is %.2g",
                step + 1,
                factor,
                sum(s * drift.tokens for s, drift in batch.items()) / max(tokens, 1),
                "nothing is known yet of the size of steps" if rule.speed is None else estimate,
                rule.kl_limit,
            )
        if rule.bound and weights:
            self._choose_exponent(parts, step, weights)
        if self._bound:
            self._choose_bound(self._bound, batch, step)
        return factor

    def _choose_exponent(
        self, parts: Sequence[UpdateBatch], step: int, weights: Sequence[Tensor]
    ) -> None:
        import torch

        from skyasync.algorithms.off_policy import smoothing_exponent

        factors = torch.cat(
            [each[part.loss_mask] for part, each in zip(parts, weights, strict=True)]
        )
        self.exponent = smoothing_exponent(factors[factors > 0], LEAST_SAMPLES)  # a power of 0 is 0
        self._phases.metrics[EXPONENT] = self.exponent
        if self._changed("exponent", self.exponent):
            log.info(
                "step %d: the factors of the off-policy correction are raised to the power %.2g from now on "
                "(trainer.staleness_control): their effective sample size in this batch is then at least %.2g",
                step + 1,
                self.exponent,
                LEAST_SAMPLES,
            )

    def _choose_bound(self, rule: StalenessBound, batch: Mapping[int, Drift], step: int) -> None:
        before = rule.bound
        known = [drift for drift in batch.values() if math.isfinite(drift.kl)]
        kl = sum(drift.tokens * drift.kl for drift in known) / max(
            sum(drift.tokens for drift in known), 1
        )
        self._phases.metrics[BOUND] = float(before)
        if rule.choose(kl - (self._rule.noise or 0.0)) != before:
            log.info(
                "step %d: prompts may be %d versions old from now on instead of %d (trainer.staleness_control; at most "
                "trainer.max_staleness=%d): staleness has left an effective sample size %s for %d steps",
                step + 1,
                rule.bound,
                before,
                rule.most,
                f"below {LEAST_SAMPLES:g}" if rule.bound < before else f"above {GOOD_SAMPLES:g}",
                WINDOW + before,
            )

    def _changed(self, name: str, value: float) -> bool:
        """Whether it is so different that it is logged again."""
        if abs(value - self._noted[name]) <= NOTED * self._noted[name]:
            return False
        self._noted[name] = value
        return True

    def state_dict(self) -> Mapping[str, Any]:
        bound = asdict(self._bound) if self._bound else None
        return {**asdict(self._rule), "exponent": self.exponent, "staleness_bound": bound}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        rule = dict(state)
        self.exponent = rule.pop("exponent", 1.0)
        bound = rule.pop("staleness_bound", None)
        self._rule = StepSize(**{**rule, "bound": self._rule.bound})
        if self._bound and bound:
            self._bound = StalenessBound(
                **{**bound, "most": self._bound.most, "least": self._bound.least}
            )
