"""All public names exist, and importing them is cheap."""

import subprocess
import sys

import pytest

import skyasync


def imported(code):
    """The heavy packages that this code imports."""
    heavy = "[m for m in ('torch', 'ray', 'transformers', 'vllm', 'datasets', 'matplotlib') if m in sys.modules]"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint({heavy})"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_public_name_resolves_without_loading_torch_ray_or_transformers():
    code = "import skyasync\nfor name in skyasync.__all__: assert getattr(skyasync, name) is not None, name"
    assert imported(code) == "[]"


@pytest.mark.parametrize(
    "module",
    [
        "config",
        "registry",
        "errors",
        "trainer.plans",
        "envs",
        "inference",
        "algorithms",
        "cli.train",
    ],
)
def test_what_a_wrong_setting_passes_through_is_light(module):
    assert imported(f"import skyasync.{module}") == "[]"


def test_the_names_are_those_listed_and_no_others():
    assert set(skyasync.__all__) == set(skyasync._HOMES)
    with pytest.raises(AttributeError, match="has no attribute 'RayPPOTrainr'"):
        skyasync.RayPPOTrainr  # noqa: B018


def test_a_name_is_the_object_of_its_home():
    from skyasync.trainer import RayPPOTrainer

    assert skyasync.RayPPOTrainer is RayPPOTrainer


def test_main_can_be_called_whatever_was_imported_before():
    code = "import skyasync.cli.train\nfrom skyasync import main\n"
    code += "try: main(argv=['--help', 'ray'])\nexcept SystemExit: pass"
    assert imported(code).endswith("[]")


def test_the_first_configuration_imports_few_modules():
    """Of the library's about 350; the trainer, the engines and the weight sync are not among them."""
    code = "from skyasync.config import load_config\nload_config(['trainer.policy.model.path=x'])"
    count = "print(len([name for name in sys.modules if name.partition('.')[0] == 'skyasync']))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\n{count}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 70
