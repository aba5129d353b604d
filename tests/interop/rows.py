"""Sums, as a user's data source."""


def rows():
    sums = [(a, b) for a in range(2, 6) for b in range(2)]
    return [
        {"prompt": f"{a}+{b}=", "answer": str(a + b), "reward_spec": {"ground_truth": str(a + b)}}
        for a, b in sums
    ]
