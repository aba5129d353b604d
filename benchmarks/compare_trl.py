"""Trained samples per second, compared with TRL's ``GRPOTrainer``: same model, prompts, reward,
batch, learning rate.

    uv run --with trl==1.16.0 -m benchmarks.compare_trl [--steps 14] [--rounds 2] [--model smollm2]
    [--without-trl]

Every contender trains the tiny model on sorting with 64 prompts x 16 samples, learning rate 3e-4
(or SmolLM2-135M on one-digit addition by ``examples/smollm2``: 4 x 8, 5e-6), in a process tree of
its own that may use the whole machine. A step's time is the distance between the ends of two steps,
of TRL's and of ours, so nothing is left out, except for the first steps (compilation, cold caches)
and our last one (which overlaps with nothing, and is followed by an evaluation). Rounds alternate
the contenders, because the load of shared machines drifts; the figures are medians over all rounds.
TRL generates with its own generation (``generate`` of transformers): its colocated vLLM fails at
its own weight update on a CPU, where vLLM 0.32 packs weights after loading them. ``--without-trl``
leaves it out, if it cannot be installed. "Controller" is the rest of a step: tokenizing,
environments, batches, messages.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.step_ends import step_times

WARM_UP = 4
PHASES = ("generate", "logprobs", "update", "sync", "wait_data", "wait_generation")


@dataclass(frozen=True)
class Work:
    """The task of all contenders: ``examples.<example>``, its model and its prompts."""

    example: str
    prompts: int
    samples: int
    learning_rate: float
    response_tokens: int
    right: Callable[[str, str], bool]  # whether a response is right, given the answer

    def model(self) -> str:
        return str(import_module(f"examples.{self.example}.model").build())

    def rows(self) -> list[dict[str, Any]]:
        return import_module(f"examples.{self.example}.tasks").train_prompts()


TINY = Work("tiny", 64, 16, 3e-4, 9, lambda response, answer: response.strip() == answer)
SMOLLM2 = Work(
    "smollm2",
    4,
    8,
    5e-6,
    16,
    lambda response, answer: re.findall(r"\d+", response)[-1:] == [answer],
)


def trl_step_times(work: Work, model: str, steps: int) -> list[float]:
    """Train with TRL in this process; returns the seconds of each step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends = [time.perf_counter()]

        def on_step_end(self, *_args: object, **_kwargs: object) -> None:
            self.ends.append(time.perf_counter())

    def reward(completions: list, answer: list[str], **_: object) -> list[float]:
        return [
            float(work.right(c[0]["content"], a)) for c, a in zip(completions, answer, strict=True)
        ]

    rows = [{"prompt": r["prompt"], "answer": r["answer"]} for r in work.rows()]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            train_dataset=Dataset.from_list(rows),
            callbacks=[clock],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                learning_rate=work.learning_rate,
                lr_scheduler_type="constant",
                per_device_train_batch_size=work.prompts * work.samples,
                num_generations=work.samples,
                max_completion_length=work.response_tokens,
                temperature=1.0,
                beta=0.0,
                max_steps=steps,
                logging_strategy="no",
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
        )
        trainer.train()
    return [end - begin for begin, end in zip(clock.ends, clock.ends[1:], strict=False)]


def our_steps(
    work: Work, model: str, plan: str, steps: int, folder: str, options: list[str]
) -> list[dict[str, float]]:
    """Train with skyasync; returns the metrics of each step but the first.

    ``ends_s`` of a step is the time from the end of the step before to its own end.
    """
    arguments = [
        "--config", f"examples/{work.example}/config.yaml", f"trainer.policy.model.path={model}",
        f"trainer.plan={plan}", f"trainer.policy.optimizer_config.lr={work.learning_rate}",
        "trainer.policy.optimizer_config.scheduler=constant",
        f"trainer.train_batch_size={work.prompts}",
        f"generator.n_samples_per_prompt={work.samples}",
        f"generator.sampling_params.max_generate_length={work.response_tokens}",
        "generator.backend=transformers", f"trainer.max_training_steps={steps}", "trainer.eval_before_train=false",
        "trainer.eval_interval=0", f"trainer.runs_dir={folder}", "trainer.run_name=run", *options,
    ]  # fmt: skip
    subprocess.run(
        [sys.executable, "-m", "skyasync", *arguments], check=True, stdout=subprocess.DEVNULL
    )
    newest = max(Path(folder).glob("run*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    rows = [json.loads(line) for line in newest.read_text().splitlines()]
    times = step_times(rows)
    return [{**row, "ends_s": times[row["step"]]} for row in rows if row["step"] in times]


def trl_in_a_process(work: Work, model: str, steps: int) -> list[float]:
    command = [
        sys.executable,
        "-m",
        "benchmarks.compare_trl",
        "--trl",
        model,
        "--steps",
        str(steps),
    ]
    command += ["--model", work.example]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--model", help="smollm2, or a folder of the tiny model; by default that is made"
    )
    parser.add_argument("--without-trl", action="store_true", help="the plans alone")
    parser.add_argument("--trl", metavar="MODEL", help=argparse.SUPPRESS)
    arguments, options = parser.parse_known_args()
    work = SMOLLM2 if arguments.model == "smollm2" else TINY
    if arguments.trl:
        print(json.dumps(trl_step_times(work, arguments.trl, arguments.steps)))
        return
    if arguments.model in (None, work.example):
        model = work.model()
    else:
        model = arguments.model
    seconds: dict[str, list[float]] = {"sync": [], "one_step_off": []}
    if not arguments.without_trl:
        seconds = {"TRL": [], **seconds}
    phases: dict[str, list[dict[str, float]]] = {"sync": [], "one_step_off": []}
    for _ in range(arguments.rounds):
        if "TRL" in seconds:
            seconds["TRL"] += trl_in_a_process(work, model, arguments.steps)[WARM_UP:]
        for plan in ("sync", "one_step_off"):
            with tempfile.TemporaryDirectory() as folder:
                steps = our_steps(work, model, plan, arguments.steps, folder, options)
            steps = [step for step in steps if WARM_UP < step["step"] < arguments.steps]
            seconds[plan] += [step["ends_s"] for step in steps]
            phases[plan] += steps
    report(work, seconds, phases)


def report(
    work: Work, seconds: dict[str, list[float]], phases: dict[str, list[dict[str, float]]]
) -> None:
    console = Console()
    batch = work.prompts * work.samples
    first = next(iter(seconds))
    base = median(seconds[first])
    table = Table("", "seconds per step", "samples/s", f"times {first}")
    for name, values in seconds.items():
        table.add_row(
            name,
            f"{median(values):.2f}",
            f"{batch / median(values):.0f}",
            f"{base / median(values):.2f}",
        )
    console.print(table)
    where = Table("median seconds of a step", *phases)
    for phase in PHASES:
        where.add_row(
            phase,
            *(
                f"{median(s.get(f'time/{phase}_s', 0.0) for s in steps):.2f}"
                for steps in phases.values()
            ),
        )
    where.add_row(
        "controller", *(f"{median(map(controller_s, steps)):.2f}" for steps in phases.values())
    )
    whole = {plan: median(seconds[plan]) for plan in phases}
    where.add_row("whole step", *(f"{value:.2f}" for value in whole.values()))
    for part in ("trainer", "engines"):
        where.add_row(
            f"{part} idle",
            *(f"{median(s[f'idle/{part}'] for s in steps):.0%}" for steps in phases.values()),
        )
    console.print(where)


def controller_s(step: dict[str, float]) -> float:
    """A step's duration without its phases; generation counts if the trainer waits for it."""
    phases = (
        "logprobs",
        "update",
        "sync",
        "wait_data" if "time/wait_data_s" in step else "generate",
    )
    return step["ends_s"] - sum(step.get(f"time/{phase}_s", 0.0) for phase in phases)


if __name__ == "__main__":
    main()
