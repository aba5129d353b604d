"""A user's function in a module that is cheap to import."""


def reward_raises(response: str) -> float:
    raise KeyError("verdict")


def program_raises(data: object, base_url: str) -> float:
    return 0.0
