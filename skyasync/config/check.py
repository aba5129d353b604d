"""Settings that are right alone and wrong together, and settings that nothing reads.

Invariant: each problem is one line that names the keys concerned and the way out. Nothing here
imports torch. The condition under which a key is read is declared with the key (``when``), or by
the plan or function that reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import attrgetter

from skyasync.algorithms import ADVANTAGE_ESTIMATORS, CORRECTIONS, LOSS_REDUCTIONS, POLICY_LOSSES
from skyasync.config.command_line import unknown_key
from skyasync.config.keys import Key, Keys
from skyasync.config.parts import Plan, engines, functions, plans, reads_behaviour
from skyasync.config.resume import check_resume
from skyasync.config.schema import Config
from skyasync.config.schema.algorithm import KL, check_algorithm, check_functions, check_streaming
from skyasync.config.schema.data import check_data
from skyasync.config.schema.environment import check_environment
from skyasync.config.schema.generator import check_agents, check_generator, check_weight_sync
from skyasync.config.schema.judges import check_judges
from skyasync.config.schema.models import check_models, check_reward_models
from skyasync.config.schema.placement import OWN_DEVICES, check_placement
from skyasync.config.schema.sampling import (
    backend,
    check_lengths,
    check_sampling,
    sampling_warnings,
)
from skyasync.config.schema.trainer import (
    check_admission,
    check_fault_tolerance,
    check_plan,
    check_trainer,
)
from skyasync.config.secrets import check_hidden
from skyasync.config.values import written
from skyasync.errors import UserError
from skyasync.registry import Registry

_ALGORITHM = "trainer.algorithm."


def check_config(
    cfg: Config, *, plan: str | type | None = None, given: Collection[str] = ()
) -> list[str]:
    """All contradictions in a configuration whose single values are right.

    Args:
        plan: the plan that the experiment fixes, a name or a class; by default ``trainer.plan``
            decides; "" for one that only the experiment knows.
        given: the keys that the user has written: those of the command line and of configuration
            files.
    """

    missing = []  # the other checks ask what these parts can do
    for read in (lambda: Plan.of(cfg, plan), lambda: engines().about(backend(cfg))):
        try:
            read()
        except UserError as error:
            missing.append(str(error))
    missing = missing or [*check_functions(cfg.trainer.algorithm)]
    if missing:
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


def check_names(cfg: Config) -> None:
    """Raises UserError for an attribute of a group that is no setting, which nothing would read."""
    keys = Keys.of(type(cfg))
    for group in ("", *keys.groups):
        of_group = vars(attrgetter(group)(cfg) if group else cfg)
        for name, value in of_group.items():
            path = f"{group}.{name}" if group else name
            if not name.startswith("_") and path not in keys and path not in keys.groups:
                raise UserError(unknown_key(path, keys, value))


def config_warnings(cfg: Config) -> list[str]:
    """Settings that may be intended, but are worth a line at the start of a run."""
    if reads_behaviour(cfg.trainer.algorithm):
        return list(sampling_warnings(cfg))
    return []


def check_unread(cfg: Config, plan: Plan | None, given: Collection[str] = ()) -> Iterator[str]:
    """One line for each key that has no effect.

    Args:
        given: keys that the user has written. Of a plan's own key even the default is an error with
            another plan: a user who writes ``trainer.max_staleness=1`` expects it to act.
    """
    from skyasync.algorithms.presets import apply_preset

    keys = Keys.of(type(cfg))
    if cfg.trainer.algorithm.preset:
        preset = apply_preset(cfg.trainer.algorithm.preset)
    else:
        preset = {}
    changed = [
        key
        for key in keys
        if attrgetter(key.path)(cfg) not in (key.default, preset.get(key.path, key.default))
    ]

    builtin_plans = plans().builtins()
    for key in keys:
        if plan is None or plan.reads(key.path) or not (key in changed or key.path in given):
            continue
        readers = [
            name
            for name, declaration in builtin_plans.items()
            if key.path in declaration.can["reads"]
        ]
        if readers:
            plan_name = " (a plan of your own lists the keys that it reads in its attribute reads)"
            plan_name = "" if plan.name in builtin_plans else plan_name
            way = f"set trainer.plan={'|'.join(readers)}, which reads it{plan_name}, or"
            yield _unread(cfg, key, f"has no effect with {plan}".rstrip(","), way)
        elif key.path == "trainer.allow_uncorrected" and not plan.stale(cfg):
            yield _unread(
                cfg,
                key,
                f"has no effect with {plan}, whose samples are never stale".replace(",,", ","),
            )

    yield from _unread_by_objective(cfg, changed)

    for key in changed:
        if not key.when or key.when(cfg):
            continue
        ranks = ""  # the policy's number of them, for a role's own on other devices
        if key.when in OWN_DEVICES:
            of_role = keys[key.when.paths[0]].when
            if key.name.startswith("ref_") or (of_role is not None and of_role(cfg)):
                ranks = f"trainer.placement.policy_{key.name.partition('_')[2]}"
        repeated = ranks or (
            "trainer.policy.model.path" if key.path.endswith(".model.path") else ""
        )
        if repeated and attrgetter(key.path)(cfg) == attrgetter(repeated)(cfg):
            continue  # as every run writes it
        why = f"it is read with {key.when};" if key.when.choices else ""
        why += f"make it {attrgetter(ranks)(cfg)}, as {ranks} is, or" if ranks else ""
        deciding = " and ".join(
            f"{path}={written(attrgetter(path)(cfg))}" for path in key.when.paths
        )
        yield _unread(cfg, key, f"has no effect with {deciding}", why)


def _unread_by_objective(cfg: Config, changed: Collection[Key]) -> Iterator[str]:
    """Keys that feed functions none of which is chosen, and keys whose reader depends on more than
    one other key."""
    trainer = cfg.trainer
    algorithm = cfg.trainer.algorithm
    chosen = functions(algorithm)
    read = {
        path
        for function in chosen
        for declaration in function.about
        for path in declaration.keys.values()
    }
    registries: Mapping[str, Registry] = {
        "policy_loss_type": POLICY_LOSSES,
        "advantage_estimator": ADVANTAGE_ESTIMATORS,
        "loss_reduction": LOSS_REDUCTIONS,
        "off_policy_correction": CORRECTIONS,
    }
    for key in changed:
        name = key.path.removeprefix(_ALGORITHM)
        if name in read or name == key.path:
            continue
        readers = []
        for choice, registry in registries.items():
            names = [
                n
                for n, declaration in registry.builtins().items()
                if any(name in a.keys.values() for a in declaration)
            ]
            if names:
                readers.append(f"{_ALGORITHM}{choice}={'|'.join(sorted(names))}")
        if readers:
            yield _unread(cfg, key, "has no effect", f"it is read with {' or '.join(readers)};")

    paths = {key.path for key in changed}
    single = trainer.update_epochs_per_batch == 1 and trainer.policy_mini_batch_size in (
        0,
        trainer.train_batch_size,
    )
    if f"{_ALGORITHM}proximal_logprobs" in paths and single:
        yield (
            f"{_ALGORITHM}proximal_logprobs={algorithm.proximal_logprobs} has no effect with one update per batch: set "
            f"trainer.policy_mini_batch_size or trainer.update_epochs_per_batch, or leave it at recompute"
        )
    anchored = any("anchor" in declaration.inputs for declaration in chosen[0].about)
    weighted = algorithm.use_kl_loss and algorithm.kl_importance_weighted
    if f"{_ALGORITHM}ratio_anchor" in paths and not anchored and not weighted:
        yield (
            f"{_ALGORITHM}ratio_anchor={algorithm.ratio_anchor} has no effect with {_ALGORITHM}policy_loss_type="
            f"{algorithm.policy_loss_type}, whose ratio has no anchor to choose: leave it at proximal"
        )
    ref = trainer.ref.model.path
    if "trainer.ref.model.path" in paths and not KL(cfg) and ref != trainer.policy.model.path:
        yield (
            f"trainer.ref.model.path={ref} has no effect without a KL term: set {_ALGORITHM}use_kl_loss=true or "
            f"{_ALGORITHM}use_kl_in_reward=true, or leave it empty"
        )


def _unread(cfg: Config, key: Key, reader: str, way: str = "") -> str:
    value = written(attrgetter(key.path)(cfg))
    return f"{key.path}={value} {reader}: {way}{' ' if way else ''}remove it (its default is {written(key.default)})"
