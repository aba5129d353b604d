"""Every wrong override gives one line with what was found and what is allowed."""

import json
import subprocess
import sys

import pytest

from skyasync.config import ConfigError, load_config
from skyasync.config.command_line import USUAL_WORDS
from skyasync.config.keys import Keys
from skyasync.config.schema import Config

LR = "trainer.policy.optimizer_config.lr"

WRONG = [
    # unknown keys
    ("lr=1e-4", f"unknown key 'lr': did you mean {LR}?"),
    ("trainer.lr=1e-4", f"did you mean {LR}?"),
    ("trainer.policy.optimizer.lr=1e-4", f"did you mean {LR}?"),
    ("trainer.algorthm.eps_clip_low=0.1", "did you mean trainer.algorithm.eps_clip_low?"),
    ("trainer.train_batchsize=8", "did you mean trainer.train_batch_size?"),
    ("batch_size=8", "trainer.train_batch_size"),
    ("trainer.learning_rate=1e-6", f"unknown key 'trainer.learning_rate': did you mean {LR}?"),
    ("steps=20", "did you mean trainer.max_training_steps?"),
    ("trainer.max_steps=20", "did you mean trainer.max_training_steps?"),
    ("trainer.batch_size=8", "did you mean trainer.train_batch_size?"),
    ("generator.max_tokens=8", "did you mean generator.sampling_params.max_generate_length?"),
    ("generator.n=8", "did you mean generator.n_samples_per_prompt?"),
    ("trainer.kl_coef=0.1", "did you mean trainer.algorithm.kl_loss_coef?"),
    ("generator.temperature=0.7", "did you mean generator.sampling_params.temperature?"),
    ("data.traindata=a.parquet", "did you mean data.train_data?"),
    ("quux.zorp=1", "unknown key 'quux.zorp': see --help for all keys"),
    ("trainer.zorp=true", "unknown key 'trainer.zorp': see --help trainer"),
    ("trainer.policy.quux.zorp=true", ": see --help trainer.policy"),
    ("trainer.flash_attn=true", "that is SkyRL's; it needs no setting here: the model's own choice of attention"),
    ("trainer.policy.fsdp_config.cpu_offload=true", "here it is trainer.policy.cpu_offload=parameters"),
    ("trainer.policy.fsdp_config.reshard_after_forward=true", "no counterpart here: FSDP2 wraps and shards"),
    ("environment.env_config.=3", "environment.env_config is a value, not a group; write environment.env_config=VALUE"),
    ("environment.env_config.a[0]=3", "environment.env_config is a value, not a group"),
    ("trainer.seed.value=1", "trainer.seed is a value, not a group; write trainer.seed=VALUE"),
    ("trainer.train_batch_size=" + "1" * 5000, "expected int, found a text of 5000 characters"),
    # other libraries' spellings
    ("rollout.max_head_offpolicyness=4", "AReaL spells it; here it is trainer.max_staleness"),
    ("async_generation_ratio=1", "here it is trainer.async_generation_ratio=1 and trainer.plan=fully_async"),
    ("trainer.fully_async.max_staleness_steps=4", "SkyRL spells it; here it is trainer.max_staleness"),
    ("vllm_generate_batch_size=64", "OpenRLHF spells it; here it is generator.generate_batch_size"),
    ("num_generations=8", "TRL spells it; here it is generator.n_samples_per_prompt"),
    ("actor_rollout_ref.rollout.n=8", "verl spells it; here it is generator.n_samples_per_prompt"),
    ("n_samples_per_prompt=8", "did you mean generator.n_samples_per_prompt?"),
    ("trainer.algorithm.policy_loss_type=my.py:mine", "policy loss 'my.py:mine': my.py does not exist"),
    # wrong types
    ("trainer.seed=abc", "trainer.seed: expected int, found the string 'abc'"),
    ("trainer.seed=1.5", "trainer.seed: expected int, found the float 1.5"),
    ("trainer.seed=true", "trainer.seed: expected int, found the bool true"),
    ("trainer.seed=null", "trainer.seed: expected int, found null"),
    (f"{LR}=fast", f"{LR}: expected float, found the string 'fast'"),
    ("trainer.report=1", "trainer.report: expected bool (true or false), found the int 1"),
    ("trainer.report=yes", "trainer.report: expected bool (true or false), found the string 'yes'"),
    ("trainer.run_name=[a]", "trainer.run_name: expected str, found a list"),
    ("trainer.policy.optimizer_config.adam_betas=0.9", "expected list of float, found the float 0.9"),
    ("trainer.policy.optimizer_config.adam_betas=[0.9,x]", "expected float, found the string 'x'"),
    ("environment.env_config=4", "environment.env_config: expected mapping, found the int 4"),
    ("generator.sampling_params.stop=[a,null]", "generator.sampling_params.stop: expected str, found null"),
    ("trainer.resume_mode=null", "trainer.resume_mode: expected str, found null (allowed: auto, none, latest)"),
    ("trainer.placement=1", "trainer.placement is a group, not a key: set one of its keys, see --help tr"),
    # values out of bounds or not among the choices
    ("trainer.train_batch_size=0", "trainer.train_batch_size=0: must be at least 1"),
    (f"{LR}=-1", f"{LR}=-1.0: must be at least 0"),
    (f"{LR}=nan", f"{LR}=nan: must be at least 0"),
    ("generator.sampling_params.top_p=0", "must be greater than 0 and at most 1"),
    ("trainer.policy.optimizer_config.adam_betas=[0.9,1.0]", "must be at least 0 and less than 1"),
    ("generator.backend=sglang", "unknown backend 'sglang': did you mean 'sglang_server'? allowed: auto"),
    ("generator.backend=vlm", "unknown backend 'vlm': did you mean 'vllm'? allowed: auto, sglang_server"),
    ("trainer.policy.model.dtype=float16", "did you mean 'bfloat16' or 'float32'? allowed: auto, bfloat16, float32"),
    # names that are registered somewhere
    ("trainer.plan=one_step", "unknown plan 'one_step': did you mean 'one_step_off'?"),
    ("trainer.algorithm.policy_loss_type=pp0", "unknown policy_loss_type 'pp0': did you mean 'ppo'"),
    ("trainer.algorithm.advantage_estimator=gropo", "did you mean 'grpo'"),
    ("trainer.algorithm.off_policy_correction=tokn_tis", "did you mean 'token_tis'"),
    ("trainer.algorithm.kl_estimator_type=k4", "allowed: abs, k1"),
    ("trainer.algorithm.loss_reduction=tokenmean", "did you mean 'token_mean'"),
    ("trainer.logger=[jsonl,wandbb]", "trainer.logger=wandbb: unknown logger 'wandbb': did you mean 'wandb'"),
    # spelling of the override itself
    ("+trainer.seed=1", "Hydra's + and ~ do not exist here (all keys are known, none can be added); write trainer"),
    ("++lr=1", f"did you mean {LR}?"),
    ("~trainer.seed", "Hydra's + and ~ do not exist here"),
    ("trainer.seed", "missing '=' in 'trainer.seed': write trainer.seed=VALUE"),
    ("seed 3", "missing '=' in 'seed 3': overrides are key=value, see --help"),
    ("trainer.seed =3", "write key=value without spaces around the '='"),
    ("trainer.seed=", "trainer.seed: the value is empty"),
    ("--trainer.seed=3", "unknown option --trainer.seed: settings are key=value without dashes; write trainer.seed="),
    ("--async_queue_size=3", "did you mean trainer.async_queue_size?"),
    ("environment.domains={[a]: 1}", "environment.domains: cannot read '{[a]: 1}': a key is a list or a mapping"),
    ("data.train_data=['a','b'", "data.train_data: cannot read \"['a','b'\": a bracket or quote does not close"),
    ("data.train_data=['${no.such}']", "data.train_data: Interpolation key 'no.such' not found"),
    ("trainer.run_name=${no.such}", "trainer.run_name: Interpolation key 'no.such' not found"),
    ("environment.env_config.size=${no.such}", "environment.env_config.size: Interpolation key 'no.such' not found"),
    ("trainer.run_name=${", "(a literal ${ is written \\${)"),
    ("--config", "--config needs a file"),
    ("--confg=a.yaml", "unknown option --confg: did you mean --config?"),
    ("--config=/no/such.yaml", "cannot read /no/such.yaml: No such file or directory"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "hint"), WRONG, ids=[override for override, _ in WRONG])
def test_a_wrong_override_is_refused_in_one_line_with_the_right_hint(
    override: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config([override])
    assert len(refused.value.problems) == 1
    assert "\n" not in refused.value.problems[0]
    assert hint in refused.value.problems[0]


def test_the_last_value_of_a_key_counts_and_a_line_names_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cfg = load_config(
        [
            "trainer.seed=1",
            "trainer.logger=[jsonl, none]",
            "trainer.seed=2",
            "trainer.logger=console",
        ]
    )
    assert (cfg.trainer.seed, cfg.trainer.logger) == (2, ["console"])
    assert caplog.messages == [
        "trainer.seed is given several times, as 1, 2: the last one counts",
        "trainer.logger is given several times, as [jsonl, none], console: the last one counts",
    ]
    caplog.clear()
    assert (
        load_config(["trainer.seed=1", "trainer.seed=1"]).trainer.seed == 1 and not caplog.messages
    )


def test_an_entry_after_its_mapping_is_added_and_a_second_mapping_replaces_the_first() -> None:
    entries = [
        "environment.env_config={a: 1}",
        "environment.env_config.b=2",
        "environment.env_config.b=3",
    ]
    assert load_config(entries).environment.env_config == {"a": 1, "b": 3}


def test_a_flag_of_another_system_with_its_value_is_answered_with_our_key() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown option --lr: .*trainer\.policy\.optimizer_config\.lr"
    ):
        load_config(["--lr=1e-5"])


def test_a_foreign_option_with_a_separate_value_is_one_problem() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(["--num_generations", "8"])
    assert len(refused.value.problems) == 1
    assert "generator.n_samples_per_prompt" in refused.value.problems[0]


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(["lr=1", "trainer.seed=x", "trainer.epochs=-1", "generator.backend=vlm"])
    assert len(refused.value.problems) == 4


PROBE = """
import json, sys
from skyasync.config import parse_or_exit
try:
    parse_or_exit(sys.argv[1:])
except SystemExit as end:
    heavy = sorted({"torch", "ray", "transformers", "vllm", "datasets", "matplotlib"} & set(sys.modules))
    print(json.dumps({"status": end.code, "heavy": heavy}))
"""


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("lr=1e-4", LR),
        ("trainer.algorithm.policy_loss_type=pp0", "'ppo'"),
        ("trainer.plan=one_step", "'one_step_off'"),
        ("trainer.policy_mini_batch_size=48", "trainer.train_batch_size=64"),
        ("trainer.logger=wandbb", "'wandb'"),
    ],
)
def test_a_refused_command_line_loads_nothing_heavy_and_prints_no_traceback(
    override: str, hint: str
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, override], capture_output=True, text=True, timeout=20
    )
    assert json.loads(ran.stdout) == {"status": 2, "heavy": []}
    assert ran.stderr.startswith("error: ")
    assert len(ran.stderr.splitlines()) == 1
    assert hint in ran.stderr


def test_words_that_people_try_lead_to_settings_that_exist() -> None:
    keys = Keys.of(Config)
    missing = {word: path for word, path in USUAL_WORDS.items() if path not in keys}
    assert missing == {}


def test_colocation_with_an_asynchronous_plan_leads_to_the_plan_that_has_both() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.plan=colocated_async"):
        load_config(["trainer.placement.colocate_all=true", "trainer.plan=fully_async"])


def test_another_frameworks_value_is_not_offered_next_to_one_of_our_own() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(["generator.backend=sglang"])
    assert "is vllm here" not in str(refused.value)
