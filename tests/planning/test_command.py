"""``python -m skyasync plan`` and ``--dry-run``: their output and exit status."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyasync.__main__ import command
from skyasync.cli.train import main
from skyasync.planning.command import NOT_RECKONED, plan_lines
from skyasync.planning.plan import make_plan
from tests.planning.models import MODELS
from tests.planning.test_plan import EIGHT, QWEN_7B, reckoned, settings

MACHINE = [
    "--gpus",
    "2",
    "--gpu-memory",
    "24GiB",
    "--host-memory=64GiB",
    "generator.backend=transformers",
]


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | MODELS["llama"]))
    return f"trainer.policy.model.path={tmp_path}"


def run(argv: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        command(argv)
    return int(ended.value.code or 0)


@pytest.mark.slow
def test_a_plan_that_fits_says_so_in_plain_text(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *MACHINE, model, "data.train_data=[x]"]) == 0
    out = capsys.readouterr().out
    assert out.isascii() and "\x1b" not in out
    assert out.splitlines()[-1] == "fits"
    assert "weights" in out and "moments" in out and "cache" in out
    assert "PFLOP per rank" in out and "\nsent         " in out and "estimate" not in out
    assert re.search(
        r"phases: update .*, optimizer step .*, log-probabilities .*, weight sync", out
    )


@pytest.mark.matrix
@pytest.mark.slow
def test_a_card_by_its_name_has_memory_and_speeds(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(
            [
                "plan",
                "--gpus=8",
                "--card",
                "L4",
                "--host-memory=64GiB",
                model,
                "data.train_data=[x]",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "8 GPUs of 22.5 GiB" in out
        and "by the published peak and bandwidths of L4" in out
        and "tokens/s" in out
    )
    assert "training reaches 15% to 45% of the peak" in out
    larger = "trainer.placement.policy_num_gpus_per_node=4 generator.num_inference_engines=4"
    assert f"unused       6 of 8 GPUs: for example {larger}" in out


@pytest.mark.matrix
@pytest.mark.slow
def test_a_plan_that_does_not_fit_ends_with_status_1_and_the_way_out(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["trainer.placement.policy_num_gpus_per_node=2", "data.train_data=[x]"]
    assert run(["plan", *MACHINE, model, *more]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("does not fit: 3 GPUs are asked for and there are 2: it fits with ")
    assert "trainer.placement.policy_num_gpus_per_node=1" in last


@pytest.mark.slow
def test_a_dry_run_of_a_program_of_ones_own_is_the_same_plan(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["plan", "--json", *MACHINE, model, "data.train_data=[x]"])
    planned = json.loads(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main(argv=[model, "data.train_data=[x]", "--dry-run", "--json", *MACHINE])
    assert json.loads(capsys.readouterr().out) == planned
    assert planned["fits"] and planned["machine"]["gpus"] == 2


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["plam"], "did you mean 'plan'"),
        (["plan", "--gpu-memory"], "--gpu-memory needs a value"),
        (["plan", "--gpus", "2", "--gpu-memory", "much"], "--gpu-memory much: not a size"),
        (["plan", "--gpus", "two"], "not a number of GPUs"),
        (["plan", "--gpus", "1" * 5000], f"--gpus {'1' * 40}: not a number of GPUs"),
        (
            ["plan", "--gpus", "2", "--card", "H99"],
            "--card H99: no card that is known, which are A100, H100",
        ),
        (["plan", "--card", "H100"], "--card also needs --gpus N"),
        (["plan", "trainer.sead=3"], "did you mean trainer.seed"),
    ],
)
def test_what_is_wrong_is_one_line(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv) == 2
    error = capsys.readouterr().err
    assert named in error and len(error.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (
            ["generator.backend=vllm", "generator.inference_engine_tensor_parallel_size=3"],
            "the 4 attention heads",
        ),
        (["generator.sampling_params.stop_token_ids=[151645]"], "beyond the vocabulary"),
        (["trainer.policy.model.config_kwargs={rope_thta: 3.0}"], "did you mean rope_theta"),
    ],
)
def test_a_run_that_would_not_start_does_not_fit(
    settings: list[str], named: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *MACHINE, model, "data.train_data=[x]", *settings]) == 2
    captured = capsys.readouterr()
    assert named in captured.err and "fits" not in captured.out


def test_what_is_not_reckoned_is_one_line_of_the_output() -> None:
    plan = make_plan(settings(), QWEN_7B, EIGHT, reckoned())
    assert f"not reckoned {NOT_RECKONED}" in plan_lines(plan, {})


def test_help_and_what_is_wrong_import_neither_torch_nor_ray(model: str) -> None:
    program = (
        "import sys\nfrom skyasync.__main__ import command\n"
        "for argv in (['plan', '--help'], ['plan', '--gpus', 'two'], ['plan', 'trainer.sead=3']):\n"
        "    try: command(argv)\n"
        "    except SystemExit: pass\n"
        "assert not {'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_plan_imports_neither_ray_nor_an_engine_and_starts_no_run(
    model: str, tmp_path: Path
) -> None:
    program = (
        "import sys\nfrom skyasync.__main__ import command\n"
        f"try: command({['plan', *MACHINE, model, 'data.train_data=[x]', f'trainer.runs_dir={tmp_path}/runs']!r})\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'ray', 'vllm'} & set(sys.modules)"
    )
    before = os.times()
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    after = os.times()
    assert (
        after.children_user + after.children_system - before.children_user - before.children_system
        < 20
    )
    assert not (tmp_path / "runs").exists()
