"""A checked configuration can be read and copied, and not written to."""

import pickle
from copy import deepcopy
from dataclasses import asdict, replace

import pytest

from skyasync.config.frozen import FrozenConfigError, freeze
from skyasync.config.load import dump_config, load_config
from skyasync.config.schema import Config
from skyasync.errors import UserError


def settled() -> Config:
    cfg = load_config(["trainer.policy.model.path=x", "environment.env_config.deep={a: [1]}"])
    freeze(cfg)
    return cfg


def test_a_write_names_the_key_and_where_it_is_set():
    with pytest.raises(UserError) as caught:
        settled().trainer.algorithm.eps_clip_low = 0.5
    line = str(caught.value)
    assert "\n" not in line and line.startswith(
        "trainer.algorithm.eps_clip_low cannot be changed any more"
    )
    assert "trainer.algorithm.eps_clip_low=VALUE" in line and "before super().prepare()" in line


def test_groups_as_a_whole_and_names_that_are_no_keys_are_refused():
    cfg = settled()
    with pytest.raises(FrozenConfigError, match=r"^trainer cannot"):
        cfg.trainer = Config().trainer
    with pytest.raises(FrozenConfigError, match=r"^data.note cannot"):
        cfg.data.note = 1
    with pytest.raises(FrozenConfigError, match=r"^generator.backend cannot"):
        del cfg.generator.backend


def test_it_reads_as_before():
    cfg, free = (
        settled(),
        load_config(["trainer.policy.model.path=x", "environment.env_config.deep={a: [1]}"]),
    )
    assert cfg == free and asdict(cfg) == asdict(free) and dump_config(cfg) == dump_config(free)


@pytest.mark.parametrize("copied", [deepcopy, lambda cfg: pickle.loads(pickle.dumps(cfg))])
def test_a_copy_is_free(copied):
    cfg = settled()
    copy = copied(cfg)
    copy.trainer.max_staleness = 7
    copy.data.train_data.append("more")
    copy.environment.env_config["deep"]["b"] = 2
    assert cfg.trainer.max_staleness == 1 and cfg.environment.env_config == {"deep": {"a": [1]}}
    assert replace(cfg.trainer, max_staleness=3).max_staleness == 3


def test_freezing_twice_changes_nothing():
    cfg = settled()
    freeze(cfg)
    with pytest.raises(FrozenConfigError, match=r"^data.train_data cannot"):
        cfg.data.train_data = ["x"]
