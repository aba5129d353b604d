"""The settings of ``trainer.algorithm``: objective, correction, advantages, KL, rewards.

Invariant: every default equals the default of the function parameter that it feeds (a test holds
it), and the names are SkyRL's where it has one. Thresholds take effect only where the function that
reads them is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from skyasync.algorithms import ADVANTAGE_ESTIMATORS, LOSS_REDUCTIONS
from skyasync.config.frozen import SettingsGroup
from skyasync.config.keys import When, key
from skyasync.config.parts import Plan, depends_on_pool, functions, weighs_by_behaviour
from skyasync.errors import unknown

if TYPE_CHECKING:
    from skyasync.config.schema import Config


#: A key whose value may be infinite.
limit = partial(key, infinite=True)
_REGISTRIES = "skyasync.algorithms:"
#: There is a reference model.
KL = When("trainer.algorithm.use_kl_loss", "trainer.algorithm.use_kl_in_reward")
#: There is a critic.
CRITIC = When(
    "trainer.algorithm.advantage_estimator",
    test=lambda cfg: (
        "values" in ADVANTAGE_ESTIMATORS.about(cfg.trainer.algorithm.advantage_estimator).inputs
    ),
    choices=lambda: (
        "trainer.algorithm.advantage_estimator="
        + "|".join(
            name
            for name, about in ADVANTAGE_ESTIMATORS.builtins().items()
            if "values" in about.inputs
        )
    ),
)


@dataclass
class KLControlConfig(SettingsGroup):
    type: str = key(
        "fixed",
        registry=_REGISTRIES + "KL_CONTROLLERS",
        open_ended=True,
        when="trainer.algorithm.use_kl_in_reward",
    )
    """The controller that changes the KL coefficient in the reward: fixed, adaptive, or a class of
    your own."""
    kl_target: float = key(0.1, above=0.0, when="trainer.algorithm.kl_ctrl.type=adaptive")
    """Mean KL per token that the adaptive controller aims at."""
    horizon: int = key(10000, low=1, when="trainer.algorithm.kl_ctrl.type=adaptive")
    """Number of trajectories in which the adaptive controller corrects an error."""


@dataclass
class SapoConfig(SettingsGroup):
    tau_pos: float = key(1.0, above=0.0)
    """Steepness of sapo's gate for positive advantages."""
    tau_neg: float = key(1.05, above=0.0)
    """Steepness of sapo's gate for negative advantages."""


@dataclass
class CispoConfig(SettingsGroup):
    cispo_eps_clip_low: float = key(1.0, low=0.0)
    """cispo clips the weight below 1 - this; 1 is no lower clip."""
    cispo_eps_clip_high: float = limit(4.0, low=0.0)
    """cispo clips the weight above 1 + this."""


@dataclass
class ClipCovConfig(SettingsGroup):
    clip_ratio: float = key(2e-4, low=0.0, high=1.0)
    """Share of the tokens that clip_cov drops."""
    clip_cov_lb: float = limit(1.0)
    """clip_cov draws among tokens with a covariance above this."""
    clip_cov_ub: float = limit(5.0)
    """clip_cov draws among tokens with a covariance below this."""


@dataclass
class KLCovConfig(SettingsGroup):
    kl_cov_frac: float = key(0.2, low=0.0, high=1.0)
    """Share of the tokens that kl_cov penalises: those of largest covariance."""
    ppo_kl_coef: float = key(1.0, low=0.0)
    """kl_cov's penalty on the log-ratio of those tokens."""


@dataclass
class DppoConfig(SettingsGroup):
    divergence: str = key("tv", choices=("tv", "kl"))
    """How dppo measures the change of a token's probability: total variation or Bernoulli KL."""
    delta_low: float = limit(0.15, low=0.0)
    """Maximum decrease that dppo allows a token with a negative advantage."""
    delta_high: float = limit(0.15, low=0.0)
    """Maximum increase that dppo allows a token with a positive advantage."""


@dataclass
class ToprConfig(SettingsGroup):
    positive_weight: float = key(1.0, low=0.0)
    """Weight of topr's positive samples."""
    negative_weight: float = key(1.0, low=0.0)
    """Weight of topr's negative samples."""


@dataclass
class OverlongBufferConfig(SettingsGroup):
    len: int = key(0, low=0)
    """Number of response tokens before max_len over which the overlong penalty grows; 0 is no
    penalty."""
    max_len: int = key(0, low=0, when="trainer.algorithm.overlong_buffer.len")
    """Number of response tokens at which the overlong penalty has its full size."""
    penalty_factor: float = key(1.0, low=0.0, when="trainer.algorithm.overlong_buffer.len")
    """Full size of the overlong penalty, which is subtracted from the reward."""


@dataclass
class DynamicSamplingConfig(SettingsGroup):
    type: str = key("none", choices=("none", "mean", "variance"))
    """Train only informative groups. mean: their mean reward is between low and high, both
    excluded; variance: their rewards differ."""
    metric: str = key(
        "", open_ended=True, when="trainer.algorithm.dynamic_sampling.type=mean|variance"
    )
    """Metric of the environments that groups are filtered by, instead of the reward (score, of
    OpenRLHF agents)."""
    low: float = key(0.0, when="trainer.algorithm.dynamic_sampling.type=mean")
    """Groups with a mean reward of this or less are dropped."""
    high: float = key(1.0, when="trainer.algorithm.dynamic_sampling.type=mean")
    """Groups with a mean reward of this or more are dropped."""
    tolerance: float = key(0.0, low=0.0, when="trainer.algorithm.dynamic_sampling.type=variance")
    """Rewards that differ by at most this count as equal."""
    mode: str = key("filter", choices=("filter", "refill"))
    """filter: train the remaining groups of the batch; refill: replace each dropped group by the
    next prompt's."""
    early_end: bool = key(False)
    """Abort the other samples of a group once they cannot bring its mean reward into the range
    (type=mean)."""
    reward_min: float = key(0.0, when="trainer.algorithm.dynamic_sampling.early_end")
    """Minimum reward of a sample, for early_end."""
    reward_max: float = key(1.0, when="trainer.algorithm.dynamic_sampling.early_end")
    """Maximum reward of a sample, for early_end."""
    max_sample_batches: int = key(10, low=0, when="trainer.algorithm.dynamic_sampling.mode=refill")
    """Maximum number of prompt batches that are sampled for one step; 0 is no limit."""


@dataclass
class AlgorithmConfig(SettingsGroup):
    preset: str = key("", registry="skyasync.algorithms.presets:PRESETS")
    """Defaults for several settings, by the name of an algorithm; settings that are given override
    them."""
    # The objective
    policy_loss_type: str = key("ppo", registry=_REGISTRIES + "POLICY_LOSSES", open_ended=True)
    """The policy objective."""
    loss_reduction: str = key(
        "token_mean", registry=_REGISTRIES + "LOSS_REDUCTIONS", open_ended=True
    )
    """How the losses of tokens are averaged or summed."""
    max_seq_len: int = key(0, low=0)
    """Constant divisor of seq_mean_token_sum_norm; 0 is the longest sequence of the batch."""
    ratio_anchor: str = key("proximal", choices=("proximal", "behaviour"))
    """The policy in the ratio's denominator; with behaviour no proximal log-probabilities are
    needed."""
    filter_logprobs: bool = key(True)
    """Compute the trainer's log-probabilities under the filters of the sampling: top_k, top_p,
    min_p, logit_bias and allowed_token_ids. The temperature is always applied."""
    proximal_logprobs: str = key("recompute", choices=("recompute", "loglinear", "linear"))
    """Proximal log-probabilities if a batch has several updates: a forward pass, or an
    interpolation between behaviour and current policy by the version of each token."""
    eps_clip_low: float = limit(0.2, low=0.0)
    """Clip ratios below 1 - this."""
    eps_clip_high: float = limit(0.2, low=0.0)
    """Clip ratios above 1 + this."""
    clip_ratio_c: float = limit(3.0, above=1.0)
    """Upper bound of dual_clip's ratio for negative advantages."""
    behave_imp_weight_cap: float = key(5.0, low=0.0)
    """decoupled_ppo drops tokens whose ratio of proximal to behaviour policy is above this; 0 is no
    cap."""
    tis_low: float = key(0.0, low=0.0)
    """Lower bound of the ratio in the loss tis."""
    tis_high: float = limit(1.0, low=0.0)
    """Upper bound of the ratio in the loss tis."""
    kimi15_tau: float = key(0.1, low=0.0)
    """Strength of kimi15's quadratic penalty for the distance to the anchor."""
    m2po_threshold: float = limit(0.04, above=0.0)
    """m2po drops tokens until the mean squared log-ratio to the behaviour policy is below this."""
    sapo: SapoConfig = field(default_factory=SapoConfig)
    cispo: CispoConfig = field(default_factory=CispoConfig)
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    kl_cov: KLCovConfig = field(default_factory=KLCovConfig)
    dppo: DppoConfig = field(default_factory=DppoConfig)
    topr: ToprConfig = field(default_factory=ToprConfig)
    use_entropy_loss: bool = key(False)
    """Add the policy's entropy to the loss, as a bonus."""
    entropy_loss_coef: float = key(0.01, low=0.0, when="trainer.algorithm.use_entropy_loss")
    """Weight of the entropy term."""
    # Corrections for stale or mismatched samples
    off_policy_correction: str = key("auto", registry=_REGISTRIES + "CORRECTIONS", open_ended=True)
    """Weight for samples of an older policy. auto is token_tis, or none for a loss that reads the
    behaviour policy itself."""
    off_policy_masks: list[str] = key([], registry=_REGISTRIES + "CORRECTIONS", open_ended=True)
    """Further corrections, usually masks, that are multiplied with off_policy_correction."""
    token_tis_ratio_clip_low: float = key(0.0, low=0.0)
    """Lower bound of the weight of token_tis."""
    token_tis_ratio_clip_high: float = limit(2.0, above=0.0)
    """Upper bound of the weight of token_tis."""
    sequence_tis_ratio_clip_high: float = limit(5.0, above=0.0)
    """Upper bound of the weight of sequence_tis."""
    geometric_tis_ratio_clip_high: float = limit(2.0, above=0.0)
    """Upper bound of the weight of geometric_tis and segment_tis."""
    icepop_low: float = key(0.5, low=0.0)
    """icepop drops tokens with a weight below this."""
    icepop_high: float = limit(5.0, above=0.0)
    """icepop drops tokens with a weight above this."""
    token_mask_is_threshold_low: float = key(0.5, low=0.0)
    """token_mask drops tokens with a weight below this."""
    token_mask_is_threshold_high: float = limit(2.0, above=0.0)
    """token_mask drops tokens with a weight above this."""
    product_mask_low: float = key(0.5, low=0.0)
    """sequence_mask and sequence_icepop drop sequences with a weight below this."""
    product_mask_high: float = limit(2.0, above=0.0)
    """sequence_mask and sequence_icepop drop sequences with a weight above this."""
    geo_mask_low: float = key(0.99, low=0.0)
    """geometric_mask and sequence_mask_tis drop sequences with a geometric mean weight below
    this."""
    geo_mask_high: float = limit(1.01, above=0.0)
    """geometric_mask and sequence_mask_tis drop sequences with a geometric mean weight above
    this."""
    outlier_token_is_threshold_low: float = key(1e-4, low=0.0)
    """outlier_mask drops sequences with any token weight below this."""
    outlier_token_is_threshold_high: float = limit(100.0, above=0.0)
    """outlier_mask drops sequences with any token weight above this."""
    kl_mask_high: float = limit(0.1)
    """kl_mask drops sequences whose estimated KL from behaviour to proximal is above this."""
    negative_mask_threshold: float = limit(0.1)
    """negative_mask drops sequences with a negative advantage if behaviour minus proximal
    log-probability is above this on average."""
    # Advantages
    advantage_estimator: str = key(
        "grpo", registry=_REGISTRIES + "ADVANTAGE_ESTIMATORS", open_ended=True
    )
    """How rewards become advantages."""
    grpo_norm_by_std: bool = key(True)
    """Divide the advantages of grpo by the group's standard deviation."""
    reward_norm_mean: str = key("group", choices=("group", "batch", "none"))
    """Samples whose mean reward the estimator normalized subtracts."""
    reward_norm_std: str = key("group", choices=("group", "batch", "none"))
    """Samples by whose standard deviation the estimator normalized divides."""
    gamma: float = key(1.0, low=0.0, high=1.0)
    """Discount per token (reinforce++, gae)."""
    lambd: float = key(1.0, low=0.0, high=1.0)
    """Decay of GAE: 1 uses the whole return, 0 only the one-step error."""
    gae_whiten: bool = key(True)
    """Whiten the advantages of gae over the tokens of the batch."""
    advantage_batch_normalize: bool = key(False)
    """Whiten advantages over the tokens of the batch."""
    advantage_clip: float = key(0.0, low=0.0)
    """Clamp advantages to plus or minus this; 0 is off."""
    # KL to the reference model
    use_kl_loss: bool = key(False)
    """Add a KL term to a frozen reference model to the loss."""
    use_kl_in_reward: bool = key(False)
    """Subtract a KL penalty to the reference from the rewards."""
    kl_loss_coef: float = key(0.001, low=0.0, when=KL)
    """Weight of the KL term."""
    kl_estimator_type: str = key(
        "k3", registry=_REGISTRIES + "KL_ESTIMATORS", open_ended=True, when=KL
    )
    """How the KL divergence is estimated."""
    kl_clamp: float = key(0.0, low=0.0, when=KL)
    """Clamp the estimate per token to plus or minus this; 0 is off."""
    kl_importance_weighted: bool = key(False, when="trainer.algorithm.use_kl_loss")
    """Multiply the KL loss by the ratio of current to anchor policy, which makes it unbiased off
    policy."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    # Rewards and groups
    truncated_responses: str = key("train", choices=("train", "mask", "zero", "drop"))
    """What happens to responses cut by the length limit: train; mask (no loss, but part of their
    group's baseline); zero (reward 0); drop (not part of the group)."""
    stop_properly_penalty_coef: float = key(1.0)
    """Factor of the reward of responses cut by the length limit; a negative value replaces their
    reward."""
    reward_bias: float = key(0.0)
    """Added to each trajectory's reward."""
    reward_scale: float = key(1.0)
    """Factor of each trajectory's reward, after reward_bias is added."""
    reward_clip: float = key(0.0, low=0.0)
    """Clamp each trajectory's scaled reward to plus or minus this; 0 is off."""
    reward_normalization: str = key("none", choices=("none", "group", "batch"))
    """Scale the shaped rewards of each group, or of the batch, to mean 0 and standard deviation
    1."""
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    extra: dict[str, Any] = key({})
    """Parameters of the chosen functions that have no setting of their own, by name."""


#: Pairs of keys under ``trainer.algorithm`` that bound an interval (clip ranges are distances from 1, no such pair).
INTERVALS = (
    ("tis_low", "tis_high"),
    ("token_tis_ratio_clip_low", "token_tis_ratio_clip_high"),
    ("icepop_low", "icepop_high"),
    ("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
    ("product_mask_low", "product_mask_high"),
    ("geo_mask_low", "geo_mask_high"),
    ("outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
    ("clip_cov.clip_cov_lb", "clip_cov.clip_cov_ub"),
    ("dynamic_sampling.low", "dynamic_sampling.high"),
)


def check_functions(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Their parameters, and the settings that ``trainer.algorithm.extra`` names."""
    chosen = functions(algorithm)
    wrong = [problem for function in chosen if (problem := function.problem())]
    if wrong:
        yield from wrong
        return
    accepted = {
        name
        for function in chosen
        for declaration in function.about
        for name in declaration.settings
    }
    for name in algorithm.extra:
        if name not in accepted:
            answer = unknown("setting", name, accepted)
            yield f"trainer.algorithm.extra {name!r} is not a setting of the chosen functions: {answer}"


def check_algorithm(cfg: Config) -> Iterator[str]:
    """Terms, bounds and handling of groups that contradict each other."""
    algorithm = cfg.trainer.algorithm
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "trainer.algorithm.use_kl_loss and trainer.algorithm.use_kl_in_reward are both true, which counts the "
            "KL divergence twice: set one of them to false"
        )
    correction = algorithm.off_policy_correction
    if (
        correction not in ("auto", "none")
        and not correction.endswith("_mask")
        and weighs_by_behaviour(algorithm)
    ):
        yield (
            f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type} (with trainer.algorithm.ratio_anchor="
            f"{algorithm.ratio_anchor}) weighs samples by the behaviour policy itself; trainer.algorithm."
            f"off_policy_correction={correction} would weigh them twice: choose auto, none or a mask"
        )
    for low, high in INTERVALS:
        lower = attrgetter(low)(algorithm)
        upper = attrgetter(high)(algorithm)
        if lower > upper:
            yield (
                f"trainer.algorithm.{low}={lower} is above trainer.algorithm.{high}={upper}, which leaves nothing "
                f"between them: lower the one or raise the other"
            )

    buffer = algorithm.overlong_buffer
    if buffer.len and buffer.max_len < buffer.len:
        yield (
            f"trainer.algorithm.overlong_buffer.len={buffer.len} is longer than trainer.algorithm.overlong_buffer."
            f"max_len={buffer.max_len}, which punishes every response: set max_len to the tokens at which the penalty "
            f"is complete"
        )
    sampling = algorithm.dynamic_sampling
    if sampling.mode == "refill" and sampling.type == "none":
        yield (
            "trainer.algorithm.dynamic_sampling.mode=refill replaces groups that are left out, and trainer.algorithm."
            "dynamic_sampling.type=none leaves none out: set it to variance or mean"
        )
    inside_bounds = sampling.low <= sampling.reward_min and sampling.high >= sampling.reward_max
    if sampling.early_end and (sampling.type != "mean" or inside_bounds):
        yield (
            f"trainer.algorithm.dynamic_sampling.early_end=true never ends a group early with dynamic_sampling.type="
            f"{sampling.type}, low={sampling.low:g} and high={sampling.high:g}: it needs type=mean, and a range that "
            f"rewards from reward_min={sampling.reward_min:g} to reward_max={sampling.reward_max:g} can miss"
        )
    if sampling.early_end and sampling.metric:
        yield (
            f"trainer.algorithm.dynamic_sampling.early_end=true decides by rewards, and trainer.algorithm."
            f"dynamic_sampling.metric={sampling.metric} judges groups by something else: remove one of them"
        )
    if (
        algorithm.truncated_responses in ("zero", "drop")
        and algorithm.stop_properly_penalty_coef != 1
    ):
        yield (
            f"trainer.algorithm.truncated_responses={algorithm.truncated_responses} and trainer.algorithm."
            f"stop_properly_penalty_coef={algorithm.stop_properly_penalty_coef:g} both decide about the reward of a "
            f"truncated response: leave the one at train, or the other at 1"
        )

    declaration = ADVANTAGE_ESTIMATORS.about(algorithm.advantage_estimator)
    if cfg.generator.n_samples_per_prompt == 1 and depends_on_pool(
        algorithm, declaration, "group_relative", "group"
    ):
        free = [
            n
            for n, declaration_of_estimator in ADVANTAGE_ESTIMATORS.builtins().items()
            if declaration_of_estimator.can["group_relative"] is False
        ]
        yield (
            f"generator.n_samples_per_prompt=1 leaves trainer.algorithm.advantage_estimator="
            f"{algorithm.advantage_estimator} no group to compare with (every advantage would be 0): "
            f"sample at least 2 per prompt, or choose an estimator without a group, such as {', '.join(free)}"
        )
    greedy = cfg.generator.sampling_params.temperature == 0
    if greedy and depends_on_pool(algorithm, declaration, "group_relative", "group"):
        yield (
            f"generator.sampling_params.temperature=0 gives all samples of a prompt the same response, and "
            f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator} compares them (every advantage "
            f"would be 0): set a temperature above 0, usually 1"
        )


def check_streaming(cfg: Config, plan: Plan | None) -> Iterator[str]:
    """One line for each setting that needs more of the batch than a plan that streams has at a
    time."""
    if plan is None or not plan.streams:
        return
    trainer = cfg.trainer
    algorithm = cfg.trainer.algorithm
    name = "trainer.algorithm."
    settings = []
    if cfg.data.replay_groups:
        settings.append(f"data.replay_groups={cfg.data.replay_groups}")
    if trainer.update_epochs_per_batch > 1:
        settings.append(f"trainer.update_epochs_per_batch={trainer.update_epochs_per_batch}")
    estimator = ADVANTAGE_ESTIMATORS.about(algorithm.advantage_estimator)
    if depends_on_pool(algorithm, estimator, "whole_batch", "batch"):
        depends = estimator.can["whole_batch"]
        if depends is True:
            switches = []
        else:
            switches = [estimator.keys[setting] for setting in depends]
        on = [f" with {name}{key}=true" for key in switches if attrgetter(key)(algorithm) is True]
        settings.append(f"{name}advantage_estimator={algorithm.advantage_estimator}{''.join(on)}")
    if algorithm.advantage_batch_normalize:
        settings.append(f"{name}advantage_batch_normalize=true")
    if algorithm.reward_normalization == "batch":
        settings.append(f"{name}reward_normalization=batch")
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type != "fixed":
        settings.append(f"{name}kl_ctrl.type={algorithm.kl_ctrl.type}")
    for function in functions(algorithm):
        if function.about.selector is not None:
            settings.append(
                f"{name}{function.key}={function.name}, which chooses among all tokens,"
            )
        elif function.about.can.get("whole_batch") is True and function.key.startswith(
            "off_policy"
        ):
            settings.append(f"{name}{function.key}={function.name}")
    reduction = LOSS_REDUCTIONS.about(algorithm.loss_reduction)
    if not reduction.can["by_parts"]:
        settings.append(f"{name}loss_reduction={algorithm.loss_reduction}")
    elif "max_seq_len" in reduction.keys.values() and not algorithm.max_seq_len:
        settings.append(f"{name}loss_reduction={algorithm.loss_reduction} with {name}max_seq_len=0")
    for setting in settings:
        yield f"{setting} needs the whole batch, and {plan} trains groups as they come: change it, or use another plan"
