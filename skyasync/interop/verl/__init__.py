"""verl: settings, recipes, reward functions."""

from skyasync.interop.system import System

SYSTEM = System("verl", "verl", order=5, adapters={"reward_signature": "rewards:VerlSignature"})
