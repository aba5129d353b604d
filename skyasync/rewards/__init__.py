"""Reward functions: text in, a number out."""

from skyasync.rewards.registry import REWARDS, quick, register
from skyasync.rewards.signature import Score

__all__ = ["REWARDS", "Score", "quick", "register"]
