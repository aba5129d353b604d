from pathlib import Path

import pytest

import examples
from skyasync.config.load import load_config
from skyasync.data.prompts import prompts_of_run
from skyasync.registry import resolve_reference

CONFIGS = sorted(Path(examples.__file__).parent.glob("*/config.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.parent.name)
@pytest.mark.parametrize("plan", ["sync", "one_step_off"])
def test_every_example_configuration_loads_and_names_things_that_exist(file, plan):
    config = load_config(["--config", str(file)], plan=plan)
    assert callable(resolve_reference(config.trainer.policy.model.path, kind="model"))
    for source in config.data.train_data + config.data.val_data:
        assert resolve_reference(source, kind="data source")()


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.parent.name)
def test_prompts_last_for_all_steps(file):
    config = load_config(["--config", str(file)])
    rows = [
        row
        for source in config.data.train_data
        for row in resolve_reference(source, kind="data source")()
    ]
    trainer = config.trainer
    assert (
        -(-prompts_of_run(trainer, len(rows)) // trainer.train_batch_size)
        == trainer.max_training_steps
        > 0
    )
