"""What plays agent programs through the endpoint, made from a configuration."""

from __future__ import annotations

from pathlib import Path

from skyasync.config.agents import ONLINE
from skyasync.config.rules import reads_behaviour
from skyasync.config.schema import Config
from skyasync.endpoint.agent_generator import AgentGenerator
from skyasync.endpoint.agent_pool import AgentPool, ray_processes
from skyasync.endpoint.online import Lobby
from skyasync.endpoint.openrlhf import agent_config
from skyasync.endpoint.server import Endpoint
from skyasync.inference.client import InferenceClient
from skyasync.processes.transient import Patience
from skyasync.rollout.rules import EpisodeRules
from skyasync.rollout.tokenizer import Tokenizer


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
    config, patience = agent_config(cfg, max_model_len), Patience.of(cfg.environment)
    processes = ray_processes(generator.agent_program, config, generator.agent_env, generator.endpoint_host, patience)
    pool = AgentPool(processes, cfg.environment.num_workers)
    return AgentGenerator(endpoint, pool, tokenizer, rules, patience, reads_behaviour=reads)
