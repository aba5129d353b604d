"""verl's keys that depend on each other."""

from __future__ import annotations

import re
from math import ceil

from skyasync.config.values import Value
from skyasync.interop.conversion import BATCH, Conversion, ConversionContext, as_list, converted
from skyasync.interop.draft import (
    ANCHOR,
    CORRECTION,
    ENGINE_SIZE,
    ESTIMATOR,
    KL_COEFFICIENT,
    LOSS,
    MINI,
    PLAN,
    REDUCTION,
    RESPONSE_LENGTH,
    Draft,
)

_FUNCTION = "custom_reward_function.name"  # the end of a key, in several groups
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_IS_TYPE = "algorithm.rollout_correction.rollout_is"
_IS_THRESHOLD = "algorithm.rollout_correction.rollout_is_threshold"
_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
_LOSS_TYPE = "algorithm.rollout_correction.loss_type"
_STALENESS = "async_training.staleness_threshold"
_SYNC = "async_training.trigger_parameter_sync_step"
_ENGINE_DEVICES = ("rollout.nnodes", "rollout.n_gpus_per_node")
_SYNC_INTERVAL = "trainer.sync_interval"


def _reward_file(value: Value, context: ConversionContext) -> list[Value]:
    """Reward functions as ``file:function``; the name of the function is another key."""
    function: Value = "compute_score"  # verl's default
    for key, name in context.source_keys.items():
        if key.endswith(_FUNCTION) and name:
            function = name
            break
    functions: list[Value] = []
    for file in map(str, as_list(value)):
        functions.append(file if ":" in file else f"{file}:{function}")
    return [functions]


CONVERSIONS: dict[str, Conversion] = {"reward_file": _reward_file}

#: Plan -> the defaults in the configuration file of its program, below those of the recipe.
_PROGRAM_DEFAULTS: dict[str, dict[str, Value]] = {
    "one_step_off": {"algorithm.rollout_correction.bypass_mode": True},
    "fully_async": {
        "algorithm.rollout_correction.bypass_mode": True,
        "async_training.staleness_threshold": 0.1,
        "async_training.trigger_parameter_sync_step": 4,
        "async_training.partial_rollout": True,
    },
}


def finish(draft: Draft) -> None:
    """Apply the rules for keys that depend on each other."""
    _penalty(draft)
    draft.remark_filters()
    for plan in _PROGRAM_DEFAULTS:
        # As in python -m verl.experimental.fully_async_policy.fully_async_main.
        if plan in draft.recipe.command:
            draft.put(PLAN, plan)
            _program_defaults(draft, plan)
    _correction(draft)
    _loss_of_bypass(draft)
    _masks(draft)
    _clip(draft)
    _reduction(draft)
    _rewards(draft)
    _engines(draft)
    if draft.value(PLAN) == "fully_async":
        _batches(draft)
    if draft.source_keys.get("trainer.v1.trainer_mode") == "separate_async":
        _separate(draft)
    elif "fully_async" in draft.recipe.command or _STALENESS in draft.source_keys:
        # The threshold alone shows that the recipe is of the asynchronous program.
        _staleness(draft)
    _warm_up(draft, "policy", "actor_rollout_ref.actor.optim.")
    _warm_up(draft, "critic", "critic.optim.")


def _penalty(draft: Draft) -> None:
    """The KL term: verl has a coefficient and an estimator for the loss, and others for the reward."""
    in_loss = bool(draft.source_value("actor_rollout_ref.actor.use_kl_loss"))
    in_reward = bool(draft.source_value("algorithm.use_kl_in_reward"))
    if in_loss:
        draft.set_one_of(KL_COEFFICIENT, "actor_rollout_ref.actor.kl_loss_coef")
        draft.set_one_of(
            "trainer.algorithm.kl_estimator_type", "actor_rollout_ref.actor.kl_loss_type"
        )
    else:
        draft.set_one_of(KL_COEFFICIENT, "algorithm.kl_ctrl.kl_coef")
        draft.set_one_of("trainer.algorithm.kl_estimator_type", "algorithm.kl_penalty")
    coefficient = draft.number(KL_COEFFICIENT) if in_loss or in_reward else 0
    # Both at once are not supported here: the term in the loss counts.
    draft.set_kl(in_loss, coefficient)
    draft.set_kl_clamp("k3", "k3_straight_through")


def _reduction(draft: Draft) -> None:
    """The reduction of the loss; some losses have their own there."""
    loss = draft.value(LOSS)
    if loss in ("gspo", "sapo", "gmpo") and draft.value(REDUCTION) != "sequence_mean":
        draft.drop(REDUCTION, f"not for the policy's loss there: {_LOSS_MODE} decides")
        # verl reduces these losses by sequences, whatever loss_agg_mode is.
        draft.put(REDUCTION, "sequence_mean", _LOSS_MODE)
    if loss == "gspo":
        _sequence_ratio(draft)
    length = "trainer.algorithm.max_seq_len"
    if draft.value(REDUCTION) == "seq_mean_token_sum_norm" and length not in draft.settings:
        note = "the width of a padded response there"
        draft.put(
            length, draft.value(RESPONSE_LENGTH), "actor_rollout_ref.actor.loss_agg_mode", note=note
        )


def _rewards(draft: Draft) -> None:
    """Reward functions, and the penalty for long responses."""
    for name, enabled in draft.source_keys.items():
        if re.search(r"overlong_buffer(_cfg)?\.enable$", name) and not enabled:
            draft.drop_group(
                "trainer.algorithm.overlong_buffer.", f"it has no effect there with {name}=false"
            )
    rewards = "environment.reward_funcs"
    for name in draft.source_keys:
        if name.endswith(_FUNCTION) and rewards in draft.settings:
            # The function's name is part of this setting: its key has a counterpart as well.
            draft.change(rewards, draft.value(rewards), name)
            draft.no_counterpart.pop(name, None)
    if draft.value(rewards) == []:
        why = f"without one the data_source chooses among verl's functions: write {rewards}"
        draft.no_counterpart.setdefault("custom_reward_function.path", why)


def _engines(draft: Draft) -> None:
    """As many engines as fit on the devices: on those of the rollout, or else on the policy's."""
    nodes = draft.source_keys.get("rollout.nnodes")
    per_node = draft.source_keys.get("rollout.n_gpus_per_node")
    if isinstance(nodes, int) and isinstance(per_node, int) and nodes and per_node:
        devices = float(nodes * per_node)
        names = draft.present_names(*_ENGINE_DEVICES)
    else:
        devices = draft.number("trainer.placement.policy_num_nodes")
        devices *= draft.number("trainer.placement.policy_num_gpus_per_node")
        names = draft.present_names("trainer.n_gpus_per_node")
    engines = devices // draft.number(ENGINE_SIZE)
    if engines >= 1:
        draft.put("generator.num_inference_engines", int(engines), *names)
        for name in _ENGINE_DEVICES:
            draft.no_counterpart.pop(name, None)


def _correction(draft: Draft) -> None:
    """The correction and its bounds; two bounds drop the tokens outside them."""
    threshold = draft.source_value(_IS_THRESHOLD)
    limits: list[Value] = [0, threshold]
    bounds = re.findall(r"[\d.]+", str(threshold))
    if len(bounds) == 2:
        limits = [float(bound) for bound in bounds]
        if draft.value(CORRECTION) == "token_tis":
            # With a lower bound verl masks tokens instead of truncating their weights.
            draft.put(CORRECTION, "icepop", _IS_TYPE, _IS_THRESHOLD)
    enabled = bool(draft.source_value(_IS_TYPE))
    draft.set_correction(enabled, limits, _IS_THRESHOLD)


def _clip(draft: Draft) -> None:
    """The clip range of losses with settings of their own for it."""
    ranges = {
        "cispo": "trainer.algorithm.cispo.cispo_eps_clip",
        "dppo": "trainer.algorithm.dppo.delta",
    }
    loss = str(draft.value(LOSS))
    if loss not in ranges:
        return
    for bound in ("low", "high"):
        setting = draft.settings.pop(f"trainer.algorithm.eps_clip_{bound}", None)
        if setting:
            draft.settings[f"{ranges[loss]}_{bound}"] = setting
    if loss != "dppo":
        return
    cap = "actor_rollout_ref.actor.clip_ratio_c"
    # The loss modes are dppo_tv and dppo_kl.
    draft.put(
        "trainer.algorithm.dppo.divergence", str(draft.source_keys[_LOSS_MODE])[-2:], _LOSS_MODE
    )
    # verl bounds the ratio of this loss with the same key.
    draft.settings.pop("trainer.algorithm.clip_ratio_c", None)
    draft.put("trainer.algorithm.extra.ratio_cap", draft.source_value(cap), cap)
    if draft.value(ANCHOR) == "proximal":
        draft.remarks.append(
            f"{LOSS}=dppo: the divergence is from the engine's policy, "
            f"there from the policy at the start of a batch"
        )


def _loss_of_bypass(draft: Draft) -> None:
    """The loss whose ratio is to the engine's log-probabilities.

    It is PPO without importance weights, or REINFORCE with them.
    """
    reinforce = draft.source_value(_LOSS_TYPE) == "reinforce"
    if draft.value(ANCHOR) != "behaviour":
        if reinforce:
            draft.set_one_of(LOSS, _LOSS_MODE)
            draft.no_counterpart[_LOSS_TYPE] = f"it has no effect there without {_BYPASS}"
        return
    in_program = any(plan in draft.recipe.command for plan in _PROGRAM_DEFAULTS)
    replaced = reinforce or in_program or draft.source_value(_LOSS_MODE) == "bypass_mode"
    if replaced and draft.source_keys.get(_LOSS_MODE, "bypass_mode") != "bypass_mode":
        draft.no_counterpart[_LOSS_MODE] = f"it has no effect there: {_BYPASS} decides"
    correction = draft.value(CORRECTION)
    if not reinforce:
        if replaced:
            draft.put(LOSS, "dual_clip", _LOSS_TYPE)
        if correction != "none":
            # The ratio to the engine's policy contains the weight: it would count twice.
            why = f"with {_BYPASS} the weights are metrics alone there: the ratio of the loss has them"
            for name in draft.present_names(*draft.origin(CORRECTION)):
                draft.no_counterpart[name] = why
            draft.set_correction(False, [], _IS_THRESHOLD)
    elif correction == "token_tis":
        draft.put(LOSS, "tis", _LOSS_TYPE, _IS_TYPE)
        draft.put(
            "trainer.algorithm.tis_high",
            draft.value("trainer.algorithm.token_tis_ratio_clip_high"),
            _IS_THRESHOLD,
        )
        draft.set_correction(False, [], _IS_THRESHOLD)
        draft.no_counterpart.pop(_IS_THRESHOLD, None)
    else:
        draft.put(LOSS, "vanilla", _LOSS_TYPE)
        # REINFORCE multiplies by the weight alone.
        draft.drop(ANCHOR, "a loss without a ratio has no anchor")
        if correction != "none":
            draft.remarks.append(
                f"{CORRECTION}={correction}: the weights are of the policy at the start of a batch, "
                f"there of the policy that is trained"
            )


#: Rejection of tokens or sequences -> our mask, the setting of its bound, and settings of ``kl_mask``.
_MASKS: dict[str, tuple[str, str, dict[str, Value]]] = {
    "token_k1": ("token_mask", "trainer.algorithm.token_mask_is_threshold", {}),
    "seq_sum_k1": ("sequence_mask", "trainer.algorithm.product_mask", {}),
    "seq_mean_k1": ("geometric_mask", "trainer.algorithm.geo_mask", {}),
    "token_k2": ("kl_mask", "trainer.algorithm.kl_mask", {"estimator": "k2", "level": "token"}),
    "token_k3": ("kl_mask", "trainer.algorithm.kl_mask", {"level": "token"}),
    "seq_sum_k2": (
        "kl_mask",
        "trainer.algorithm.kl_mask",
        {"estimator": "k2", "level": "sequence"},
    ),
    "seq_sum_k3": ("kl_mask", "trainer.algorithm.kl_mask", {"level": "sequence"}),
    "seq_mean_k2": ("kl_mask", "trainer.algorithm.kl_mask", {"estimator": "k2"}),
    "seq_mean_k3": ("kl_mask", "trainer.algorithm.kl_mask", {}),
    "seq_max_k2": ("kl_mask", "trainer.algorithm.kl_mask", {"estimator": "k2", "level": "max"}),
    "seq_max_k3": ("kl_mask", "trainer.algorithm.kl_mask", {"level": "max"}),
}


def _masks(draft: Draft) -> None:
    """Masks and their bounds."""
    rejection = "algorithm.rollout_correction.rollout_rs"
    threshold = "algorithm.rollout_correction.rollout_rs_threshold"
    options = _comma_separated(draft.source_value(rejection))
    bounds = _comma_separated(draft.source_value(threshold))
    if len(bounds) == 1:  # it bounds all of them
        bounds *= len(options)
    if len(bounds) != len(options):
        return
    masks: list[Value] = []
    for option in options:
        # A mask has one bound here: it is not used twice.
        if option not in _MASKS or _MASKS[option][0] in masks:
            return
        masks.append(_MASKS[option][0])
    for option, bound in zip(options, bounds, strict=True):
        limits = bound.split("_")  # one bound, or low_high
        for limit in limits:
            is_number = re.fullmatch(r"\d+\.?\d*(e-?\d+)?|\.\d+", limit)
            if not is_number or float(limit) <= 0:
                return
        _, path, extra = _MASKS[option]
        highest = float(limits[-1])
        if option.endswith("k1"):
            # k1 bounds the ratio behaviour / proximal there, and proximal / behaviour here.
            lowest = float(limits[0]) if len(limits) == 2 else 1 / highest
            draft.put(f"{path}_low", round(1 / highest, 9), threshold)
            draft.put(f"{path}_high", round(1 / lowest, 9), threshold)
        else:
            draft.put(f"{path}_high", highest, threshold)
        for name, value in extra.items():
            draft.put(f"trainer.algorithm.extra.{name}", value, rejection)
    paths = "trainer.algorithm.off_policy_masks"
    draft.put(paths, masks, rejection)
    draft.no_counterpart.pop(rejection, None)
    draft.no_counterpart.pop(threshold, None)
    if draft.value(ANCHOR) == "behaviour":
        draft.remarks.append(
            f"{paths}: they compare the policy at the start of a batch with the engine's, "
            f"there the policy that is trained"
        )
    else:
        draft.remarks.append(
            f"{paths}: {REDUCTION} divides by rejected tokens as well, there it does not"
        )


def _comma_separated(value: Value) -> list[str]:
    """``a, b`` as a list of texts."""
    text = str(value or "").replace(" ", "")
    return text.split(",")


def _sequence_ratio(draft: Draft) -> None:
    """GSPO: gradients where advantages differ within a response, and the bound of the ratio."""
    if draft.value(ESTIMATOR) in ("gae", "reinforce++"):
        draft.put("trainer.algorithm.extra.token_gradient", True, _LOSS_MODE)
    draft.remarks.append(f"{LOSS}=gspo: a response's ratio is bounded by exp(20), there by exp(10)")


def _staleness(draft: Draft) -> None:
    """Batches that the asynchronous program generates ahead, and its intervals in weight syncs.

    Prompts in flight and in its queue are at most 1 + threshold times those of the steps between
    two weight syncs.
    """
    threshold = draft.source_keys.get(_STALENESS, _PROGRAM_DEFAULTS["fully_async"][_STALENESS])
    steps = draft.number(_SYNC_INTERVAL)
    ratio = "trainer.async_generation_ratio"
    draft.settings.pop(ratio, None)
    if isinstance(threshold, int | float):
        # Without the batch that is trained. Rounded, because 1 + 0.1 is not exact.
        batches = round(steps * (1 + threshold) - 1, 6)
        if batches:
            draft.put(ratio, batches, _STALENESS, _SYNC)
        draft.put("trainer.max_staleness", ceil(batches), _STALENESS, _SYNC)
        draft.not_needed.pop(_STALENESS, None)
    _count_syncs(draft, "trainer.eval_interval", "trainer.ckpt_interval")


def _separate(draft: Draft) -> None:
    """The mode whose step is a weight sync: a batch is divided among the updates between two."""
    prefix = "trainer.v1.separate_async."
    interval = f"{prefix}parameter_sync_step"
    warmup = f"{prefix}num_warmup_batches"
    steps = draft.source_keys.get(interval, 4)
    warmup_batches = draft.source_keys.get(warmup, 1)
    if not isinstance(steps, int) or not isinstance(warmup_batches, int):
        return
    if steps < 1:
        return
    batch = draft.number(BATCH)
    draft.put(_SYNC_INTERVAL, steps, interval)
    if batch % steps == 0:
        note = f"data.train_batch_size over the {steps} steps between two weight syncs"
        prompts = int(batch // steps)
        draft.change(BATCH, prompts, interval, note=note)
    batches = steps * (1 + warmup_batches) - 1
    draft.put("trainer.async_generation_ratio", float(batches), warmup, interval)
    draft.put("trainer.max_staleness", batches, warmup, interval)
    draft.not_needed.pop(warmup, None)
    bound = "trainer.v1.sampler.max_off_policy_threshold"
    if bound in draft.source_keys:
        draft.no_counterpart[bound] = f"the batches that are generated ahead bound it: {warmup}"
    _count_syncs(
        draft, "trainer.eval_interval", "trainer.ckpt_interval", "trainer.max_training_steps"
    )


def _count_syncs(draft: Draft, *paths: str) -> None:
    """Convert settings that count weight syncs there and steps here."""
    steps = draft.number(_SYNC_INTERVAL)
    if steps <= 1:
        return
    for path in paths:
        syncs = draft.value(path)
        if path in draft.settings and isinstance(syncs, int) and syncs > 0:
            note = f"{syncs} weight syncs there, {steps:g} steps from one to the next"
            draft.change(path, int(syncs * steps), note=note)
    if draft.value(ANCHOR) == "proximal":
        draft.remarks.append(
            f"{ANCHOR}=proximal: the policy at the start of each batch, there that of the last weight sync"
        )


def _batches(draft: Draft) -> None:
    """Batches that are counted in mini-batches there, and a run that is counted in prompts."""
    batches = "async_training.require_batches"
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size"
    if draft.source_keys.get("data.train_batch_size", 0) == 0:
        count = draft.source_keys.get(batches, 1)
        batch = int(draft.number(MINI) * count) if isinstance(count, int) else None
        draft.put(BATCH, batch, mini, batches)
        draft.no_counterpart.pop(batches, None)
        draft.not_needed["data.train_batch_size"] = f"{mini} times {batches}"
    if "trainer.total_training_steps" in draft.source_keys:
        return
    for name in draft.present_names("rollout.total_rollout_steps", "trainer.total_rollout_steps"):
        prompts = draft.source_keys[name]
        if isinstance(prompts, int):
            steps = int(prompts // draft.number(BATCH))
            draft.put("trainer.max_training_steps", steps, name)
            draft.no_counterpart.pop(name, None)


def _program_defaults(draft: Draft, plan: str) -> None:
    """Apply the defaults of the program that has this plan."""
    for name, value in _PROGRAM_DEFAULTS[plan].items():
        if name in draft.source_keys:
            continue
        row = draft.system.table.exact[name]
        settings = converted(row, value, draft.context()) or {}
        for path, entry in settings.items():
            draft.put(path, entry, name)


def _warm_up(draft: Draft, section: str, optimizer: str) -> None:
    """The warm-up: a number of steps has precedence over a ratio there.

    It counts batches there and optimizer steps here.
    """
    prefix = f"trainer.{section}.optimizer_config."
    name = f"{optimizer}lr_warmup_steps"
    steps = draft.source_keys.get(name)
    if not isinstance(steps, int):
        steps = -1  # verl's default: the ratio decides
    if steps >= 0:
        draft.drop(f"{prefix}warmup_ratio", f"it has no effect there: {name} decides")
    draft.remark_warm_up(section)
    updates = draft.updates_per_batch()
    path = f"{prefix}num_warmup_steps"
    if updates > 1 and steps > 0 and path in draft.settings:
        note = f"optimizer steps, {updates} of them in a step there, whose first step has no rate"
        draft.put(path, steps * updates, name, note=note)
