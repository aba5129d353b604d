"""What the metrics of a run mean: ``python -m skyasync.observability.metric_names`` prints ``docs/metrics.md``.

Invariant: every metric that a run logs by itself has an entry here (a test holds it); a name in angle brackets stands
for what differs from run to run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """``unit`` is "" for plain numbers."""

    name: str
    meaning: str
    unit: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.sub(r"<n>", r"-?\\d+", re.sub(r"<(?!n>)\w+>", r".+", re.escape(self.name))))


SHARE, TOKENS, SECONDS, GIB = "share", "tokens", "seconds", "GiB"

METRICS = (
    Metric("step", "The training step; 0 is the evaluation before the first."),
    Metric("time", "When the row was written last.", "seconds since 1970"),
    Metric("reward/mean", "Mean reward of the trajectories that were rolled out for the step."),
    Metric("reward/std", "Standard deviation of the rewards."),
    Metric("reward/mixed_groups", "Groups whose samples have different rewards.", SHARE),
    Metric("reward/mean/<domain>", "The mean reward of a domain's rows (data.domain_key)."),
    Metric("reward/mixed_groups/<domain>", "Groups of a domain whose samples have different rewards.", SHARE),
    Metric("reward/prompts/<domain>", "A domain's part of the step's prompts.", SHARE),
    Metric("reward/shaped_mean", "Mean reward after truncation, length penalty, scale, clip and normalisation."),
    Metric("reward/kl", "Mean KL penalty in the rewards, per token, before its coefficient."),
    Metric("reward/kl_coef", "Coefficient of the KL penalty, which an adaptive controller changes."),
    Metric("replay/same", "1 while a replay is as the run was: samples, losses, gradient norms."),
    Metric("response/length_mean", "Generated tokens per trajectory, observations not counted.", TOKENS),
    Metric("response/length_max", "Generated tokens of the longest trajectory.", TOKENS),
    Metric("response/truncated", "Trajectories cut by their length.", SHARE),
    Metric("response/dropped", "Trajectories left out by truncated_responses=drop."),
    Metric("response/repeated", "Samples that are equal to another of their group.", SHARE),
    Metric(
        "response/repeated_expected",
        "response/repeated as it would be by chance, by the samples' own probabilities.",
        SHARE,
    ),
    Metric(
        "env/<function>/no_reward", "Responses to which a reward function or judge gave no reward (a timeout).", SHARE
    ),
    Metric("env/<judge>/raw", "A judge's grade, before offset, scale and clip (environment.judges)."),
    Metric("env/given_up", "Episodes that environment.on_error has ended.", SHARE),
    Metric("env/retries", "Tries after transient errors, on average over the episodes that needed any."),
    Metric(
        "env/dropped",
        "Samples that a group dropped, since enough others were complete (generator.oversample_per_prompt).",
    ),
    Metric("env/dropped_tokens", "Generated tokens of the samples in env/dropped, on average; a lower bound."),
    Metric("env/reward_model", "The reward model's score, neither scaled nor weighed (trainer.reward)."),
    Metric(
        "env/reward_model/<name>",
        "The score of one of several reward models, neither scaled nor weighed (trainer.reward.models).",
    ),
    Metric("env/<name>", "A metric of the environments, on average over the trajectories that report it."),
    Metric("dynamic_sampling/sampled", "Groups that were rolled out for the step."),
    Metric("dynamic_sampling/rejected", "Groups that were not trained, because the filter rejected them."),
    Metric("dynamic_sampling/ended_early", "Trajectories ended because their group was decided."),
    Metric("dynamic_sampling/limit_reached", "1 in a step whose batch stayed short at the limit of rejections."),
    Metric("policy/loss", "The loss, summed over the batch with its weights, on average over the step's updates."),
    Metric("policy/tokens", "Trained tokens per update.", TOKENS),
    Metric("policy/row_tokens", "Tokens of the rows that an update learns from, prompts included.", TOKENS),
    Metric("policy/computed_tokens", "Tokens computed for them: shared ones once, and padding.", TOKENS),
    Metric("policy/clip_fraction", "Tokens that the loss clips: they have no gradient.", SHARE),
    Metric("policy/ratio", "Mean ratio of the current policy to the anchor (the proximal policy)."),
    Metric("policy/correction_weight", "Mean factor of the off-policy correction."),
    Metric("policy/correction_masked", "Tokens whose off-policy correction has the factor 0.", SHARE),
    Metric("policy/approx_kl", "Mean of log anchor - log current, over the updates of the step.", "nats per token"),
    Metric("policy/kl_loss", "KL divergence of policy and reference, as in the loss.", "nats per token"),
    Metric(
        "policy/entropy",
        "Entropy of the policy, where use_entropy_loss asks for it (with any coefficient).",
        "nats per token",
    ),
    Metric("policy/grad_norm", "Norm of the gradient before clipping."),
    Metric("policy/lr", "The policy's learning rate in the step."),
    Metric("policy/<statistic>", "Other statistics of the chosen loss (docs/reference/losses.md)."),
    Metric(
        "critic/loss", "The value loss, summed over the batch with its weights, on average over the step's updates."
    ),
    Metric("critic/tokens", "Tokens that the critic trains on per update.", TOKENS),
    Metric("critic/row_tokens", "As policy/row_tokens, of a critic with a model of its own.", TOKENS),
    Metric("critic/computed_tokens", "As policy/computed_tokens, of a critic with a model of its own.", TOKENS),
    Metric("critic/clip_frac", "Tokens whose clipped value decides their loss (trainer.critic.value_clip).", SHARE),
    Metric(
        "critic/explained_variance",
        "1 - Var(R - V) / Var(R): how well the values before the update predict the returns R.",
    ),
    Metric("critic/values_mean", "Mean value of the trained tokens, before the critic's update."),
    Metric("critic/returns_mean", "Mean return, which the critic learns."),
    Metric("critic/grad_norm", "Norm of the critic's gradient before clipping."),
    Metric("critic/lr", "The critic's learning rate."),
    Metric("policy/teacher_kl", "Reverse KL over the trainer.teacher.top_k tokens and the rest.", "nats per token"),
    Metric("teacher/kl", "Mean log policy - log teacher of the sampled tokens: the reverse KL.", "nats per token"),
    Metric("off_policy/ratio_mean", "Mean of w = proximal / behaviour probability of the trained tokens."),
    Metric("off_policy/ratio_max", "Largest w = proximal / behaviour probability of the trained tokens."),
    Metric("off_policy/ratio_min", "Smallest w = proximal / behaviour probability of the trained tokens."),
    Metric(
        "off_policy/effective_sample_size",
        "(mean w)^2 / mean(w^2), w = proximal / behaviour probability; 1 if all tokens weigh the same.",
        SHARE,
    ),
    Metric("off_policy/kl", "KL of behaviour to proximal policy, k3 estimate.", "nats per token"),
    Metric("off_policy/abs_log_ratio", "Mean of |log w|, w = proximal / behaviour probability.", "nats per token"),
    Metric(
        "off_policy/from_<n>/abs_log_ratio",
        "Mean of |log w| of a row's trained tokens from the n-th on (0, 16, 64, 256, 1024, 4096) to the next n.",
        "nats per token",
    ),
    Metric(
        "gap/mean",
        "Mean difference of log-probabilities, trainer to engine, of tokens of staleness 0: both had the same weights "
        "(under partial_rollout=keep some read what older ones had cached).",
        "nats",
    ),
    Metric("gap/max", "Largest difference of log-probabilities, trainer to engine, of tokens of staleness 0.", "nats"),
    Metric("gap/k3", "KL of engine to trainer on tokens of staleness 0, k3 estimate.", "nats per token"),
    Metric("gap/from_<n>", "gap/mean of a row's trained tokens from the n-th on to the next n in the list.", "nats"),
    Metric("off_policy/masked_fraction", "Tokens whose correction factor is 0.", SHARE),
    Metric("off_policy/clipped_fraction", "Tokens whose factor is neither 0 nor w.", SHARE),
    Metric("off_policy/staleness_<n>/<name>", "The metric off_policy/<name> of tokens that were n versions old."),
    Metric("staleness_control/lr_scale", "Factor of the policy's learning rate (trainer.staleness_control=auto)."),
    Metric(
        "staleness_control/full_step_kl",
        "Estimated KL of behaviour to proximal policy if all steps were full ones, numerical noise left out.",
        "nats per token",
    ),
    Metric(
        "staleness_control/correction_exponent", "Exponent of the correction's factors in the following optimizer step."
    ),
    Metric(
        "staleness_control/max_staleness", "Staleness bound of prompts that were submitted in the step.", "versions"
    ),
    Metric("sampler/taken", "Prompts that data.sampler has taken of those that it was offered.", SHARE),
    Metric("staleness/mean", "Mean staleness: versions from a token's sampling to its training.", "versions"),
    Metric("staleness/min", "Smallest staleness of a trained token.", "versions"),
    Metric("staleness/max", "Largest staleness of a trained token.", "versions"),
    Metric("staleness/head_mean", "Mean staleness of the first tokens of the trajectories.", "versions"),
    Metric("staleness/last_token_mean", "Mean staleness of the last tokens of the trajectories.", "versions"),
    Metric("staleness/tokens_<n>", "Trained tokens that were n versions old.", TOKENS),
    Metric(
        "sync/logprob_gap",
        "Largest difference of log-probabilities, trainer to engine, on verification prompts.",
        "nats",
    ),
    Metric(
        "sync/logprob_gap_mean",
        "Mean difference of log-probabilities, trainer to engine, on verification prompts.",
        "nats",
    ),
    Metric("sync/logprob_gap_limit", "Largest allowed sync/logprob_gap_mean; a larger one ends the run.", "nats"),
    Metric("sync/bytes", "Bytes sent by a weight sync that need not send all weights.", "bytes"),
    Metric("sync/share_changed", "Weights that differ from those of the sync before (weight_sync_mode=delta).", SHARE),
    Metric("sync/fallbacks", "Weight syncs so far that sent all weights although a part would do, without the first."),
    Metric("sync/bytes_to_nodes", "Weights that crossed to other nodes with engines, once to each.", "bytes"),
    Metric("sync/to_nodes_s", "Seconds to send weights to all other nodes with engines.", SECONDS),
    Metric("rollout/running", "Prompts in flight when the step began to train (fully_async)."),
    Metric("rollout/finished", "Prompts that waited for training when the step began to train (fully_async)."),
    Metric("throughput/tokens_per_s", "Tokens that the engines generated in the step's time.", "tokens/s"),
    Metric("throughput/samples_per_s", "Trajectories trained in the step's time.", "samples/s"),
    Metric("idle/trainer", "Part of the step's time in which the policy's workers had no work.", SHARE),
    Metric("idle/engines", "Time in which engines were idle, on average over the engines.", SHARE),
    Metric(
        "throughput/engine_<n>_tokens_per_s",
        "Tokens that engine n generated in the step's time, with 2 to 8 engines.",
        "tokens/s",
    ),
    Metric("engines/alive", "Healthy engines, once one has joined or left."),
    Metric("engines/joined", "Engines that have joined so far."),
    Metric("engines/left", "Engines that have left so far."),
    Metric("memory/controller_gib", "Resident memory of the controller, not shared.", GIB),
    Metric("memory/workers_gib", "Resident memory, not shared, of all models' ranks on the controller's machine.", GIB),
    Metric(
        "memory/engines_gib",
        "Resident memory, not shared, of engines and their processes on the controller's machine.",
        GIB,
    ),
    Metric(
        "memory/environments_gib",
        "Resident memory, not shared, of environments, rewards and agents on the controller's machine.",
        GIB,
    ),
    Metric("memory/object_store_gib", "Memory of Ray's object store.", GIB),
    Metric("memory/shared_gib", "Use of the machine's /dev/shm: weights during a sync, Ray's objects.", GIB),
    Metric("memory/free_gib", "Free memory of the machine, or of the container's limit.", GIB),
    Metric("disk/run_gib", "Size of the run's folder.", GIB),
    Metric("disk/free_gib", "Free space where checkpoints are written.", GIB),
    Metric("time/step_s", "Duration of the step.", SECONDS),
    Metric("time/generate_s", "Time from a batch's first request to its last token.", SECONDS),
    Metric("time/train_s", "Time to train a batch, including time/update_s.", SECONDS),
    Metric("time/update_s", "Time of gradients and optimizer steps.", SECONDS),
    Metric(
        "time/logprobs_s",
        "Time of the proximal policy's log-probabilities, if they are computed before the update.",
        SECONDS,
    ),
    Metric("time/reference_s", "Time of the reference's log-probabilities.", SECONDS),
    Metric("time/teacher_s", "Time of the teacher's log-probabilities.", SECONDS),
    Metric(
        "time/reward_s", "Time of the reward model's scores; other episodes are played or trained meanwhile.", SECONDS
    ),
    Metric("time/values_s", "Time of the critic's values.", SECONDS),
    Metric("time/sync_s", "Time to send weights to the engines and verify them.", SECONDS),
    Metric("time/eval_s", "Time of an evaluation.", SECONDS),
    Metric("time/checkpoint_s", "Time for which training waits for a checkpoint.", SECONDS),
    Metric("time/export_s", "Time to write a Hugging Face folder (trainer.export_interval).", SECONDS),
    Metric("time/sleep_s", "Time to put engines on the policy's devices to sleep.", SECONDS),
    Metric("time/wake_s", "Time to give hybrid engines the policy's devices and the newest weights.", SECONDS),
    Metric("time/wait_<what>_s", "Time for which the trainer waits: for data, generation or rollouts.", SECONDS),
    Metric("time/<phase>_s", "Time of a phase of your own plan (self.timed).", SECONDS),
    Metric("checkpoint/write_s", "Time to write a checkpoint during training (trainer.ckpt_async).", SECONDS),
    Metric("sft/loss", "Cross-entropy per response token that skyasync sft learns, before the update.", "nats"),
    Metric("eval/loss", "Cross-entropy per response token on the held-out rows of skyasync sft.", "nats"),
    Metric("eval/score", "Mean reward of the held-out prompts."),
    Metric("eval/score/<domain>", "Mean reward of a domain's held-out prompts."),
    Metric("eval/version", "The policy version that was evaluated."),
    Metric(
        "eval/pass@<n>",
        "Probability that at least one of n samples of a prompt is correct (trainer.eval_passing), unbiased.",
    ),
    Metric("eval/maj@<n>", "Probability that the most frequent answer of n samples is correct (trainer.eval_answer)."),
    Metric("eval/<set>/score", "Mean reward of a named set's prompts (data.val_sets)."),
    Metric("eval/<set>/pass@<n>", "Probability that at least one of n samples is correct, for the prompts of a set."),
    Metric(
        "eval/<set>/maj@<n>",
        "Probability that the most frequent answer of n samples is correct, for the prompts of a set.",
    ),
    Metric("eval/<set>/response_length_mean", "Generated tokens per trajectory of the set.", TOKENS),
    Metric("eval/<set>/response_truncated", "Trajectories of the set cut by their length.", SHARE),
    Metric("eval/<set>/<name>", "Another metric of rollouts, for the prompts of a set."),
    Metric("eval/<name>", "Another metric of rollouts in evaluation: reward_std, response_length_mean, ..."),
    Metric(
        "nonfinite/skipped",
        "Optimizer steps left out of this step (trainer.on_nonfinite=skip): weights and optimizer state stay; "
        "the step still has its number, its prompts and its weight sync.",
    ),
    Metric("nonfinite/rewards", "Episodes whose reward was not finite."),
    Metric("spikes/count", "Metrics above their limit in the step (trainer.spike_limits)."),
    Metric(
        "spikes/rolled_back_to", "The step whose weights and optimizer state a rollback restored (trainer.on_spike)."
    ),
    Metric("warnings/non_finite", "Values of this row that were NaN or infinite; they are null."),
    Metric(
        "warnings/stuck_ratio",
        "1 if the ratio w was exactly 1 on all stale tokens: the log-probabilities are not the engine's.",
    ),
    Metric("warnings/repeated_samples", "1 if samples repeated each other as chance would not."),
)

_INTRODUCTION = """\
# Metrics

This page is made by `python -m skyasync.observability.metric_names > docs/metrics.md`.

What a run writes to `metrics.jsonl`, one row per step, and to its trackers. A metric that does not apply is absent; one
that was NaN or infinite is null. Algorithms and callbacks of your own add theirs.

| metric | meaning | unit |
|---|---|---|
"""


def entry_of(name: str) -> Metric | None:
    """The entry that a metric's name belongs to; exact names come before those with brackets."""
    exact = next((metric for metric in METRICS if metric.name == name), None)
    return exact or next((metric for metric in METRICS if metric.pattern.fullmatch(name)), None)


def markdown() -> str:
    return _INTRODUCTION + "".join(f"| `{m.name}` | {m.meaning} | {m.unit} |\n" for m in METRICS)


if __name__ == "__main__":
    print(markdown(), end="")
