"""Whole recipes of other frameworks: translated, loaded, and two of them trained, scaled down to the tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from skyasync.interop.recipe import read_recipe
from tests.interop.harness import Run, train
from tests.interop.test_documented_recipes import A, P, Translation

pytestmark = pytest.mark.slow

AGENT = """
from openrlhf.utils.agent import AgentExecutorBase, AgentInstanceBase


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.tries = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.tries += 1
        reward = float(sum(map(ord, states["action_text"])) % 2)
        return {
            "rewards": reward, "scores": reward, "environment_feedback": " once more: ",
            "done": self.tries == 2, "sampling_params": states.get("sampling_params"),
            "extra_logs": {"tries": self.tries},
        }


class AgentExecutor(AgentExecutorBase):
    def __init__(self):
        super().__init__(AgentInstance)
"""
THREE = """
import torch

turns = 0


async def step(state, action, label):
    global turns
    turns += 1
    reward = torch.tensor(float(sum(map(ord, action)) % 2))
    return {"rewards": reward, "scores": reward, "environment_feedback": " once more: ", "done": turns == 2}
"""
OPENRLHF = """
export VLLM_USE_V1=1
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/srv/openrlhf"}' \\
  -- python3 -m openrlhf.cli.train_ppo_ray \\
  --actor.model_name_or_path acme/small-thinker --train.agent_func_path {agent} \\
  --data.prompt_dataset acme/questions --data.input_key prompt --data.label_key answer \\
  --data.apply_chat_template --data.max_len 74240 --data.max_samples 128000 --ds.packing_samples \\
  --ref.num_nodes 1 --ref.num_gpus_per_node 4 --actor.num_nodes 1 --actor.num_gpus_per_node 4 \\
  --vllm.num_engines 2 --vllm.tensor_parallel_size 2 --vllm.gpu_memory_utilization 0.95 \\
  --train.colocate_all --ds.enable_sleep --vllm.sync_backend nccl --vllm.enforce_eager \\
  --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 1024 \\
  --algo.dynamic_filtering_enable --algo.dynamic_filtering_range 0.0 1.0 \\
  --train.dynamic_batch_enable --train.max_tokens_per_gpu 16192 --rollout.max_tokens_per_gpu 32768 \\
  --train.micro_batch_size 1 --rollout.micro_batch_size 8 --rollout.max_new_tokens 64000 \\
  --train.max_epochs 1 --train.num_episodes 1 --algo.advantage.estimator reinforce_baseline \\
  --actor.adam.lr 5e-7 --actor.entropy_coef 0.0 --algo.kl.init_coef 1e-5 --algo.kl.use_loss --algo.kl.estimator k2 \\
  --algo.advantage.is_correction_enable --algo.advantage.is_correction_type icepop \\
  --ds.zero_stage 3 --actor.gradient_checkpointing_enable --ds.ring_attn_size 2 --ds.ring_attn_head_stride 2 \\
  --ds.param_dtype bf16 --ckpt.output_dir /srv/final --ckpt.path /srv/ckpt --ckpt.save_steps 10 --ckpt.max_num 3 \\
  --ckpt.save_hf --logger.logging_steps 1 --eval.steps -1 \\
  --train.async_enable --train.async_queue_size 1 --train.partial_rollout_enable
"""
ENGINE = {"generating_args": {"max_new_tokens": "${response_length}", "top_p": 0.99, "top_k": 100, "num_beams": 1,
                              "temperature": 0.99, "num_return_sequences": "${num_return_sequences_in_group}"},
          "data_args": {"template": "qwen2_5"}}  # fmt: skip
MEGATRON = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1,
            "use_distributed_optimizer": True, "recompute_granularity": "full"}  # fmt: skip
VERIFIED = {
    "exp_name": "verified", "seed": 42, "async_generation_ratio": 1, "rollout_batch_size": 64, "prompt_length": 2048,
    "response_length": 8192, "num_return_sequences_in_group": 8, "is_num_return_sequences_expand": True,
    "ppo_epochs": 1, "adv_estimator": "reinforce", "whiten_advantages": True, "max_steps": 500, "save_steps": 100,
    "logging_steps": 1, "eval_steps": 10, "pretrain": "acme/small", "reward_pretrain": "acme/small",
    "actor_train": {
        "model_args": {"attn_implementation": "fa2", "disable_gradient_checkpointing": False, "dtype": "bf16"},
        "training_args": {"learning_rate": 1e-6, "weight_decay": 0, "per_device_train_batch_size": 1,
                          "gradient_accumulation_steps": 128, "warmup_steps": 20},
        "data_args": {"template": "qwen2_5", "file_name": ["data/math.jsonl"]},
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": MEGATRON},
        "device_mapping": "list(range(0,4))", "infer_batch_size": 4,
    },
    "actor_infer": ENGINE | {
        "strategy_args": {"strategy_name": "vllm", "strategy_config": {"gpu_memory_utilization": 0.8, "block_size": 16,
                                                                       "load_format": "auto"}},
        "device_mapping": "list(range(4,8))", "infer_batch_size": 1,
    },
}  # fmt: skip
AGENTIC = {name: value for name, value in VERIFIED.items() if not name.startswith(("num_return", "is_num"))} | {
    "rollout_batch_size": 1024, "val_batch_size": 1024, "sequence_length": 8192, "adv_estimator": "grpo",
    "actor_infer": ENGINE | {
        "generating_args": {**ENGINE["generating_args"], "max_new_tokens": 128, "num_return_sequences": 1},
        "strategy_args": {"strategy_name": "sglang", "strategy_config": {"mem_fraction_static": 0.85}},
        "device_mapping": "list(range(4,8))",
    },
    "train_env_manager": {"num_env_groups": 128, "group_size": 8},
}  # fmt: skip
AREAL = {
    "experiment_name": "sums", "trial_name": "first", "total_train_epochs": 10, "cluster": {"n_gpus_per_node": 8},
    "rollout": {"backend": "vllm:d4", "max_concurrent_rollouts": 256, "max_head_offpolicyness": 4,
                "consumer_batch_size": 256},
    "gconfig": {"n_samples": 4, "max_new_tokens": 1024, "temperature": 1.0},
    "actor": {"backend": "fsdp:d4", "path": "acme/small", "gradient_checkpointing": True, "dtype": "bfloat16",
              "use_decoupled_loss": True, "recompute_logprobs": True, "ppo_n_minibatches": 1, "eps_clip": 0.4,
              "optimizer": {"type": "adam", "lr": 1.7e-5, "lr_scheduler_type": "constant"}},
    "train_dataset": {"batch_size": 256, "path": "acme/sums", "type": "rl", "max_length": 1024},
}  # fmt: skip
SKYRL = """
uv run --isolated --extra vllm -m examples.async.main_async \\
  trainer.placement.colocate_all=false trainer.placement.colocate_policy_ref=true \\
  trainer.placement.policy_num_gpus_per_node=4 trainer.placement.ref_num_gpus_per_node=4 \\
  generator.num_inference_engines=4 generator.inference_engine_tensor_parallel_size=1 \\
  trainer.logger="console" "$@"
"""


def of_script(folder: Path, text: str) -> Translation:
    (folder / "run.sh").write_text(text)
    return Translation(read_recipe([str(folder / "run.sh")]), folder)


def of_yaml(folder: Path, recipe: object) -> Translation:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return Translation(read_recipe([str(folder / "recipe.yaml")]), folder)


def openrlhf(folder: Path, agent: str = AGENT) -> Translation:
    (folder / "agent_func.py").write_text(agent)
    return of_script(folder, OPENRLHF.replace("{agent}", str(folder / "agent_func.py")))


def check(found: Translation, expected: dict[str, object]) -> None:
    assert {path: found[path] for path in expected} == expected


def test_openrlhfs_command(tmp_path: Path) -> None:
    check(openrlhf(tmp_path), {
        "trainer.plan": "fully_async", "trainer.partial_rollout": "keep", "trainer.max_staleness": 1,
        "trainer.train_batch_size": 128, "generator.n_samples_per_prompt": 8, "trainer.policy_mini_batch_size": 0,
        "trainer.max_prompt_length": 10240, "generator.sampling_params.max_generate_length": 64000,
        f"{P}colocate_all": False, f"{P}colocate_policy_ref": True, f"{P}policy_num_gpus_per_node": 4,
        "generator.num_inference_engines": 2, "generator.inference_engine_tensor_parallel_size": 2,
        "trainer.parallel.context": 2, f"{A}off_policy_correction": "icepop", f"{A}kl_estimator_type": "k2",
        f"{A}dynamic_sampling.type": "mean", f"{A}dynamic_sampling.metric": "score", "trainer.eval_interval": 0,
        "generator.agent_func_path": str(tmp_path / "agent_func.py"), "trainer.ckpt_path": "/srv/ckpt",
        "trainer.ckpt_keep": 3, "trainer.export_interval": 10, "data.train_data": ["acme/questions:train[:128000]"],
    })  # fmt: skip


def test_rolls_file_for_verified_rewards(tmp_path: Path) -> None:
    check(of_yaml(tmp_path, VERIFIED), {
        "trainer.plan": "fully_async", "trainer.async_generation_ratio": 1, "trainer.eval_mode": "pause",
        "trainer.train_batch_size": 64, "generator.n_samples_per_prompt": 8, "trainer.policy_mini_batch_size": 0,
        f"{A}advantage_batch_normalize": True, "trainer.reward.model.path": "", "data.train_data": ["data/math.jsonl"],
        "generator.sampling_params.max_generate_length": 8192, "generator.engine_kwargs.block_size": 16,
        "generator.num_inference_engines": 4, f"{P}policy_num_gpus_per_node": 4, "trainer.ckpt_interval": 100,
    })  # fmt: skip


def test_rolls_file_for_agents(tmp_path: Path) -> None:
    check(of_yaml(tmp_path, AGENTIC), {
        "trainer.plan": "fully_async", "trainer.train_batch_size": 128, "generator.n_samples_per_prompt": 8,
        f"{A}advantage_estimator": "normalized", "generator.max_model_len": 8192, "trainer.eval_mode": "pause",
        "generator.num_inference_engines": 4,
    })  # fmt: skip


def test_areals_file(tmp_path: Path) -> None:
    check(of_yaml(tmp_path, AREAL), {
        "trainer.plan": "fully_async", "trainer.max_staleness": 4, "trainer.staleness_bound": "mean",
        f"{A}policy_loss_type": "ppo", f"{A}ratio_anchor": "proximal", "trainer.train_batch_size": 256,
        "generator.n_samples_per_prompt": 4, "generator.max_concurrent_rollouts": 256, "trainer.epochs": 10,
        "generator.num_inference_engines": 4, f"{P}policy_num_gpus_per_node": 4,
    })  # fmt: skip


def test_skyrls_command(tmp_path: Path) -> None:
    check(of_script(tmp_path, SKYRL), {
        "trainer.plan": "one_step_off", f"{P}colocate_all": False, f"{P}colocate_policy_ref": True,
        f"{P}policy_num_gpus_per_node": 4, "generator.num_inference_engines": 4, "trainer.logger": ["jsonl", "console"],
    })  # fmt: skip


def trained(folder: Path, found: Translation, *more: str) -> Run:
    """The translated file on the tiny model; the command line only scales it down."""
    small = [
        f"{P}policy_num_gpus_per_node=1", "generator.num_inference_engines=1", "generator.backend=transformers",
        "generator.inference_engine_tensor_parallel_size=1", "generator.engine_kwargs={}", "trainer.parallel.context=1",
        "generator.weight_sync_backend=auto", "trainer.policy.model.dtype=float32", "trainer.ckpt_interval=0",
        "trainer.ckpt_keep=2",
        "trainer.ckpt_path=''", "trainer.export_interval=0", "trainer.export_path=''",
    ]  # fmt: skip
    return train("--config", str(folder / "ours.yaml"), *small, *more)


@pytest.mark.parametrize("agent", [AGENT, THREE], ids=["instance", "function of three parameters"])
def test_openrlhfs_command_trains_with_its_agent(agent: str, tmp_path: Path) -> None:
    run = trained(tmp_path, openrlhf(tmp_path, agent), f"{A}dynamic_sampling.max_sample_batches=4",
                  "trainer.policy.optimizer_config.scheduler=constant",
                  "trainer.policy.optimizer_config.warmup_ratio=0",
                  "trainer.policy.optimizer_config.scheduler_kwargs={}")  # fmt: skip
    assert run.learned
    assert 0.0 < run.metrics["reward/mean"] < 2.0


def test_areals_file_trains(tmp_path: Path) -> None:
    reward = Path(__file__).parent / "areal" / "files" / "reward.py"
    run = trained(tmp_path, of_yaml(tmp_path, AREAL), "trainer.epochs=1", "generator.max_concurrent_rollouts=4",
                  "trainer.policy.optimizer_config.warmup_ratio=0",
                  f"environment.reward_funcs=[{reward}:parity_reward_fn]")  # fmt: skip
    assert run.learned
    assert run.metrics["staleness/mean"] <= 4
