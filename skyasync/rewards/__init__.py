"""Reward functions: text in, a number out."""

from skyasync.rewards.registry import REWARDS, quick, register
from skyasync.rewards.score import Score

__all__ = ["REWARDS", "Score", "quick", "register"]
