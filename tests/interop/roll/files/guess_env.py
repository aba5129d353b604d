"""An environment with gem's interface, like ROLL's: an instruction in info, metrics with their aggregation."""

import random


class GuessEnv:
    def __init__(self, highest: int = 10, format_penalty: float = 0.0, **_):
        self.highest, self.format_penalty = highest, format_penalty
        self.number, self.tries = 0, 0

    def reset(self, seed=None):
        random.seed(seed)
        self.number, self.tries = random.randint(1, self.highest), 0
        return "Guess.", {"env_instruction": f"A number from 1 to {self.highest}."}

    def step(self, action: str):
        self.tries += 1
        valid = any(character.isdigit() for character in action)
        right = str(self.number) in action
        reward = (
            1.0 if right else (0.0 if valid else self.format_penalty * self.tries + len(action) % 2)
        )
        metrics = {"action_is_valid": valid, "success": right}
        modes = {"action_is_valid": "mean", "success": "last"}
        info = {"metrics": metrics, "metrics_agg_mode": modes, "suffix": f" ({self.tries})"}
        return f"Not {self.tries}.", reward, right, self.tries >= 3, info
