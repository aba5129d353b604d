"""TRL: settings, recipes (its programs and notebooks too), reward functions."""

from skyasync.interop.system import System

SYSTEM = System(
    "trl",
    "TRL",
    order=6,
    adapters={"reward_signature": "rewards:TrlSignature", "program": "program:read"},
    command="trl",
)
