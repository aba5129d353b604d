"""AReaL: settings, recipes, reward functions and agents."""

from skyasync.interop.system import System

SYSTEM = System(
    "areal",
    "AReaL",
    order=4,
    adapters={"reward_signature": "adapters:ArealSignature", "agent_class": "adapters:program_of"},
)
