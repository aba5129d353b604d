"""A recipe of another framework becomes a configuration that loads, and every key is reported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from skyasync.__main__ import command
from skyasync.config import Config, ConfigError, load_config
from skyasync.errors import UserError
from skyasync.interop import shell
from skyasync.interop.recipe import SourceRecipe, detect, flags, read_recipe
from skyasync.interop.system import systems
from skyasync.interop.translation import translated

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
SAMPLES = [
    ("openrlhf/recipe.sh", "openrlhf"),
    ("skyrl/recipe.sh", "skyrl"),
    ("roll/recipe.yaml", "roll"),
    ("areal/recipe.yaml", "areal"),
    ("verl/recipe.yaml", "verl"),
    ("trl/recipe.py", "trl"),
    ("trl/recipe.yaml", "trl"),
]
A = "trainer.algorithm."


def ours(text: str, folder: Path) -> Config:
    file = folder / "ours.yaml"
    file.write_text(text)
    return load_config(["--config", str(file)])


def flat(text: str) -> dict[str, object]:
    def leaves(tree: dict[str, object], prefix: str = "") -> dict[str, object]:
        found: dict[str, object] = {}
        for name, value in tree.items():
            whole = f"{prefix}{name}"
            is_group = isinstance(value, dict) and whole != "environment.domains"
            found |= leaves(value, f"{whole}.") if is_group else {whole: value}  # type: ignore[arg-type]
        return found

    return leaves(yaml.safe_load(text))


def of(*words: str, system: str) -> dict[str, object]:
    return flat(translated(SourceRecipe(flags(words)), system))


@pytest.mark.parametrize(("file", "system"), SAMPLES)
def test_a_recipe_is_recognised_loads_and_accounts_for_every_key(
    file: str, system: str, tmp_path: Path
) -> None:
    recipe = read_recipe([str(HERE / file)])
    assert detect(recipe) == system
    text = translated(recipe, system)
    assert isinstance(ours(text, tmp_path), Config)
    lines = text.splitlines()
    accounted = [key for key in recipe.keys if any(key in line.partition("#")[2] for line in lines)]
    assert [key for key in recipe.keys if key not in accounted] == []


EXPECTED = {
    "openrlhf/recipe.sh": {
        "trainer.plan": "fully_async", "trainer.train_batch_size": 96, "trainer.policy_mini_batch_size": 24,
        "generator.n_samples_per_prompt": 12, f"{A}off_policy_correction": "icepop", f"{A}icepop_low": 0.4,
        f"{A}icepop_high": 4.0, f"{A}use_kl_loss": True, f"{A}kl_loss_coef": 0.002, f"{A}eps_clip_high": 0.3,
        "trainer.max_prompt_length": 1024, "trainer.update_epochs_per_batch": 2, "trainer.epochs": 3,
        "data.train_data": ["acme/sums:hard"], "environment.reward_funcs": ["/data/rewards/judge.py:reward_func"],
        f"{A}advantage_estimator": "reinforce++_baseline", "trainer.eval_interval": 0,
        "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95], "trainer.ckpt_path": "/data/runs/one/ckpt",
    },
    "skyrl/recipe.sh": {
        "trainer.plan": "fully_async", "trainer.max_staleness": 3, "generator.max_concurrent_rollouts": 192,
        f"{A}policy_loss_type": "ppo", f"{A}off_policy_correction": "sequence_tis",
        f"{A}off_policy_masks": ["outlier_mask"], "trainer.policy.optimizer_config.scheduler": "constant",
        "trainer.ckpt_keep": 0, "trainer.resume_mode": "none", "data.train_data": ["/data/sums/train.parquet"],
        "environment.reward_funcs": ["gsm8k"], "trainer.policy.optimizer_config.weight_decay": 0.01,
    },
    "roll/recipe.yaml": {
        "trainer.plan": "fully_async", "trainer.async_generation_ratio": 1.5, "trainer.max_staleness": 2,
        "trainer.policy_mini_batch_size": 16, f"{A}advantage_estimator": "normalized", f"{A}reward_norm_std": "batch",
        f"{A}policy_loss_type": "dual_clip", f"{A}kl_loss_coef": 0.002, f"{A}dynamic_sampling.mode": "refill",
        "environment.domains": {"sums": {"proportion": 0.7}, "products": {"proportion": 0.3}},
        "generator.sampling_params.max_generate_length": 900, "generator.num_inference_engines": 4,
        "trainer.run_name": "sums-acme-small", f"{A}loss_reduction": "sequence_mean",
    },
    "areal/recipe.yaml": {
        "trainer.plan": "fully_async", "trainer.max_staleness": 3, "trainer.staleness_bound": "mean",
        f"{A}policy_loss_type": "decoupled_ppo", f"{A}behave_imp_weight_cap": 4.0, f"{A}eps_clip_low": 0.3,
        f"{A}eps_clip_high": 0.4, "trainer.policy_mini_batch_size": 32, f"{A}reward_norm_mean": "group",
        "generator.num_inference_engines": 3, "generator.inference_engine_tensor_parallel_size": 2,
        "trainer.policy.optimizer_config.adam_betas": [0.9, 0.95], "trainer.logger": ["jsonl", "wandb"],
        "trainer.placement.policy_num_gpus_per_node": 2, f"{A}reward_clip": 20.0,
    },
    "verl/recipe.yaml": {
        f"{A}policy_loss_type": "gspo", f"{A}loss_reduction": "sequence_mean", f"{A}kl_loss_coef": 0.004,
        f"{A}kl_estimator_type": "k3", f"{A}use_kl_loss": True, "trainer.policy_mini_batch_size": 20,
        "generator.num_inference_engines": 4, "environment.reward_funcs": ["rewards/sums.py:judge"],
        "generator.eval_n_samples_per_prompt": 3, "data.val_data": ["/data/sums/test.parquet"],
        "trainer.placement.colocate_all": True, "trainer.ckpt_interval": 0,
    },
    "trl/recipe.py": {
        "trainer.train_batch_size": 4, "generator.n_samples_per_prompt": 6, f"{A}loss_reduction": "sequence_mean",
        f"{A}advantage_estimator": "normalized", f"{A}reward_norm_std": "none", f"{A}kl_loss_coef": 0.02,
        f"{A}off_policy_correction": "token_tis", f"{A}token_tis_ratio_clip_high": 2.5,
        "data.train_data": ["acme/sums#hard:train"], f"{A}truncated_responses": "mask", f"{A}eps_clip_high": 0.28,
    },
    "trl/recipe.yaml": {
        "trainer.train_batch_size": 8, "data.train_data": ["acme/sums#hard"],
        "environment.reward_funcs": ["my_rewards:brevity"], "generator.sampling_params.top_k": -1,
    },
}  # fmt: skip


@pytest.mark.parametrize(("file", "system"), SAMPLES)
def test_a_recipe_says_here_what_it_says_there(file: str, system: str) -> None:
    found = flat(translated(read_recipe([str(HERE / file)]), system))
    assert {path: found.get(path) for path in EXPECTED[file]} == EXPECTED[file]


def test_keys_without_a_counterpart_are_comments_with_a_reason() -> None:
    text = translated(read_recipe([str(HERE / "openrlhf/recipe.sh")]), "openrlhf")
    assert (
        "#   critic.num_gpus_per_node=2: trainer.placement" in text
    )  # which has no effect without gae
    assert "#   ds.zero_stage=3: fsdp2 always shards" in text
    assert "# Not known as keys of OpenRLHF:\n#   quux.zorp=7" in text


@pytest.mark.parametrize("system", systems())
def test_a_system_s_defaults_alone_load(system: str, tmp_path: Path) -> None:
    text = translated(SourceRecipe({}), system)
    assert isinstance(ours(text, tmp_path), Config)


@pytest.mark.parametrize("system", systems())
def test_every_key_at_its_default_is_accounted_for(system: str, tmp_path: Path) -> None:
    from skyasync.config.values import free, parse

    keys = {
        row.names[0]: free(parse(row.default))
        for row in systems()[system].table.rows
        if row.default
    }
    text = translated(SourceRecipe(keys), system)
    ours(text, tmp_path)
    assert [
        key for key in keys if not any(key in line.partition("#")[2] for line in text.splitlines())
    ] == []


def test_what_contradicts_is_left_out_with_the_reason(tmp_path: Path) -> None:
    text = translated(
        SourceRecipe({"trainer.placement.colocate_all": True}, "-m examples.async.main_async"),
        "skyrl",
    )
    assert ours(text, tmp_path).trainer.placement.colocate_all is False
    assert "#   trainer.placement.colocate_all=true: plan one_step_off" in text


def test_units_and_kinds_that_other_keys_decide() -> None:
    sync = of("--rollout.n_samples_per_prompt", "8", "--rollout.batch_size", "128", "--train.batch_size", "1024",
              system="openrlhf")  # fmt: skip
    assert sync["trainer.policy_mini_batch_size"] == 0
    reward = of("--algo.kl.init_coef", "0.05", system="openrlhf")
    assert (reward[f"{A}use_kl_in_reward"], reward[f"{A}kl_loss_coef"]) == (True, 0.05)
    none = of("--algo.kl.init_coef", "0", "--algo.kl.use_loss", system="openrlhf")
    assert none[f"{A}use_kl_loss"] is False
    band = of("algorithm.rollout_correction.rollout_is=token",
              "algorithm.rollout_correction.rollout_is_threshold=0.5_3.0", system="verl")  # fmt: skip
    assert (band[f"{A}off_policy_correction"], band[f"{A}icepop_high"]) == ("icepop", 3.0)


def test_a_shell_script_is_read_as_a_shell_would() -> None:
    text = """
    H=${NOT_SET:-"${A:-h}/i"}; A=1; B='$A'; : "${C:=3}" ; D=${E:-$C}  # not this
    LIST=(--x "$A" --y '#z'  # nor this
       --w $((C * (A + 1))))
    export F="a b"
    if [ "$A" = 1 ]; then G=yes; else G=no; fi
    run "${LIST[@]}" $B "$F" ${D} $G $H ${NOT_SET} $@ | tee log
    """
    words = [
        "run",
        "--x",
        "1",
        "--y",
        "#z",
        "--w",
        "6",
        "$A",
        "a b",
        "3",
        "yes",
        "h/i",
        "${NOT_SET}",
    ]
    assert words in shell.read(text, environment={}).commands


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run --model <your-model> --n 8", ["run", "--model", "<your-model>", "--n", "8"]),
        ("case $A in x|1) B=2;; *) B=3;; esac; run $B > log 2>&1 &", ["run", "2"]),
        ("f() { run \"$@\" ${#} ${A%%.*}; }; f 'a b' c", ["run", "a b", "c", "2", "1"]),
        ("if [ $A -gt 0 ] && [[ $A == [12] ]]; then B=yes; else B=no; fi; run $B", ["run", "yes"]),
        ("if command -v x; then B=1; else B=2; fi; env C=3 run --b=$B --c=${C}", ["run", "--b=1", "--c=${C}"]),
        ("run [1,2] e={a:1} +f.g=null 'q'\"\\\"r\" ~k {1,2} $(nproc)  # s",
         ["run", "[1,2]", "e={a:1}", "+f.g=null", 'q"r', "~k", "{1,2}", "$(nproc)"]),
    ],
)  # fmt: skip
def test_a_command_of_a_shell_script(text: str, words: list[str]) -> None:
    assert words in shell.read(text, environment={"A": "1"}).commands


def test_flags_are_read_as_argparse_and_hydra_would() -> None:
    assert flags(["--a", "-1", "--b", "--c=2", "+d.e=[1,2]", "--f", "0.2", "0.3", "++g=null"]) == {
        "a": -1, "b": True, "c": 2, "d.e": [1, 2], "f": [0.2, 0.3], "g": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "system", "loggers"),
    [
        (["trainer.logger=[console,wandb]"], "verl", ["jsonl", "console", "wandb"]),
        (["trainer.logger=['console','file']"], "verl", ["jsonl", "console"]),
        (["trainer.logger=[tensorboard,clearml]"], "verl", ["jsonl", "tensorboard"]),
        (["--report_to", "wandb"], "trl", ["jsonl", "wandb"]),
        (["--report_to", "wandb", "trackio"], "trl", ["jsonl", "wandb", "trackio"]),
        (["trainer.logger=console"], "skyrl", ["jsonl", "console"]),
    ],
)
def test_a_translated_list_of_loggers_keeps_the_metrics_file(
    words: list[str], system: str, loggers: list[str]
) -> None:
    text = translated(SourceRecipe(flags(words)), system)
    assert flat(text)["trainer.logger"] == loggers
    assert ("there is no tracker clearml" in text) == ("clearml" in words[0])


@pytest.mark.parametrize(
    "name", ["7b-$(date +%Y)", "$EXPERIMENT", "7b-`date +%Y`", "7b-$(basename $(pwd) x)"]
)
def test_a_name_that_a_shell_fills_in_is_no_value(name: str, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        f"NAME={name}\npython -m verl.trainer.main_ppo trainer.experiment_name=$NAME trainer.total_epochs=2\n"
    )
    text = translated(read_recipe([str(tmp_path / "run.sh")]), "verl")
    assert "trainer.run_name" not in flat(text)
    assert "write it by hand" in next(
        line for line in text.splitlines() if "#   trainer.experiment_name=" in line
    )


def test_an_ambiguous_or_foreign_recipe_asks_for_the_system() -> None:
    with pytest.raises(UserError, match="--from"):
        detect(SourceRecipe({"quux": 1}))
    with pytest.raises(UserError, match=r"add --from openrlhf\|"):
        detect(SourceRecipe({"seed": 1, "temperature": 1}))


def test_the_verb_prints_a_configuration_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, json\nfrom skyasync.__main__ import command\ncommand(sys.argv[1:])\n"
        "heavy = {'torch', 'ray', 'transformers', 'vllm', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "print(json.dumps(sorted(heavy)), file=sys.stderr)"
    )
    arguments = [sys.executable, "-c", code, "translate", str(HERE / "areal/recipe.yaml")]
    ran = subprocess.run(arguments, capture_output=True, text=True, timeout=60)
    assert json.loads(ran.stderr) == []
    assert ours(ran.stdout, tmp_path).trainer.plan == "fully_async"


def test_flags_may_be_given_without_a_file_and_win_over_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command(["translate", "--from", "trl", "--learning_rate", "5e-6"])
    assert flat(capsys.readouterr().out)["trainer.policy.optimizer_config.lr"] == 5e-6
    command(["translate", str(HERE / "verl/recipe.yaml"), "trainer.total_epochs=9"])
    assert flat(capsys.readouterr().out)["trainer.epochs"] == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/no/such.sh"], "cannot read /no/such.sh: No such file"),
        (["--from", "verll", "a=1"], "unknown system 'verll': did you mean 'verl'"),
        (["--from"], "--from needs a system: skyrl, openrlhf"),
    ],
)
def test_what_cannot_be_translated_is_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        command(["translate", *arguments])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 5000, "loss_type: grpo\ntrain_dataset: " + "[" * 400 + "]" * 400]
)
def test_a_recipe_that_is_nested_too_deeply_is_said(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(SystemExit):
        command(["translate", "--from", "trl", str(tmp_path / "deep.yaml")])
    assert capsys.readouterr().err == "error: the recipe is nested too deeply\n"


@pytest.mark.parametrize("value", ["1" * 5000, ".inf", ".nan"])
def test_a_number_without_a_whole_value_is_left_out(value: str) -> None:
    text = translated(SourceRecipe(flags(["--num_train_epochs", value])), "trl")
    assert next(line for line in text.splitlines() if "num_train_epochs" in line).endswith(
        ": a whole number here"
    )


def test_help_names_the_systems(capsys: pytest.CaptureFixture[str]) -> None:
    command(["translate", "--help"])
    assert ", ".join(systems()) in capsys.readouterr().out


def test_values_of_secret_keys_are_not_repeated() -> None:
    text = translated(
        SourceRecipe({"stats_logger.wandb.wandb_api_key": "hush", "seed": 1}), "areal"
    )
    assert "stats_logger.wandb.wandb_api_key" in text
    assert "hush" not in text


def test_what_a_shell_would_fill_in_stays_as_text_and_is_said(tmp_path: Path) -> None:
    text = translated(
        SourceRecipe({"data.prompt_dataset": "${ROOT}/sums", "train.seed": 1}), "openrlhf"
    )
    assert ours(text, tmp_path).data.train_data == ["${ROOT}/sums"]
    assert "to be written by hand:\n#   data.prompt_dataset=${ROOT}/sums" in text


def test_nothing_is_translated_that_the_loader_would_refuse() -> None:
    with pytest.raises(ConfigError):
        load_config(["trainer.placement.colocate_all=true", "trainer.plan=one_step_off"])


def test_a_recipe_with_a_critic_keeps_it(tmp_path: Path) -> None:
    recipe = tmp_path / "ppo.sh"
    recipe.write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --algo.advantage.estimator gae --critic.num_gpus_per_node 2 "
        "--critic.adam.lr 9e-6 --critic.freezing_steps 10 --actor.model_name_or_path a/b --data.prompt_dataset c/d\n"
    )
    found = flat(translated(read_recipe([str(recipe)]), "openrlhf"))
    expected = {
        "trainer.algorithm.advantage_estimator": "gae", "trainer.placement.critic_num_gpus_per_node": 2,
        "trainer.placement.colocate_policy_critic": False, "trainer.critic.optimizer_config.lr": 9e-6,
        "trainer.critic.optimizer_config.adam_betas": [0.9, 0.95], "trainer.critic.value_clip": 0.5,
        "trainer.critic.warmup_steps": 11,
    }  # fmt: skip
    assert {path: found.get(path) for path in expected} == expected


@pytest.mark.parametrize(
    ("words", "prompt", "response"),
    [
        (["--prompt_max_len", "512", "--generate_max_len", "8000"], 512, 8000),
        (["--generate_max_len", "8000"], 1024, 8000),
        (["--prompt_max_len", "512"], 512, 1024),
        (["--max_len", "3072", "--max_new_tokens", "1024"], 2048, 1024),
        (["--max_len", "3072", "--prompt_max_len", "512"], 512, 2560),
    ],
)
def test_lengths_of_earlier_releases_are_limits_of_their_own(
    words: list[str], prompt: int, response: int
) -> None:
    found = {"trainer.max_prompt_length": 512, **of(*words, system="openrlhf")}
    assert found["trainer.max_prompt_length"] == prompt
    assert found["generator.sampling_params.max_generate_length"] == response
    assert found.get("generator.max_model_len") == (3072 if "--max_len" in words else None)


OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg."


def test_a_penalty_counts_if_it_is_on_and_is_complete_at_the_longest_response() -> None:
    words = [f"{OVERLONG}len=64", f"{OVERLONG}penalty_factor=0.5", "data.max_response_length=512"]
    on = of(*words, f"{OVERLONG}enable=True", system="verl")
    buffer = f"{A}overlong_buffer."
    assert (on[f"{buffer}len"], on[f"{buffer}max_len"], on[f"{buffer}penalty_factor"]) == (
        64,
        512,
        0.5,
    )
    off = of(*words, f"{OVERLONG}enable=False", system="verl")
    assert [path for path in off if path.startswith(buffer)] == []
    older = of(
        "reward_model.overlong_buffer.len=64",
        "reward_model.overlong_buffer.enable=True",
        system="verl",
    )
    assert older[f"{buffer}len"] == 64
    given = of(
        "--reward.overlong_buffer_len", "64", "--rollout.max_new_tokens", "300", system="openrlhf"
    )
    assert (given[f"{buffer}len"], given[f"{buffer}max_len"]) == (64, 300)


@pytest.mark.parametrize(
    ("words", "system", "expected"),
    [
        (["actor.use_lora=false", "actor.lora_rank=16"], "areal", {"trainer.policy.lora.rank": None}),
        (["actor.use_lora=true"], "areal",
         {"trainer.policy.lora.rank": 32, "trainer.policy.lora.target_modules": None}),
        (["actor.use_lora=true", "actor.lora_rank=8"], "areal", {"trainer.policy.lora.rank": 8}),
        (["actor.overlong_tokens=64"], "areal", {f"{A}overlong_buffer.len": None}),
        (["actor.overlong_tokens=64", "actor.overlong_reward_penalty=true", "actor.max_new_tokens=300"], "areal",
         {f"{A}overlong_buffer.len": 64, f"{A}overlong_buffer.max_len": 300}),
        (["eval_gconfig.greedy=true", "eval_gconfig.temperature=1.0"], "areal",
         {"generator.eval_sampling_params.temperature": 0}),
        (["eval_gconfig.greedy=true"], "areal", {"generator.eval_sampling_params.temperature": 0}),
        (["--lora_r", "16"], "trl", {"trainer.policy.lora.rank": None}),
        (["--lora_r", "16", "--use_peft"], "trl", {"trainer.policy.lora.rank": 16}),
        (["pg_clip=0.1", "pg_clip_high=0.28"], "roll", {f"{A}eps_clip_low": 0.1, f"{A}eps_clip_high": 0.1}),
        (["pg_clip=0.1", "pg_clip_high=0.28", "use_pg_clip_range=true"], "roll", {f"{A}eps_clip_high": 0.28}),
    ],
)  # fmt: skip
def test_a_key_counts_if_its_switch_is_on(
    words: list[str], system: str, expected: dict[str, object]
) -> None:
    found = of(*words, system=system)
    assert {path: found.get(path) for path in expected} == expected


@pytest.mark.parametrize(
    ("words", "system", "expected"),
    [
        (["adv_estimator=gae"], "roll", {"advantage_estimator": "gae", "gae_whiten": False}),
        (["adv_estimator=gae", "whiten_advantages=true"], "roll",
         {"gae_whiten": None, "advantage_batch_normalize": True}),
        (["adv_estimator=reinforce"], "roll", {"advantage_estimator": "normalized", "reward_norm_mean": "none"}),
        (["adv_estimator=reinforce", "whiten_advantages=true"], "roll", {"advantage_estimator": "reinforce++"}),
        (["adv_estimator=reinforce", "gamma=0.9"], "roll", {"advantage_estimator": "reinforce++"}),
        (["critic.path=x", "actor.reward_norm.mean_level=group"], "areal",
         {"advantage_estimator": "gae", "gae_whiten": False, "reward_norm_mean": None}),
    ],
)  # fmt: skip
def test_advantages_are_whitened_if_they_are_there(
    words: list[str], system: str, expected: dict[str, object]
) -> None:
    found = of(*words, system=system)
    assert {name: found.get(f"{A}{name}") for name in expected} == expected


@pytest.mark.parametrize(("strategy", "interval"), [("", 0), ("no", 0), ("epoch", 0), ("steps", 7)])
def test_trls_eval_steps_count_with_the_strategy_steps_alone(strategy: str, interval: int) -> None:
    words = ["--eval_strategy", strategy] if strategy else []
    text = translated(SourceRecipe(flags(["--eval_steps", "7", *words])), "trl")
    assert flat(text).get("trainer.eval_interval", Config().trainer.eval_interval) == interval
    assert ("#   eval_steps=7: it has no effect there" in text) == (interval == 0)


def test_a_verl_recipe_without_a_reward_function_says_that_one_must_be_given() -> None:
    comment = "#   custom_reward_function.path: without one"
    assert comment in translated(SourceRecipe(flags(["data.train_files=a.parquet"])), "verl")
    assert comment not in translated(
        SourceRecipe(flags(["custom_reward_function.path=a.py"])), "verl"
    )


def test_a_trl_run_evaluates_with_the_sampling_of_training() -> None:
    found = of("--num_generations", "6", "--temperature", "0.9", system="trl")
    assert found["generator.eval_sampling_params.temperature"] is None
    assert found["generator.eval_n_samples_per_prompt"] == 6


def test_a_skyrl_run_evaluates_greedily_with_its_response_length_unless_it_says_how() -> None:
    group = "generator.eval_sampling_params."
    usual = of("generator.sampling_params.max_generate_length=4096", system="skyrl")
    assert usual.get(f"{group}temperature", 0.0) == 0.0, "greedy, as by default here"
    assert usual.get(f"{group}max_generate_length", 4096) == 4096, "as in training"
    own = of(
        "generator.sampling_params.max_generate_length=4096", f"{group}top_p=0.7", system="skyrl"
    )
    assert (own[f"{group}temperature"], own[f"{group}max_generate_length"]) == (1.0, 1024)


@pytest.mark.parametrize(
    ("words", "system"),
    [
        (["--train.async_enable", "--algo.advantage.estimator", "reinforce_baseline",
          "--rollout.n_samples_per_prompt", "8"], "openrlhf"),
        (["trainer.fully_async.enabled=true"], "skyrl"),
        (["async_generation_ratio=1", "num_return_sequences_in_group=8", "adv_estimator=grpo"], "roll"),
    ],
)  # fmt: skip
def test_an_asynchronous_recipe_without_a_correction_has_none_here(
    words: list[str], system: str
) -> None:
    found = of(*words, system=system)
    assert found["trainer.plan"] != "sync"
    assert (found[f"{A}off_policy_correction"], found["trainer.allow_uncorrected"]) == (
        "none",
        True,
    )
    on = {
        "openrlhf": "--algo.advantage.is_correction_enable",
        "skyrl": f"{A}off_policy_correction.tis_ratio_type=token",
        "roll": "train_infer_correction.is_weight.enabled=true",
    }
    corrected = of(*words, on[system], system=system)
    assert corrected[f"{A}off_policy_correction"] == "token_tis"
    assert "trainer.allow_uncorrected" not in corrected


def test_a_reference_to_a_group_stands_for_its_keys(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "actor: {path: a/b, optimizer: {lr: 2e-5, beta2: 0.95}}\n"
        "critic: {path: '${actor.path}', optimizer: '${actor.optimizer}'}\n"
        "ref: '${ref}'\nloop: {inner: '${loop}'}\n"
    )
    keys = read_recipe([str(tmp_path / "recipe.yaml")]).keys
    assert (keys["critic.optimizer.lr"], keys["critic.optimizer.beta2"]) == (2e-5, 0.95)
    assert "critic.optimizer" not in keys
    assert (keys["ref"], keys["loop.inner"]) == ("${ref}", "${loop}")


def test_references_to_groups_that_stand_for_too_much_are_an_error(tmp_path: Path) -> None:
    lines = ["g0: {a: 1, b: 2}"]
    lines += [f"g{at}: {{a: '${{g{at - 1}}}', b: '${{g{at - 1}}}'}}" for at in range(1, 40)]
    (tmp_path / "recipe.yaml").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="too many keys"):
        read_recipe([str(tmp_path / "recipe.yaml")])
