"""verl's keys that depend on each other."""

from __future__ import annotations

import re
from math import ceil

from skyasync.config.values import Value
from skyasync.interop.conversion import BATCH, Conversion, ConversionContext, as_list, converted
from skyasync.interop.draft import CORRECTION, MINI, PLACEMENT, PLAN, SAMPLING, A, Draft

_ACTOR = "actor_rollout_ref.actor."
_FUNCTION = "custom_reward_function.name"
_CORRECTION = "algorithm.rollout_correction."
_BYPASS = f"{_CORRECTION}bypass_mode"
_LOSS_TYPE = f"{_CORRECTION}loss_type"
_STALENESS = "async_training.staleness_threshold"
_SYNC = "async_training.trigger_parameter_sync_step"


def _reward_file(value: Value, context: ConversionContext) -> list[Value]:
    """Files, whose function another key names."""
    name = next(
        (value for key, value in context.theirs.items() if key.endswith(_FUNCTION) and value),
        "compute_score",
    )
    return [[file if ":" in file else f"{file}:{name}" for file in map(str, as_list(value))]]


CONVERSIONS: dict[str, Conversion] = {"reward_file": _reward_file}

#: What the programs of asynchronous plans set in files of their own, where a recipe does not.
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
    """Which KL is meant, the number of engines, the correction's bounds, the plan of its
    program."""
    in_loss = draft.theirs(f"{_ACTOR}use_kl_loss")
    in_reward = draft.theirs("algorithm.use_kl_in_reward")
    draft.set_one_of(
        f"{A}kl_loss_coef", f"{_ACTOR}kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef"
    )
    draft.set_one_of(
        f"{A}kl_estimator_type", f"{_ACTOR}kl_loss_type" if in_loss else "algorithm.kl_penalty"
    )
    draft.set_kl(bool(in_loss), draft.number(f"{A}kl_loss_coef") if in_loss or in_reward else 0)
    draft.set_kl_clamp("k3", "k3_straight_through")
    draft.remark_filters()
    for plan in _PROGRAM_DEFAULTS:
        if plan in draft.recipe.command:
            draft.put(PLAN, plan)
            _program_defaults(draft, plan)
    _correction(draft)
    _loss_of_bypass(draft)
    _masks(draft)
    mode = f"{_ACTOR}policy_loss.loss_mode"
    _clip(draft, mode)
    if draft.value(f"{A}policy_loss_type") in ("gspo", "sapo", "gmpo"):
        reduction = f"{A}loss_reduction"
        if draft.value(reduction) != "sequence_mean":
            draft.drop(reduction, f"not for the policy's loss there: {mode} decides")
            draft.put(reduction, "sequence_mean", mode)
    if draft.value(f"{A}policy_loss_type") == "gspo":
        _sequence_ratio(draft, mode)
    length = f"{A}max_seq_len"
    if draft.value(f"{A}loss_reduction") == "seq_mean_token_sum_norm" and length not in draft.ours:
        note = "the width of a padded response there"
        draft.put(
            length,
            draft.value(f"{SAMPLING}.max_generate_length"),
            f"{_ACTOR}loss_agg_mode",
            note=note,
        )
    for name in [
        name for name in draft.given if re.search(r"overlong_buffer(_cfg)?\.enable$", name)
    ]:
        if not draft.given[name]:
            draft.drop_group(f"{A}overlong_buffer.", f"it has no effect there with {name}=false")
    rewards = "environment.reward_funcs"
    for name in [name for name in draft.given if name.endswith(_FUNCTION)]:
        if rewards in draft.ours:
            draft.put(rewards, draft.value(rewards), *draft.origin(rewards), name)
            draft.left.pop(name, None)
    if draft.value(rewards) == []:
        why = f"without one the data_source chooses among verl's functions: write {rewards}"
        draft.left.setdefault("custom_reward_function.path", why)
    # As many engines as fit on the devices: those of the rollout alone, or else the policy's.
    own = ("rollout.nnodes", "rollout.n_gpus_per_node")
    devices = draft.number(f"{PLACEMENT}policy_num_nodes") * draft.number(
        f"{PLACEMENT}policy_num_gpus_per_node"
    )
    theirs = draft.named("trainer.n_gpus_per_node")
    nodes, per_node = (draft.given.get(name) for name in own)
    if isinstance(nodes, int) and isinstance(per_node, int) and nodes and per_node:
        devices = float(nodes * per_node)
        theirs = draft.named(*own)
    engines = devices // draft.number("generator.inference_engine_tensor_parallel_size")
    if engines >= 1:
        draft.put("generator.num_inference_engines", int(engines), *theirs)
        for name in own:
            draft.left.pop(name, None)
    if draft.value(PLAN) == "fully_async":
        _batches(draft)
    if draft.given.get("trainer.v1.trainer_mode") == "separate_async":
        _separate(draft)
    elif "fully_async" in draft.recipe.command or _STALENESS in draft.given:
        _staleness(draft)
    for section, optimizer in (("policy", f"{_ACTOR}optim."), ("critic", "critic.optim.")):
        _warm_up(draft, section, optimizer)


def _correction(draft: Draft) -> None:
    """The correction and its bounds; two bounds drop the tokens outside them."""
    kind = f"{_CORRECTION}rollout_is"
    threshold = f"{_CORRECTION}rollout_is_threshold"
    bounds = re.findall(r"[\d.]+", str(draft.theirs(threshold)))
    limits: list[Value] = [0, draft.theirs(threshold)]
    if len(bounds) == 2:
        limits = [float(bound) for bound in bounds]
        if draft.value(CORRECTION) == "token_tis":
            draft.put(CORRECTION, "icepop", kind, threshold)
    draft.set_correction(bool(draft.theirs(kind)), limits, threshold)


def _clip(draft: Draft, mode: str) -> None:
    """The clip range of losses that have keys of their own for it."""
    ranges = {"cispo": f"{A}cispo.cispo_eps_clip", "dppo": f"{A}dppo.delta"}
    loss = str(draft.value(f"{A}policy_loss_type"))
    for end in ("low", "high"):
        if loss in ranges and (setting := draft.ours.pop(f"{A}eps_clip_{end}", None)):
            draft.ours[f"{ranges[loss]}_{end}"] = setting
    if loss != "dppo":
        return
    cap = f"{_ACTOR}clip_ratio_c"
    draft.put(f"{A}dppo.divergence", str(draft.given[mode])[-2:], mode)
    draft.ours.pop(f"{A}clip_ratio_c", None)
    draft.put(f"{A}extra.ratio_cap", draft.theirs(cap), cap)
    if draft.value(f"{A}ratio_anchor") == "proximal":
        draft.remarks.append(
            f"{A}policy_loss_type=dppo: the divergence is from the engine's policy, "
            f"there from the policy at the start of a batch"
        )


def _loss_of_bypass(draft: Draft) -> None:
    """The loss whose ratio is to the engine's log-probabilities: PPO without weights, or REINFORCE
    with them."""
    loss = f"{A}policy_loss_type"
    mode = f"{_ACTOR}policy_loss.loss_mode"
    kind = f"{_CORRECTION}rollout_is"
    reinforce = draft.theirs(_LOSS_TYPE) == "reinforce"
    if draft.value(f"{A}ratio_anchor") != "behaviour":
        if reinforce:
            draft.set_one_of(loss, mode)
            draft.left[_LOSS_TYPE] = f"it has no effect there without {_BYPASS}"
        return
    replaced = reinforce or any(plan in draft.recipe.command for plan in _PROGRAM_DEFAULTS)
    replaced = replaced or draft.theirs(mode) == "bypass_mode"
    for name in draft.named(mode) if replaced else ():
        if draft.given[name] != "bypass_mode":
            draft.left[name] = f"it has no effect there: {_BYPASS} decides"
    correction = draft.value(CORRECTION)
    if not reinforce:
        if replaced:
            draft.put(loss, "dual_clip", _LOSS_TYPE)
        if correction != "none":
            why = f"with {_BYPASS} the weights are metrics alone there: the ratio of the loss has them"
            draft.left |= dict.fromkeys(draft.named(*draft.origin(CORRECTION)), why)
            draft.set_correction(False, [], f"{kind}_threshold")
    elif correction == "token_tis":
        draft.put(loss, "tis", _LOSS_TYPE, kind)
        draft.put(f"{A}tis_high", draft.value(f"{A}token_tis_ratio_clip_high"), f"{kind}_threshold")
        draft.set_correction(False, [], f"{kind}_threshold")
        draft.left.pop(f"{kind}_threshold", None)
    else:
        draft.put(loss, "vanilla", _LOSS_TYPE)
        draft.drop(f"{A}ratio_anchor", "a loss without a ratio has no anchor")
        if correction != "none":
            draft.remarks.append(
                f"{CORRECTION}={correction}: the weights are of the policy at the start of a batch, "
                f"there of the policy that is trained"
            )


#: Rejection of tokens or sequences: its mask here, the key of its bound, and settings of ``kl_mask``.
_MASKS: dict[str, tuple[str, str, dict[str, Value]]] = {
    "token_k1": ("token_mask", f"{A}token_mask_is_threshold", {}),
    "seq_sum_k1": ("sequence_mask", f"{A}product_mask", {}),
    "seq_mean_k1": ("geometric_mask", f"{A}geo_mask", {}),
    "token_k2": ("kl_mask", f"{A}kl_mask", {"estimator": "k2", "level": "token"}),
    "token_k3": ("kl_mask", f"{A}kl_mask", {"level": "token"}),
    "seq_sum_k2": ("kl_mask", f"{A}kl_mask", {"estimator": "k2", "level": "sequence"}),
    "seq_sum_k3": ("kl_mask", f"{A}kl_mask", {"level": "sequence"}),
    "seq_mean_k2": ("kl_mask", f"{A}kl_mask", {"estimator": "k2"}),
    "seq_mean_k3": ("kl_mask", f"{A}kl_mask", {}),
    "seq_max_k2": ("kl_mask", f"{A}kl_mask", {"estimator": "k2", "level": "max"}),
    "seq_max_k3": ("kl_mask", f"{A}kl_mask", {"level": "max"}),
}


def _masks(draft: Draft) -> None:
    """Masks and their bounds; those of k1 are of behaviour over proximal there, the other way round
    here."""
    rejection = f"{_CORRECTION}rollout_rs"
    threshold = f"{_CORRECTION}rollout_rs_threshold"
    options = str(draft.theirs(rejection) or "").replace(" ", "").split(",")
    bounds = str(draft.theirs(threshold) or "").replace(" ", "").split(",")
    if len(bounds) == 1:
        bounds *= len(options)
    chosen = [_MASKS.get(option) for option in options]
    masks = [entry[0] for entry in chosen if entry]
    if len(masks) < len(chosen) or len({*masks}) < len(masks) or len(bounds) != len(options):
        return
    for option, bound in zip(options, bounds, strict=True):
        _, key, extra = _MASKS[option]
        limits = bound.split("_")
        if not all(
            re.fullmatch(r"\d+\.?\d*(e-?\d+)?|\.\d+", end) and float(end) > 0 for end in limits
        ):
            return
        highest = float(limits[-1])
        if option.endswith("k1"):
            if len(limits) == 2:
                lowest = float(limits[0])
            else:
                lowest = 1 / highest
            draft.put(f"{key}_low", round(1 / highest, 9), threshold)
            draft.put(f"{key}_high", round(1 / lowest, 9), threshold)
        else:
            draft.put(f"{key}_high", highest, threshold)
        for name, value in extra.items():
            draft.put(f"{A}extra.{name}", value, rejection)
    draft.put(f"{A}off_policy_masks", [*masks], rejection)
    draft.left.pop(rejection, None)
    draft.left.pop(threshold, None)
    if draft.value(f"{A}ratio_anchor") == "behaviour":
        draft.remarks.append(
            f"{A}off_policy_masks: they compare the policy at the start of a batch with the engine's, "
            f"there the policy that is trained"
        )
    else:
        draft.remarks.append(
            f"{A}off_policy_masks: {A}loss_reduction divides by rejected tokens as well, there it does not"
        )


def _sequence_ratio(draft: Draft, mode: str) -> None:
    """GSPO: gradients where advantages differ within a response, and the bound of the ratio."""
    if draft.value(f"{A}advantage_estimator") in ("gae", "reinforce++"):
        draft.put(f"{A}extra.token_gradient", True, mode)
    draft.remarks.append(
        f"{A}policy_loss_type=gspo: a response's ratio is bounded by exp(20), there by exp(10)"
    )


def _staleness(draft: Draft) -> None:
    """How far the asynchronous program generates ahead, and what it counts in weight syncs.

    Prompts in flight and in its queue are at most 1 + threshold times those of the steps between
    two weight syncs.
    """
    threshold = draft.given.get(_STALENESS, _PROGRAM_DEFAULTS["fully_async"][_STALENESS])
    between = draft.number("trainer.sync_interval")
    ratio = "trainer.async_generation_ratio"
    draft.ours.pop(ratio, None)
    if isinstance(threshold, int | float):
        batches = round(between * (1 + threshold) - 1, 6)
        if batches:
            draft.put(ratio, batches, _STALENESS, _SYNC)
        draft.put("trainer.max_staleness", ceil(batches), _STALENESS, _SYNC)
        draft.silent.pop(_STALENESS, None)
    _count_syncs(draft, "trainer.eval_interval", "trainer.ckpt_interval")


def _separate(draft: Draft) -> None:
    """The mode whose step is a weight sync there: a batch is divided among the updates between two
    of them."""
    prefix = "trainer.v1.separate_async."
    interval = f"{prefix}parameter_sync_step"
    warmup = f"{prefix}num_warmup_batches"
    between = draft.given.get(interval, 4)
    warmup_batches = draft.given.get(warmup, 1)
    if not isinstance(between, int) or not isinstance(warmup_batches, int) or between < 1:
        return
    batch = draft.number(BATCH)
    draft.put("trainer.sync_interval", between, interval)
    if batch % between == 0:
        note = f"data.train_batch_size over the {between} steps between two weight syncs"
        draft.put(BATCH, int(batch // between), *draft.origin(BATCH), interval, note=note)
    batches = between * (1 + warmup_batches) - 1
    draft.put("trainer.async_generation_ratio", float(batches), warmup, interval)
    draft.put("trainer.max_staleness", batches, warmup, interval)
    draft.silent.pop(warmup, None)
    bound = "trainer.v1.sampler.max_off_policy_threshold"
    if bound in draft.given:
        draft.left[bound] = f"the batches that are generated ahead bound it: {warmup}"
    _count_syncs(
        draft, "trainer.eval_interval", "trainer.ckpt_interval", "trainer.max_training_steps"
    )


def _count_syncs(draft: Draft, *paths: str) -> None:
    """What is counted in weight syncs there, in steps here, and whose policy the proximal one
    is."""
    between = draft.number("trainer.sync_interval")
    for path in paths:
        syncs = draft.value(path)
        if between > 1 and path in draft.ours and isinstance(syncs, int) and syncs > 0:
            note = f"{syncs} weight syncs there, {between:g} steps from one to the next"
            draft.put(path, int(syncs * between), *draft.origin(path), note=note)
    if between > 1 and draft.value(f"{A}ratio_anchor") == "proximal":
        draft.remarks.append(
            f"{A}ratio_anchor=proximal: the policy at the start of each batch, there that of the last weight sync"
        )


def _batches(draft: Draft) -> None:
    """Batches are counted in mini-batches there, and the run in prompts."""
    batches = "async_training.require_batches"
    mini = f"{_ACTOR}ppo_mini_batch_size"
    if draft.given.get("data.train_batch_size", 0) == 0:
        count = draft.given.get(batches, 1)
        draft.put(
            BATCH,
            int(draft.number(MINI) * count) if isinstance(count, int) else None,
            mini,
            batches,
        )
        draft.left.pop(batches, None)
        draft.silent["data.train_batch_size"] = f"{mini} times {batches}"
    for name in draft.named("rollout.total_rollout_steps", "trainer.total_rollout_steps"):
        prompts = draft.given[name]
        if isinstance(prompts, int) and "trainer.total_training_steps" not in draft.given:
            draft.put("trainer.max_training_steps", int(prompts // draft.number(BATCH)), name)
            draft.left.pop(name, None)


def _program_defaults(draft: Draft, plan: str) -> None:
    """The defaults of the program that has this plan."""
    for name, value in _PROGRAM_DEFAULTS[plan].items():
        if name in draft.given:
            continue
        row = draft.system.table.exact[name]
        for path, entry in (converted(row, value, draft.context()) or {}).items():
            draft.put(path, entry, name)


def _warm_up(draft: Draft, section: str, optimizer: str) -> None:
    """Steps of the warm-up have precedence over a ratio there, and count whole batches: here
    optimizer steps."""
    name = f"{optimizer}lr_warmup_steps"
    steps = draft.given.get(name)
    if isinstance(steps, int) and steps >= 0:
        draft.drop(
            f"trainer.{section}.optimizer_config.warmup_ratio",
            f"it has no effect there: {name} decides",
        )
    draft.remark_warm_up(section)
    mini = draft.number(MINI) or draft.number(BATCH)
    updates = ceil(draft.number(BATCH) / mini) * int(
        draft.number("trainer.update_epochs_per_batch")
    )
    path = f"trainer.{section}.optimizer_config.num_warmup_steps"
    if updates > 1 and isinstance(steps, int) and steps > 0 and path in draft.ours:
        note = f"optimizer steps, {updates} of them in a step there, whose first step has no rate"
        draft.put(path, steps * updates, name, note=note)
