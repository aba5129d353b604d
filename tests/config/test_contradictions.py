"""Contradicting settings are rejected, with both keys and the solution."""

from pathlib import Path

import pytest
import yaml

from skyasync.algorithms import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from skyasync.algorithms.presets import PRESETS
from skyasync.config import ConfigError, dump_config, load_config
from skyasync.workers.roles import roles_with_ranks

UNCORRECTED = ["trainer.plan=one_step_off", "trainer.algorithm.off_policy_correction=none"]

#: Settings that have no effect on the engines' own log-probabilities.
NOT_READ = ["trainer.algorithm.off_policy_correction=none", "trainer.allow_uncorrected=true"]


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["trainer.plan=one_step_off", "trainer.placement.colocate_all=true"],
         ["trainer.placement.colocate_all=true", "trainer.plan=one_step_off", "or trainer.plan=sync"]),
        (UNCORRECTED,
         ["off_policy_correction=none", "policy_loss_type=ppo", "token_tis", "trainer.allow_uncorrected=true"]),
        (["trainer.stream_groups=2"],
         ["trainer.stream_groups=2 has no effect with trainer.plan=sync", "set trainer.plan=streamed"]),
        (["trainer.placement.colocate_all=true", "generator.engines=[http://a:1]"],
         ["trainer.placement.colocate_all=true has no effect with generator.engines=[http://a:1]"]),
        (["trainer.policy_mini_batch_size=48"],
         ["trainer.policy_mini_batch_size=48", "trainer.train_batch_size=64", "divisor is 32"]),
        (["trainer.policy_mini_batch_size=128"],
         ["trainer.policy_mini_batch_size=128", "is larger than trainer.train_batch_size=64"]),
        (["generator.n_samples_per_prompt=1"],
         ["generator.n_samples_per_prompt=1", "trainer.algorithm.advantage_estimator=grpo", "at least 2"]),
        (["generator.max_model_len=1000", "generator.max_turns=3"],
         ["generator.max_model_len=1000", "generator.max_turns=3", "max_generate_length=256", "raise it to 1280"]),
        (["generator.eval_n_samples_per_prompt=4"],
         ["generator.eval_n_samples_per_prompt=4", "generator.eval_sampling_params.temperature=0", "null"]),
        (["generator.eval_n_samples_per_prompt=4", "generator.sampling_params.temperature=0",
          "generator.eval_sampling_params.temperature=null"],
         ["generator.sampling_params.temperature=0", "teaches nothing"]),
        (["generator.max_model_len=600"],
         ["generator.max_model_len=600", "trainer.max_prompt_length=512", "max_generate_length=256", "it to 768"]),
        (["generator.sampling_params.min_tokens=300"],
         ["generator.sampling_params.min_tokens=300", "generator.sampling_params.max_generate_length=256"]),
        (["trainer.algorithm.use_kl_loss=true", "trainer.algorithm.use_kl_in_reward=true"],
         ["trainer.algorithm.use_kl_loss", "trainer.algorithm.use_kl_in_reward", "set one of them to false"]),
        (["trainer.algorithm.policy_loss_type=rollout_is", "trainer.algorithm.off_policy_correction=token_tis"],
         ["policy_loss_type=rollout_is", "off_policy_correction=token_tis", "choose auto, none or a mask"]),
        (["trainer.algorithm.icepop_low=6", "trainer.algorithm.off_policy_correction=icepop"],
         ["trainer.algorithm.icepop_low=6.0", "trainer.algorithm.icepop_high=5.0", "raise the other"]),
        (["trainer.placement.policy_num_gpus_per_node=4", "trainer.parallel.tensor=2", "trainer.policy.fsdp_size=2"],
         ["trainer.policy.fsdp_size=2", "trainer.parallel.tensor=2", "choose one"]),
        (["trainer.placement.policy_num_gpus_per_node=2", "trainer.parallel.context=2",
          "trainer.policy.torch_compile=true"],
         ["trainer.policy.torch_compile=true", "trainer.parallel.context=2"]),
        (["trainer.placement.policy_num_gpus_per_node=2", "trainer.parallel.tensor=2",
          "trainer.policy.optimizer_config.name=adamw_8bit"],
         ["optimizer_config.name=adamw_8bit", "trainer.parallel.tensor=2", "choose adamw"]),
        (["trainer.logger=[jsonl,console,jsonl]"], ["trainer.logger names jsonl twice"]),
        (["trainer.algorithm.overlong_buffer.len=5"], ["overlong_buffer.len=5", "overlong_buffer.max_len=0"]),
        (["generator.backend=transformers", "generator.inference_engine_tensor_parallel_size=2"],
         ["generator.inference_engine_tensor_parallel_size=2", "generator.backend=vllm"]),
        (["generator.backend=transformers", "generator.weight_sync_backend=nccl"],
         ["generator.weight_sync_backend=nccl", "generator.backend=vllm", "use generator.weight_sync_backend"]),
        (["generator.agent_func_path=a.py", "environment.env_class=gsm8k"],
         ["generator.agent_func_path=a.py", "environment.env_class=gsm8k", "leave one of them empty"]),
        (["generator.agent_program=a:b", "environment.env_class=gsm8k"],
         ["generator.agent_program=a:b", "environment.env_class=gsm8k", "leave one of them empty"]),
        (["trainer.teacher.model.path=t", "trainer.teacher.top_k=8", "generator.sampling_params.top_p=0.9"],
         ["trainer.teacher.top_k=8", "generator.sampling_params.top_p=0.9", "trainer.algorithm.filter_logprobs=false"]),
        (["trainer.policy.router_replay=R3", "generator.engines=[http://127.0.0.1:8000]"],
         ["trainer.policy.router_replay=R3", "needs generator.backend=transformers", "backend=vllm_server does not"]),
        (["trainer.policy.router_replay=R3", "generator.backend=vllm",
          "generator.engine_kwargs.pipeline_parallel_size=2"],
         ["trainer.policy.router_replay=R3", "pipeline_parallel_size",
          "inference_engine_tensor_parallel_size instead"]),
        (["trainer.policy.router_replay=R3", "generator.backend=transformers", "trainer.policy.torch_compile=true"],
         ["trainer.policy.router_replay=R3", "trainer.policy.torch_compile=true", "remove one of them"]),
        (["trainer.parallel.context_kind=ring"],
         ["trainer.parallel.context_kind=ring", "trainer.parallel.context=1", "leave the kind at ulysses"]),
        (["trainer.parallel.pipeline=2", "trainer.placement.policy_num_gpus_per_node=3"],
         ["trainer.parallel.pipeline=2 times", "does not divide the 3 ranks of", "make them 4"]),
        (["trainer.parallel.pipeline=2", "trainer.placement.policy_num_gpus_per_node=2",
          "trainer.policy.lora.rank=4"],
         ["trainer.policy.lora.rank=4", "trainer.parallel.pipeline=2", "remove one of them"]),
        (["trainer.parallel.pipeline=2", "trainer.placement.policy_num_gpus_per_node=2",
          "trainer.policy.router_replay=R3", "generator.backend=transformers"],
         ["trainer.policy.router_replay=R3", "trainer.parallel.pipeline=2", "remove one of them"]),
        (["trainer.parallel.pipeline=2", "trainer.placement.policy_num_gpus_per_node=2",
          "trainer.policy.optimizer_config.bf16_stochastic_round=true"],
         ["trainer.policy.optimizer_config.bf16_stochastic_round=true", "tied embeddings", "remove one of them"]),
        (["trainer.parallel.pipeline=2", "trainer.placement.policy_num_gpus_per_node=2",
          "trainer.algorithm.advantage_estimator=gae", "trainer.critic.backbone=shared"],
         ["trainer.critic.backbone=shared", "trainer.parallel.pipeline=2", "remove one of them"]),
        (["trainer.parallel.pipeline=2", "trainer.placement.policy_num_gpus_per_node=2",
          "trainer.policy.torch_compile=true"],
         ["trainer.policy.torch_compile=true", "trainer.parallel.pipeline=2", "remove one of them"]),
        (["trainer.parallel.expert=2", "trainer.placement.policy_num_gpus_per_node=3"],
         ["trainer.parallel.expert=2", "the 3 ranks"]),
        (["trainer.parallel.expert=2", "trainer.placement.policy_num_gpus_per_node=4", "trainer.parallel.tensor=2"],
         ["trainer.parallel.expert=2", "trainer.parallel.tensor=2", "set trainer.parallel.expert=0"]),
        (["trainer.parallel.expert=2", "trainer.placement.policy_num_gpus_per_node=2", "trainer.policy.lora.rank=4"],
         ["trainer.policy.lora.rank=4", "trainer.parallel.expert=2", "remove one"]),
        (["trainer.parallel.expert=2", "trainer.placement.policy_num_gpus_per_node=4", "trainer.policy.fsdp_size=2"],
         ["trainer.policy.fsdp_size=2", "trainer.parallel.expert=2", "choose one"]),
        (["trainer.parallel.tensor=2"],
         ["trainer.parallel.tensor=2", "the 1 ranks of", "policy_num_gpus_per_node=1", "make them 2"]),
        (["trainer.placement.policy_num_gpus_per_node=2", "trainer.parallel.tensor=2", "trainer.ref.fsdp_size=2",
          "trainer.algorithm.use_kl_loss=true"],
         ["trainer.parallel.tensor=2", "trainer.ref.fsdp_size=2", "choose one"]),
        (["trainer.resume_mode=latest"], ["trainer.resume_mode=latest", "trainer.run_name", "trainer.ckpt_path"]),
        (["trainer.placement.colocate_all=true", "generator.weight_sync_backend=nccl"],
         ["generator.weight_sync_backend=nccl", "trainer.placement.colocate_all=true", "shared_memory"]),
        (["generator.backend=vllm", "generator.weight_sync_senders=2"],
         ["generator.weight_sync_senders=2 has no effect", "generator.weight_sync_backend=auto"]),
        (["generator.backend=vllm", "generator.weight_sync_backend=nccl", "generator.weight_sync_senders=5",
          "trainer.placement.policy_num_nodes=2", "trainer.placement.policy_num_gpus_per_node=2"],
         ["generator.weight_sync_senders=5 is more than the 4 policy ranks", "set it to 4 or less"]),
        (["generator.weight_sync_backend=cuda_ipc", "generator.backend=vllm"],
         ["generator.weight_sync_backend=cuda_ipc", "trainer.placement.colocate_all=false", "nccl"]),
        (["generator.weight_sync_backend=cuda_ipc", "generator.backend=vllm", "trainer.placement.colocate_all=true",
          "generator.weight_sync_mode=delta"],
         ["generator.weight_sync_mode=delta", "generator.weight_sync_backend=cuda_ipc", "remove one of them"]),
        (["trainer.placement.colocate_all=true", "generator.backend=transformers",
          "generator.weight_sync_backend=cuda_ipc"],
         ["generator.weight_sync_backend=cuda_ipc needs generator.backend=vllm", "transformers use"]),
        (["trainer.placement.colocate_all=true", "generator.engines=[http://127.0.0.1:8000]",
          "generator.weight_sync_backend=cuda_ipc"],
         ["generator.weight_sync_backend=cuda_ipc needs generator.backend=vllm", "backend=vllm_server use"]),
        (["trainer.placement.colocate_all=true", "generator.inference_engine_tensor_parallel_size=2"],
         ["generator.inference_engine_tensor_parallel_size=2", "trainer.placement.colocate_all=true"]),
        (["trainer.algorithm.truncated_responses=zero", "trainer.algorithm.stop_properly_penalty_coef=0.5"],
         ["truncated_responses=zero", "stop_properly_penalty_coef=0.5", "leave the one at train"]),
        (["generator.backend=transformers", "generator.sampling_params.structured_outputs.regex=a+"],
         ["generator.sampling_params.structured_outputs", "generator.backend=vllm", "transformers engine"]),
        (["generator.backend=transformers", "generator.eval_sampling_params.repetition_detection={min_count: 3}"],
         ["generator.eval_sampling_params.repetition_detection", "generator.backend=vllm"]),
        (["generator.sampling_params.logit_bias={word: 1.0}"], ["sampling_params.logit_bias has the token 'word'"]),
        (["generator.sampling_params.logit_bias={7: 101}"], ["sampling_params.logit_bias.7=101", "-100 to 100"]),
        (["generator.sampling_params.repetition_penalty=1.1", "generator.sampling_params.bad_words=[no]"],
         ["repetition_penalty=1.1, bad_words=[no]", "trainer.algorithm.off_policy_correction=auto reads",
          "trainer.algorithm.off_policy_correction=none", "trainer.allow_uncorrected=true"]),
        (["generator.backend=vllm", "generator.sampling_params.structured_outputs.regex=a+",
          "trainer.algorithm.policy_loss_type=rollout_is"],
         ["structured_outputs={regex: a+}", "trainer.algorithm.policy_loss_type=rollout_is reads"]),
        (["trainer.plan=fully_async", "trainer.partial_rollout=recompute", *NOT_READ,
          "generator.sampling_params.frequency_penalty=0.5"],
         ["sampling_params.frequency_penalty", "trainer.partial_rollout=keep"]),
        (["trainer.plan=fully_async", "trainer.partial_rollout=recompute",
          "generator.eval_sampling_params.bad_words=[no]"],
         ["eval_sampling_params.bad_words", "trainer.partial_rollout=keep"]),
        (["trainer.algorithm.dynamic_sampling.mode=refill"],
         ["dynamic_sampling.mode=refill", "dynamic_sampling.type=none", "variance or mean"]),
        (["trainer.algorithm.dynamic_sampling.early_end=true", "trainer.algorithm.dynamic_sampling.metric=score",
          "trainer.algorithm.dynamic_sampling.type=mean", "trainer.algorithm.dynamic_sampling.low=0.2"],
         ["early_end=true decides by rewards", "dynamic_sampling.metric=score"]),
        (["trainer.algorithm.dynamic_sampling.early_end=true", "trainer.algorithm.dynamic_sampling.type=mean"],
         ["early_end=true never ends a group early", "reward_min=0", "reward_max=1"]),
        (["trainer.algorithm.preset=ppo", "trainer.critic.warmup_steps=5", "trainer.max_training_steps=5"],
         ["trainer.critic.warmup_steps=5", "trainer.max_training_steps=5", "lower the first"]),
        (["trainer.reward.model.path=a/b", "trainer.algorithm.dynamic_sampling.early_end=true",
          "trainer.algorithm.dynamic_sampling.type=mean", "trainer.algorithm.dynamic_sampling.low=0.2"],
         ["dynamic_sampling.early_end=true", "trainer.reward.model.path=a/b", "scores it afterwards"]),
        (["trainer.algorithm.preset=ppo", "trainer.plan=streamed"],
         ["trainer.algorithm.advantage_estimator=gae with trainer.algorithm.gae_whiten=true", "trainer.plan=streamed"]),
        (["trainer.critic.optimizer_config.lr=1e-5"],
         ["trainer.critic.optimizer_config.lr=1e-05 has no effect with trainer.algorithm.advantage_estimator=grpo",
          "it is read with trainer.algorithm.advantage_estimator=gae", "5e-06"]),
        (["trainer.placement.policy_num_gpus_per_node=4", "trainer.placement.ref_num_gpus_per_node=2",
          "trainer.algorithm.use_kl_loss=true"],
         ["trainer.placement.ref_num_gpus_per_node=2", "trainer.placement.colocate_policy_ref=true",
          "make it 4, as trainer.placement.policy_num_gpus_per_node is"]),
        (["trainer.placement.policy_num_gpus_per_node=4", "trainer.placement.reward_num_gpus_per_node=4"],
         ["trainer.placement.reward_num_gpus_per_node=4 has no effect"]),
        (["trainer.algorithm.preset=ppo", "trainer.placement.critic_num_gpus_per_node=2"],
         ["trainer.placement.critic_num_gpus_per_node=2", "trainer.placement.colocate_policy_critic=true"]),
        (["trainer.algorithm.preset=ppo", "trainer.critic.backbone=shared", "trainer.critic.model.dtype=bfloat16"],
         ["trainer.critic.model.dtype=bfloat16", "trainer.critic.backbone=shared has none", "its default is auto"]),
        (["trainer.algorithm.preset=ppo", "trainer.critic.backbone=shared", "trainer.critic.model.path=a/b"],
         ["trainer.critic.model.path=a/b", "trainer.critic.backbone=own"]),
        (["trainer.algorithm.preset=ppo", "trainer.critic.backbone=shared",
          "trainer.placement.colocate_policy_critic=false"],
         ["trainer.placement.colocate_policy_critic=false", "trainer.critic.backbone=shared has none"]),
        (["trainer.algorithm.preset=ppo", "trainer.critic.backbone=shared",
          "trainer.critic.optimizer_config.name=muon"],
         ["trainer.critic.optimizer_config.name=muon", "one vector"]),
        (["trainer.algorithm.preset=ppo", "trainer.critic.value_loss_coef=1"],
         ["trainer.critic.value_loss_coef=1", "trainer.critic.backbone=own", "0.1"]),
        (["trainer.critic.backbone=shared"],
         ["trainer.critic.backbone=shared has no effect", "advantage_estimator=gae"]),
        (["trainer.policy.lora.rank=8", "trainer.policy.lora.base_dtype=nf4", "trainer.policy.lora.sync=adapter",
          "generator.backend=transformers"],
         ["trainer.policy.lora.base_dtype=nf4", "trainer.policy.lora.sync=adapter", "sync=merged"]),
        (["trainer.policy.lora.rank=8", "trainer.policy.lora.base_dtype=int8", "trainer.policy.lora.export=adapter"],
         ["trainer.policy.lora.base_dtype=int8", "trainer.policy.lora.export=adapter", "export=merged"]),
        (["trainer.policy.lora.rank=8", "trainer.policy.lora.base_dtype=int8", "trainer.parallel.tensor=2",
          "trainer.placement.policy_num_gpus_per_node=2"],
         ["trainer.policy.lora.base_dtype=int8", "trainer.parallel.tensor=2 splits"]),
        (["trainer.policy.lora.base_dtype=nf4"], ["base_dtype=nf4 has no effect", "trainer.policy.lora.rank=0"]),
        (["trainer.policy.optimizer_config.adam_betas=[0.9]"], ["adam_betas has 1 entries", "[0.9,0.999]"]),
    ],
)  # fmt: skip
def test_a_contradiction_names_both_keys_and_the_way_out(
    overrides: list[str], named: list[str]
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(overrides)
    for text in named:
        assert text in refused.value.problems[0]


@pytest.mark.parametrize(
    "way_out",
    [
        "trainer.allow_uncorrected=true",
        "trainer.algorithm.policy_loss_type=rollout_is",
        "trainer.algorithm.policy_loss_type=decoupled_ppo",
        "trainer.algorithm.policy_loss_type=m2po",
        "trainer.algorithm.ratio_anchor=behaviour",
        "trainer.algorithm.off_policy_masks=[token_mask]",
    ],
)
def test_an_uncorrected_asynchronous_run_has_ways_out(way_out: str) -> None:
    load_config([*UNCORRECTED, way_out])


def test_responses_of_evaluations_that_no_weight_sync_cuts_may_have_penalties() -> None:
    load_config(["trainer.plan=fully_async", "trainer.partial_rollout=recompute", "trainer.eval_mode=pause",
                 "generator.eval_sampling_params.frequency_penalty=0.5"])  # fmt: skip


#: One step off policy, as its tutorial is started.
PRINTED = [
    "trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=true",
    "trainer.placement.policy_num_gpus_per_node=4", "trainer.placement.ref_num_gpus_per_node=4",
    "generator.num_inference_engines=4", "generator.inference_engine_tensor_parallel_size=1",
]  # fmt: skip


@pytest.mark.parametrize("more", [(), ("trainer.algorithm.use_kl_loss=true",)])
def test_a_reference_on_the_policys_devices_may_repeat_the_number_of_its_ranks(
    more: tuple[str, ...],
) -> None:
    config = load_config(["trainer.policy.model.path=m", "data.train_data=[d]", "trainer.plan=one_step_off", *PRINTED,
                          *more])  # fmt: skip
    assert config.trainer.placement.ref_num_gpus_per_node == 4


@pytest.mark.parametrize("plan", ["sync", "one_step_off"])
def test_a_plans_key_in_a_users_file_is_checked_even_at_its_default(
    plan: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.yaml"
    written = {
        "trainer": {"policy": {"model": {"path": "m"}}, "plan": plan, "partial_rollout": "keep"}
    }
    file.write_text(yaml.safe_dump(written))
    with pytest.raises(
        ConfigError, match=rf"partial_rollout=keep has no effect with trainer\.plan={plan}"
    ):
        load_config(["--config", str(file)])
    load_config(["--config", str(file), "trainer.plan=fully_async"])
    file.write_text(
        dump_config(load_config(["trainer.policy.model.path=m", f"trainer.plan={plan}"]))
    )
    load_config(["--config", str(file)])  # a dumped configuration has all keys


def test_sharing_devices_is_for_plans_that_take_turns() -> None:
    load_config(["trainer.placement.colocate_all=true"])
    with pytest.raises(ConfigError, match="colocate_all"):
        load_config(
            [
                "trainer.placement.colocate_all=true",
                "trainer.plan=fully_async",
                "trainer.max_staleness=0",
            ]
        )


def test_a_synchronous_run_needs_no_correction() -> None:
    load_config(["trainer.algorithm.off_policy_correction=none"])


def test_a_plan_fixed_by_the_experiment_counts_instead_of_the_key() -> None:
    with pytest.raises(
        ConfigError, match="this experiment's plan, one_step_off, is asynchronous"
    ) as refused:
        load_config(["trainer.algorithm.off_policy_correction=none"], plan="one_step_off")
    assert "trainer.plan=" not in str(refused.value)
    load_config(UNCORRECTED, plan="sync")


def test_a_users_registered_loss_is_checked_by_its_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_behaviour(current, behaviour, advantages): ...
    def with_anchor(current, anchor, advantages): ...

    monkeypatch.setitem(POLICY_LOSSES, "mine", with_behaviour)
    monkeypatch.setitem(POLICY_LOSSES, "anchored", with_anchor)
    load_config([*UNCORRECTED, "trainer.algorithm.policy_loss_type=mine"])
    load_config(
        [
            *UNCORRECTED,
            "trainer.algorithm.policy_loss_type=anchored",
            "trainer.algorithm.ratio_anchor=behaviour",
        ]
    )
    with pytest.raises(
        ConfigError, match="policy_loss_type=anchored does not use the behaviour log-probabilities"
    ):
        load_config([*UNCORRECTED, "trainer.algorithm.policy_loss_type=anchored"])


def test_a_model_that_every_run_settles_for_the_critic_is_no_slip() -> None:
    paths = [f"trainer.{role}.model.path=a" for role in ("policy", "critic")]
    load_config(paths)
    with pytest.raises(ConfigError, match=r"trainer\.critic\.model\.path=b has no effect"):
        load_config([paths[0], "trainer.critic.model.path=b"])


def test_an_estimator_of_ones_own_that_takes_values_has_a_critic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mine(rewards, values, mask): ...

    monkeypatch.setitem(ADVANTAGE_ESTIMATORS, "mine", mine)
    cfg = load_config(
        ["trainer.algorithm.advantage_estimator=mine", "trainer.critic.value_clip=0.5"]
    )
    assert [role.name for role in roles_with_ranks(cfg)] == ["policy", "critic"]


def test_gae_streams_without_whitening_and_without_groups() -> None:
    load_config(["trainer.algorithm.preset=ppo", "trainer.plan=streamed", "trainer.algorithm.gae_whiten=false",
                 "generator.n_samples_per_prompt=1"])  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS.names())
def test_every_preset_is_free_of_contradictions(preset: str) -> None:
    teacher = ["trainer.teacher.model.path=a/b"] if preset == "distill" else []
    assert (
        load_config([f"trainer.algorithm.preset={preset}", *teacher]).trainer.algorithm.preset
        == preset
    )
