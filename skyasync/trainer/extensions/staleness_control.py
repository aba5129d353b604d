"""Step size, correction and staleness bound of asynchronous training, by the age of samples.

    momentum     AdamW's first decay rate is divided by 1 + staleness
    step size    no larger than keeps the KL divergence at its limit
    correction   if its factors differ so much that few tokens carry the gradient: they are smoothed
    bound        if that is not enough for many steps: fewer prompts in flight; later as many again

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
MEMORY = 0.5  # weight of the earlier estimates in a new one
# Training steps whose factors are stored. For samples that are older the missing factors count as
# 1.
STORED_FACTORS = 256
LOGGED_CHANGE = 0.1  # relative change from which on a decision is logged again
# Effective sample sizes, as fractions of the tokens: that of the alarm, and that of a healthy run
# (docs/staleness.md).
LEAST_SAMPLES = 0.5
GOOD_SAMPLES = 0.9
# All batches of so many steps, and of as many as the bound, must agree before the bound changes.
WINDOW = 8


@dataclass
class StepSize:
    """Chooses the factor of the learning rate from the KL divergences of past batches.

    A pure state machine.

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
        measured = {s: drift for s, drift in batch.items() if s >= 0 and math.isfinite(drift.kl)}
        current = measured.pop(0, None)
        if current:
            self.noise = _average(self.noise, current.kl)
        squared_moves = sum(
            drift.tokens * self._steps_moved(s) ** 2 for s, drift in measured.items()
        )
        if squared_moves:
            noise = self.noise or 0.0
            kl = sum(drift.tokens * max(drift.kl - noise, 0.0) for drift in measured.values())
            self.speed = _average(self.speed, kl / squared_moves)
        tokens = sum(drift.tokens for drift in batch.values())
        squared_staleness = _token_sum(batch, 2) / max(tokens, 1)
        if sum(factor > 0 for factor in self.factors) < self.bound:
            # AdamW's first steps are its largest.
            squared_staleness = max(squared_staleness, self.bound**2)
        self.staleness = math.sqrt(squared_staleness)
        lowest = 1.0 / (1.0 + self.staleness / 2)
        self.full_kl = (self.speed or 0.0) * squared_staleness
        factor = lowest if self.speed is None else 1.0
        if self.full_kl > self.kl_limit:
            # The divergence is quadratic in the factor.
            factor = max(lowest, math.sqrt(self.kl_limit / self.full_kl))
        self._remember(factor)
        return factor

    def record_skipped_step(self) -> None:
        """The policy was not trained in this training step."""
        self._remember(0.0)

    def _remember(self, factor: float) -> None:
        self.factors = [*self.factors, factor][-STORED_FACTORS:]

    def _steps_moved(self, staleness: int) -> float:
        """Full steps by which the policy has moved in so many training steps."""
        latest = self.factors[-staleness:]
        return sum(latest) + (staleness - len(latest))


def _token_sum(batch: Mapping[int, Drift], power: int) -> int:
    """Sum of this power of the staleness over the tokens of a batch."""
    return sum(drift.tokens * staleness**power for staleness, drift in batch.items())


@dataclass
class StalenessBound:
    """Chooses how many versions samples may be old, within the user's limit.

    A pure state machine. It reads the effective sample size that staleness alone leaves. If
    log-ratios are normal with variance v, their effective sample size is ``exp(-v)`` (Kong 1992)
    and their KL divergence ``v / 2``. So the effective sample size is ``exp(-2 KL)``. The
    divergence of tokens of staleness 0 is subtracted, because a lower bound would not change it.

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
        if self.bound < 0:  # not restored from a checkpoint
            self.bound = self.most
        self.bound = min(self.bound, self.most)

    def choose(self, excess_kl: float) -> int:
        """The bound after a training step on a batch with this KL divergence, noise left out."""
        sample_size = math.exp(-2 * max(excess_kl, 0.0))
        self.low = self.low + 1 if sample_size < LEAST_SAMPLES else 0
        self.good = self.good + 1 if sample_size > GOOD_SAMPLES else 0
        previous_bound = self.bound
        if self.low >= WINDOW + previous_bound:
            self.bound = max(previous_bound // 2, min(self.least, self.most))
        elif self.good >= WINDOW + previous_bound:
            self.bound = min(previous_bound + 1, self.most)
        if self.bound != previous_bound:
            self.low = 0
            self.good = 0
        return self.bound


def _average(estimate: float | None, value: float) -> float:
    """The estimate with a new value, by an exponential moving average."""
    if estimate is None:
        return value
    return MEMORY * estimate + (1 - MEMORY) * value


class StalenessControl(RunExtension):
    """Decides after each batch how the next is trained (``trainer.staleness_control=auto``).

    Args:
        bound: versions that a sample may be old by the run's settings.
        lowest_bound: the lowest that the plan can guarantee. None: it has no bound to change.

    Attributes:
        exponent: of the correction's factors from the next optimizer step on.
        beta1: AdamW's first decay rate in this training step; None: the settings'.
    """

    def __init__(self, context: RunContext, bound: int, lowest_bound: int | None = None) -> None:
        self._phases = context.phases
        self._step_size = StepSize(bound)
        self._bound: StalenessBound | None = None
        if lowest_bound is not None and bound:
            self._bound = StalenessBound(bound, lowest_bound)
        self.exponent = 1.0
        self.beta1: float | None = None
        self._decay = context.cfg.trainer.policy.optimizer_config.adam_betas[0]
        # Decisions as they were last logged; of beta1 its distance to 1 counts.
        self._logged_values = {"factor": 1.0, "exponent": 1.0, "1 - beta1": 1.0 - self._decay}

    @property
    def staleness_bound(self) -> int | None:
        """Versions that prompts submitted from now on may be old; None: by the settings."""
        if self._bound:
            return self._bound.bound
        return None

    def record_skipped_step(self) -> None:
        """The policy was not trained in this training step."""
        self._step_size.record_skipped_step()

    def choose(
        self, update_batches: Sequence[UpdateBatch], step: int, weights: Sequence[Tensor] = ()
    ) -> float:
        """Choose the factor of a training step's learning rate, and how to correct the next step.

        Args:
            update_batches: of the training step's first optimizer step.
            step: training steps done.
            weights: the correction's factors of these batches, each ``[batch, length]``.

        Raises:
            UserError: if stale samples lack the log-probabilities of the engine.
        """
        from skyasync.algorithms.off_policy import drift_by_staleness

        batch = drift_by_staleness(update_batches, step)
        if any(staleness > 0 and math.isnan(drift.kl) for staleness, drift in batch.items()):
            raise UserError(
                "trainer.staleness_control=auto compares the trained policy with the one that sampled, and the "
                "generator's output lacks rollout_logprobs: return them, or set trainer.staleness_control=none"
            )
        step_size = self._step_size
        factor = step_size.choose(batch)
        # Staleness acts as momentum (Mitliagkas et al. 2016, 1605.09774). The divisor is ours:
        # rates that keep the mean age of gradients were worse in our benchmark.
        decay = self._decay / (1.0 + step_size.staleness)
        self.beta1 = decay if decay < self._decay else None
        self._phases.metrics |= {SCALE: factor, FULL_KL: step_size.full_kl, BETA1: decay}
        if self._must_log("1 - beta1", 1.0 - decay):
            log.info(
                "step %d: AdamW's first decay rate is %.2g, and %.2g by the settings (trainer.staleness_control): "
                "samples are %.1f versions old, which acts as momentum",
                step + 1,
                decay,
                self._decay,
                step_size.staleness,
            )
        if self._must_log("factor", factor):
            tokens = sum(drift.tokens for drift in batch.values())
            if step_size.speed is None:
                estimate = "nothing is known yet of the size of steps"
            else:
                estimate = f"they would be {step_size.full_kl:.2g} nats per token from the policy after full steps"
            log.info(
                "step %d: the learning rate is multiplied by %.2g (trainer.staleness_control): samples are %.1f "
                "versions old, %s, and the limit is %.2g",
                step + 1,
                factor,
                _token_sum(batch, 1) / max(tokens, 1),
                estimate,
                step_size.kl_limit,
            )
        if step_size.bound and weights:
            self._choose_exponent(update_batches, step, weights)
        if self._bound:
            self._choose_bound(self._bound, batch, step)
        return factor

    def _choose_exponent(
        self, update_batches: Sequence[UpdateBatch], step: int, weights: Sequence[Tensor]
    ) -> None:
        """Smooth the correction's factors from the next step on, if few tokens dominate."""
        import torch

        from skyasync.algorithms.off_policy import smoothing_exponent

        token_factors = []
        for batch, batch_weights in zip(update_batches, weights, strict=True):
            token_factors.append(batch_weights[batch.loss_mask])  # [loss tokens]
        factors = torch.cat(token_factors)
        # A factor of 0 stays 0 under every exponent.
        self.exponent = smoothing_exponent(factors[factors > 0], LEAST_SAMPLES)
        self._phases.metrics[EXPONENT] = self.exponent
        if self._must_log("exponent", self.exponent):
            log.info(
                "step %d: the factors of the off-policy correction are raised to the power %.2g from now on "
                "(trainer.staleness_control): their effective sample size in this batch is then at least %.2g",
                step + 1,
                self.exponent,
                LEAST_SAMPLES,
            )

    def _choose_bound(self, rule: StalenessBound, batch: Mapping[int, Drift], step: int) -> None:
        previous_bound = rule.bound
        measured = [drift for drift in batch.values() if math.isfinite(drift.kl)]
        tokens = sum(drift.tokens for drift in measured)
        mean_kl = sum(drift.tokens * drift.kl for drift in measured) / max(tokens, 1)
        self._phases.metrics[BOUND] = float(previous_bound)
        # A lower bound would not change what engine and trainer compute differently.
        if rule.choose(mean_kl - (self._step_size.noise or 0.0)) != previous_bound:
            if rule.bound < previous_bound:
                sample_size = f"below {LEAST_SAMPLES:g}"
            else:
                sample_size = f"above {GOOD_SAMPLES:g}"
            log.info(
                "step %d: prompts may be %d versions old from now on instead of %d (trainer.staleness_control; at most "
                "trainer.max_staleness=%d): staleness has left an effective sample size %s for %d steps",
                step + 1,
                rule.bound,
                previous_bound,
                rule.most,
                sample_size,
                WINDOW + previous_bound,
            )

    def _must_log(self, name: str, value: float) -> bool:
        """Whether a decision differs enough from the logged one; it then counts as logged."""
        if abs(value - self._logged_values[name]) <= LOGGED_CHANGE * self._logged_values[name]:
            return False
        self._logged_values[name] = value
        return True

    def state_dict(self) -> Mapping[str, Any]:
        state = asdict(self._step_size)
        state["exponent"] = self.exponent
        state["staleness_bound"] = asdict(self._bound) if self._bound else None
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # The limits are those of this run's settings, not of the run that was saved.
        step_size = dict(state)
        self.exponent = step_size.pop("exponent", 1.0)
        bound_state = step_size.pop("staleness_bound", None)
        step_size["bound"] = self._step_size.bound
        self._step_size = StepSize(**step_size)
        if self._bound and bound_state:
            limits = {"most": self._bound.most, "least": self._bound.least}
            self._bound = StalenessBound(**(bound_state | limits))
