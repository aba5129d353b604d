"""Examples from other frameworks' pages: keys that decide together, programs and scripts, unchanged."""

import json
from pathlib import Path

import pytest
import yaml

from skyasync.config import Config, load_config
from skyasync.errors import UserError
from skyasync.interop import shell
from skyasync.interop.recipe import SourceRecipe, detect, flags, read_recipe
from skyasync.interop.translation import translated

pytestmark = pytest.mark.slow

RECIPES = sorted(Path(__file__).parent.glob("*/recipe.*"))
A, P = "trainer.algorithm.", "trainer.placement."
ASYNC = ("--train.async_enable", "--rollout.batch_size", "128", "--rollout.n_samples_per_prompt", "8",
         "--train.batch_size", "1024", "--algo.advantage.estimator", "reinforce_baseline",
         "--algo.advantage.is_correction_enable")  # fmt: skip


class Translation:
    """A translated recipe: its text and the configuration that it loads as."""

    def __init__(self, recipe: SourceRecipe, folder: Path, system: str = "") -> None:
        self.text = translated(recipe, system or detect(recipe))
        file = folder / "ours.yaml"
        file.write_text(self.text)
        self.config = load_config(["--config", str(file)])
        self.written = yaml.safe_load(self.text)

    def __getitem__(self, path: str) -> object:
        value: object = self.config
        for name in path.split("."):
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        return value

    def why(self, key: str) -> str:
        return next(
            line
            for line in self.text.splitlines()
            if line.startswith((f"#   {key}=", f"#   {key}:"))
        )


def of(folder: Path, system: str, *words: str, command: str = "") -> Translation:
    return Translation(SourceRecipe(flags(words), command), folder, system)


def script(folder: Path, text: str, name: str = "run.sh") -> SourceRecipe:
    (folder / name).write_text(text)
    return read_recipe([str(folder / name)])


def test_keys_that_are_also_ours_may_stand_next_to_others(tmp_path: Path) -> None:
    words = [
        "trainer.placement.colocate_all=false", "trainer.placement.colocate_policy_ref=true",
        "trainer.placement.policy_num_gpus_per_node=4", "trainer.placement.ref_num_gpus_per_node=4",
        "generator.num_inference_engines=4", "generator.inference_engine_tensor_parallel_size=1",
        "generator.backend=vllm", "generator.async_engine=true", "generator.weight_sync_backend=nccl",
    ]  # fmt: skip
    recipe = script(
        tmp_path,
        "uv run --isolated -m examples.async.main_async " + " \\\n  ".join(words) + ' "$@"\n',
    )
    found = Translation(recipe, tmp_path)
    assert (found["trainer.plan"], found["generator.num_inference_engines"]) == ("one_step_off", 4)
    assert (found[f"{P}policy_num_gpus_per_node"], found[f"{P}colocate_policy_ref"]) == (4, True)
    assert "it shares the policy's devices" in found.why(f"{P}ref_num_gpus_per_node")


def test_partial_rollout_is_a_plan_whose_engines_run_on(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        "openrlhf",
        *ASYNC,
        "--train.partial_rollout_enable",
        "--train.async_queue_size",
        "3",
    )
    assert (found["trainer.plan"], found["trainer.partial_rollout"], found["trainer.max_staleness"]) == (
        "fully_async", "keep", 3,
    )  # fmt: skip
    without = of(tmp_path, "openrlhf", *ASYNC, "--train.async_queue_size", "3")
    assert (without["trainer.plan"], without["trainer.async_queue_size"]) == ("one_step_off", 3)


def test_generating_beyond_a_batch_is_a_plan_that_can(tmp_path: Path) -> None:
    found = of(tmp_path, "openrlhf", *ASYNC, "--rollout.vllm_generate_batch_size", "256")
    assert (found["trainer.plan"], found["generator.generate_batch_size"]) == ("fully_async", 256)
    assert found["trainer.partial_rollout"] == "wait"
    same = of(tmp_path, "openrlhf", *ASYNC, "--rollout.vllm_generate_batch_size", "128")
    assert same["trainer.plan"] == "one_step_off"
    assert "no larger than" in same.why("rollout.vllm_generate_batch_size")


def test_what_nothing_reads_is_left_out_even_at_our_default(tmp_path: Path) -> None:
    found = of(tmp_path, "openrlhf", "--train.async_enable", "--train.partial_rollout_enable", "false",
               "--train.async_queue_size", "1")  # fmt: skip
    assert "partial_rollout" not in found.written["trainer"]
    assert "has no effect with trainer.plan=one_step_off" in found.why(
        "train.partial_rollout_enable"
    )


@pytest.mark.parametrize("asynchronous", [True, False])
def test_models_that_are_colocated_share_the_policy_s_devices(
    asynchronous: bool, tmp_path: Path
) -> None:
    plan = ("--train.async_enable", "--algo.advantage.is_correction_enable") if asynchronous else ()
    found = of(tmp_path, "openrlhf", *plan, "--train.colocate_all", "--actor.num_gpus_per_node", "4",
               "--ref.num_gpus_per_node", "4", "--critic.num_gpus_per_node", "4", "--vllm.num_engines", "4",
               "--algo.advantage.estimator", "gae")  # fmt: skip
    assert found[f"{P}colocate_all"] is not asynchronous
    assert (found[f"{P}colocate_policy_ref"], found[f"{P}colocate_policy_critic"]) == (True, True)
    assert found[f"{P}policy_num_gpus_per_node"] == 4
    for model in ("ref", "critic"):
        assert f"{model}_num_gpus_per_node" not in found.written["trainer"]["placement"]
        assert "it shares the policy's devices" in found.why(f"{model}.num_gpus_per_node")


def test_colocated_engines_use_all_devices_of_the_policy(tmp_path: Path) -> None:
    found = of(tmp_path, "verl", "trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
               "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.hybrid_engine=true")  # fmt: skip
    assert (
        found["generator.num_inference_engines"],
        found["generator.inference_engine_tensor_parallel_size"],
    ) == (
        8,
        1,
    )


def test_streams_without_a_batch_have_mini_batches_and_engines_of_their_own(tmp_path: Path) -> None:
    found = of(tmp_path, "verl", "data.train_batch_size=0", "actor_rollout_ref.actor.ppo_mini_batch_size=32",
               "async_training.require_batches=4", "rollout.total_rollout_steps=51200", "rollout.nnodes=2",
               "rollout.n_gpus_per_node=2", "trainer.n_gpus_per_node=6", "actor_rollout_ref.hybrid_engine=false",
               "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
               command="-m verl.experimental.fully_async_policy.fully_async_main")  # fmt: skip
    assert (found["trainer.train_batch_size"], found["trainer.policy_mini_batch_size"]) == (128, 32)
    assert (found["generator.num_inference_engines"], found["trainer.max_training_steps"]) == (
        4,
        400,
    )


def test_groups_of_an_agent_are_filtered_by_their_scores(tmp_path: Path) -> None:
    filtered = ("--algo.dynamic_filtering_enable", "--rollout.n_samples_per_prompt", "4", "--train.batch_size", "64",
                "--rollout.batch_size", "16", "--algo.advantage.estimator", "group_norm")  # fmt: skip
    with_agent = of(tmp_path, "openrlhf", *filtered, "--train.agent_func_path", "agent.py")
    assert with_agent[f"{A}dynamic_sampling.metric"] == "score"
    assert of(tmp_path, "openrlhf", *filtered)[f"{A}dynamic_sampling.metric"] == ""


def test_checkpoints_for_others_are_exports_and_a_data_set_is_cut_by_its_name(
    tmp_path: Path,
) -> None:
    found = of(tmp_path, "openrlhf", "--ckpt.save_hf", "--ckpt.save_steps", "10", "--data.max_samples", "128000",
               "--data.prompt_dataset", "acme/sums", "--ckpt.path", "/data/ckpt", "--ckpt.best_metric_key",
               "eval/acc")  # fmt: skip
    assert (found["trainer.export_interval"], found["trainer.ckpt_best_metric"]) == (10, "eval/acc")
    assert found["data.train_data"] == ["acme/sums:train[:128000]"]


def test_a_variable_of_the_environment_that_a_system_reads_is_a_key(tmp_path: Path) -> None:
    exports = "export OPENRLHF_ASYNC_NUM_TASKS=16\nOPENRLHF_ASYNC_QUEUE_SIZE=4\n"
    words = " ".join((*ASYNC, "--train.agent_func_path", "agent.py"))
    recipe = script(tmp_path, f"{exports}python3 -m openrlhf.cli.train_ppo_ray {words}\n")
    found = Translation(recipe, tmp_path)
    assert (found["generator.max_concurrent_episodes"], found["trainer.async_queue_size"]) == (
        16,
        4,
    )


AGENTIC = {
    "async_generation_ratio": 1, "rollout_batch_size": 1024, "adv_estimator": "grpo", "pretrain": "acme/small",
    "reward_pretrain": "acme/small", "eval_steps": 10, "exp_name": "agents",
    "actor_train": {
        "device_mapping": "list(range(0,4))",
        "training_args": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 128},
        "strategy_args": {"strategy_name": "megatron_train", "strategy_config": {
            "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1, "recompute_granularity": "full",
            "sequence_parallel": True}},
    },
    "actor_infer": {
        "device_mapping": "list(range(4,8))",
        "strategy_args": {"strategy_name": "sglang", "strategy_config": {"block_size": 16, "load_format": "auto"}},
    },
}  # fmt: skip


def roll(folder: Path, **more: object) -> Translation:
    (folder / "recipe.yaml").write_text(yaml.safe_dump(AGENTIC | more))
    return Translation(read_recipe([str(folder / "recipe.yaml")]), folder)


def test_an_unnamed_group_size_is_one_response(tmp_path: Path) -> None:
    found = roll(tmp_path)
    assert (found["trainer.train_batch_size"], found["generator.n_samples_per_prompt"]) == (1024, 1)
    assert found["trainer.policy_mini_batch_size"] == 2 * 128 * 4 // 2, (
        "two tensor ranks have the same rows"
    )
    assert found[f"{A}advantage_estimator"] == "normalized"
    assert (found[f"{A}reward_norm_mean"], found[f"{A}reward_norm_std"]) == ("none", "none")


def test_a_batch_of_agents_counts_trajectories(tmp_path: Path) -> None:
    found = roll(tmp_path, train_env_manager={"group_size": 8, "num_env_groups": 16})
    assert (found["trainer.train_batch_size"], found["generator.n_samples_per_prompt"]) == (128, 8)


@pytest.mark.parametrize(
    ("norms", "mean", "deviation"),
    [
        ({}, "none", "none"),
        ({"grouping": "traj_group_id", "method": "mean_std"}, "group", "group"),
        ({"grouping": "traj_group_id", "method": "mean"}, "group", "none"),
        ({"grouping": "batch", "method": "mean_std"}, "batch", "batch"),
        ({"norm_mean_type": "group", "norm_std_type": "batch"}, "group", "batch"),
        (
            {"grouping": "traj_group_id", "method": "mean_std", "norm_std_type": "batch"},
            "group",
            "batch",
        ),
    ],
)
def test_rewards_of_agents_are_compared_by_their_norms_whatever_the_estimator(
    norms: dict[str, str], mean: str, deviation: str, tmp_path: Path
) -> None:
    found = roll(
        tmp_path,
        train_env_manager={"group_size": 8, "num_env_groups": 16},
        reward_normalization=norms,
    )
    assert found[f"{A}advantage_estimator"] == "normalized"
    assert (found[f"{A}reward_norm_mean"], found[f"{A}reward_norm_std"]) == (mean, deviation)
    spread_of_the_rewards = (mean, deviation) == ("group", "batch")
    assert found[f"{A}extra"] == ({"raw_std": True} if spread_of_the_rewards else {})


def test_a_variable_of_the_file_is_no_reward_model_and_validation_pauses_generation(
    tmp_path: Path,
) -> None:
    found = roll(tmp_path)
    assert found["trainer.reward.model.path"] == ""
    assert "a variable of the file" in found.why("reward_pretrain")
    assert (found["trainer.plan"], found["trainer.eval_mode"]) == ("fully_async", "pause")
    assert roll(tmp_path, async_generation_ratio=0)["trainer.eval_mode"] == "overlap"


def test_mesh_dimensions_engine_options_and_recomputation_are_translated(tmp_path: Path) -> None:
    found = roll(tmp_path)
    assert found["trainer.parallel.tensor"] == 2
    assert found["trainer.policy.gradient_checkpointing"] is True
    assert found["generator.engine_kwargs"] == {"block_size": 16, "load_format": "auto"}
    assert "sglang_server" in next(
        line for line in found.text.splitlines() if "backend: vllm" in line
    )
    areal = of(tmp_path, "areal", "actor.backend=fsdp:d2t2", "rollout.backend=vllm:d2t2")
    assert (areal[f"{P}policy_num_gpus_per_node"], areal["trainer.parallel.tensor"]) == (4, 2)
    whole = of(tmp_path, "areal", "allocation_mode=sglang:d4t2+d2c2")
    assert (whole[f"{P}policy_num_gpus_per_node"], whole["trainer.parallel.context"]) == (4, 2)
    staged = of(tmp_path, "areal", "actor.backend=megatron:d2p2t2", "rollout.backend=vllm:d2t2")
    assert (staged[f"{P}policy_num_gpus_per_node"], staged["trainer.parallel.pipeline"]) == (8, 2)
    moe = of(tmp_path, "areal", "actor.backend=megatron:d4e4", "rollout.backend=vllm:d2t2")
    assert (moe[f"{P}policy_num_gpus_per_node"], moe["trainer.parallel.expert"]) == (4, 4)


def test_rows_of_skyrl_s_gsm8k_are_judged_by_the_reward_function_though_they_name_an_environment(
    tmp_path: Path,
) -> None:
    found = of(tmp_path, "skyrl", "environment.env_class=gsm8k")
    assert (found["environment.env_class"], found["environment.reward_funcs"]) == (
        "reward",
        ["gsm8k"],
    )
    assert found["environment.env_class_from_rows"] is False


ACTOR = "actor_rollout_ref.actor."
CISPO = f"{ACTOR}policy_loss.loss_mode=cispo"


@pytest.mark.parametrize(
    ("system", "words", "bounds"),
    [
        ("verl", [CISPO], (0.2, 0.2)),
        ("verl", [CISPO, f"{ACTOR}clip_ratio=0.3", f"{ACTOR}clip_ratio_low=null"], (0.3, 0.3)),
        ("verl", [CISPO, f"{ACTOR}clip_ratio_low=10", f"{ACTOR}clip_ratio_high=0.28"], (10, 0.28)),
        ("trl", ["--loss_type", "cispo", "--epsilon_high", "2.5"], (1, 1.5)),
        ("trl", ["--loss_type", "cispo", "--epsilon", "3.1"], (1, 2.1)),
        ("roll", ["actor_train.pg_variant=cispo"], (0.1, 0.1)),
        ("roll", ["pg_variant=cispo", "cispo_epsilon_high=0.3"], (0.1, 0.3)),
    ],
)
def test_cispo_has_their_bounds(
    system: str, words: list[str], bounds: tuple[float, float], tmp_path: Path
) -> None:
    found = of(tmp_path, system, *words)
    assert found[f"{A}policy_loss_type"] == "cispo"
    assert (found[f"{A}cispo.cispo_eps_clip_low"], found[f"{A}cispo.cispo_eps_clip_high"]) == bounds


def test_a_bound_of_cispo_below_1_is_said(tmp_path: Path) -> None:
    given = of(tmp_path, "trl", "--loss_type", "cispo", "--epsilon_high", "0.28")
    assert "no weight exceeds 0.28 there" in given.why("epsilon_high")
    assert "no weight exceeds 0.2 there" in of(tmp_path, "trl", "--loss_type", "cispo").why(
        "epsilon"
    )


@pytest.mark.parametrize(
    ("system", "words"),
    [
        ("verl", [f"{ACTOR}policy_loss.loss_mode=gspo"]),
        ("verl", [f"{ACTOR}policy_loss.loss_mode=sapo"]),
        ("verl", [f"{ACTOR}policy_loss.loss_mode=geo_mean"]),
        ("openrlhf", ["--actor.policy_loss_type", "gspo"]),
        ("openrlhf", ["--policy_loss_type", "gspo"]),
        ("trl", ["--loss_type", "sapo"]),
    ],
)
def test_a_loss_whose_sequences_count_alike_there_is_averaged_so(
    system: str, words: list[str], tmp_path: Path
) -> None:
    found = of(tmp_path, system, *words)
    assert found[f"{A}loss_reduction"] == "sequence_mean"
    assert (
        f"loss_reduction: sequence_mean  # {words[0].partition('=')[0].lstrip('-')}" in found.text
    )


def test_a_reduction_that_the_loss_overrules_is_said(tmp_path: Path) -> None:
    found = of(
        tmp_path,
        "verl",
        f"{ACTOR}policy_loss.loss_mode=gspo",
        f"{ACTOR}loss_agg_mode=seq-mean-token-sum",
    )
    assert found[f"{A}loss_reduction"] == "sequence_mean"
    assert "policy_loss.loss_mode decides" in found.why(f"{ACTOR}loss_agg_mode")
    same = of(
        tmp_path,
        "verl",
        f"{ACTOR}policy_loss.loss_mode=gspo",
        f"{ACTOR}loss_agg_mode=seq-mean-token-mean",
    )
    assert "loss_reduction: sequence_mean  # actor_rollout_ref.actor.loss_agg_mode" in same.text
    other = of(tmp_path, "verl", CISPO, f"{ACTOR}loss_agg_mode=seq-mean-token-sum")
    assert other[f"{A}loss_reduction"] == "sequence_token_sum"


def test_gsm8k_has_the_columns_that_its_loader_reads(tmp_path: Path) -> None:
    found = of(
        tmp_path, "areal", "train_dataset.path=openai/gsm8k", "valid_dataset.path=openai/gsm8k"
    )
    assert (found["data.train_data"], found["data.val_data"]) == (
        ["openai/gsm8k#main:train"],
        ["openai/gsm8k#main:test"],
    )
    assert (found["data.prompt_key"], found["data.label_key"]) == ("question", "answer")


@pytest.mark.parametrize("name", ["actor.recompute_logprob", "actor.recompute_logprobs"])
def test_log_probabilities_of_the_engine_are_an_anchor(name: str, tmp_path: Path) -> None:
    assert of(tmp_path, "areal", f"{name}=false")[f"{A}ratio_anchor"] == "behaviour"
    assert of(tmp_path, "areal", f"{name}=true")[f"{A}ratio_anchor"] == "proximal"


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: f"{file.parent.name}{file.suffix}")
def test_a_translation_is_of_the_recipe_and_not_of_the_machine(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = read_recipe([str(file)])
    here = translated(recipe, detect(recipe))
    monkeypatch.setattr(
        "skyasync.config.schema.sampling.find_spec", lambda _: None
    )  # vLLM is not installed
    assert Translation(recipe, tmp_path).text == here


def test_an_engine_s_options_do_not_hinge_on_an_installed_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyasync.config.schema.sampling.find_spec", lambda _: None)
    for system, word in (
        ("openrlhf", "--vllm.enforce_eager"),
        ("areal", "vllm.enforce_eager=true"),
    ):
        found = of(tmp_path, system, word)
        assert (found["generator.backend"], found["generator.engine_kwargs"]) == (
            "vllm",
            {"enforce_eager": True},
        )


def test_options_that_servers_do_not_take_are_said(tmp_path: Path) -> None:
    found = of(tmp_path, "skyrl", "generator.inference_engine.external_server_urls=['http://a:1']",
               "generator.inference_engine.enforce_eager=true",
               "generator.inference_engine.run_engines_locally=false")  # fmt: skip
    assert found["generator.engines"] == ["http://a:1"]
    assert "has no effect" in found.why("generator.inference_engine.enforce_eager")


PROGRAM = '''"""Sums by GRPO.

accelerate launch --config_file four.yaml sums.py \\
    --model_name_or_path acme/small --learning_rate 1e-5 --num_generations 4 \\
    --per_device_train_batch_size 8 --importance_sampling_level sequence --use_peft \\
    --lora_target_modules "q_proj", "v_proj"
"""
from acme.rewards import brevity
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, TrlParser

def exact(completions, **kwargs):
    return [0.0 for _ in completions]

if __name__ == "__main__":
    script_args, training_args, model_args = TrlParser((object, GRPOConfig, object)).parse_args_and_config()
    train, held_out = load_dataset("acme/sums", split=["train[:5%]", "test"])
    train = train.map(lambda row: row)
    trainer = GRPOTrainer(model=model_args.model_name_or_path, args=training_args, reward_funcs=[exact, brevity],
                          train_dataset=train, eval_dataset=held_out if training_args.eval_strategy != "no" else None)
    trainer.train()
'''


def program(folder: Path, text: str, name: str = "sums.py") -> Translation:
    (folder / name).write_text(text)
    return Translation(read_recipe([str(folder / name)]), folder)


def test_a_program_that_reads_its_command_line_has_the_flags_that_its_docstring_shows(
    tmp_path: Path,
) -> None:
    found = program(tmp_path, PROGRAM)
    assert (found["trainer.policy.model.path"], found["generator.n_samples_per_prompt"]) == (
        "acme/small",
        4,
    )
    assert found["data.train_data"] == ["acme/sums:train[:5%]"]
    assert found["data.val_data"] == ["acme/sums:test"]
    assert found["environment.reward_funcs"] == [
        f"{tmp_path / 'sums.py'}:exact",
        "acme.rewards:brevity",
    ]
    assert found[f"{A}policy_loss_type"] == "gspo"
    assert found["trainer.policy.lora.rank"] == 16
    assert found["trainer.policy.lora.target_modules"] == ["q_proj", "v_proj"]


FLAGS = "--use_vllm true --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --steps_per_generation 8"


@pytest.mark.parametrize(
    ("start", "nodes", "per_node"),
    [
        ("accelerate launch --num_processes 8 train.py", 1, 8),
        (
            "accelerate launch --config_file zero3.yaml --num_processes=8 --num_machines 2 train.py",
            2,
            4,
        ),
        ("torchrun --nproc-per-node 4 --nnodes 2 -m acme.train", 2, 4),
        ("torchrun --nproc_per_node=8 train.py", 1, 8),
        ("trl grpo --num_processes 8", 1, 8),
    ],
)
def test_trls_batches_are_those_of_all_processes(
    start: str, nodes: int, per_node: int, tmp_path: Path
) -> None:
    found = Translation(
        script(tmp_path, f"{start} {FLAGS} --vllm_mode colocate\n"), tmp_path, "trl"
    )
    assert (found[f"{P}policy_num_nodes"], found[f"{P}policy_num_gpus_per_node"]) == (
        nodes,
        per_node,
    )
    assert (found["trainer.train_batch_size"], found["trainer.policy_mini_batch_size"]) == (16, 8)
    assert found["generator.num_inference_engines"] == 8
    assert "one process" not in found.text


@pytest.mark.parametrize(
    "start", ["trl grpo", "accelerate launch --num_processes $N train.py", "python train.py"]
)
def test_batches_of_one_process_are_said_to_be(start: str, tmp_path: Path) -> None:
    found = Translation(script(tmp_path, f"{start} {FLAGS}\n"), tmp_path, "trl")
    assert (found["trainer.train_batch_size"], found["trainer.policy_mini_batch_size"]) == (2, 1)
    assert "batch sizes are those of one process" in found.why("num_processes")


def test_a_program_without_a_key_has_the_defaults(tmp_path: Path) -> None:
    found = program(tmp_path, "from trl import GRPOConfig\nconfig = GRPOConfig()\n")
    assert found["generator.sampling_params.max_generate_length"] == 512


def test_other_trainers_have_defaults_of_their_own(tmp_path: Path) -> None:
    code = "from trl import RLOOConfig, RLOOTrainer\nRLOOTrainer('a/b', ['m:f'], args=RLOOConfig(use_vllm=True))\n"
    rloo = program(tmp_path, code)
    assert (rloo[f"{A}advantage_estimator"], rloo["generator.n_samples_per_prompt"]) == ("rloo", 2)
    assert (rloo[f"{A}use_kl_in_reward"], rloo[f"{A}kl_loss_coef"]) == (True, 0.05)
    assert (rloo[f"{A}policy_loss_type"], rloo[f"{A}extra"]) == ("gspo", {"product": True})
    assert (rloo[f"{A}loss_reduction"], rloo[f"{A}off_policy_correction"]) == (
        "sequence_mean",
        "none",
    )
    later = program(
        tmp_path, "AsyncGRPOTrainer(model='a/b', args=AsyncGRPOConfig(max_staleness=2))\n"
    )
    assert (later["trainer.plan"], later["trainer.max_staleness"]) == ("fully_async", 2)


def test_what_a_program_does_to_rows_is_said(tmp_path: Path) -> None:
    code = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
rows = load_dataset("acme/sums", split="train").map(as_prompt, remove_columns=["q"])
rows = rows.filter(lambda row: row["n"] > 2).shuffle(seed=1)
GRPOTrainer(model="a/b", reward_funcs=["m:f"], train_dataset=rows, eval_dataset=load_dataset("acme/sums", split="test"),
            args=GRPOConfig(max_completion_length=4 * 256))
"""
    found = program(tmp_path, code)
    assert found["data.train_data"] == ["acme/sums:train"]
    assert found["generator.sampling_params.max_generate_length"] == 1024
    why = found.why("train_dataset")
    assert ".map(as_prompt).filter(lambda row: row['n'] > 2) is not applied" in why
    assert "#   eval_dataset" not in found.text


def test_a_notebook_is_its_code(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Sums"]},
        {"cell_type": "code", "source": ["!pip install trl\n", "%env A=1"]},
        {
            "cell_type": "code",
            "source": ["from trl import GRPOConfig\n", "GRPOConfig(learning_rate=3e-6)"],
        },
    ]
    found = program(tmp_path, json.dumps({"cells": cells}), "sums.ipynb")
    assert found["trainer.policy.optimizer_config.lr"] == 3e-6


SHELL = """
usage() { echo "give a model"; exit 1; }
MODE=${1:-fast}; SIZE=${SIZE:-$((2 * (3 + 1)))}; NAME=${MODEL##*/}
case "$MODE" in
  slow|careful) LR=1e-7 ;;
  fast) LR=1e-6 ;;
  *) usage ;;
esac
if [ "$SIZE" -gt 4 ]; then BIG=yes; elif [ -z "$NOPE" ]; then BIG=unsure; else BIG=no; fi
[ -n "$NOPE" ] && LR=1
COMMON="a.lr=$LR \\
  a.big=$BIG"
LIST=(b.name="$NAME" 'b.text=x y'); LIST+=(b.n=${N:-${M:-7}})
cat <<EOF > note
it's "not" a command a.lr=2
EOF
train() {
  local KIND=$1; shift
  python3 -m program $COMMON "${LIST[@]}" c.kind=$KIND +c.out=$(pwd)/out "$@" 2>&1 | tee log
}
train quick "${@:2}"
"""


def test_conditions_functions_and_word_splitting_are_those_of_a_shell() -> None:
    [command] = [
        words
        for words in shell.read(SHELL, {"MODEL": "acme/small"}).commands
        if words[0] == "python3"
    ]
    assert flags(command) == {
        "a.lr": 1e-6, "a.big": "yes", "b.name": "small", "b.text": "x y", "b.n": 7, "c.kind": "quick",
        "c.out": "$(pwd)/out",
    }  # fmt: skip


def test_a_condition_that_needs_what_is_not_known_is_said(tmp_path: Path) -> None:
    known = script(
        tmp_path, 'A=1\nif [ "$A" = 1 ]; then B=8; else B=2; fi\npython x.py --seed $B --n 1\n'
    )
    assert (known.keys["seed"], known.branches) == (8, False)
    unknown = script(
        tmp_path, "if nvidia-smi; then B=8; else B=2; fi\npython x.py --seed $B --n 1\n"
    )
    assert (unknown.keys["seed"], unknown.branches) == (8, True)


def test_a_script_that_starts_another_is_read_with_it(tmp_path: Path) -> None:
    (tmp_path / "base.sh").write_text(
        'python3 -m verl.trainer.main_ppo trainer.total_epochs=${EPOCHS:-2} "$@"\n'
    )
    recipe = script(
        tmp_path, 'D=$(dirname "$0")\nEPOCHS=5 bash $D/base.sh data.train_batch_size=8 "$@"\n'
    )
    assert recipe.keys == {"trainer.total_epochs": 5, "data.train_batch_size": 8}
    wrapped = script(
        tmp_path, 'docker exec box bash -c "cd /x && python3 -m verl.trainer.main_ppo a.b=1"\n'
    )
    assert wrapped.keys == {"a.b": 1}


@pytest.mark.parametrize(
    "named",
    [
        "--config_path $(basename $(dirname $0)) --config_name agents",
        "--config-path=./ --config-name='agents'",
        "--config examples/agents.yaml",
    ],
)
def test_the_yaml_file_that_a_script_names_is_read(named: str, tmp_path: Path) -> None:
    (tmp_path / "agents.yaml").write_text("rollout_batch_size: 64\n")
    recipe = script(tmp_path, f"python examples/start.py {named} ppo_epochs=3\n")
    assert recipe.keys == {"rollout_batch_size": 64, "ppo_epochs": 3}
    with pytest.raises(UserError, match="give the YAML file itself"):
        script(tmp_path, "python examples/start.py --config_name elsewhere\n")


def test_a_launcher_s_yaml_has_its_script(tmp_path: Path) -> None:
    job = {
        "resources": {"cpus": 4},
        "run": "cd x\npython3 -m verl.trainer.main_ppo trainer.total_epochs=4\n",
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    assert read_recipe([str(tmp_path / "job.yaml")]).keys == {"trainer.total_epochs": 4}


def test_a_number_that_a_shell_fills_in_is_left_to_be_written(tmp_path: Path) -> None:
    found = of(tmp_path, "verl", "trainer.nnodes=${NNODES}", "actor_rollout_ref.rollout.name=$ENGINE",
               "actor_rollout_ref.rollout.tensor_model_parallel_size=$TP", "trainer.n_gpus_per_node=4")  # fmt: skip
    assert isinstance(found.config, Config)
    assert "a shell fills it in: write it by hand" in found.why("trainer.nnodes")
