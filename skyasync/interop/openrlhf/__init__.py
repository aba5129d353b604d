"""OpenRLHF: settings, recipes, agent files, reward files and reward servers."""

from skyasync.interop.system import System

SYSTEM = System(
    "openrlhf",
    "OpenRLHF",
    order=2,
    adapters={
        "environment": "agent_file",
        "reward_signature": "rewards:OpenRLHFSignature",
        "remote_reward": "rewards:remote",
        "user_modules": "user_modules:stand_ins",
        "agent_file": "agent_file:settle_agent_file",
    },
    agent_program="skyasync.interop.openrlhf.agent_program:play",
)
