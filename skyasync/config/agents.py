"""What an agent program or an agent file takes the place of.

Invariant: nothing here imports torch; each problem is one line that names both keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from skyasync.config.schema import Config
from skyasync.other_frameworks import other_frameworks

#: What ``generator.agent_program`` says where programs outside of the run play the episodes.
ONLINE = "online"


def check_agents(cfg: Config) -> Iterator[str]:
    """Settings that would judge what the program judges, or leave an episode without an end."""
    if cfg.generator.agent_program == ONLINE:
        yield from _check_online(cfg)
    file, program, env_class = cfg.generator.agent_func_path, cfg.generator.agent_program, cfg.environment.env_class
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
                f"generator.agent_program={program} plays the episodes and returns their scores; {name}={value} would "
                f"have no part in it: leave one of them empty"
            )
    if file and env_class not in ("", other_frameworks().agent_file_environment):
        yield (
            f"generator.agent_func_path={file} plays the rows that name no environment, and environment.env_class="
            f"{env_class} those too: leave one of them empty"
        )


def _check_online(cfg: Config) -> Iterator[str]:
    if not cfg.generator.episode_timeout_s:
        yield (
            "generator.agent_program=online needs generator.episode_timeout_s: a session whose program never ends it "
            "would hold up the run"
        )
    if cfg.environment.on_error == "raise":
        yield (
            "generator.agent_program=online needs environment.on_error=mask or keep: with raise, a program outside "
            "that goes away without ending its session would end the run"
        )
