"""The ledger of a run's prompts, as its steps write it and its checkpoints keep it.

Invariant: groups that are finished and not yet trained are in every checkpoint (``ckpt_rollouts``),
as the generator gave them, before any hook has changed them. A run that resumes does not generate
them again.
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
from skyasync.rollout.types import Group, Prompt, PromptId, Rollout
from skyasync.trainer.context import RunContext

log = logging.getLogger(__name__)

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
        undone: why the current step, and those since a checkpoint, count for nothing; empty if they
            count.
    """

    def __init__(self, context: RunContext, generator: Generator) -> None:
        self.ledger: Ledger[Group] = Ledger()
        self._generator = generator
        self._prompts = context.prompts
        self._samples = context.cfg.generator.n_samples_per_prompt
        self._saves = context.cfg.trainer.ckpt_rollouts and saves(context.cfg.trainer)
        self._ids: dict[str, PromptId] = {}  # of open prompts
        self._rejected: dict[str, str] = {}  # in the current step, and why
        self._released: set[str] = (
            set()
        )  # open prompts that a plan has rejected, without waiting for the step
        self.undone = ""

    def start(self, prompts: Sequence[Prompt], version: int) -> dict[PromptId, Group]:
        """Note that these are rolled out now. Returns the groups that a checkpoint had, which need
        no rollout."""
        self._ids |= {str(prompt.id): prompt.id for prompt in prompts}
        groups = {prompt.id: self.ledger.start(str(prompt.id), version) for prompt in prompts}
        return {
            identity: copy_group(group) for identity, group in groups.items() if group is not None
        }

    def on_rollout(self, trainer: Watched, groups: Sequence[Group]) -> None:
        for group in groups if self._saves else ():
            self.ledger.finish(str(group.prompt.id), copy_group(group))

    def reject(self, before: Sequence[Group], after: Sequence[Group], why: str) -> None:
        """Note that some groups are left out of the current step: those of ``before`` that are not
        in ``after``."""
        if len(after) < len(before):
            left = {str(group.prompt.id) for group in after}
            self._rejected |= {
                name: why for group in before if (name := str(group.prompt.id)) not in left
            }

    def release(self, groups: Sequence[Group]) -> None:
        """Note that a plan replaces these. A checkpoint keeps the groups, but no version: nothing
        waits for them."""
        self._released |= {str(group.prompt.id) for group in groups}

    def undo(self, step: int, lines: Iterable[Line]) -> None:
        """The models are what they were after that step again, and so the current step trains
        nothing either.

        Args:
            lines: of the run's ``ledger.jsonl``.
        """
        self.undone = f"its step was undone, back to step {step} (trainer.on_spike=rollback)"
        self.ledger.undo(trained_after(lines, step), self.undone)

    def close(self, rollout: Rollout) -> Line:
        """Close the prompts that a step has trained. Returns the line for ``ledger.jsonl``."""
        failed = {
            str(group.prompt.id)
            for group in rollout.groups
            if all(trajectory.metrics.get("given_up") for trajectory in group.trajectories)
        }
        rejected = {str(identity): NO_SIGNAL for identity in rollout.rejected} | self._rejected
        trained = {str(group.prompt.id): None for group in rollout.groups}
        others = [name for name in trained if name not in failed and name not in rejected]
        self.ledger.close(others, "given_up" if self.undone else "trained", self.undone)
        for name in sorted(rejected.keys() - failed):
            self.ledger.close([name], "rejected", rejected[name])
        self.ledger.close(sorted(failed), "given_up", FAILED)
        self._rejected = {}
        self.undone = ""
        self._ids = {
            name: identity for name, identity in self._ids.items() if name in self.ledger.versions
        }
        self._released &= self.ledger.versions.keys()
        return self.ledger.line()

    def state_dict(self) -> Mapping[str, Any]:
        return self._prompts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._prompts.load_state_dict(state)

    async def save(self, folder: Path) -> None:
        """Write the open prompts into a checkpoint: finished groups, and the tokens so far of those
        in flight."""
        if not self._saves:
            return
        if isinstance(self._generator, TrajectoryGenerator):
            partial = await self._generator.partial_rollouts()
        else:
            partial = []
        if not (self.ledger.versions or self.ledger.finished):
            return
        waited_for = self.ledger.versions.keys() - self._released
        versions = {
            self._ids[name]: v for name, v in self.ledger.versions.items() if name in waited_for
        }
        in_flight = self.ledger.versions.keys() - self.ledger.finished.keys()
        partial = [trajectory for trajectory in partial if str(trajectory.id.prompt) in in_flight]
        state = saved.RolloutState(versions, list(self.ledger.finished.values()), partial)
        if state.tokens < TURN_TOKENS:
            saved.write(folder / saved.FILE, state)
        else:
            await asyncio.to_thread(saved.write, folder / saved.FILE, state)

    def resume(self, folder: Path) -> None:
        """Take over a checkpoint's rollouts, if they fit this run: ``start`` gives the groups
        back."""
        if not self._saves or not (folder / saved.FILE).exists():
            return
        state = saved.read(folder / saved.FILE, self._prompts.of_identity)
        if any(len(group.trajectories) != self._samples for group in state.groups):
            log.warning(
                "the rollouts in %s are left out and generated again: they are not of generator.n_samples_per_prompt"
                "=%d",
                folder,
                self._samples,
            )
            return
        self._ids = {str(identity): identity for identity in state.versions}
        groups = {str(group.prompt.id): group for group in state.groups}
        self.ledger.restore(
            {str(identity): version for identity, version in state.versions.items()}, groups
        )
        log.info(
            "%d finished groups of that checkpoint will be trained as they are", len(state.groups)
        )
        if isinstance(self._generator, TrajectoryGenerator):
            self._generator.resume_from(state.partial)
            if state.partial:
                tokens = sum(
                    len(action.tokens) for each in state.partial for action in each.actions
                )
                log.info(
                    "%d episodes of it go on from the %d tokens that they had",
                    len(state.partial),
                    tokens,
                )

    def open_positions(self, position: int, trained_early: frozenset[int]) -> dict[int, int]:
        """Where the open prompts are in the stream, from ``position`` on, and the version when each
        was started."""
        left = dict(self.ledger.versions)
        versions = {}
        for each in range(position, self._prompts.total):
            if not left:
                break
            if each not in trained_early and (name := str(self._prompts.prompt(each).id)) in left:
                versions[each] = left.pop(name)
        return versions


def copy_group(group: Group) -> Group:
    """The group as it is now: a hook may set a reward or replace a segment; arrays are never
    changed, and shared."""
    return Group(group.prompt, [trajectory.copy() for trajectory in group.trajectories])


G = TypeVar("G")  # what a finished prompt has become
End = Literal["trained", "rejected", "given_up"]
Line = dict[str, object]
UNDONE = "undone"  # in a line: prompts that earlier lines have as trained


@dataclass
class Ledger(Generic[G]):
    """The state of every prompt of one run, who owns it, and how each one ended; by name (epoch and
    row).

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
    time; what a checkpoint keeps of the open ones is exactly what a resumed run is given back,
    once.

    Attributes:
        versions: open prompt -> the policy version when it was started.
        finished: those whose group is complete, and the group; those that a checkpoint had among
            them.
    """

    versions: dict[str, int] = field(default_factory=dict)
    finished: dict[str, G] = field(default_factory=dict)
    _not_requested: set[str] = field(default_factory=set)  # finished in the run before
    _ended: dict[str, dict[str, str]] = field(
        default_factory=dict
    )  # since the last line: name -> why

    def start(self, name: str, version: int) -> G | None:
        """A prompt is requested. Its group, if the run before had finished it; else it is in flight
        from here on."""
        self.versions.setdefault(name, version)
        if name not in self._not_requested:
            return None
        self._not_requested.remove(name)
        return self.finished[name]

    def finish(self, name: str, group: G) -> None:
        """Its group is complete."""
        if name in self.versions:
            self.finished[name] = group

    def close(self, names: Iterable[str], end: End, reason: str = "") -> None:
        """Note how they ended. One that was never started (a plan has it from another source) is
        counted too."""
        for name in names:
            self.versions.pop(name, None)
            self.finished.pop(name, None)
            self._not_requested.discard(name)
            self._ended.setdefault(end, {})[name] = reason

    def undo(self, names: Iterable[str], reason: str) -> None:
        """The steps that trained them have been undone, and their data is not trained another
        time."""
        self._ended.setdefault(UNDONE, {}).update(dict.fromkeys(names, reason))

    def line(self) -> Line:
        """The prompts that have ended since the last call, by end: their names, with a reason if
        one is known."""
        ended = {end: names for end, names in self._ended.items() if names}
        self._ended = {}
        return {
            end: dict(names) if any(names.values()) else list(names) for end, names in ended.items()
        }

    def restore(self, versions: Mapping[str, int], finished: Mapping[str, G]) -> None:
        """Take over the open prompts of a checkpoint."""
        self.versions = dict(versions)
        self.finished = dict(finished)
        self._not_requested = set(finished)


def audit(lines: Iterable[Mapping[str, object]]) -> dict[str, list[str]]:
    """Every prompt of a ``ledger.jsonl`` and how it ended, as ``end@step``; more than one entry is
    one too many."""
    outcomes: dict[str, list[str]] = {}
    for line in lines:
        names = {
            end: [str(n) for n in value]
            for end, value in line.items()
            if isinstance(value, Mapping | list)
        }
        for name in names.get(UNDONE, ()):
            outcomes[name] = [
                end for end in outcomes.get(name, []) if not end.startswith("trained@")
            ]
            outcomes[name].append(f"given_up@{line['step']}")
        for end in ("trained", "rejected", "given_up"):
            for name in names.get(end, ()):
                outcomes.setdefault(name, []).append(f"{end}@{line['step']}")
    return outcomes


def trained_after(lines: Iterable[Mapping[str, object]], step: int) -> list[str]:
    """The prompts that steps after this one have trained, if that has not been undone."""
    by_name = (
        (name, outcome.partition("@"))
        for name, outcomes in audit(lines).items()
        for outcome in outcomes
    )
    return [name for name, (end, _, when) in by_name if end == "trained" and int(when) > step]
