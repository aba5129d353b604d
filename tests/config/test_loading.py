"""Valid arguments: types, layers, users' own keys."""

import copy
import enum
import re
import sys
import types
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import MISSING

from skyasync.cli.train import configuration
from skyasync.config import Config, ConfigError, check_config, key, load_config, parse_or_exit
from skyasync.config.load import origins
from skyasync.config.schema import AlgorithmConfig, TrainerConfig
from skyasync.errors import UserError
from skyasync.preflight.prepare import about_recipe


class Mode(enum.Enum):
    fast = 1
    slow = 2


@dataclass
class MyTrainer(TrainerConfig):
    seed: int = 7
    bonus: float = key(0.5, "A trainer key of one's own.", low=0.0, high=1.0)


@dataclass
class MyGroup:
    limit: float | None = None
    size: int | str = 1
    mode: Mode = Mode.fast
    kind: Literal["a", "b"] = "a"
    names: list[str] = field(default_factory=list)
    table: dict[str, int] = field(default_factory=lambda: {"x": 1})
    anything: Any = None


@dataclass
class MyConfig(Config):
    trainer: MyTrainer = field(default_factory=MyTrainer)
    mine: MyGroup = field(default_factory=MyGroup)


@dataclass
class Required(Config):
    token: str = MISSING


def write(folder: Path, text: str, name: str = "settings.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_a_mapping_may_have_names_that_look_like_numbers() -> None:
    cfg = load_config(
        [
            "generator.sampling_params.logit_bias={15: -2.0}",
            "generator.sampling_params.logit_bias.7=1",
        ]
    )
    assert cfg.generator.sampling_params.logit_bias == {"15": -2.0, "7": 1}


def test_without_arguments_the_schema_s_defaults_stand() -> None:
    assert load_config([]) == Config()


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("trainer.policy.optimizer_config.lr=1e-6", 1e-6),
        ("trainer.policy.optimizer_config.lr=3", 3.0),
        ("trainer.algorithm.eps_clip_high=inf", float("inf")),
        ("trainer.seed=1_000", 1000),
        ("trainer.report=False", False),
        ("trainer.run_name=001", "001"),
        ("trainer.run_name=1e5", "1e5"),
        ("trainer.run_name=true", "true"),
        ("trainer.run_name='null'", "null"),
        ('trainer.run_name=""', ""),
        ("trainer.run_name=a = b: c # d", "a = b: c # d"),
        ("trainer.export_path=~/runs", "~/runs"),
        ("trainer.run_name=seed-${trainer.seed}", "seed-42"),
        ("trainer.run_name=\\${trainer.seed}", "${trainer.seed}"),
        ("data.train_data=a.parquet", ["a.parquet"]),
        ("data.train_data='a.parquet'", ["a.parquet"]),
        ("data.train_data=[a.parquet,package.module:make]", ["a.parquet", "package.module:make"]),
        ("data.train_data=['a b','c']", ["a b", "c"]),
        ("data.train_data=[]", []),
        ("generator.sampling_params.stop=[on,1,'null']", ["on", "1", "null"]),
        ("trainer.policy.optimizer_config.adam_betas=[0,0.95]", [0.0, 0.95]),
        ("environment.env_config={size: 4, name: x, deep: {a: [1, 2.5, null]}}",
         {"size": 4, "name": "x", "deep": {"a": [1, 2.5, None]}}),
        ("environment.env_class=my.module:MyEnv", "my.module:MyEnv"),
    ],
)  # fmt: skip
def test_a_value_is_read_as_its_key_s_type(override: str, value: Any) -> None:
    loaded = attrgetter(override.partition("=")[0])(load_config([override]))
    assert loaded == value
    assert type(loaded) is type(value)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("mine.limit=null", "limit", None),
        ("mine.limit=2", "limit", 2.0),
        ("mine.size=3", "size", 3),
        ("mine.size=big", "size", "big"),
        ("mine.mode=slow", "mode", Mode.slow),
        ("mine.kind=b", "kind", "b"),
        ("mine.names=one", "names", ["one"]),
        ("mine.table={y: 2}", "table", {"y": 2}),
        ("mine.table.y=2", "table", {"x": 1, "y": 2}),
        ("mine.anything=[1,x]", "anything", [1, "x"]),
    ],
)
def test_keys_of_a_user_s_own_group_are_typed_as_well(override: str, name: str, value: Any) -> None:
    loaded = load_config([override], schema=MyConfig)
    assert isinstance(loaded, MyConfig)
    assert getattr(loaded.mine, name) == value


def test_a_subclassed_group_keeps_its_defaults_bounds_and_hints() -> None:
    loaded = load_config(["trainer.bonus=0.9"], schema=MyConfig)
    assert (loaded.trainer.seed, loaded.trainer.bonus) == (7, 0.9)
    with pytest.raises(ConfigError, match=r"trainer\.bonus=2\.0: must be at least 0 and at most 1"):
        load_config(["trainer.bonus=2"], schema=MyConfig)
    with pytest.raises(ConfigError, match=r"did you mean trainer\.bonus\?"):
        load_config(["bonus=1"], schema=MyConfig)
    with pytest.raises(ConfigError, match="expected one of fast, slow, found the string 'medium'"):
        load_config(["mine.mode=medium"], schema=MyConfig)


def test_a_key_without_default_must_be_given() -> None:
    with pytest.raises(
        ConfigError, match=r"^token has no value and no default: write token=VALUE$"
    ):
        load_config([], schema=Required)
    assert load_config(["token=x"], schema=Required).token == "x"


def test_entries_of_a_free_mapping_are_set_one_by_one_in_any_order() -> None:
    arguments = [
        "environment.env_config.deep.b=2",
        "environment.env_config={a: 1}",
        "environment.env_config.c=x",
    ]
    for order in (arguments, arguments[::-1]):
        assert load_config(order).environment.env_config == {"a": 1, "deep": {"b": 2}, "c": "x"}


def test_a_group_defined_inside_a_function_is_refused_with_the_way_out() -> None:
    namespace: dict[str, Any] = {"dataclass": dataclass, "Config": Config, "__name__": __name__}
    exec("@dataclass\nclass Hidden(Config):\n    value: 'NotThere' = None\n", namespace)
    with pytest.raises(UserError, match=r"NotThere.*define it at the top of a module"):
        load_config([], schema=namespace["Hidden"])


def test_a_free_mapping_is_replaced_as_a_whole_by_a_later_layer(tmp_path: Path) -> None:
    first = write(tmp_path, "environment: {env_config: {a: 1, b: 2}}")
    second = write(tmp_path, "environment: {env_config: {c: 3}}", "second.yaml")
    assert load_config(["--config", first, "--config", second]).environment.env_config == {"c": 3}
    assert load_config(
        ["--config", first, "environment.env_config.b=4"]
    ).environment.env_config == {"a": 1, "b": 4}


def test_a_text_with_references_is_a_list_of_one_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DATA", "/data")
    file = write(
        tmp_path,
        "data: {train_data: '${oc.env:DATA}/train.parquet', val_data: '${data.train_data}'}",
    )
    assert (
        (data := load_config(["--config", file]).data).train_data
        == data.val_data
        == ["/data/train.parquet"]
    )
    assert load_config(["data.train_data=${trainer.runs_dir}"]).data.train_data == ["runs"]
    with pytest.raises(
        ConfigError, match=r"trainer\.eval_k: Invalid value assigned: int is not a ListConfig"
    ):
        load_config(["trainer.eval_k=${trainer.seed}"])


def test_the_path_of_a_file_may_have_an_equals_sign(tmp_path: Path) -> None:
    file = write(tmp_path, "trainer: {seed: 3}", "lr=1e-3.yaml")
    assert load_config(["--config", file, "trainer.epochs=2"]).trainer.seed == 3
    with pytest.raises(ConfigError, match="--config needs a file"):
        load_config(["--config", "trainer.epochs=2"])


def test_overrides_win_over_files_and_later_files_over_earlier_ones(tmp_path: Path) -> None:
    first = write(tmp_path, "trainer:\n  seed: 1\n  epochs: 2\n  train_batch_size: 8\n")
    second = write(
        tmp_path,
        "trainer:\n  seed: 2\n  epochs: 3\ngenerator.backend: transformers\n",
        "second.yaml",
    )
    cfg = load_config(["trainer.seed=3", "--config", first, f"--config={second}"])
    assert (cfg.trainer.seed, cfg.trainer.epochs, cfg.trainer.train_batch_size) == (3, 3, 8)
    assert cfg.generator.backend == "transformers"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("trainer:\n  sed: 1\n", r"settings.yaml:2: unknown key 'trainer.sed': did you mean trainer.seed"),
        ("trainer:\n  seed: x\n", "settings.yaml:2: trainer.seed: expected int, found the string 'x'"),
        ("trainer:\n  seed: '1'\n", "settings.yaml:2: trainer.seed: expected int, found the string '1'"),
        ("trainer:\n  epochs: -1\n", "settings.yaml:2: trainer.epochs=-1: must be at least 0"),
        ("trainer:\n  run_name:\n", "settings.yaml:2: trainer.run_name: expected str, found null"),
        ("trainer: 3\n", "settings.yaml:1: trainer is a group"),
        ("trainer:\n  seed: 1\n  seed: 2\n", "settings.yaml:3: trainer.seed is given twice, first in line 2"),
        ("algorithm:\n  kl_ctrl:\n    kl_coef: 0.1\n", "settings.yaml:3: unknown key 'algorithm.kl_ctrl.kl_coef': "
         "that is how verl spells it; here it is trainer.algorithm.kl_loss_coef"),
        ("trainer: [\n", "settings.yaml:2: not valid YAML"),
        ("a: " + "[" * 5000, "settings.yaml: not valid YAML: it is nested too deeply"),
        ("trainer:\n  [seed]: 1\n", "settings.yaml:2: a key is a list or a mapping, and must be a text"),
        ("environment:\n  domains: {{a: 1}: 2}\n", "settings.yaml:2: a key is a list or a mapping, and must be a text"),
        ("trainer: &here\n  seed: *here\n", "settings.yaml:1: an anchor contains itself"),
        ("data:\n  train_data: &here [a, *here]\n", "settings.yaml:2: an anchor contains itself"),
        ("- 1\n", "settings.yaml: expected groups and keys"),
    ],
)  # fmt: skip
def test_a_problem_in_a_file_is_reported_with_its_line(
    text: str, hint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(["--config", write(tmp_path, text)])
    assert len(refused.value.problems) == 1
    assert hint in refused.value.problems[0]


def test_the_default_file_serves_until_a_file_or_a_model_is_named(tmp_path: Path) -> None:
    default = Path(write(tmp_path, "trainer: {seed: 5, policy: {model: {path: tiny}}}"))
    other = write(tmp_path, "trainer: {epochs: 2}", "other.yaml")
    assert load_config([], default_config=default).trainer.policy.model.path == "tiny"
    assert load_config(["trainer.epochs=2"], default_config=default).trainer.seed == 5
    assert load_config(["--config", other], default_config=default).trainer.seed == 42
    assert load_config(["trainer.policy.model.path=big"], default_config=default).trainer.seed == 42


def test_with_data_of_ones_own_only_the_default_files_model_is_taken(tmp_path: Path) -> None:
    text = "trainer: {seed: 5, policy: {model: {path: tiny}}}\ndata: {train_data: [theirs], val_data: [theirs]}"
    default = Path(write(tmp_path, text))
    cfg = load_config(["data.train_data=mine", "trainer.epochs=3"], default_config=default)
    assert (cfg.trainer.policy.model.path, cfg.trainer.seed, cfg.trainer.epochs) == ("tiny", 42, 3)
    assert (cfg.data.train_data, cfg.data.val_data) == (["mine"], [])
    assert origins(cfg) == {
        "trainer.policy.model.path": "recipe", "data.train_data": "command line", "trainer.epochs": "command line"
    }  # fmt: skip


def test_the_tiny_examples_recipe_is_taken_whole_or_not_at_all_and_a_line_says_so() -> None:
    whole = configuration(["trainer.plan=one_step_off"])
    assert whole.data.val_data and whole.generator.sampling_params.max_generate_length == 9
    line = about_recipe(whole)
    assert re.match(
        r"neither a model nor data.train_data is named: 1\d settings are those of the tiny example",
        line,
    )
    given = ["data.train_data=mine.jsonl", "environment.env_class=e"]
    mine = configuration(given)
    expected = load_config([f"trainer.policy.model.path={whole.trainer.policy.model.path}", *given])
    assert mine == expected and mine.data.val_data == []
    assert about_recipe(mine).startswith(
        "no model is named: the tiny example model is trained on data.train_data"
    )
    assert about_recipe(expected) == ""


def test_it_is_known_who_has_set_what(tmp_path: Path) -> None:
    default = Path(write(tmp_path, "trainer: {seed: 5, epochs: 2}"))
    assert origins(load_config(["trainer.epochs=4"], default_config=default)) == {
        "trainer.seed": "recipe", "trainer.epochs": "command line"
    }  # fmt: skip
    file = write(tmp_path, "trainer:\n  seed: 5\n  epochs: 2\n", "file.yaml")
    cfg = load_config(["--config", file, "trainer.epochs=4", "trainer.algorithm.preset=dapo"])
    found = origins(cfg)
    assert (found["trainer.seed"], found["trainer.epochs"]) == (f"{file}:2", "command line")
    assert found["trainer.algorithm.eps_clip_high"] == "preset dapo"
    assert origins(copy.deepcopy(cfg)) == found


@dataclass
class PresetAlgorithm(AlgorithmConfig):
    preset: str = ""


@dataclass
class PresetTrainer(TrainerConfig):
    algorithm: PresetAlgorithm = field(default_factory=PresetAlgorithm)


@dataclass
class PresetConfig(Config):
    trainer: PresetTrainer = field(default_factory=PresetTrainer)


@pytest.fixture
def presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of presets instead of the library's: one valid, one with an unknown key."""
    tables = {
        "wide": {
            "trainer.algorithm.eps_clip_low": 0.3,
            "trainer.algorithm.eps_clip_high": 1e-6,
            "trainer.seed": 1,
        },
        "broken": {"trainer.sed": 1},
    }

    def apply_preset(name: str) -> dict[str, Any]:
        if name not in tables:
            raise UserError(f"unknown preset {name!r}")
        return tables[name]

    module = types.ModuleType("skyasync.algorithms.presets")
    module.apply_preset = apply_preset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("presets")
def test_a_preset_lies_above_the_default_file_and_below_files_and_overrides(tmp_path: Path) -> None:
    default = Path(write(tmp_path, "trainer: {seed: 5, epochs: 2, algorithm: {eps_clip_low: 0.1}}"))
    preset = "trainer.algorithm.preset=wide"
    cfg = load_config(
        [preset, "trainer.algorithm.eps_clip_high=0.4"], schema=PresetConfig, default_config=default
    )
    assert (cfg.trainer.algorithm.eps_clip_low, cfg.trainer.algorithm.eps_clip_high) == (0.3, 0.4)
    assert (cfg.trainer.seed, cfg.trainer.epochs) == (1, 2)
    file = write(tmp_path, "trainer: {seed: 9, algorithm: {preset: wide}}", "file.yaml")
    cfg = load_config(["--config", file], schema=PresetConfig)
    assert (cfg.trainer.seed, cfg.trainer.algorithm.eps_clip_high) == (9, 1e-6)


@pytest.mark.usefixtures("presets")
def test_an_unknown_preset_and_a_preset_with_a_wrong_key_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"preset=wid: unknown preset 'wid'"):
        load_config(["trainer.algorithm.preset=wid"], schema=PresetConfig)
    with pytest.raises(
        ConfigError, match=r"preset broken: unknown key 'trainer\.sed': did you mean trainer\.seed"
    ):
        load_config(["trainer.algorithm.preset=broken"], schema=PresetConfig)


def test_parse_or_exit_prints_one_line_per_problem_and_leaves_with_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        parse_or_exit(["trainer.seed=x", "lr=1"])
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.startswith("error: ") for line in printed.err.splitlines()] == [True, True]


def test_parse_or_exit_returns_what_load_config_returns() -> None:
    assert parse_or_exit(["trainer.seed=3"], schema=MyConfig) == load_config(
        ["trainer.seed=3"], schema=MyConfig
    )


def test_the_defaults_do_not_contradict_each_other() -> None:
    assert check_config(Config()) == []


def test_what_is_changed_in_one_configuration_is_not_in_the_next() -> None:
    first = load_config(["trainer.seed=7", "environment.env_config.colour=red"])
    first.trainer.logger.append("wandb")
    first.environment.env_config["colour"] = "blue"
    assert load_config([]) == Config()
