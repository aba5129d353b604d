"""What plays agent programs through the endpoint, made from a configuration."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from skyasync.config.agents import ONLINE
from skyasync.config.rules import reads_behaviour
from skyasync.config.sampling import evaluation
from skyasync.config.parts import reads_behaviour
from skyasync.config.schema import Config
from skyasync.config.schema.agents import ONLINE
from skyasync.endpoint.agent_generator import AgentGenerator
from skyasync.endpoint.agent_pool import AgentPool, ray_processes
from skyasync.endpoint.online import Lobby
from skyasync.endpoint.server import Endpoint
from skyasync.engines.client import InferenceClient
from skyasync.rollout.rules import EpisodeRules
from skyasync.rollout.tokenizer import Tokenizer, template_text
from skyasync.rollout.tokenizer import Tokenizer
from skyasync.utils.retry import RetryPolicy


def agent_generator(
    cfg: Config, tokenizer: Tokenizer, client: InferenceClient, max_model_len: int, folder: Path | None
) -> AgentGenerator:
    """Programs of processes of the run, or, with ``agent_program=online``, those that come from outside.

    Args:
        max_model_len: tokens of a prompt and its response together.
        folder: the run's, where programs from outside find the endpoint's address and key.
    """
    generator, rules, reads = cfg.generator, EpisodeRules.of(cfg), reads_behaviour(cfg.trainer.algorithm)
    lobby = Lobby(folder) if generator.agent_program == ONLINE else None
    endpoint = Endpoint(
        client,
        tokenizer,
        max_model_len,
        generator.endpoint_host,
        port=generator.endpoint_port,
        tools=generator.tool_parser,
        reasoning=generator.reasoning_parser,
        lobby=lobby,
    )
    if lobby is not None:
        return AgentGenerator(endpoint, lobby, tokenizer, rules, reads_behaviour=reads)
    config, patience = agent_config(cfg, max_model_len), RetryPolicy.of(cfg.environment)
    processes = ray_processes(generator.agent_program, config, generator.agent_env, generator.endpoint_host, patience)
    pool = AgentPool(processes, cfg.environment.num_workers)
    return AgentGenerator(endpoint, pool, tokenizer, rules, patience, reads_behaviour=reads)


def agent_config(cfg: Config, max_length: int) -> dict[str, object]:
    """What agent programs are told: the environments' settings; those that play an agent file, how the run samples."""
    config: dict[str, object] = dict(cfg.environment.env_config)
    if not cfg.generator.agent_func_path:
        return config
    template = template_text(cfg.data.chat_template) if cfg.data.chat_template else ""
    return config | {
        "tokenizer": (cfg.trainer.policy.model.path, template, json.dumps(dict(cfg.data.chat_template_kwargs))),
        "chat_template": cfg.data.apply_chat_template,
        "max_length": max_length,
        "sampling": {False: asdict(cfg.generator.sampling_params), True: asdict(evaluation(cfg.generator))},
    }
