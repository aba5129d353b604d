"""Files that other programs read: the image, the launch files, CI's stages, and notes for contributors."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from skyasync.config import Config, load_config

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "examples" / "launch"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))


def settings_of(command: str) -> Config:
    """The configuration of a shell command that contains ``skyasync key=value ...``."""
    words = shlex.split(command.replace("\\\n", " "))
    return load_config(words[words.index("skyasync") + 1 :])


def devices(cfg: Config) -> int:
    placement = cfg.trainer.placement
    ranks = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    per_engine = cfg.generator.inference_engine_tensor_parallel_size
    return ranks + cfg.generator.num_inference_engines * per_engine


def test_the_slurm_job_uses_the_devices_that_it_requests() -> None:
    file = LAUNCH / "slurm.sbatch"
    subprocess.run(["bash", "-n", file], check=True)
    text = file.read_text()
    nodes, gpus = (
        int(re.search(rf"--{option}=(\d+)", text)[1])  # type: ignore[index]
        for option in ("nodes", "gpus-per-node")
    )
    assert devices(settings_of(text[text.index("srun") :])) == nodes * gpus


def test_the_kuberay_job_uses_the_devices_that_it_requests() -> None:
    job = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}" in PROJECT["dependencies"]
    (workers,) = cluster["workerGroupSpecs"]
    pods = [cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]]
    for pod in pods:
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    requested = int(pods[1]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    cfg = settings_of(job["spec"]["entrypoint"])
    assert devices(cfg) == workers["replicas"] * requested


def test_the_skypilot_task_uses_the_devices_that_it_requests() -> None:
    task: dict[str, Any] = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert set(task) == {"name", "resources", "workdir", "file_mounts", "setup", "run"}
    assert task["resources"]["accelerators"].endswith(f":{devices(settings_of(task['run']))}")
    check_install(task["setup"])


def check_install(command: str) -> None:
    """Of this project, with extras that exist."""
    target = shlex.split(command)[-1]
    extra = re.search(r"\[(\w+)\]", target)
    assert extra is None or extra[1] in PROJECT["optional-dependencies"]


def test_the_image_installs_the_package_as_the_installation_page_does() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (python,) = re.findall(r"^FROM python:(3\.\d+) AS base$", text, re.MULTILINE)
    assert python in PYTHONS
    assert re.findall(r"^FROM base AS (\w+)$", text, re.MULTILINE) == ["cpu", "cuda"]
    installs = re.findall(r"pip install .*", text)
    assert len(installs) == 2
    for install in installs:
        check_install(install)


def test_every_stage_of_ci_is_one_that_the_script_knows() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    job = yaml.safe_load(text)["jobs"]["stage"]
    matrix = job["strategy"]["matrix"]
    script = (ROOT / ".ci" / "run").read_text()
    assert matrix["stage"] == re.findall(r"^if runs ([a-z]+); then$", script, re.MULTILINE)
    pythons = {*matrix["python"], *(entry["python"] for entry in matrix["include"])}
    assert pythons == set(PYTHONS)


def test_an_unknown_stage_ends_with_the_stages_there_are() -> None:
    done = subprocess.run([ROOT / ".ci" / "run", "test"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "unknown stage test: style, tests, faults, recipes or wheel\n"


@pytest.mark.parametrize("name", ["AGENTS.md", "SECURITY.md"])
def test_notes_name_files_that_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    assert len(text.splitlines()) <= 60
    named = re.findall(r"\]\(([^):]+)\)", text) + re.findall(
        r"`((?:skyasync|tests|docs)/[\w/.]+)`", text
    )
    missing = [path for path in named if not (ROOT / path).exists()]
    assert named and missing == []
