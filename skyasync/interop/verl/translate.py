"""verl's keys that depend on each other."""

from __future__ import annotations

import re
from math import ceil

from skyasync.config.values import Value
from skyasync.interop.conversion import BATCH, Conversion, ConversionContext, as_list, converted
from skyasync.interop.draft import CORRECTION, MINI, PLACEMENT, PLAN, A, Draft

_ACTOR = "actor_rollout_ref.actor."
_FUNCTION = "custom_reward_function.name"


def _reward_file(value: Value, context: ConversionContext) -> list[Value]:
    """Files, whose function another key names."""
    name = next((value for key, value in context.theirs.items() if key.endswith(_FUNCTION) and value), "compute_score")
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
    """Which KL is meant, the number of engines, the correction's bounds, the plan of its program."""
    in_loss, in_reward = draft.theirs(f"{_ACTOR}use_kl_loss"), draft.theirs("algorithm.use_kl_in_reward")
    draft.set_one_of(f"{A}kl_loss_coef", f"{_ACTOR}kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef")
    draft.set_one_of(f"{A}kl_estimator_type", f"{_ACTOR}kl_loss_type" if in_loss else "algorithm.kl_penalty")
    draft.set_kl(bool(in_loss), draft.number(f"{A}kl_loss_coef") if in_loss or in_reward else 0)
    draft.set_kl_clamp("k3", "k3_straight_through")
    draft.remark_kl_in_reward()
    draft.remark_filters()
    kind, threshold = (f"algorithm.rollout_correction.rollout_is{end}" for end in ("", "_threshold"))
    bounds = re.findall(r"[\d.]+", str(draft.theirs(threshold)))
    limits: list[Value] = [float(bound) for bound in bounds] if len(bounds) == 2 else [0, draft.theirs(threshold)]
    if len(bounds) == 2 and draft.value(CORRECTION) == "token_tis":
        draft.put(CORRECTION, "icepop", kind, threshold)
    draft.set_correction(bool(draft.theirs(kind)), limits, threshold)
    mode = f"{_ACTOR}policy_loss.loss_mode"
    if str(draft.given.get(mode)).startswith("dppo_"):
        draft.put(f"{A}dppo.divergence", str(draft.given[mode])[-2:], mode)
    if draft.value(f"{A}policy_loss_type") == "cispo":
        for end in ("low", "high"):
            if setting := draft.ours.pop(f"{A}eps_clip_{end}", None):
                draft.ours[f"{A}cispo.cispo_eps_clip_{end}"] = setting
    if draft.value(f"{A}policy_loss_type") in ("gspo", "sapo", "gmpo"):
        reduction = f"{A}loss_reduction"
        if draft.value(reduction) != "sequence_mean":
            draft.drop(reduction, f"not for the policy's loss there: {mode} decides")
            draft.put(reduction, "sequence_mean", mode)
    for name in [name for name in draft.given if re.search(r"overlong_buffer(_cfg)?\.enable$", name)]:
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
    for plan in _PROGRAM_DEFAULTS:
        if plan in draft.recipe.command:
            draft.put(PLAN, plan)
            _program_defaults(draft, plan)
    # As many engines as fit on the devices: those of the rollout alone, or else the policy's.
    own = ("rollout.nnodes", "rollout.n_gpus_per_node")
    devices = draft.number(f"{PLACEMENT}policy_num_nodes") * draft.number(f"{PLACEMENT}policy_num_gpus_per_node")
    theirs = draft.named("trainer.n_gpus_per_node")
    nodes, per_node = (draft.given.get(name) for name in own)
    if isinstance(nodes, int) and isinstance(per_node, int) and nodes and per_node:
        devices, theirs = float(nodes * per_node), draft.named(*own)
    engines = devices // draft.number("generator.inference_engine_tensor_parallel_size")
    if engines >= 1:
        draft.put("generator.num_inference_engines", int(engines), *theirs)
        for name in own:
            draft.left.pop(name, None)
    if draft.value(PLAN) == "fully_async":
        _batches(draft)
    draft.set_staleness("async_training.staleness_threshold")
    for section, optimizer in (("policy", f"{_ACTOR}optim."), ("critic", "critic.optim.")):
        _warm_up(draft, section, optimizer)


def _batches(draft: Draft) -> None:
    """Batches are counted in mini-batches there, and the run in prompts."""
    batches, mini = "async_training.require_batches", f"{_ACTOR}ppo_mini_batch_size"
    if draft.given.get("data.train_batch_size", 0) == 0:
        count = draft.given.get(batches, 1)
        draft.put(BATCH, int(draft.number(MINI) * count) if isinstance(count, int) else None, mini, batches)
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
    """Steps of the warm-up have precedence over a ratio there, and count whole batches: here optimizer steps."""
    name = f"{optimizer}lr_warmup_steps"
    steps = draft.given.get(name)
    if isinstance(steps, int) and steps >= 0:
        draft.drop(f"trainer.{section}.optimizer_config.warmup_ratio", f"it has no effect there: {name} decides")
    draft.remark_warm_up(section)
    mini = draft.number(MINI) or draft.number(BATCH)
    updates = ceil(draft.number(BATCH) / mini) * int(draft.number("trainer.update_epochs_per_batch"))
    path = f"trainer.{section}.optimizer_config.num_warmup_steps"
    if updates > 1 and isinstance(steps, int) and steps > 0 and path in draft.ours:
        note = f"optimizer steps, {updates} of them in a step there, whose first step has no rate"
        draft.put(path, steps * updates, name, note=note)
