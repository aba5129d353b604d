"""How other libraries spell our keys.

Invariant: every entry names a key of our schema (a test holds it), so that meeting a foreign key ends in a
hint that works. Names are those of the libraries' public documentation in 2025 and 2026; where the meaning
is not quite the same, the note says what differs.
"""

from __future__ import annotations

from typing import NamedTuple


class Peer(NamedTuple):
    """``theirs`` is their key: met in full, or as the end of a longer path."""

    theirs: str
    library: str
    ours: str
    note: str = ""


_PROMPTS = "counts prompts, not responses"
_OPTIMIZER = "trainer.policy.optimizer_config"
_SAMPLING = "generator.sampling_params"
_EVAL_SAMPLING = "generator.eval_sampling_params"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

PEERS: tuple[Peer, ...] = (
    # SkyRL, where it differs from us
    Peer("fully_async.max_staleness_steps", "SkyRL", "trainer.max_staleness", "with trainer.plan=fully_async"),
    Peer("fully_async.num_parallel_generation_workers", "SkyRL", "generator.max_concurrent_rollouts", _PROMPTS),
    Peer("trainer.algorithm.use_tis", "SkyRL", "trainer.algorithm.off_policy_correction", "token_tis or none"),
    Peer("trainer.hf_save_interval", "SkyRL", "trainer.export_path", "the final policy only"),
    Peer("trainer.max_ckpts_to_keep", "SkyRL", "trainer.ckpt_keep"),
    Peer("inference_engine.num_engines", "SkyRL", "generator.num_inference_engines"),
    Peer("inference_engine.tensor_parallel_size", "SkyRL", "generator.inference_engine_tensor_parallel_size"),
    Peer("inference_engine.gpu_memory_utilization", "SkyRL", "generator.gpu_memory_utilization"),
    Peer("inference_engine.max_num_seqs", "SkyRL", "generator.max_num_seqs"),
    Peer("inference_engine.weight_sync_backend", "SkyRL", "generator.weight_sync_backend"),
    Peer("inference_engine.backend", "SkyRL", "generator.backend"),
    Peer("generator.max_input_length", "SkyRL", "generator.max_model_len", "prompt plus response"),
    Peer("sampling_params.max_tokens", "SkyRL and vLLM", f"{_SAMPLING}.max_generate_length"),
    Peer("eval_sampling_params.max_tokens", "SkyRL and vLLM", f"{_EVAL_SAMPLING}.max_generate_length"),
    Peer("sampling_params.n", "vLLM", "generator.n_samples_per_prompt"),
    Peer("generator.apply_overlong_filtering", "SkyRL", "trainer.algorithm.truncated_responses", "mask"),
    # OpenRLHF
    Peer("async_queue_size", "OpenRLHF", "trainer.async_queue_size"),
    Peer("async_train", "OpenRLHF", "trainer.plan", "one_step_off"),
    Peer("vllm_generate_batch_size", "OpenRLHF", "generator.generate_batch_size", "with trainer.plan=fully_async"),
    Peer("partial_rollout_enable", "OpenRLHF", "trainer.partial_rollout", "keep or wait"),
    Peer("n_samples_per_prompt", "OpenRLHF", "generator.n_samples_per_prompt"),
    Peer("rollout_batch_size", "OpenRLHF and ROLL", "trainer.train_batch_size", _PROMPTS),
    Peer("micro_train_batch_size", "OpenRLHF", "trainer.micro_train_batch_size_per_gpu"),
    Peer("micro_rollout_batch_size", "OpenRLHF", "trainer.micro_forward_batch_size_per_gpu"),
    Peer("prompt_max_len", "OpenRLHF", "trainer.max_prompt_length"),
    Peer("generate_max_len", "OpenRLHF", f"{_SAMPLING}.max_generate_length"),
    Peer("max_epochs", "OpenRLHF", "trainer.update_epochs_per_batch"),
    Peer("num_episodes", "OpenRLHF", "trainer.epochs"),
    Peer("actor_learning_rate", "OpenRLHF", f"{_OPTIMIZER}.lr"),
    Peer("max_norm", "OpenRLHF", f"{_OPTIMIZER}.max_grad_norm"),
    Peer("init_kl_coef", "OpenRLHF", "trainer.algorithm.kl_loss_coef", "with use_kl_loss or use_kl_in_reward"),
    Peer("kl_estimator", "OpenRLHF", "trainer.algorithm.kl_estimator_type"),
    Peer("eps_clip", "OpenRLHF and AReaL", "trainer.algorithm.eps_clip_low", "and eps_clip_high"),
    Peer("eps_clip_low_high", "OpenRLHF", "trainer.algorithm.eps_clip_low", "and eps_clip_high"),
    Peer("enable_vllm_is_correction", "OpenRLHF", "trainer.algorithm.off_policy_correction", "token_tis or none"),
    Peer("vllm_num_engines", "OpenRLHF", "generator.num_inference_engines"),
    Peer("vllm_tensor_parallel_size", "OpenRLHF and TRL", "generator.inference_engine_tensor_parallel_size"),
    Peer("vllm_gpu_memory_utilization", "OpenRLHF and TRL", "generator.gpu_memory_utilization"),
    Peer("vllm_sync_backend", "OpenRLHF", "generator.weight_sync_backend"),
    Peer("colocate_all_models", "OpenRLHF", "trainer.placement.colocate_all"),
    Peer("colocate_actor_ref", "OpenRLHF", "trainer.placement.colocate_policy_ref"),
    Peer("actor_num_nodes", "OpenRLHF", "trainer.placement.policy_num_nodes"),
    Peer("actor_num_gpus_per_node", "OpenRLHF", "trainer.placement.policy_num_gpus_per_node"),
    Peer("ref_num_gpus_per_node", "OpenRLHF", "trainer.placement.ref_num_gpus_per_node"),
    Peer("prompt_data", "OpenRLHF", "data.train_data"),
    Peer("data.prompt_dataset", "OpenRLHF", "data.train_data"),
    Peer("train.async_enable", "OpenRLHF", "trainer.plan", "one_step_off"),
    Peer("train.colocate_all", "OpenRLHF", "trainer.placement.colocate_all"),
    Peer("train.micro_batch_size", "OpenRLHF", "trainer.micro_train_batch_size_per_gpu"),
    Peer("rollout.micro_batch_size", "OpenRLHF", "trainer.micro_forward_batch_size_per_gpu"),
    Peer("rollout.batch_size", "OpenRLHF", "trainer.train_batch_size", _PROMPTS),
    Peer("rollout.max_new_tokens", "OpenRLHF", f"{_SAMPLING}.max_generate_length"),
    Peer("is_correction_enable", "OpenRLHF", "trainer.algorithm.off_policy_correction", "token_tis or none"),
    Peer("max_ckpt_num", "OpenRLHF", "trainer.ckpt_keep"),
    Peer("eval_dataset", "OpenRLHF", "data.val_data"),
    Peer("dynamic_filtering", "OpenRLHF", "trainer.algorithm.dynamic_sampling.type", "mean"),
    Peer("dynamic_filtering_reward_range", "OpenRLHF", "trainer.algorithm.dynamic_sampling.low", "and high"),
    Peer("overlong_buffer_len", "OpenRLHF", "trainer.algorithm.overlong_buffer.len"),
    Peer("overlong_penalty_factor", "OpenRLHF", "trainer.algorithm.overlong_buffer.penalty_factor"),
    Peer("input_key", "OpenRLHF", "data.prompt_key"),
    Peer("label_key", "OpenRLHF", "data.label_key"),
    Peer("apply_chat_template", "OpenRLHF", "data.apply_chat_template"),
    Peer("remote_rm_url", "OpenRLHF", "environment.reward_funcs", "file.py:function"),
    # ROLL
    Peer("generating_args.max_new_tokens", "ROLL", f"{_SAMPLING}.max_generate_length"),
    Peer("generating_args.temperature", "ROLL", f"{_SAMPLING}.temperature"),
    Peer("generating_args.top_p", "ROLL", f"{_SAMPLING}.top_p"),
    Peer("generating_args.top_k", "ROLL", f"{_SAMPLING}.top_k"),
    Peer("async_generation_ratio", "ROLL", "trainer.async_generation_ratio", "with trainer.plan=fully_async"),
    Peer("num_return_sequences_in_group", "ROLL", "generator.n_samples_per_prompt"),
    Peer("prompt_length", "ROLL", "trainer.max_prompt_length"),
    Peer("ppo_epochs", "ROLL", "trainer.update_epochs_per_batch"),
    Peer("pretrain", "ROLL and OpenRLHF", "trainer.policy.model.path"),
    Peer("pg_clip", "ROLL", "trainer.algorithm.eps_clip_low", "and eps_clip_high"),
    Peer("pg_variant", "ROLL", "trainer.algorithm.policy_loss_type"),
    Peer("track_with", "ROLL", "trainer.logger", "a list"),
    Peer("exp_name", "ROLL", "trainer.run_name"),
    Peer("domain_interleave_probs", "ROLL", "environment.domains", "proportion of each domain"),
    # AReaL
    Peer("max_head_offpolicyness", "AReaL", "trainer.max_staleness", "with trainer.staleness_bound=mean"),
    Peer("max_concurrent_rollouts", "AReaL", "generator.max_concurrent_rollouts", _PROMPTS),
    Peer("consumer_batch_size", "AReaL", "trainer.train_batch_size", _PROMPTS),
    Peer("train_dataset.batch_size", "AReaL", "trainer.train_batch_size", _PROMPTS),
    Peer("train_dataset.path", "AReaL", "data.train_data"),
    Peer("valid_dataset.path", "AReaL", "data.val_data"),
    Peer("gconfig.n_samples", "AReaL", "generator.n_samples_per_prompt"),
    Peer("gconfig.max_new_tokens", "AReaL", f"{_SAMPLING}.max_generate_length"),
    Peer("gconfig.temperature", "AReaL", f"{_SAMPLING}.temperature"),
    Peer("gconfig.top_p", "AReaL", f"{_SAMPLING}.top_p"),
    Peer("gconfig.top_k", "AReaL", f"{_SAMPLING}.top_k"),
    Peer("gconfig.min_new_tokens", "AReaL", f"{_SAMPLING}.min_tokens"),
    Peer("gconfig.stop_token_ids", "AReaL", f"{_SAMPLING}.stop_token_ids"),
    Peer("gconfig.frequency_penalty", "AReaL", f"{_SAMPLING}.frequency_penalty"),
    Peer("actor.path", "AReaL", "trainer.policy.model.path"),
    Peer("actor.optimizer.lr", "AReaL", f"{_OPTIMIZER}.lr"),
    Peer("actor.kl_ctl", "AReaL", "trainer.algorithm.kl_loss_coef", "with use_kl_loss or use_kl_in_reward"),
    Peer("total_train_epochs", "AReaL", "trainer.epochs"),
    # verl
    Peer("actor_rollout_ref.model.path", "verl", "trainer.policy.model.path"),
    Peer("model.enable_gradient_checkpointing", "verl", "trainer.policy.gradient_checkpointing"),
    Peer(f"{_ACTOR}.optim.lr", "verl", f"{_OPTIMIZER}.lr"),
    Peer(f"{_ACTOR}.optim.weight_decay", "verl", f"{_OPTIMIZER}.weight_decay"),
    Peer(f"{_ACTOR}.optim.lr_warmup_steps", "verl", f"{_OPTIMIZER}.num_warmup_steps"),
    Peer(f"{_ACTOR}.grad_clip", "verl", f"{_OPTIMIZER}.max_grad_norm"),
    Peer(f"{_ACTOR}.ppo_mini_batch_size", "verl", "trainer.policy_mini_batch_size"),
    Peer("ppo_micro_batch_size_per_gpu", "verl", "trainer.micro_train_batch_size_per_gpu"),
    Peer("log_prob_micro_batch_size_per_gpu", "verl", "trainer.micro_forward_batch_size_per_gpu"),
    Peer("ppo_max_token_len_per_gpu", "verl", "trainer.micro_batch_tokens"),
    Peer(f"{_ACTOR}.ppo_epochs", "verl", "trainer.update_epochs_per_batch"),
    Peer(f"{_ACTOR}.clip_ratio", "verl", "trainer.algorithm.eps_clip_low", "and eps_clip_high"),
    Peer("clip_ratio_low", "verl", "trainer.algorithm.eps_clip_low"),
    Peer("clip_ratio_high", "verl", "trainer.algorithm.eps_clip_high"),
    Peer("loss_agg_mode", "verl", "trainer.algorithm.loss_reduction"),
    Peer("policy_loss.loss_mode", "verl", "trainer.algorithm.policy_loss_type"),
    Peer("kl_loss_type", "verl", "trainer.algorithm.kl_estimator_type"),
    Peer("algorithm.kl_penalty", "verl", "trainer.algorithm.kl_estimator_type"),
    Peer("kl_ctrl.kl_coef", "verl", "trainer.algorithm.kl_loss_coef", "with use_kl_in_reward"),
    Peer("adv_estimator", "verl and ROLL", "trainer.algorithm.advantage_estimator"),
    Peer(f"{_ROLLOUT}.name", "verl", "generator.backend"),
    Peer(f"{_ROLLOUT}.n", "verl", "generator.n_samples_per_prompt"),
    Peer(f"{_ROLLOUT}.temperature", "verl", f"{_SAMPLING}.temperature"),
    Peer(f"{_ROLLOUT}.top_p", "verl", f"{_SAMPLING}.top_p"),
    Peer(f"{_ROLLOUT}.top_k", "verl", f"{_SAMPLING}.top_k"),
    Peer(f"{_ROLLOUT}.response_length", "verl", f"{_SAMPLING}.max_generate_length"),
    Peer(f"{_ROLLOUT}.val_kwargs.n", "verl", "generator.eval_n_samples_per_prompt"),
    Peer(f"{_ROLLOUT}.val_kwargs.temperature", "verl", f"{_EVAL_SAMPLING}.temperature"),
    Peer("tensor_model_parallel_size", "verl", "generator.inference_engine_tensor_parallel_size"),
    Peer("data.train_files", "verl", "data.train_data"),
    Peer("data.val_files", "verl", "data.val_data"),
    Peer("data.train_batch_size", "verl", "trainer.train_batch_size"),
    Peer("data.val_batch_size", "verl", "trainer.eval_batch_size"),
    Peer("data.max_response_length", "verl", f"{_SAMPLING}.max_generate_length"),
    Peer("response_length", "verl and ROLL", f"{_SAMPLING}.max_generate_length"),
    Peer("trainer.n_gpus_per_node", "verl", "trainer.placement.policy_num_gpus_per_node"),
    Peer("trainer.nnodes", "verl", "trainer.placement.policy_num_nodes"),
    Peer("trainer.total_epochs", "verl", "trainer.epochs"),
    Peer("trainer.total_training_steps", "verl", "trainer.max_training_steps"),
    Peer("trainer.save_freq", "verl", "trainer.ckpt_interval"),
    Peer("trainer.test_freq", "verl", "trainer.eval_interval"),
    Peer("trainer.val_before_train", "verl", "trainer.eval_before_train"),
    Peer("trainer.experiment_name", "verl", "trainer.run_name"),
    Peer("trainer.default_local_dir", "verl", "trainer.ckpt_path"),
    Peer("async_training.staleness_threshold", "verl", "trainer.async_queue_size", "whole batches ahead"),
    Peer("custom_reward_function.path", "verl", "environment.reward_funcs", "file.py:function"),
    # TRL
    Peer("reward_funcs", "TRL", "environment.reward_funcs"),
    Peer("reward_weights", "TRL", "environment.reward_weights"),
    Peer("num_generations", "TRL", "generator.n_samples_per_prompt"),
    Peer("num_generations_eval", "TRL", "generator.eval_n_samples_per_prompt"),
    Peer("learning_rate", "TRL and ROLL", f"{_OPTIMIZER}.lr"),
    Peer("lr_scheduler_type", "TRL", f"{_OPTIMIZER}.scheduler"),
    Peer("warmup_steps", "TRL and ROLL", f"{_OPTIMIZER}.num_warmup_steps"),
    Peer("per_device_train_batch_size", "TRL", "trainer.micro_train_batch_size_per_gpu"),
    Peer("generation_batch_size", "TRL", "trainer.train_batch_size", _PROMPTS),
    Peer("max_completion_length", "TRL", f"{_SAMPLING}.max_generate_length"),
    Peer("num_train_epochs", "TRL", "trainer.epochs"),
    Peer("num_iterations", "TRL", "trainer.update_epochs_per_batch"),
    Peer("max_steps", "TRL and ROLL", "trainer.max_training_steps"),
    Peer("beta", "TRL", "trainer.algorithm.kl_loss_coef", "with use_kl_loss"),
    Peer("epsilon", "TRL", "trainer.algorithm.eps_clip_low", "and eps_clip_high"),
    Peer("epsilon_high", "TRL", "trainer.algorithm.eps_clip_high"),
    Peer("loss_type", "TRL", "trainer.algorithm.policy_loss_type", "and loss_reduction"),
    Peer("vllm_importance_sampling_correction", "TRL", "trainer.algorithm.off_policy_correction", "token_tis or none"),
    Peer("mask_truncated_completions", "TRL", "trainer.algorithm.truncated_responses", "mask"),
    Peer("use_vllm", "TRL", "generator.backend", "vllm"),
    Peer("model_name_or_path", "TRL", "trainer.policy.model.path"),
    Peer("report_to", "TRL", "trainer.logger", "a list"),
    Peer("output_dir", "TRL and ROLL", "trainer.runs_dir"),
    Peer("save_steps", "TRL, ROLL and OpenRLHF", "trainer.ckpt_interval"),
    Peer("save_total_limit", "TRL", "trainer.ckpt_keep"),
    Peer("eval_steps", "TRL, ROLL and OpenRLHF", "trainer.eval_interval"),
    Peer("resume_from_checkpoint", "TRL and ROLL", "trainer.resume_mode", "latest or none"),
)


def find_peer(path: str) -> Peer | None:
    """The entry that ``path`` spells, or ends in; the longest one if there are several."""
    matches = [peer for peer in PEERS if path == peer.theirs or path.endswith(f".{peer.theirs}")]
    return max(matches, key=lambda peer: len(peer.theirs), default=None)
