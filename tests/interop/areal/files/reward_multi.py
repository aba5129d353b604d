"""The same with keyword arguments, which are the data set's own columns."""


def length_reward(completions: str, answer: str, source: str = "", **kwargs) -> float:
    return len(completions) % 3 / 2 + (source == "book")
