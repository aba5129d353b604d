"""A dumped configuration loads as an equal one, whatever its values."""

import dataclasses
import tempfile
from operator import attrgetter
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyasync.config import Config, dump_config, load_config
from skyasync.config.check import check_unread
from skyasync.config.keys import Key, Keys
from skyasync.config.parts import Plan
from skyasync.config.schema.algorithm import INTERVALS
from skyasync.config.schema.sampling import UNMIRRORED

pytestmark = pytest.mark.slow

KEYS = Keys.of(Config)

# "???" is OmegaConf's "no value"; unpaired surrogates are no text.
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12).filter(
    lambda text: text != "???"
)
TRICKY = st.sampled_from(
    ["null", "true", "1e-6", "001", "${", "\\${x}", "${trainer.seed}", "a: b", "[", "'", "\\", "~"]
)
STRINGS = TEXT | TRICKY
FREE = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | STRINGS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=6,
)


def values(key: Key) -> st.SearchStrategy[Any]:
    low = key.low if key.low is not None else key.above
    high = key.high if key.high is not None else key.below
    if key.choices:
        return st.sampled_from(key.options())
    if key.registry:
        names = st.sampled_from(key.names())
        return st.lists(names, min_size=1, max_size=1) if key.type == list[str] else names
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(int(low or 0), 10**6),
        float: st.floats(
            low, high, allow_nan=False, allow_infinity=None if key.infinite else False
        ).filter(key.allows),
        str: STRINGS,
        list[str]: st.lists(STRINGS, max_size=3),
        list[int]: st.lists(st.integers(int(low or 0), 10**6), max_size=3),
        list[float]: st.lists(st.floats(low, high).filter(key.allows), min_size=2, max_size=2),
    }
    arms = get_args(key.type) if isinstance(key.type, UnionType) else (key.type,)
    given = simple.get(arms[0], st.dictionaries(STRINGS, FREE, max_size=3))
    return st.none() | given if len(arms) > 1 else given


@st.composite
def configs(draw: st.DrawFn) -> Config:
    config = Config()
    for path in draw(st.lists(st.sampled_from(sorted(KEYS.by_path)), max_size=12, unique=True)):
        owner: Any = config
        *groups, name = path.split(".")
        for group in groups:
            owner = getattr(owner, group)
        setattr(owner, name, draw(values(KEYS[path])))
    return config


def consistent(config: Config) -> Config:
    """The same configuration with the keys restored that contradict others."""
    trainer, generator, plain = config.trainer, config.generator, Config()
    for pair in INTERVALS:
        for path in pair:
            *groups, name = path.split(".")
            group = attrgetter(".".join(["trainer.algorithm", *groups]))
            setattr(group(config), name, getattr(group(plain), name))
    sampling = generator.sampling_params
    sampling.logit_bias, sampling.structured_outputs, sampling.repetition_detection = {}, {}, {}
    for name in UNMIRRORED:
        setattr(sampling, name, getattr(plain.generator.sampling_params, name))
    generator.eval_sampling_params = {}
    generator.eval_n_samples_per_prompt = 1
    generator.oversample_per_prompt = 0
    trainer.algorithm.truncated_responses = plain.trainer.algorithm.truncated_responses
    trainer.algorithm.dynamic_sampling.mode = plain.trainer.algorithm.dynamic_sampling.mode
    trainer.algorithm.dynamic_sampling.early_end = False
    if trainer.algorithm.advantage_estimator == "none":  # needs a teacher
        trainer.algorithm.advantage_estimator = plain.trainer.algorithm.advantage_estimator
    trainer.algorithm.overlong_buffer.len = 0
    trainer.critic.warmup_steps, trainer.reward.model.path, trainer.reward.models = 0, "", {}
    trainer.parallel, trainer.policy.fsdp_size = plain.trainer.parallel, 0
    trainer.policy.torch_compile, trainer.policy.router_replay = False, "none"
    trainer.policy.cpu_offload, trainer.policy.lora.base_dtype, trainer.critic.backbone = (
        "none",
        "",
        "own",
    )
    trainer.algorithm.off_policy_correction = "auto"
    trainer.policy_mini_batch_size = 0
    trainer.placement.colocate_all = trainer.algorithm.use_kl_loss = False
    trainer.allow_uncorrected, trainer.spike_limits = True, {}
    trainer.algorithm.extra = generator.engine_kwargs = {}
    trainer.policy.optimizer_config = plain.trainer.policy.optimizer_config
    trainer.sync_interval = 1
    generator.weight_sync_mode, generator.weight_sync_backend = "full", "auto"
    if generator.backend.endswith("_server") and not generator.engines:
        generator.backend = "auto"
    if trainer.plan in ("streamed", "colocated_async", "hybrid_async"):  # need other settings
        trainer.plan = "sync"
    trainer.resume_mode = "none"
    trainer.max_training_steps = max(trainer.max_training_steps, int(config.data.streaming))
    trainer.partial_rollout = plain.trainer.partial_rollout
    trainer.async_generation_ratio, generator.generate_batch_size = 0.0, 0
    generator.n_samples_per_prompt = max(2, generator.n_samples_per_prompt)
    generator.max_model_len = 0
    generator.sampling_params.min_tokens = plain.generator.sampling_params.min_tokens
    (
        config.environment.reward_funcs,
        config.environment.reward_weights,
        config.environment.domains,
    ) = [], [], {}
    config.data.reasoning_gym = config.data.val_sets = config.environment.judges = {}
    trainer.eval_k, trainer.eval_answer = [], "auto"
    generator.agent_program = generator.agent_func_path = ""
    while unread := list(check_unread(config, Plan.of(config, None))):
        for problem in unread:
            group, _, name = problem.partition("=")[0].rpartition(".")
            setattr(attrgetter(group)(config), name, KEYS[f"{group}.{name}"].default)
    return config


@pytest.mark.matrix
@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(configs().map(consistent))
def test_what_is_dumped_loads_back_equal(config: Config) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(dump_config(config), encoding="utf-8")
        assert load_config(["--config", str(file)]) == config


@settings(max_examples=60, deadline=None)
@given(STRINGS)
def test_quoted_text_on_the_command_line_arrives_unchanged_but_for_references(text: str) -> None:
    quoted = yaml.safe_dump(text, default_style='"', width=10**6)
    if "${" not in text:
        assert load_config([f"trainer.run_name={quoted}"]).trainer.run_name == text


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1e300))
def test_python_s_own_spelling_of_a_float_is_read_exactly(number: float) -> None:
    assert (
        load_config(
            [f"trainer.policy.optimizer_config.lr={number!r}"]
        ).trainer.policy.optimizer_config.lr
        == number
    )


def test_the_dump_holds_every_key_in_the_schema_s_order() -> None:
    dumped = yaml.safe_load(dump_config(Config()))
    assert list(dumped) == [field.name for field in dataclasses.fields(Config)]
    assert list(dumped["trainer"]) == list(dataclasses.asdict(Config())["trainer"])
