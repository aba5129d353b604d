"""What the chosen parts say of themselves: the plan, the engine, the functions of the objective.

Invariant: no part's name decides; a user's part is judged by the same rules. Nothing here imports
torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from skyasync.algorithms import (
    ADVANTAGE_ESTIMATORS,
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSS_REDUCTIONS,
    POLICY_LOSSES,
)
from skyasync.config.values import written
from skyasync.errors import UserError
from skyasync.registry import About, Registry, resolve_reference

if TYPE_CHECKING:
    from skyasync.config.schema import AlgorithmConfig, Config


def engines() -> Registry:
    """The inference engines, by ``generator.backend``."""
    return _registry("skyasync.inference.interface:ENGINES")


def plans() -> Registry:
    """The execution plans, by ``trainer.plan``."""
    return _registry("skyasync.trainer.plans:PLANS")


def reward_functions() -> Registry:
    """The reward functions, by the names in ``environment.reward_funcs``."""
    return _registry("skyasync.rewards:REWARDS")


def _registry(reference: str) -> Registry:
    """A registry of a package above this one, as ``key(registry=...)`` names it: the configuration
    asks what is registered, and imports no other package by itself."""
    registry: Registry = resolve_reference(reference, kind="registry")
    return registry


class Plan(NamedTuple):
    """The plan of a run: what it is called, what it says of itself, and whether the experiment
    fixes it."""

    name: str
    about: About
    fixed: bool = False

    @classmethod
    def of(cls, cfg: Config, plan: str | type | None) -> Plan | None:
        """The chosen one; None for "": one that only the experiment knows."""
        if isinstance(plan, type):
            return cls(plan.__name__, plans().describe(plan), True)
        name = cfg.trainer.plan if plan is None else plan
        if name:
            return cls(name, plans().about(name), plan is not None)
        return None

    @property
    def asynchronous(self) -> bool:
        return bool(self.about.can["asynchronous"])

    @property
    def streams(self) -> bool:
        return bool(self.about.can["streams"])

    @property
    def shares_devices(self) -> str:
        return str(self.about.can["shares_devices"])

    def stale(self, cfg: Config) -> bool:
        """Whether samples may be older than the policy that they train."""
        if cfg.data.replay_groups:
            return True
        if self.reads("trainer.max_staleness") and cfg.trainer.max_staleness == 0:
            return False
        return self.asynchronous or cfg.trainer.sync_interval > 1

    def most_stale(self, cfg: Config) -> int:
        """Versions by which samples may be older than the policy they train; 1 if a plan of the
        user has no setting."""
        trainer = cfg.trainer
        waits = cfg.trainer.sync_interval - 1
        if not self.stale(cfg):
            return 0
        if self.reads("trainer.max_staleness"):
            return trainer.max_staleness
        if self.reads("trainer.async_queue_size"):
            queued = trainer.async_queue_size
        else:
            queued = 1
        return waits + (queued if self.asynchronous else 0)

    def reads(self, path: str) -> bool:
        return path in self.about.can["reads"]

    def __str__(self) -> str:
        if self.fixed:
            return f"this experiment's plan, {self.name},"
        return f"trainer.plan={self.name}"


def engines_with(capability: str, among: str = "") -> str:
    """The built-in engines with a capability (or with ``among`` in its values), for a message."""
    has = {name: declaration.can[capability] for name, declaration in engines().builtins().items()}
    able = [name for name, value in has.items() if (among in value if among else value)]
    if able:
        return supported(able)
    return f"an engine of your own that declares it ({capability})"


def supported(backends: Sequence[str]) -> str:
    """Engines that can do what another cannot, as one would choose them."""
    if len(backends) > 1:
        other_engines = f" (supported backends: {', '.join(backends)})"
    else:
        other_engines = ""
    return f"generator.backend={backends[0]}{other_engines}"


# ---------------------------------------------------------------- the objective


class ChosenFunction(NamedTuple):
    """A function of the objective: the key that chose it, the registry that has it."""

    key: str
    name: str
    registry: Registry

    @property
    def about(self) -> About:
        return self.registry.about(self.name)

    def problem(self) -> str:
        """The problem of its parameters; "" if there is none."""
        try:
            wrong = self.registry.problem(self.name)
        except UserError as error:  # there is no such file, module or attribute
            wrong = str(error)
        if wrong:
            return f"trainer.algorithm.{self.key}={self.name}: {wrong}"
        return ""


def functions(algorithm: AlgorithmConfig) -> list[ChosenFunction]:
    """The functions of the objective."""
    correction = algorithm.off_policy_correction
    if correction == "auto":
        if _uses_behaviour(algorithm):
            correction = "none"
        else:
            correction = "token_tis"
    chosen = [
        ChosenFunction("policy_loss_type", algorithm.policy_loss_type, POLICY_LOSSES),
        ChosenFunction("advantage_estimator", algorithm.advantage_estimator, ADVANTAGE_ESTIMATORS),
        ChosenFunction("loss_reduction", algorithm.loss_reduction, LOSS_REDUCTIONS),
        ChosenFunction("off_policy_correction", correction, CORRECTIONS),
        *(
            ChosenFunction("off_policy_masks", mask, CORRECTIONS)
            for mask in algorithm.off_policy_masks
        ),
    ]
    if algorithm.use_kl_loss or algorithm.use_kl_in_reward:
        chosen.append(
            ChosenFunction("kl_estimator_type", algorithm.kl_estimator_type, KL_ESTIMATORS)
        )
    return chosen


def reads_behaviour(algorithm: AlgorithmConfig) -> str:
    """The setting by which the behaviour policy enters the objective; "" if it does not."""
    if _uses_behaviour(algorithm):
        if any(
            "behaviour" in declaration.inputs
            for declaration in POLICY_LOSSES.about(algorithm.policy_loss_type)
        ):
            return f"trainer.algorithm.policy_loss_type={algorithm.policy_loss_type}"
        return f"trainer.algorithm.ratio_anchor={algorithm.ratio_anchor}"
    if algorithm.off_policy_correction != "none":
        return f"trainer.algorithm.off_policy_correction={algorithm.off_policy_correction}"
    masks = [mask for mask in algorithm.off_policy_masks if mask != "none"]
    if masks:
        return f"trainer.algorithm.off_policy_masks={written(masks)}"
    return ""


def weighs_by_behaviour(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss itself has the behaviour policy in its ratio."""
    return _enters(POLICY_LOSSES.about(algorithm.policy_loss_type), algorithm)


def _uses_behaviour(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss uses it, in its ratio or to choose tokens."""
    return any(
        _enters(declaration, algorithm)
        for declaration in POLICY_LOSSES.about(algorithm.policy_loss_type)
    )


def _enters(declaration: About, algorithm: AlgorithmConfig) -> bool:
    return "behaviour" in declaration.inputs or (
        algorithm.ratio_anchor == "behaviour" and "anchor" in declaration.inputs
    )


def depends_on_pool(
    algorithm: AlgorithmConfig, declaration: About, capability: str, pool: str
) -> bool:
    """Whether an estimator has a capability, which may depend on settings: those that choose its
    pools, or switches."""
    value = declaration.can[capability]
    if isinstance(value, bool):
        return value
    return any(
        attrgetter(declaration.keys[setting])(algorithm) in (pool, True) for setting in value
    )


def check_correction(cfg: Config, plan: Plan) -> Iterator[str]:
    """Samples of an older policy, and nothing that corrects for it."""
    algorithm = cfg.trainer.algorithm
    if not plan.stale(cfg):
        return
    if plan.asynchronous:
        why = str(plan)
    else:
        why = f"trainer.sync_interval={cfg.trainer.sync_interval}"
    if cfg.data.replay_groups:
        why = f"data.replay_groups={cfg.data.replay_groups}"
    if not reads_behaviour(algorithm) and not cfg.trainer.allow_uncorrected:
        losses = sorted(
            name
            for name, declaration in POLICY_LOSSES.builtins().items()
            if "behaviour" in declaration.inputs
        )
        yield (
            f"trainer.algorithm.off_policy_correction=none leaves the samples of an older policy uncorrected, since "
            f"{why} is asynchronous and trainer.algorithm.policy_loss_type={algorithm.policy_loss_type} does not use "
            f"the behaviour log-probabilities: choose a correction (auto, token_tis), a loss that uses them "
            f"({', '.join(losses)}), or trainer.allow_uncorrected=true"
        )


def reported_metric(cfg: Config) -> str:
    """The metric that groups are filtered by and episodes must report; "" if reward models may
    report it later."""
    reward = cfg.trainer.reward
    if reward.model.path or reward.models:
        return ""
    return cfg.trainer.algorithm.dynamic_sampling.metric
