"""Agent programs, and what they take the place of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyasync.config.keys import key
from skyasync.other_frameworks import other_frameworks

if TYPE_CHECKING:
    from skyasync.config.schema import Config


#: What ``generator.agent_program`` says where programs outside of the run play the episodes.
ONLINE = "online"


@dataclass
class AgentsConfig:
    """The part of ``GeneratorConfig`` that is about agent programs."""

    agent_func_path: str = key("", open_ended=True)
    """An OpenRLHF agent's file, played by every row that names no env_class."""
    agent_program: str = key("", open_ended=True)
    """Agent program in place of environments, module:function or file.py:function: it is called with data, base_url and
    api_key of an OpenAI-compatible endpoint, and returns the reward. Or a class with async run(data, **extra). Or
    online: programs outside of the run open sessions and send their rewards."""
    turn_discount: float = key(1.0, above=0.0, high=1.0, when="generator.agent_program")
    """Factor of the reward of each call of an agent program, once for every call before it, where the program gives
    rewards call by call."""
    agent_env: list[str] = key([], when="generator.agent_program")
    """Environment variables that agent programs may see though their names look secret (KEY, TOKEN, ...)."""
    endpoint_host: str = key("127.0.0.1", open_ended=True, when="generator.agent_program")
    """Address that the endpoint listens on; one other than the loopback opens it."""
    endpoint_port: int = key(0, low=0, high=65535, when="generator.agent_program")
    """Port that the endpoint listens on; 0 is one of the system's choice."""
    tool_parser: str = key(
        "hermes", registry="skyasync.agents.parsers:TOOL_PARSERS", open_ended=True, when="generator.agent_program"
    )
    """How the model writes calls of tools: a family's form, vllm:NAME for one of vLLM's parsers, or module:function of
    your own, text -> (text, calls)."""
    reasoning_parser: str = key(
        "",
        choices=("",),
        registry="skyasync.agents.parsers:REASONING_PARSERS",
        open_ended=True,
        when="generator.agent_program",
    )
    """How the model writes its thinking, which the endpoint then tells apart from the reply: a family's form,
    vllm:NAME, or module:function, text -> (thinking, text); empty leaves it in the text."""


def check_agents(cfg: Config) -> Iterator[str]:
    """Settings that would reward what the program rewards, or leave an episode without an end."""
    generator, env_class = cfg.generator, cfg.environment.env_class
    file, program = generator.agent_func_path, generator.agent_program
    if program == ONLINE and not generator.episode_timeout_s:
        yield (
            "generator.agent_program=online needs generator.episode_timeout_s: a session whose program never ends it "
            "would hold up the run"
        )
    if program == ONLINE and cfg.environment.on_error == "raise":
        yield (
            "generator.agent_program=online needs environment.on_error=mask or keep: with raise, a program outside "
            "that goes away without ending its session would end the run"
        )
    if file and program in other_frameworks().agent_file_programs:  # not chosen, but settled in an earlier run
        program = ""
    others = {
        "environment.env_class": env_class,
        "environment.reward_funcs": ",".join(cfg.environment.reward_funcs),
        "generator.agent_func_path": file,
    }
    for name, value in others.items():
        if program and value:
            yield (
                f"generator.agent_program={program} plays the episodes and returns their rewards; {name}={value} would "
                f"not be used: leave one of them empty"
            )
    if file and env_class not in ("", other_frameworks().agent_file_environment):
        yield (
            f"generator.agent_func_path={file} plays the rows that name no environment, and environment.env_class="
            f"{env_class} those too: leave one of them empty"
        )
