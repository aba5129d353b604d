"""Between our groups and SkyRL's two lists: a generator's output, and the uid of each of its rows.

Invariant: a group's prompt, versions and metrics survive the way there and back; rows with one uid are one group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from skyasync.errors import UserError
from skyasync.rollout.generator_api import generator_output, groups_from_output
from skyasync.rollout.types import GeneratorOutput, Group, Prompt, Trajectory

Listed = dict[str, Any]


def as_output(groups: Sequence[Group]) -> tuple[Listed, list[str]]:
    """Parallel lists; rewards are numbers where each trajectory earned its own at its end, else one per token."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    output: Listed = dict(generator_output(trajectories))
    uids = [str(g.prompt.id) for g in groups for t in g.trajectories for _ in t.sequences]
    if all(map(_earned_at_the_end, trajectories)):
        output["rewards"] = [trajectory.reward for trajectory in trajectories]
    if any(value != value for row in output["rollout_logprobs"] for value in row):  # a generator gave none
        del output["rollout_logprobs"]
    return output, uids


def as_groups(
    output: Mapping[str, Any], uids: Sequence[str], prompts: Mapping[str, Prompt], version: int
) -> list[Group]:
    """One group per uid, in the order in which they come.

    Raises:
        UserError: for a uid that nobody has, or lists of other lengths.
    """
    if len(uids) != len(output["response_ids"]):
        raise UserError(f"there are {len(uids)} uids for {len(output['response_ids'])} responses")
    groups = []
    for uid in dict.fromkeys(uids):
        if uid not in prompts:
            raise UserError(f"uid {uid!r} is that of no prompt of this step")
        rows = [row for row, found in enumerate(uids) if found == uid]
        part = {name: [value[row] for row in rows] for name, value in output.items() if _per_row(value, len(uids))}
        found = part.get("trajectory_ids")
        samples = len(rows) if found is None else len(dict.fromkeys(map(str, found)))
        groups += groups_from_output(cast(GeneratorOutput, part), [prompts[uid]], version, samples)
    return groups


def through(
    groups: list[Group], version: int, hook: Callable[[Listed, list[str]], tuple[Mapping[str, Any], Sequence[str]]]
) -> list[Group]:
    """The groups that a hook of theirs makes of these."""
    if not groups:
        return groups
    prompts = {str(group.prompt.id): group.prompt for group in groups}
    return as_groups(*hook(*as_output(groups)), prompts, version)


def _earned_at_the_end(trajectory: Trajectory) -> bool:
    actions = trajectory.actions
    return len(trajectory.sequences) == 1 and all(action.reward == 0.0 for action in actions[:-1])


def _per_row(value: object, rows: int) -> bool:
    return isinstance(value, list) and len(value) == rows
