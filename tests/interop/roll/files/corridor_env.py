"""A gymnasium environment with discrete actions, which is not registered."""

import gymnasium


class Corridor(gymnasium.Env):
    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012
    render_mode = "ansi"

    def __init__(self, length: int = 3):
        self.length, self.place = length, 0
        self.action_space = gymnasium.spaces.Discrete(2)
        self.observation_space = gymnasium.spaces.Discrete(length)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(self.length))
        return self.place, {}

    def step(self, action):
        self.place += 1 if action == 1 else -1
        inside = 0 <= self.place < self.length
        return self.place, float(self.place >= self.length) + self.place / 8, not inside, False, {}

    def render(self):
        return "".join("x" if place == self.place else "." for place in range(self.length))
