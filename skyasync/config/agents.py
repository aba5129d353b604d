"""What an agent program or an agent file takes the place of.

Invariant: nothing here imports torch; each problem is one line that names both keys.
"""

from __future__ import annotations

from collections.abc import Iterator

from skyasync.config.schema import Config


def _plays_files(cfg: Config) -> bool:
    """It is what agent files with a loop of their own are played by, and was settled, not chosen."""
    return cfg.generator.agent_program == "skyasync.endpoint.openrlhf:play"


def check_agents(cfg: Config) -> Iterator[str]:
    """Settings that would judge what the program judges."""
    program = "" if cfg.generator.agent_func_path and _plays_files(cfg) else cfg.generator.agent_program
    others = {
        "environment.env_class": cfg.environment.env_class,
        "environment.reward_funcs": ",".join(cfg.environment.reward_funcs),
        "generator.agent_func_path": cfg.generator.agent_func_path,
    }
    for name, value in others.items():
        if program and value:
            yield (
                f"generator.agent_program={program} plays the episodes and returns their scores; {name}={value} would "
                f"have no part in it: leave one of them empty"
            )
    file, env_class = cfg.generator.agent_func_path, cfg.environment.env_class
    if file and env_class not in ("", "openrlhf"):
        yield (
            f"generator.agent_func_path={file} plays the rows that name no environment, and environment.env_class="
            f"{env_class} those too: leave one of them empty"
        )
