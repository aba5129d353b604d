"""Paths, files and models as every process of the run will find them: a cluster's processes work in another folder.

Invariant: settling twice changes nothing; what is settled here is not written to again.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from skyasync.config.keys import Keys
from skyasync.config.paths import model_path
from skyasync.config.resume import Resume
from skyasync.config.reward_models import WHERE
from skyasync.config.schema import Config
from skyasync.data.sources import absolute, absolute_all
from skyasync.errors import UserError
from skyasync.models import SCORE, VOCABULARY
from skyasync.models.config import complaints
from skyasync.preflight.model import check_model, check_one_label, check_same_tokens
from skyasync.preflight.parallel import check_axes
from skyasync.preflight.routers import check_routers
from skyasync.registry import absolute_reference
from skyasync.rewards import settings as rewards
from skyasync.rollout.tokenizer import template_text
from skyasync.workers.roles import POLICY, ROLES, TEACHER_ROLE, Role


def settle_references(cfg: Config) -> None:
    """Files by their absolute paths."""
    from skyasync.envs.adapters.openrlhf import settle_agent_file

    trainer = cfg.trainer
    settle_agent_file(cfg)
    folders: list[tuple[Any, str]] = [(trainer, "ckpt_path"), (trainer, "export_path"), (trainer.critic, "export_path")]
    for settings, name in folders:
        if getattr(settings, name):
            setattr(settings, name, str(Path(getattr(settings, name)).expanduser().resolve()))
    if folder := Resume.of(trainer).folder:
        trainer.resume_mode = str(folder.resolve())
    if cfg.data.chat_template and "{" not in cfg.data.chat_template:
        cfg.data.chat_template = str(Path(cfg.data.chat_template).expanduser().resolve())
        template_text(cfg.data.chat_template)
    for name in ("train_data", "val_data"):
        setattr(cfg.data, name, [absolute(source) for source in getattr(cfg.data, name)])
    for name, entry in cfg.data.val_sets.items():
        if isinstance(entry, dict):
            entry["data"] = absolute_all(entry["data"])
        else:
            cfg.data.val_sets[name] = absolute_all(entry)
    rewards.settle_references(cfg.environment)
    parts = [key.path for key in Keys.of(type(cfg)) if key.registry and key.open_ended]
    for path in (*parts, "trainer.eval_answer", "generator.agent_program", "environment.env_class"):
        group, _, name = path.rpartition(".")
        holder = attrgetter(group)(cfg)
        value = getattr(holder, name)
        whole = [absolute_reference(v) for v in value] if isinstance(value, list) else absolute_reference(value)
        setattr(holder, name, whole)


def settle_models(cfg: Config, wanted: Sequence[Role], *, own_tokenizer: bool) -> None:
    """Every role's model is a folder or a hub's name, and fits; where none is named it is the policy's.

    Args:
        wanted: the roles of the run, whose models are looked at.
        own_tokenizer: the experiment brings one of its own.
    """
    for name, entry in cfg.trainer.reward.models.items():
        key = f"{WHERE}.{name}.path"
        entry["path"] = model_path(entry["path"], key)
        _check_scorer(entry["path"], cfg, key)
    for role in ROLES.values():
        model = role.own_model(cfg)
        if model is None:
            continue
        named, key = model.path, f"{role.section}.model.path"
        if not named and key in role.enabled_by:
            continue  # there is none
        model.path = model_path(named, key) if named else model_path(role.model(cfg).path)
        if role not in wanted:
            continue
        own = named or role.name == POLICY
        if own:
            check_model(model.path, cfg, key=key, own_tokenizer=own_tokenizer or role.name != POLICY)
            if role.on_policys_devices(cfg):
                check_axes(cfg.trainer.parallel, model.path, key)
            if role.name == POLICY:
                check_routers(cfg.trainer.policy.router_replay, model.path, key)
        if wrong := next(complaints(model.path, model.config_kwargs, f"{role.section}.model"), ""):
            raise UserError(wrong)
        if own and role.head != VOCABULARY:
            check_one_label(model.path, key, trained=role.head == SCORE)
        if own and (role.head == SCORE or role.name == TEACHER_ROLE):
            check_same_tokens(model.path, cfg.trainer.policy.model.path, key)


def _check_scorer(path: str, cfg: Config, key: str) -> None:
    check_model(path, cfg, key=key, own_tokenizer=True)
    check_one_label(path, key, trained=True)
    check_same_tokens(path, cfg.trainer.policy.model.path, key)
