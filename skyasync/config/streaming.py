"""What cannot be trained group by group: whatever looks at a whole batch, or at the same batch twice.

Invariant: derived from what the chosen functions say of themselves; each refusal names its key and the way out.
"""

from __future__ import annotations

from collections.abc import Iterator

from skyasync.config.rules import Plan, functions, judges_by
from skyasync.config.schema import Config


def check_streaming(cfg: Config, plan: Plan | None) -> Iterator[str]:
    """One line for each setting that needs more of the batch than a plan that streams has at a time."""
    if plan is None or not plan.streams:
        return
    for setting in whole_batch_settings(cfg):
        yield f"{setting} needs the whole batch, and {plan} trains groups as they come: change it, or use another plan"


def whole_batch_settings(cfg: Config) -> Iterator[str]:
    """The settings, as one would write them."""
    from skyasync.algorithms import ADVANTAGE_ESTIMATORS, LOSS_REDUCTIONS

    trainer, algorithm = cfg.trainer, cfg.trainer.algorithm
    reduction = LOSS_REDUCTIONS.about(algorithm.loss_reduction)
    if trainer.update_epochs_per_batch > 1:
        yield f"trainer.update_epochs_per_batch={trainer.update_epochs_per_batch}"
    estimator = ADVANTAGE_ESTIMATORS.about(algorithm.advantage_estimator)
    if judges_by(algorithm, estimator, "whole_batch", "batch"):
        said = estimator.can["whole_batch"]
        switches = [] if said is True else [estimator.keys[name] for name in said]
        on = [f" with trainer.algorithm.{key}=true" for key in switches if getattr(algorithm, key) is True]
        yield f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator}{''.join(on)}"
    if algorithm.advantage_batch_normalize:
        yield "trainer.algorithm.advantage_batch_normalize=true"
    if algorithm.reward_normalization == "batch":
        yield "trainer.algorithm.reward_normalization=batch"
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive":
        yield "trainer.algorithm.kl_ctrl.type=adaptive"
    for function in functions(algorithm):
        if function.about.selector is not None:
            yield f"trainer.algorithm.{function.key}={function.name}, which chooses among all tokens,"
        elif function.about.can.get("whole_batch") is True and function.key.startswith("off_policy"):
            yield f"trainer.algorithm.{function.key}={function.name}"
    if not reduction.can["by_parts"]:
        yield f"trainer.algorithm.loss_reduction={algorithm.loss_reduction}"
    elif "max_seq_len" in reduction.keys.values() and not algorithm.max_seq_len:
        yield f"trainer.algorithm.loss_reduction={algorithm.loss_reduction} with trainer.algorithm.max_seq_len=0"
