"""Simulated runs of all plans with faults: the real plans, client, supervisor, generator, checkpoints and ledger.

Only the processes are simulated (``simulated_processes``). A schedule's events hit them, while ``operate`` does the
work of the program and its user: it restarts workers, and starts the same command again if it ends too early.

Invariant of a simulated run, otherwise it is reported as broken: nothing waits forever. At the end the ledger has every
prompt once, trained or failed with a reason. No step is missing or doubled. No step was trained on samples that are
staler than the plan allows. No task is left. A plan that is reproducible ends with the weights of a run without events.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from skyasync.config.schema import Config
from skyasync.errors import headline
from skyasync.observability.jsonl import read_rows
from skyasync.rollout.types import Prompt, PromptId
from skyasync.simulate.clock import run_virtual
from skyasync.trainer import RayPPOTrainer
from skyasync.trainer.extensions.prompt_ledger import audit
from skyasync.trainer.plans import PLANS
from tests.chaos.audit import unlike, wrong_prompts, wrong_steps
from tests.chaos.events import KINDS, schedule
from tests.chaos.simulated_command import Command, Virtual

REPRODUCIBLE = ("sync", "one_step_off", "streamed")
NAMES = ("sync", "one_step_off", "streamed", "fully_async", "colocated_async", "hybrid_async")
OTHER_WEIGHTS = "the weights are not those of the run without events"
CHAOS_S = 400.0  # of events; after that there are no more faults
LIMIT_S = 50_000.0
LINGER_S = 2_000.0  # seconds until tasks that wait for an answer time out
MOST_COMMANDS = 200
#: Errors that may end a command: repeated or lasting faults of processes while it starts, and flipped bits.
ENDS = re.compile(
    "^(EngineFailed|RanksFailed|Cancelled|Timeout|ProcessLost)Error|other weights than the trainer"
    "|the checkpoint of step |the process that runs the environment (was not ready|ended while it was loading)"
)
#: Kinds that have a target in simulation: a stopped program or controller would stop the clock itself.
WEIGHTS = {
    name: kind.weight
    for name, kind in KINDS.items()
    if name not in ("freeze-driver", "freeze-controller")
}


@dataclass
class Play:
    """One schedule and its result."""

    plan: str
    seed: int
    events: Counter[str] = field(default_factory=Counter)  # events that had a target
    commands: int = 0
    restarts: int = 0  # restarts of workers
    weights: str = ""  # at the end
    wrong: list[str] = field(default_factory=list)


def settings_of(seed: int, plan: str) -> tuple[Config, int]:
    """A configuration drawn from the seed, and the number of prompts."""
    chance, cfg = random.Random(f"settings {seed}"), Config()
    trainer, generator = cfg.trainer, cfg.generator
    batch, trainer.epochs, staleness = (
        chance.randint(1, 3),
        chance.randint(1, 2),
        chance.randint(0, 3),
    )
    trainer.plan, trainer.train_batch_size, trainer.max_staleness = plan, batch, staleness
    trainer.sync_interval = (
        chance.randint(1, staleness + 1) if plan in ("fully_async", "hybrid_async") else 1
    )
    trainer.placement.colocate_all = plan == "colocated_async"
    trainer.partial_rollout = chance.choice(["keep", "wait", "recompute"])
    trainer.async_queue_size = chance.randint(1, 2)
    trainer.ckpt_interval, trainer.ckpt_keep = chance.randint(1, 3), chance.choice([0, 2])
    trainer.ckpt_async, trainer.ckpt_rollouts = chance.random() < 0.5, chance.random() < 0.7
    trainer.policy_mini_batch_size = 0
    trainer.eval_before_train, trainer.allow_uncorrected, trainer.save_samples = False, True, 0
    trainer.seed = chance.randrange(1000)
    generator.n_samples_per_prompt, generator.num_inference_engines = (
        chance.randint(1, 2),
        chance.randint(1, 3),
    )
    generator.sampling_params.max_generate_length = 8
    generator.hybrid_engines = chance.randint(1, 2) if plan == "hybrid_async" else 0
    generator.max_concurrent_rollouts = chance.choice([0, batch])
    prompts = chance.randint(3, 8)
    trainer.stream_groups = chance.randint(1, batch) if plan == "streamed" else 0
    generator.sampling_params.seed = trainer.seed
    return cfg, prompts


def play(seed: int, plan: str) -> Play:
    """One schedule on one plan; ``wrong`` has the broken invariants."""
    played = _played(seed, plan, CHAOS_S)
    saves = settings_of(seed, plan)[
        0
    ].trainer.ckpt_rollouts  # else a resumed run generates them by newer weights
    if plan in REPRODUCIBLE and not played.wrong and (saves or plan != "one_step_off"):
        undisturbed = _played(seed, plan, 0.0)
        played.wrong += undisturbed.wrong
        if played.weights != undisturbed.weights:
            played.wrong.append(OTHER_WEIGHTS)
    return played


def _played(seed: int, plan: str, events_s: float) -> Play:
    played = Play(plan, seed)
    with _folder() as folder, _quiet():
        try:
            run_virtual(_operate(played, folder, events_s))
            played.wrong += _audited(played, folder / "run")
        except (
            Exception
        ) as error:  # a deadlock, an assertion, or an error that ended the command every time
            played.wrong.append(headline(error))
    return played


async def _operate(played: Play, folder: Path, events_s: float) -> None:
    cfg, rows = settings_of(played.seed, played.plan)
    prompts = [
        Prompt(PromptId(0, row), [{"role": "user", "content": chr(97 + row)}], _env())
        for row in range(rows)
    ]
    events = schedule(
        played.seed, random.Random(played.seed).choice([5.0, 20.0, 60.0]), events_s, WEIGHTS
    )
    plan = type("Virtual", (Virtual, cast(type[RayPPOTrainer], PLANS.find(played.plan))), {})
    command: Command | None = None
    striking = asyncio.create_task(_strike(played, events, lambda: command))
    try:
        async with asyncio.timeout(LIMIT_S):
            while played.commands < MOST_COMMANDS:
                played.commands += 1
                command = Command(cfg, plan, prompts, folder, seed=played.seed + played.commands)
                if await command.run():
                    played.weights = command.weights
                    break
                if not ENDS.search(said := headline(command.error or RuntimeError())):
                    played.wrong.append(
                        f"a command ended by itself by what no event explains: {said}"
                    )
                played.restarts += command.restarts
            else:
                raise RuntimeError(
                    f"{MOST_COMMANDS} times the command had ended: {command and command.error}"
                )
    finally:
        striking.cancel()
        await asyncio.gather(striking, return_exceptions=True)
    await asyncio.sleep(LINGER_S)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    played.wrong += [f"a task is left: {task.get_coro()}" for task in left]


async def _strike(played: Play, events: list[Any], command: Callable[[], Command | None]) -> None:
    loop = asyncio.get_running_loop()
    for event in events:
        await asyncio.sleep(max(0.0, event.at - loop.time()))
        target = command()
        if target is not None and target.inject(event):
            played.events[event.kind] += 1


def _audited(played: Play, folder: Path) -> list[str]:
    """Complaints on the run's files."""
    cfg, rows = settings_of(played.seed, played.plan)
    steps = [row["step"] for row in read_rows(folder / "metrics.jsonl")]
    ledger = read_rows(folder / "ledger.jsonl")
    total = -(-rows * cfg.trainer.epochs // cfg.trainer.train_batch_size)
    wrong = wrong_steps(steps) + wrong_prompts(ledger) + unlike(ledger, steps)
    if max(steps, default=0) != total:
        wrong.append(f"the last of {total} steps in the metrics is {max(steps, default=0)}")
    epochs = range(cfg.trainer.epochs)
    missing = {str(PromptId(epoch, row)) for epoch in epochs for row in range(rows)} - audit(
        ledger
    ).keys()
    return wrong + [f"prompt {name} is nowhere in the ledger" for name in sorted(missing)]


def play_all(count: int, seed: int, say: Callable[[str], None]) -> int:
    """Run ``schedules`` schedules, the plans in turn; the exit status. Prints each failure, and the sums at the end."""
    by_plan = {name: [0, 0, 0, 0] for name in NAMES}
    kinds: Counter[str] = Counter()
    broken = 0
    for number in range(count):
        played = play(seed + number, NAMES[number % len(NAMES)])
        sums = by_plan[played.plan]
        sums[0], sums[1] = sums[0] + 1, sums[1] + sum(played.events.values())
        sums[2], sums[3] = sums[2] + played.restarts, sums[3] + played.commands - 1
        kinds += played.events
        broken += bool(played.wrong)
        for line in played.wrong:
            say(f"{played.plan}, seed {played.seed}: {line}")
        if (number + 1) % 1000 == 0:
            say(f"{number + 1} schedules, {broken} of them broken")
    say(
        "| plan | schedules | events that met something | workers started again | command started again |"
    )
    for name, (schedules, events, restarts, commands) in by_plan.items():
        say(f"| {name} | {schedules} | {events} | {restarts} | {commands} |")
    say(", ".join(f"{kind} {times}" for kind, times in sorted(kinds.items())))
    say(f"{count} schedules, {broken} of them broken")
    return 1 if broken else 0


def _env() -> str:
    return "tests.chaos.simulated_processes:Turns"


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder in memory if there is enough: the run syncs its files thousands of times."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir=memory if memory.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's warnings of injected faults."""
    logger = logging.getLogger("skyasync")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)
