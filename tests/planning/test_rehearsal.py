"""``skyasync rehearse``: its changes of the configuration, its results, and a real one."""

from __future__ import annotations

import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from skyasync import BasePPOExp, RayPPOTrainer
from skyasync.__main__ import command
from skyasync.cli.train import main
from skyasync.config import Config, load_config
from skyasync.config.check import check_config
from skyasync.examples.tiny.model import build
from skyasync.interop.recipe import detect, read_recipe
from skyasync.interop.translation import translated
from skyasync.planning.rehearsal import output_settings, smaller
from skyasync.utils.machine import Machine

CLUSTER = [
    "trainer.plan=fully_async", "trainer.placement.policy_num_nodes=8", "trainer.placement.policy_num_gpus_per_node=8",
    "trainer.parallel.tensor=4", "trainer.parallel.context=2", "generator.num_inference_engines=64",
    "generator.inference_engine_tensor_parallel_size=2", "generator.backend=vllm", "generator.weight_sync_backend=nccl",
    "trainer.train_batch_size=512", "trainer.policy_mini_batch_size=128", "generator.n_samples_per_prompt=16",
    "generator.sampling_params.max_generate_length=32768", "generator.sampling_params.min_tokens=64",
    "trainer.max_staleness=4", "trainer.algorithm.use_kl_loss=true", "trainer.algorithm.kl_loss_coef=0.01",
    "trainer.placement.colocate_policy_ref=false", "trainer.placement.ref_num_nodes=2",
]  # fmt: skip
RECIPES = sorted(Path("tests/interop").glob("*/recipe.*"))
FOREIGN = MappingProxyType({"data.train_data": "reasoning_gym:basic_arithmetic"})


def changed(cfg: Config) -> Config:
    for key, value in smaller(cfg).items():
        holder: object = cfg
        *groups, name = key.split(".")
        for group in groups:
            holder = getattr(holder, group)
        setattr(holder, name, value)
    return cfg


@pytest.mark.parametrize("size, small", [(0, 0), (8, 1), (64, 0)])
def test_a_shard_group_within_the_ranks_stays_one_within_them(size: int, small: int) -> None:
    cfg = load_config([*CLUSTER, "trainer.policy.model.path=x", "data.train_data=[x]"])
    cfg.trainer.policy.fsdp_size = size
    assert changed(cfg).trainer.policy.fsdp_size == small


def test_a_cluster_becomes_two_of_each() -> None:
    cfg = changed(load_config([*CLUSTER, "trainer.policy.model.path=x", "data.train_data=[x]"]))
    placement, generator = cfg.trainer.placement, cfg.generator
    assert (placement.policy_num_nodes, placement.policy_num_gpus_per_node) == (
        1,
        8,
    )  # data, context, tensor
    assert (cfg.trainer.parallel.tensor, cfg.trainer.parallel.context) == (2, 2)
    assert (placement.ref_num_nodes, placement.ref_num_gpus_per_node) == (1, 1)
    assert (generator.num_inference_engines, generator.inference_engine_tensor_parallel_size) == (
        2,
        1,
    )
    assert (cfg.trainer.train_batch_size, cfg.trainer.policy_mini_batch_size) == (
        4,
        2,
    )  # two updates, as many as two
    assert (cfg.trainer.plan, cfg.trainer.max_staleness) == ("fully_async", 4)
    assert check_config(cfg) == []


def test_two_local_engines_stand_in_for_servers() -> None:
    servers = [
        "generator.engines=[http://a:8000]",
        "generator.weight_sync_dir=/shared",
        "generator.backend=sglang_server",
    ]
    cfg = changed(load_config([*servers, "trainer.policy.model.path=x", "data.train_data=[x]"]))
    assert (cfg.generator.engines, cfg.generator.weight_sync_dir, cfg.generator.backend) == (
        [],
        "",
        "auto",
    )
    assert check_config(cfg) == []


@pytest.mark.parametrize(
    ("settings", "engine", "options"),
    [
        (["trainer.placement.colocate_all=true"], "transformers", {}),
        (
            [
                "generator.engine_kwargs={block_size: 16, enable_chunked_prefill: true, enforce_eager: true}"
            ],
            "vllm",
            {"enforce_eager": True},
        ),
        (
            ["generator.engine_kwargs={enforce_eager: true}", "trainer.policy.router_replay=R3"],
            "transformers",
            {},
        ),
    ],
)
def test_what_vllm_has_on_gpus_alone_is_left_out_or_the_embedded_engine_stands_in(
    settings: list[str], engine: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyasync.planning.rehearsal.find_spec", lambda _: True)
    usual = ["generator.backend=vllm", "trainer.policy.model.path=x", "data.train_data=[x]"]
    cfg = changed(load_config([*usual, *settings]))
    assert (cfg.generator.backend, cfg.generator.engine_kwargs) == (engine, options)
    assert check_config(cfg) == []


def test_the_policy_learns_and_new_weights_are_sent_within_the_steps() -> None:
    critic = ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.warmup_steps=20"]
    rare = ["trainer.plan=fully_async", "trainer.sync_interval=8", "trainer.max_staleness=8"]
    cfg = changed(
        load_config([*critic, *rare, "trainer.policy.model.path=x", "data.train_data=[x]"])
    )
    assert cfg.trainer.critic.warmup_steps == 1 and cfg.trainer.sync_interval == 2
    assert check_config(cfg) == []


def test_a_wrong_model_is_named_by_its_own_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    reference = ["trainer.algorithm.use_kl_loss=true", "trainer.ref.model.path=nowhere"]
    assert status([*reference, f"trainer.policy.model.path={tmp_path}", "data.train_data=[x]"]) == 2
    assert "trainer.ref.model.path='nowhere' is neither" in capsys.readouterr().err


def test_no_folder_of_the_recipe_is_written_into(tmp_path: Path) -> None:
    folders = (
        "trainer.runs_dir",
        "trainer.ckpt_path",
        "trainer.export_path",
        "trainer.critic.export_path",
    )
    of_rehearsal = output_settings(tmp_path)
    assert all(
        of_rehearsal[key] == "" or Path(of_rehearsal[key]).is_relative_to(tmp_path)
        for key in folders
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda file: f"{file.parent.name}{file.suffix}")
def test_what_is_left_of_another_frameworks_recipe_is_still_in_order(
    recipe: Path, tmp_path: Path
) -> None:
    source, file = read_recipe([str(recipe)]), tmp_path / "ours.yaml"
    file.write_text(translated(source, detect(source)))
    cfg = changed(
        load_config(
            ["--config", str(file), *(f"{key}=[{value}]" for key, value in FOREIGN.items())]
        )
    )
    assert check_config(cfg) == []
    assert (
        cfg.trainer.train_batch_size <= 8
        and cfg.generator.sampling_params.max_generate_length <= 32
    )


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The model and data of a recipe."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "rows.jsonl").write_text('{"prompt": "3 + 4 = ?", "answer": "7"}\n' * 20)
    model = build(out=folder / "model", progress=False, steps=1)
    return [
        f"trainer.policy.model.path={model}", f"data.train_data=[{folder / 'rows.jsonl'}]", "data.label_key=answer",
        f"data.val_data=[{folder / 'rows.jsonl'}]", "trainer.plan=one_step_off", "generator.backend=transformers",
        "trainer.placement.policy_num_gpus_per_node=8", "generator.num_inference_engines=8",
        "generator.sampling_params.max_generate_length=4096", "trainer.train_batch_size=256",
    ]  # fmt: skip


def reward(folder: Path, text: str) -> list[str]:
    (folder / "my_reward.py").write_text(text)
    return [
        "environment.env_class=reward",
        f"environment.reward_funcs=[{folder / 'my_reward.py'}:score]",
    ]


def status(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        command(["rehearse", *argv])
    return int(ended.value.code or 0)


FAULTS = {
    "data.prompt_key=question": "question",
    "data.val_data=[nowhere.parquet]": "nowhere.parquet",
    "data.chat_template=nowhere.jinja": "nowhere.jinja",
    "environment.env_class=gsm9k": "gsm9k",
    "trainer.algorithm.advantage_estimator=grpoo": "grpo",
    "trainer.max_prompt_length=2": "trainer.max_prompt_length=2",
    "trainer.policy.freeze=[tower]": "tower",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_before_any_process_starts(
    fault: str, recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = (
        []
        if fault.startswith("environment.env_class")
        else reward(tmp_path, "def score(response): return 1.0\n")
    )
    assert status([*recipe, *own, fault]) == 2
    error = capsys.readouterr().err
    assert FAULTS[fault] in error and "Traceback" not in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("trainer.parallel.tensor=8", "does not divide"),
        pytest.param(
            "generator.sampling_params.max_generate_length=1000000",
            "does not fit",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_the_full_size_is_looked_at_first(
    setting: str, named: str, recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ["--gpus", "16", "--gpu-memory", "1GiB", "--host-memory", "64GiB"]
    broken = reward(tmp_path, "def score(response, nothing): return 1.0\n")
    assert status([*recipe, *broken, setting, *machine]) == 2
    captured = capsys.readouterr()
    assert named in captured.out + captured.err


@pytest.mark.slow
def test_a_card_without_a_number_of_gpus_is_an_error(
    recipe: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "skyasync.planning.command.this_machine", lambda: Machine(0, 0, 64 * 2**30, "")
    )
    own = reward(tmp_path, "def score(response): return 1.0\n")
    assert status([*recipe, *own, "--card", "H100"]) == 2
    assert "card also needs --gpus N" in capsys.readouterr().err


class Own(BasePPOExp):
    """A program's own experiment, which creates its own trainer."""

    def get_trainer(self, **parts: Any) -> RayPPOTrainer:  # type: ignore[override]
        return OneBatchAtATime.get_trainer(**parts)


class OneBatchAtATime(RayPPOTrainer):
    async def train(self) -> None:
        for prompts in self.remaining_prompts():
            status = await self.train_on(await self.generate(prompts))
            await self.sync_policy_weights_to_inference_engines()
            await self.end_step(status)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_recipe_is_rehearsed_and_leaves_nothing(
    ray_session: None, recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = reward(
        tmp_path, "def score(response, answer):\n    return float(response.strip() == answer)\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(Own, ["--rehearse", *recipe, *own, "trainer.plan=sync"])
    out = capsys.readouterr().out
    assert ended.value.code == 0
    assert "trainer.train_batch_size: 256 -> 2" in out and "rehearsed in " in out
    folder = Path(re.search(r"in (\S+); changed", out)[1])  # type: ignore[index]
    assert not folder.exists()


@pytest.mark.matrix
@pytest.mark.slow
def test_a_reward_that_raises_late_ends_it_with_the_reward_named(
    ray_session: None, recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = f"""
def score(response):
    with open({str(tmp_path / "calls")!r}, "a+") as calls:
        calls.write("x")
        assert calls.tell() < 12, "too late"
    return 1.0
"""
    assert status([*recipe, *reward(tmp_path, late), "environment.max_retries=0"]) == 1
    assert "too late" in capsys.readouterr().err
