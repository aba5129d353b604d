"""The ledger of a run's prompts: its steps write it, and its checkpoints save the open prompts.

Invariant: groups that are finished and not yet trained are in every checkpoint (``ckpt_rollouts``),
as the generator returned them, before any hook has changed them. A run that resumes does not
generate them again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from skyasync.arrays import TURN_TOKENS
from skyasync.callbacks import RunExtension, Watched
from skyasync.config.resume import saves
from skyasync.rollout import partial_rollouts as saved
from skyasync.rollout.generator_api import Generator, TrajectoryGenerator
from skyasync.rollout.types import Group, Prompt, PromptId, Rollout, Trajectory
from skyasync.trainer.context import RunContext

log = logging.getLogger(__name__)

# Reasons, in ``ledger.jsonl``, for prompts that were not trained.
NO_SIGNAL = "not worth training on (trainer.algorithm.dynamic_sampling)"
TRUNCATED = "no response ended by itself (trainer.algorithm.truncated_responses=drop)"
LEFT_OUT = (
    "no update was made of its step, whose numbers are not finite (trainer.on_nonfinite=skip)"
)
FAILED = "no episode reached its end (environment.on_error)"


class PromptLedger(RunExtension):
    """Follows prompts from their start to their end.

    Attributes:
        ledger: the state of each prompt, by its name.
        undone: why the current step is not counted as trained; empty if it is.
    """

    def __init__(self, context: RunContext, generator: Generator) -> None:
        self.ledger: Ledger[Group] = Ledger()
        self._generator = generator
        self._prompts = context.prompts
        self._samples = context.cfg.generator.n_samples_per_prompt
        self._saves = context.cfg.trainer.ckpt_rollouts and saves(context.cfg.trainer)
        self._ids: dict[str, PromptId] = {}  # of open prompts
        self._rejection_reasons: dict[str, str] = {}  # by name, in the current step
        # Open prompts that a plan has rejected before a step is trained.
        self._released_names: set[str] = set()
        self.undone = ""

    def start(self, prompts: Sequence[Prompt], version: int) -> dict[PromptId, Group]:
        """Note that rollouts of these prompts begin.

        Returns:
            Groups that a checkpoint had: they need no rollout.
        """
        restored_groups = {}
        for prompt in prompts:
            name = str(prompt.id)
            self._ids[name] = prompt.id
            group = self.ledger.start(name, version)
            if group is not None:
                restored_groups[prompt.id] = copy_group(group)
        return restored_groups

    def on_rollout(self, trainer: Watched, groups: Sequence[Group]) -> None:
        if not self._saves:
            return
        for group in groups:
            self.ledger.finish(str(group.prompt.id), copy_group(group))

    def reject(
        self, offered_groups: Sequence[Group], accepted_groups: Sequence[Group], reason: str
    ) -> None:
        """Note that some groups are left out of the current step.

        Args:
            offered_groups: the groups before the choice.
            accepted_groups: the groups after it.
        """
        if len(accepted_groups) >= len(offered_groups):
            return
        accepted_names = names_of(accepted_groups)
        for group in offered_groups:
            name = str(group.prompt.id)
            if name not in accepted_names:
                self._rejection_reasons[name] = reason

    def release(self, groups: Sequence[Group]) -> None:
        """Note that a plan replaces these groups.

        A checkpoint has the groups, but no version: nothing waits for them.
        """
        self._released_names |= names_of(groups)

    def undo(self, step: int, lines: Iterable[Line]) -> None:
        """Note that the models are those of that step again.

        The prompts of later steps, and of the current one, do not count as trained.

        Args:
            lines: of the run's ``ledger.jsonl``.
        """
        self.undone = f"its step was undone, back to step {step} (trainer.on_spike=rollback)"
        self.ledger.undo(trained_after(lines, step), self.undone)

    def close(self, rollout: Rollout) -> Line:
        """Close the prompts that a step has trained. Returns the line for ``ledger.jsonl``."""
        rejection_reasons = {str(identity): NO_SIGNAL for identity in rollout.rejected}
        rejection_reasons |= self._rejection_reasons
        ledger = self.ledger
        failed_names = set()
        trained: dict[str, None] = {}  # in order; a prompt may have several groups
        for group in rollout.groups:
            name = str(group.prompt.id)
            if all(trajectory.metrics.get("given_up") for trajectory in group.trajectories):
                failed_names.add(name)
            elif name not in rejection_reasons:
                trained[name] = None
        trained_names = [name for name in trained if name not in failed_names]
        ledger.close(trained_names, "given_up" if self.undone else "trained", self.undone)
        for name in sorted(rejection_reasons.keys() - failed_names):
            ledger.close([name], "rejected", rejection_reasons[name])
        ledger.close(sorted(failed_names), "given_up", FAILED)
        self._rejection_reasons = {}
        self.undone = ""
        for name in self._ids.keys() - ledger.versions.keys():
            del self._ids[name]
        self._released_names &= ledger.versions.keys()
        return ledger.line()

    def state_dict(self) -> Mapping[str, Any]:
        return self._prompts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state)

    async def save(self, folder: Path) -> None:
        """Write the open prompts into a checkpoint.

        Finished prompts have their groups, prompts in flight the tokens so far.
        """
        if not self._saves:
            return
        partial: list[Trajectory] = []
        if isinstance(self._generator, TrajectoryGenerator):
            partial = await self._generator.partial_rollouts()
        ledger = self.ledger
        if not (ledger.versions or ledger.finished):
            return
        versions = {}
        for name, version in ledger.versions.items():
            if name not in self._released_names:
                versions[self._ids[name]] = version
        # The rollout of a prompt may have finished while the generator was collecting.
        in_flight = ledger.versions.keys() - ledger.finished.keys()
        partial = [trajectory for trajectory in partial if str(trajectory.id.prompt) in in_flight]
        state = saved.RolloutState(versions, list(ledger.finished.values()), partial)
        path = folder / saved.FILE
        # A large file in a thread, so that the event loop is not blocked.
        if state.tokens < TURN_TOKENS:
            saved.write(path, state)
        else:
            await asyncio.to_thread(saved.write, path, state)

    def resume(self, folder: Path) -> None:
        """Restore a checkpoint's rollouts, if they fit this run: ``start`` returns the groups."""
        path = folder / saved.FILE
        if not self._saves or not path.exists():
            return
        state = saved.read(path, self._prompts.of_identity)
        if any(len(group.trajectories) != self._samples for group in state.groups):
            log.warning(
                "the rollouts in %s are left out and generated again: they are not of generator.n_samples_per_prompt"
                "=%d",
                folder,
                self._samples,
            )
            return
        self._ids = {}
        versions = {}
        for identity, version in state.versions.items():
            self._ids[str(identity)] = identity
            versions[str(identity)] = version
        groups = {str(group.prompt.id): group for group in state.groups}
        self.ledger.restore(versions, groups)
        log.info(
            "%d finished groups of that checkpoint will be trained as they are", len(state.groups)
        )
        if isinstance(self._generator, TrajectoryGenerator):
            self._generator.resume_from(state.partial)
            if state.partial:
                tokens = 0
                for trajectory in state.partial:
                    tokens += sum(len(action.tokens) for action in trajectory.actions)
                log.info(
                    "%d episodes of it go on from the %d tokens that they had",
                    len(state.partial),
                    tokens,
                )

    def open_positions(self, position: int, trained_early: frozenset[int]) -> dict[int, int]:
        """The open prompts: position in the stream -> the version that started the prompt.

        Args:
            position: all prompts before it have been trained.
            trained_early: positions of prompts after it that have been trained too.
        """
        open_versions = dict(self.ledger.versions)
        versions = {}
        for index in range(position, self._prompts.total):
            if not open_versions:
                break
            if index in trained_early:
                continue
            name = str(self._prompts.prompt(index).id)
            if name in open_versions:
                versions[index] = open_versions.pop(name)
        return versions


def names_of(groups: Sequence[Group]) -> set[str]:
    """The names of the groups' prompts."""
    return {str(group.prompt.id) for group in groups}


def copy_group(group: Group) -> Group:
    """Copy a group as it is now: a hook may set a reward or replace a segment.

    Arrays are shared: they are never changed.
    """
    return Group(group.prompt, [trajectory.copy() for trajectory in group.trajectories])


G = TypeVar("G")  # what a finished prompt has become
End = Literal["trained", "rejected", "given_up"]
Line = dict[str, object]
UNDONE = "undone"  # in a line: prompts that earlier lines have as trained


@dataclass
class Ledger(Generic[G]):
    """The state of every prompt of one run, by name (epoch and row): its owner, and its end.

    ```
     (stream) ──start──▶ in flight ──finish──▶ finished ──close──▶ trained | rejected | given up
    ```

    | state     | owned by                                | what becomes of it when its owner fails                  |
    |-----------|-----------------------------------------|----------------------------------------------------------|
    | (stream)  | the position in the prompt stream,      | it is a number in every checkpoint                       |
    |           | until the plan admits it                |                                                          |
    | in flight | the generator's task                    | an engine or environment: another one continues it; a    |
    |           |                                         | rank, the controller, the program: the resumed run has   |
    |           |                                         | the tokens that the checkpoint holds, or generates it    |
    |           |                                         | again                                                    |
    | finished  | this ledger, and the plan's buffer      | the checkpoint holds the group; the resumed run trains it|
    | closed    | the step that trained or rejected it    | a step half done is not counted: it is made again from   |
    |           |                                         | the checkpoint before it                                 |

    Pure: no asyncio, no I/O. A prompt is open from its start to its close and is in one state at a
    time. A resumed run gets the open prompts of the checkpoint back exactly once.

    Attributes:
        versions: open prompt -> the policy version when it was started.
        finished: open prompt -> its complete group, also of prompts that a checkpoint had.
    """

    versions: dict[str, int] = field(default_factory=dict)
    finished: dict[str, G] = field(default_factory=dict)
    # Restored from a checkpoint, and not started in this run.
    _restored_names: set[str] = field(default_factory=set)
    # Since the previous line: end -> name -> reason.
    _closed_names: dict[str, dict[str, str]] = field(default_factory=dict)

    def start(self, name: str, version: int) -> G | None:
        """Start a prompt: it is in flight. Returns its group if an earlier run had finished it."""
        self.versions.setdefault(name, version)
        if name not in self._restored_names:
            return None
        self._restored_names.remove(name)
        return self.finished[name]

    def finish(self, name: str, group: G) -> None:
        """The prompt's group is complete."""
        if name in self.versions:
            self.finished[name] = group

    def close(self, names: Iterable[str], end: End, reason: str = "") -> None:
        """Note how prompts ended; also prompts that were never started here.

        A plan may have them from another source.
        """
        for name in names:
            self.versions.pop(name, None)
            self.finished.pop(name, None)
            self._restored_names.discard(name)
            self._closed_names.setdefault(end, {})[name] = reason

    def undo(self, names: Iterable[str], reason: str) -> None:
        """Note that the steps that trained these prompts have been undone."""
        self._closed_names.setdefault(UNDONE, {}).update(dict.fromkeys(names, reason))

    def line(self) -> Line:
        """The prompts that have ended since the previous call: end -> names, or name -> reason."""
        line: Line = {}
        for end, reasons in self._closed_names.items():
            if any(reasons.values()):
                line[end] = dict(reasons)
            elif reasons:
                line[end] = list(reasons)
        self._closed_names = {}
        return line

    def restore(self, versions: Mapping[str, int], finished: Mapping[str, G]) -> None:
        """Restore the open prompts of a checkpoint."""
        self.versions = dict(versions)
        self.finished = dict(finished)
        self._restored_names = set(finished)


def audit(lines: Iterable[Mapping[str, object]]) -> dict[str, list[str]]:
    """Every prompt of a ``ledger.jsonl`` -> how it ended, as ``end@step``.

    A correct ledger has one entry for each prompt.
    """
    outcomes: dict[str, list[str]] = {}
    for line in lines:
        step = line["step"]
        for name in _names_in(line, UNDONE):
            undone = [end for end in outcomes.get(name, []) if not end.startswith("trained@")]
            outcomes[name] = [*undone, f"given_up@{step}"]
        for end in ("trained", "rejected", "given_up"):
            for name in _names_in(line, end):
                outcomes.setdefault(name, []).append(f"{end}@{step}")
    return outcomes


def _names_in(line: Mapping[str, object], end: str) -> list[str]:
    names = line.get(end)
    if not isinstance(names, Mapping | list):
        return []
    return [str(name) for name in names]


def trained_after(lines: Iterable[Mapping[str, object]], step: int) -> list[str]:
    """The prompts that steps after this one have trained, unless that was undone."""
    names = []
    for name, outcomes in audit(lines).items():
        for outcome in outcomes:
            end, _, trained_step = outcome.partition("@")
            if end == "trained" and int(trained_step) > step:
                names.append(name)
    return names
