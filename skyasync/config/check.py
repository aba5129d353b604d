"""Settings that are right alone and wrong together, and settings that nothing reads.

Invariant: each problem is one line that names the keys concerned and the way out. Nothing here imports torch. What
reads a key stands beside the key (``when``), or with the plan or function that reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any

from skyasync.algorithms import ADVANTAGE_ESTIMATORS, CORRECTIONS, LOSS_REDUCTIONS, POLICY_LOSSES
from skyasync.config.keys import Key, Keys
from skyasync.config.parts import Plan, functions, reads_behaviour
from skyasync.config.resume import check_resume
from skyasync.config.schema import Config
from skyasync.config.schema.agents import check_agents
from skyasync.config.schema.algorithm import (
    KL,
    AlgorithmConfig,
    check_algorithm,
    check_functions,
    check_streaming,
)
from skyasync.config.schema.data import check_data
from skyasync.config.schema.environment import check_environment
from skyasync.config.schema.fault_tolerance import check_fault_tolerance
from skyasync.config.schema.generator import (
    check_generator,
)
from skyasync.config.schema.judges import check_judges
from skyasync.config.schema.models import check_models
from skyasync.config.schema.placement import APART, check_placement
from skyasync.config.schema.reward_models import check_reward_models
from skyasync.config.schema.sampling import backend, check_lengths, check_sampling, sampling_warnings
from skyasync.config.schema.trainer import check_admission, check_plan, check_trainer
from skyasync.config.schema.weight_sync import check_weight_sync
from skyasync.config.secrets import check_hidden
from skyasync.config.values import written
from skyasync.errors import UserError

_ALGORITHM = "trainer.algorithm."


def check_config(cfg: Config, *, plan: str | type | None = None, given: Collection[str] = ()) -> list[str]:
    """All contradictions in a configuration whose single values are right.

    Args:
        plan: the plan that the experiment fixes, a name or a class; by default ``trainer.plan`` decides; "" for one
            that only the experiment knows.
        given: the keys that the user has written: those of the command line and of configuration files.
    """
    if missing := [*_missing_parts(cfg, plan)] or [*check_functions(cfg.trainer.algorithm)]:
        return missing
    chosen = Plan.of(cfg, plan)
    return [
        *check_plan(cfg, chosen),
        *check_admission(cfg, chosen),
        *check_streaming(cfg, chosen),
        *check_generator(cfg),
        *check_weight_sync(cfg),
        *check_hidden(cfg),
        *check_unread(cfg, chosen, given),
        *check_placement(cfg),
        *check_resume(cfg.trainer),
        *check_fault_tolerance(cfg.trainer),
        *check_trainer(cfg),
        *check_lengths(cfg),
        *check_sampling(cfg),
        *check_algorithm(cfg),
        *check_models(cfg),
        *check_reward_models(cfg),
        *check_environment(cfg.environment),
        *check_judges(cfg.environment),
        *check_data(cfg),
        *check_agents(cfg),
    ]


def config_warnings(cfg: Config) -> list[str]:
    """What may be meant so, but is worth a line at the start of a run."""
    return list(sampling_warnings(cfg)) if reads_behaviour(cfg.trainer.algorithm) else []


def _missing_parts(cfg: Config, plan: str | type | None) -> Iterator[str]:
    """References to parts that do not exist; the other checks ask what these parts can do."""
    from skyasync.inference.interface import ENGINES

    for read in (lambda: Plan.of(cfg, plan), lambda: ENGINES.about(backend(cfg))):
        try:
            read()
        except UserError as error:
            yield str(error)


def check_unread(cfg: Config, plan: Plan | None, given: Collection[str] = ()) -> Iterator[str]:
    """One line for each key that has no effect.

    Args:
        given: keys that the user has written: of a plan's own key even the default is refused there with another plan,
            since whoever writes ``trainer.max_staleness=1`` expects it to act.
    """
    from skyasync.algorithms.presets import apply_preset

    keys = Keys.of(type(cfg))
    preset = apply_preset(cfg.trainer.algorithm.preset) if cfg.trainer.algorithm.preset else {}
    changed = [key for key in keys if attrgetter(key.path)(cfg) not in (key.default, preset.get(key.path, key.default))]
    checked = [key for key in keys if key in changed or key.path in given]
    yield from _of_plans(cfg, plan, checked)
    yield from _of_functions(cfg.trainer.algorithm, changed)
    for key in changed:
        if key.when and not key.when(cfg) and not _settled(cfg, key):
            readers = f"it is read with {key.when};" if key.when.choices else ""
            if ranks := _policys(cfg, key):
                readers += f"make it {attrgetter(ranks)(cfg)}, as {ranks} is, or"
            yield _line(cfg, key, f"has no effect with {key.when.found(cfg)}", readers)
    yield from _of_updates(cfg, [key.path for key in changed])


def _settled(cfg: Config, key: Key) -> bool:
    """What repeats the policy's: a role's model, which every run writes so, or its ranks on devices that it shares."""
    same = _policys(cfg, key) or ("trainer.policy.model.path" if key.path.endswith(".model.path") else "")
    return bool(same) and attrgetter(key.path)(cfg) == attrgetter(same)(cfg)


def _policys(cfg: Config, key: Key) -> str:
    """The policy's number of ranks for a role's own, which is for devices apart from the policy's."""
    if key.when not in APART:
        return ""
    role = key.when.paths[0]
    of_role = Keys.of(type(cfg))[role].when
    there = role.endswith("_ref") or (of_role is not None and of_role(cfg))
    return f"trainer.placement.policy_{key.name.partition('_')[2]}" if there else ""


def _of_plans(cfg: Config, plan: Plan | None, checked: Collection[Key]) -> Iterator[str]:
    from skyasync.trainer.plans import PLANS

    readers: dict[str, list[str]] = {}
    for name, about in PLANS.builtins().items():
        for path in about.can["reads"]:
            readers.setdefault(path, []).append(name)
    for key in checked:
        if plan is None or plan.reads(key.path):
            continue
        if key.path in readers:
            own = (
                ""
                if plan.name in PLANS.builtins()
                else " (a plan of your own lists the keys that it reads in its attribute reads)"
            )
            way = f"set trainer.plan={'|'.join(readers[key.path])}, which reads it{own}, or"
            yield _line(cfg, key, f"has no effect with {plan}".rstrip(","), way)
        elif key.path == "trainer.allow_uncorrected" and not plan.stale(cfg):
            yield _line(cfg, key, f"has no effect with {plan}, whose samples are never stale".replace(",,", ","))


def _of_functions(algorithm: AlgorithmConfig, changed: Collection[Key]) -> Iterator[str]:
    """Keys that feed functions of the objective, none of them chosen."""
    chosen = functions(algorithm)
    read = {path for one in chosen for about in one.about for path in about.keys.values()}
    for key in changed:
        name = key.path.removeprefix(_ALGORITHM)
        readers = _readers(name)
        if readers and name not in read and name != key.path:
            yield _line(algorithm, key, "has no effect", f"it is read with {readers};", path=name)


def _readers(name: str) -> str:
    """Which choices read a key of the algorithm."""
    registries: Mapping[str, Any] = {
        "policy_loss_type": POLICY_LOSSES,
        "advantage_estimator": ADVANTAGE_ESTIMATORS,
        "loss_reduction": LOSS_REDUCTIONS,
        "off_policy_correction": CORRECTIONS,
    }
    found = []
    for choice, registry in registries.items():
        names = [n for n, about in registry.builtins().items() if any(name in a.keys.values() for a in about)]
        if names:
            found.append(f"{_ALGORITHM}{choice}={'|'.join(sorted(names))}")
    return " or ".join(found)


def _of_updates(cfg: Config, changed: Collection[str]) -> Iterator[str]:
    """Keys whose reader depends on more than one other key."""
    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    single = trainer.update_epochs_per_batch == 1 and trainer.policy_mini_batch_size in (0, trainer.train_batch_size)
    if f"{_ALGORITHM}proximal_logprobs" in changed and single:
        yield (
            f"{_ALGORITHM}proximal_logprobs={algorithm.proximal_logprobs} has no effect with one update per batch: set "
            f"trainer.policy_mini_batch_size or trainer.update_epochs_per_batch, or leave it at recompute"
        )
    anchored = any("anchor" in about.inputs for about in functions(algorithm)[0].about)
    weighted = algorithm.use_kl_loss and algorithm.kl_importance_weighted
    if f"{_ALGORITHM}ratio_anchor" in changed and not anchored and not weighted:
        yield (
            f"{_ALGORITHM}ratio_anchor={algorithm.ratio_anchor} has no effect with {_ALGORITHM}policy_loss_type="
            f"{algorithm.policy_loss_type}, whose ratio has no anchor to choose: leave it at proximal"
        )
    unused = "trainer.ref.model.path" in changed and not KL(cfg)
    if unused and trainer.ref.model.path != trainer.policy.model.path:
        yield (
            f"trainer.ref.model.path={trainer.ref.model.path} has no effect without a KL term: set "
            f"{_ALGORITHM}use_kl_loss=true or {_ALGORITHM}use_kl_in_reward=true, or leave it empty"
        )


def _line(cfg: object, key: Key, what: str, why: str = "", path: str = "") -> str:
    value = written(attrgetter(path or key.path)(cfg))
    return f"{key.path}={value} {what}: {why}{' ' if why else ''}remove it (its default is {written(key.default)})"
