"""Refusals that follow from what the chosen parts say of themselves: the catalogues of plans, engines and algorithms.

Invariant: no part's name stands here; a user's part is judged by the same rules. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from skyasync.catalogue import About
from skyasync.config.algorithm import CRITIC, AlgorithmConfig
from skyasync.config.conditions import holds
from skyasync.config.reward_models import check_reward_models
from skyasync.config.sampling import backend
from skyasync.config.schema import REWARD, Config
from skyasync.config.shared_critic import check_shared_critic
from skyasync.config.values import written
from skyasync.errors import UserError, unknown
from skyasync.registry import Registry


class Plan(NamedTuple):
    """The plan of a run: what it is called, what it says of itself, and whether the experiment fixes it."""

    name: str
    about: About
    fixed: bool = False

    @classmethod
    def of(cls, cfg: Config, plan: str | type | None) -> Plan | None:
        """The chosen one; None for "": one that only the experiment knows."""
        from skyasync.trainer.plans import PLANS

        if isinstance(plan, type):
            return cls(plan.__name__, PLANS.describe(plan), True)
        name = cfg.trainer.plan if plan is None else plan
        return cls(name, PLANS.about(name), plan is not None) if name else None

    @property
    def asynchronous(self) -> bool:
        return bool(self.about.can["asynchronous"])

    @property
    def streams(self) -> bool:
        return bool(self.about.can["streams"])

    def stale(self, cfg: Config) -> bool:
        """Whether samples may be older than the policy that they train."""
        if self.reads("trainer.max_staleness") and cfg.trainer.max_staleness == 0:
            return False
        return self.asynchronous or cfg.trainer.sync_interval > 1

    def reads(self, path: str) -> bool:
        return path in self.about.can["reads"]

    def __str__(self) -> str:
        return f"this experiment's plan, {self.name}," if self.fixed else f"trainer.plan={self.name}"


class Chosen(NamedTuple):
    """A function of the objective: the key that chose it, the registry that has it."""

    key: str
    name: str
    registry: Registry

    @property
    def about(self) -> About:
        return self.registry.about(self.name)

    @property
    def problem(self) -> str:
        """What is wrong with its parameters, "" if nothing is."""
        try:
            wrong = self.registry.problem(self.name)
        except UserError as error:  # there is no such file, module or attribute
            wrong = str(error)
        return f"trainer.algorithm.{self.key}={self.name}: {wrong}" if wrong else ""


def functions(algorithm: AlgorithmConfig) -> list[Chosen]:
    """All functions that the objective is made of."""
    from skyasync.algorithms import ADVANTAGE_ESTIMATORS, CORRECTIONS, KL_ESTIMATORS, LOSS_REDUCTIONS, POLICY_LOSSES

    chosen = [
        Chosen("policy_loss_type", algorithm.policy_loss_type, POLICY_LOSSES),
        Chosen("advantage_estimator", algorithm.advantage_estimator, ADVANTAGE_ESTIMATORS),
        Chosen("loss_reduction", algorithm.loss_reduction, LOSS_REDUCTIONS),
        Chosen("off_policy_correction", _correction(algorithm), CORRECTIONS),
        *(Chosen("off_policy_masks", mask, CORRECTIONS) for mask in algorithm.off_policy_masks),
    ]
    if algorithm.use_kl_loss or algorithm.use_kl_in_reward:
        chosen.append(Chosen("kl_estimator_type", algorithm.kl_estimator_type, KL_ESTIMATORS))
    return chosen


def check_functions(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Their parameters, and the settings that ``trainer.algorithm.extra`` names."""
    chosen = functions(algorithm)
    wrong = [one.problem for one in chosen if one.problem]
    yield from wrong
    accepted = {name for one in chosen for about in one.about for name in about.settings}
    for name in () if wrong else algorithm.extra:
        if name not in accepted:
            yield f"trainer.algorithm.extra {name!r} is no setting of the chosen functions: " + unknown(
                "setting", name, accepted
            )


def check_plan(cfg: Config, plan: Plan | None) -> Iterator[str]:
    """Devices that are shared, and samples that are stale and not corrected."""
    if plan is None:
        return
    way_back = "" if plan.fixed else " or trainer.plan=sync"
    interval = cfg.trainer.sync_interval
    if cfg.trainer.placement.colocate_all and interval > 1:
        yield (
            f"trainer.sync_interval={interval} leaves the engines without new weights after most steps, and "
            f"trainer.placement.colocate_all=true wakes them by handing weights over: set one of them to its default"
        )
    if cfg.trainer.placement.colocate_all and (plan.asynchronous or plan.streams):
        yield (
            f"trainer.placement.colocate_all=true lets engines and policy take turns, but {plan} runs both at the "
            f"same time: set trainer.placement.colocate_all=false{way_back}"
        )
    yield from check_correction(cfg, plan)


def check_correction(cfg: Config, plan: Plan) -> Iterator[str]:
    """Samples of an older policy, and nothing that corrects for it."""
    algorithm = cfg.trainer.algorithm
    if not plan.stale(cfg):
        return
    why = str(plan) if plan.asynchronous else f"trainer.sync_interval={cfg.trainer.sync_interval}"
    if not corrected(algorithm) and not cfg.trainer.allow_uncorrected:
        yield (
            f"trainer.algorithm.off_policy_correction=none leaves the samples of an older policy uncorrected, since "
            f"{why} is asynchronous and trainer.algorithm.policy_loss_type={algorithm.policy_loss_type} does not use "
            f"the behaviour log-probabilities: choose a correction (auto, token_tis), a loss that uses them "
            f"({', '.join(_losses_with_behaviour())}), or trainer.allow_uncorrected=true"
        )


def check_admission(cfg: Config, plan: Plan | None) -> Iterator[str]:
    """How far generation may be ahead."""
    trainer, generator = cfg.trainer, cfg.generator
    if plan is None or not plan.reads("trainer.max_staleness"):
        return
    between = trainer.sync_interval - 1
    if trainer.max_staleness < between:
        yield (
            f"trainer.sync_interval={trainer.sync_interval} lets samples age by {between}, more than "
            f"trainer.max_staleness={trainer.max_staleness} allows: raise the one, or lower the other"
        )
    elif 0 < trainer.async_generation_ratio < between:
        yield (
            f"trainer.async_generation_ratio={trainer.async_generation_ratio:g} generates too little ahead for the "
            f"{trainer.sync_interval} batches that trainer.sync_interval={trainer.sync_interval} trains between two "
            f"weight syncs: raise it to {between}, or lower the interval"
        )
    if trainer.async_generation_ratio > trainer.max_staleness:
        yield (
            f"trainer.async_generation_ratio={trainer.async_generation_ratio:g} generates further ahead than "
            f"trainer.max_staleness={trainer.max_staleness} allows: raise trainer.max_staleness to "
            f"{ceil(trainer.async_generation_ratio)}, or lower the ratio"
        )
    batch = trainer.train_batch_size
    least, most = (between + 1) * batch, (trainer.max_staleness + 1) * batch
    of = f"trainer.train_batch_size={batch}" + (f" times trainer.sync_interval={between + 1}" if between else "")
    if generator.generate_batch_size and not least <= generator.generate_batch_size <= most:
        yield (
            f"generator.generate_batch_size={generator.generate_batch_size} is not between "
            f"{of} and the {most} prompts that trainer.max_staleness="
            f"{trainer.max_staleness} allows: change it, or raise trainer.max_staleness to "
            f"{max(ceil(generator.generate_batch_size / batch) - 1, trainer.max_staleness)}"
        )


def check_spares(cfg: Config) -> Iterator[str]:
    """What cannot take the first samples of a group that are complete."""
    generator = cfg.generator
    key = f"generator.spare_samples_per_prompt={generator.spare_samples_per_prompt}"
    if not generator.spare_samples_per_prompt:
        return
    if generator.agent_program:
        yield f"{key} is for environments, and generator.agent_program plays programs: remove one of them"
    if not generator.is_num_return_sequences_expand:
        yield (
            f"{key} takes the samples of a group that are complete first, and "
            f"generator.is_num_return_sequences_expand=false lets them end together: remove one of them"
        )
    if cfg.trainer.algorithm.dynamic_sampling.early_end:
        yield (
            f"{key} starts more samples than a group has, and trainer.algorithm.dynamic_sampling.early_end=true "
            f"decides by those that it has: remove one of them"
        )


def check_estimator(cfg: Config) -> Iterator[str]:
    """Advantages that would always be 0."""
    from skyasync.algorithms import ADVANTAGE_ESTIMATORS

    algorithm = cfg.trainer.algorithm
    about = ADVANTAGE_ESTIMATORS.about(algorithm.advantage_estimator)
    if cfg.generator.n_samples_per_prompt == 1 and judges_by(algorithm, about, "group_relative", "group"):
        free = [n for n, other in ADVANTAGE_ESTIMATORS.builtins().items() if other.can["group_relative"] is False]
        yield (
            f"generator.n_samples_per_prompt=1 leaves trainer.algorithm.advantage_estimator="
            f"{algorithm.advantage_estimator} no group to compare with (every advantage would be 0): "
            f"sample at least 2 per prompt, or choose an estimator without a group, such as {', '.join(free)}"
        )


def reported_metric(cfg: Config) -> str:
    """What groups are filtered by, where episodes must report it; "" where a reward model may, behind their end."""
    return "" if holds(REWARD, cfg) else cfg.trainer.algorithm.dynamic_sampling.metric


def check_critic(cfg: Config) -> Iterator[str]:
    """A policy that is never trained."""
    trainer, warmup = cfg.trainer, cfg.trainer.critic.warmup_steps
    yield from check_shared_critic(cfg)
    if holds(CRITIC, cfg) and 0 < trainer.max_training_steps <= warmup:
        yield (
            f"trainer.critic.warmup_steps={warmup} trains the critic alone to the end of "
            f"trainer.max_training_steps={trainer.max_training_steps}: lower the one, or raise the other"
        )


def check_teacher(cfg: Config) -> Iterator[str]:
    """Advantages that would always be 0: neither rewards nor a teacher are asked. And distributions with holes."""
    from skyasync.algorithms import ADVANTAGE_ESTIMATORS

    sampling, teacher = cfg.generator.sampling_params, cfg.trainer.teacher
    filters = {"top_k": sampling.top_k > 0, "top_p": sampling.top_p < 1, "min_p": sampling.min_p > 0}
    filters |= {name: bool(getattr(sampling, name)) for name in ("logit_bias", "allowed_token_ids")}
    filter_of = next((name for name, there in filters.items() if there), "")
    if teacher.model.path and teacher.top_k and filter_of and cfg.trainer.algorithm.filter_logprobs:
        yield (
            f"trainer.teacher.top_k={teacher.top_k} compares full distributions, and generator.sampling_params."
            f"{filter_of}={written(getattr(sampling, filter_of))} removes tokens from them, others for the policy than "
            f"for the teacher: remove one of the two, or set trainer.algorithm.filter_logprobs=false"
        )
    estimator = cfg.trainer.algorithm.advantage_estimator
    if not cfg.trainer.teacher.model.path and not ADVANTAGE_ESTIMATORS.about(estimator).can["rewarded"]:
        yield (
            f"trainer.algorithm.advantage_estimator={estimator} learns nothing from rewards, and there is no teacher "
            f"(every advantage would be 0): set trainer.teacher.model.path, or choose another estimator"
        )


def check_reward_model(cfg: Config) -> Iterator[str]:
    """A group that is decided before its scores are known."""
    reward = cfg.trainer.reward
    yield from check_reward_models(reward.models)
    which = f"model.path={reward.model.path}" if reward.model.path else f"models={written(reward.models)}"
    if holds(REWARD, cfg) and cfg.trainer.algorithm.dynamic_sampling.early_end:
        yield (
            f"trainer.algorithm.dynamic_sampling.early_end=true decides a group while it is played, and "
            f"trainer.reward.{which} scores it afterwards: remove one of them"
        )


def judges_by(algorithm: AlgorithmConfig, about: About, capability: str, pool: str) -> bool:
    """Whether an estimator has a capability, which may depend on settings: those that choose its pools, or switches."""
    said = about.can[capability]
    if isinstance(said, bool):
        return said
    return any(getattr(algorithm, about.keys[setting]) in (pool, True) for setting in said)


def corrected(algorithm: AlgorithmConfig) -> bool:
    """Whether the behaviour policy enters the objective at all."""
    return bool(reads_behaviour(algorithm))


def reads_behaviour(algorithm: AlgorithmConfig) -> str:
    """The setting by which it does; "" if it does not."""
    masks = [mask for mask in algorithm.off_policy_masks if mask != "none"]
    if _uses_behaviour(algorithm):
        anchored = not any("behaviour" in about.inputs for about in _loss(algorithm))
        name = "ratio_anchor" if anchored else "policy_loss_type"
    elif algorithm.off_policy_correction != "none":
        name = "off_policy_correction"
    else:
        return f"trainer.algorithm.off_policy_masks={written(masks)}" if masks else ""
    return f"trainer.algorithm.{name}={getattr(algorithm, name)}"


def weighs_by_behaviour(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss itself has the behaviour policy in its ratio."""
    return _enters(_loss(algorithm), algorithm)


def _uses_behaviour(algorithm: AlgorithmConfig) -> bool:
    """In its ratio, or to choose tokens by."""
    return any(_enters(about, algorithm) for about in _loss(algorithm))


def _enters(about: About, algorithm: AlgorithmConfig) -> bool:
    anchored = algorithm.ratio_anchor == "behaviour" and "anchor" in about.inputs
    return "behaviour" in about.inputs or anchored


def _loss(algorithm: AlgorithmConfig) -> About:
    from skyasync.algorithms import POLICY_LOSSES

    return POLICY_LOSSES.about(algorithm.policy_loss_type)


def _losses_with_behaviour() -> list[str]:
    from skyasync.algorithms import POLICY_LOSSES

    return sorted(name for name, about in POLICY_LOSSES.builtins().items() if "behaviour" in about.inputs)


def _correction(algorithm: AlgorithmConfig) -> str:
    """What ``auto`` stands for."""
    if algorithm.off_policy_correction != "auto":
        return algorithm.off_policy_correction
    return "none" if _uses_behaviour(algorithm) else "token_tis"


def missing_parts(cfg: Config, plan: str | type | None) -> list[str]:
    """References to parts that are not there; the other rules ask what they can do."""
    from skyasync.engines.protocol import ENGINES

    problems = []
    for read in (lambda: Plan.of(cfg, plan), lambda: ENGINES.about(backend(cfg))):
        try:
            read()
        except UserError as error:
            problems.append(str(error))
    return problems
