"""Trained samples per second beside TRL's ``GRPOTrainer``: same model, prompts, reward, batch and learning rate.

    uv run --with trl==1.16.0 -m benchmarks.compare_trl [--steps 14] [--rounds 2]

Every contender trains the tiny model on sorting with 64 prompts x 16 samples, learning rate 3e-4, in a process
tree of its own that may use the whole machine. A step's time is the distance between the ends of two steps, so
nothing is left out; the first steps (compilation, warm caches) are. Rounds alternate the contenders, because
shared machines drift; the figures are medians over all rounds. TRL generates with its own generation (``generate``
of transformers): its colocated vLLM does not survive its own weight update on a CPU, where vLLM 0.32 packs weights
after loading them. "Controller" is what remains of a step: tokenising, environments, batches, messages.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

PROMPTS, SAMPLES, LEARNING_RATE = 64, 16, 3e-4
RESPONSE_TOKENS = 9
WARM_UP = 4
PHASES = ("generate", "logprobs", "update", "sync", "wait_data", "wait_generation")


def trl_step_times(model: str, steps: int) -> list[float]:
    """Train with TRL in this process; returns the seconds of each step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from examples.tiny.tasks import train_prompts

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends = [time.perf_counter()]

        def on_step_end(self, *_args: object, **_kwargs: object) -> None:
            self.ends.append(time.perf_counter())

    def reward(completions: list, answer: list[str], **_: object) -> list[float]:
        return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]

    rows = [{"prompt": r["prompt"], "answer": r["answer"]} for r in train_prompts()]
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
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                per_device_train_batch_size=PROMPTS * SAMPLES,
                num_generations=SAMPLES,
                max_completion_length=RESPONSE_TOKENS,
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


def our_steps(model: str, plan: str, steps: int, folder: str, options: list[str]) -> list[dict[str, float]]:
    """Train with skyasync; returns the metrics of each step."""
    arguments = [
        "--config", "examples/tiny/config.yaml", f"trainer.policy.model.path={model}", f"trainer.plan={plan}",
        f"trainer.policy.optimizer_config.lr={LEARNING_RATE}", "trainer.policy.optimizer_config.scheduler=constant",
        f"trainer.train_batch_size={PROMPTS}",
        f"generator.n_samples_per_prompt={SAMPLES}", f"generator.sampling_params.max_generate_length={RESPONSE_TOKENS}",
        "generator.backend=transformers", f"trainer.max_training_steps={steps}", "trainer.eval_before_train=false",
        "trainer.eval_interval=0", f"trainer.runs_dir={folder}", "trainer.run_name=run", *options,
    ]  # fmt: skip
    subprocess.run([sys.executable, "-m", "skyasync", *arguments], check=True, stdout=subprocess.DEVNULL)
    newest = max(Path(folder).glob("run*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    rows = [json.loads(line) for line in newest.read_text().splitlines()]
    return [row for row in rows if row["step"] > 0]


def trl_in_a_process(model: str, steps: int) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.compare_trl", "--trl", model, "--steps", str(steps)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--model", help="folder of the tiny model; by default it is made")
    parser.add_argument("--trl", metavar="MODEL", help=argparse.SUPPRESS)
    arguments, options = parser.parse_known_args()
    if arguments.trl:
        print(json.dumps(trl_step_times(arguments.trl, arguments.steps)))
        return
    from examples.tiny.model import build

    model = arguments.model or str(build())
    seconds: dict[str, list[float]] = {"TRL": [], "sync": [], "one_step_off": []}
    phases: dict[str, list[dict[str, float]]] = {"sync": [], "one_step_off": []}
    for _ in range(arguments.rounds):
        seconds["TRL"] += trl_in_a_process(model, arguments.steps)[WARM_UP:]
        for plan in ("sync", "one_step_off"):
            with tempfile.TemporaryDirectory() as folder:
                steps = our_steps(model, plan, arguments.steps, folder, options)[WARM_UP:-1]
            seconds[plan] += [step["time/step_s"] for step in steps]
            phases[plan] += steps
    report(seconds, phases)


def report(seconds: dict[str, list[float]], phases: dict[str, list[dict[str, float]]]) -> None:
    console, batch = Console(), PROMPTS * SAMPLES
    base = median(seconds["TRL"])
    table = Table("", "seconds per step", "samples/s", "times TRL")
    for name, values in seconds.items():
        table.add_row(name, f"{median(values):.2f}", f"{batch / median(values):.0f}", f"{base / median(values):.2f}")
    console.print(table)
    where = Table("median seconds of a step", *phases)
    for phase in PHASES:
        where.add_row(
            phase, *(f"{median(s.get(f'time/{phase}_s', 0.0) for s in steps):.2f}" for steps in phases.values())
        )
    where.add_row("controller", *(f"{median(map(controller_s, steps)):.2f}" for steps in phases.values()))
    whole = {plan: median(seconds[plan]) for plan in phases}
    where.add_row("whole step", *(f"{value:.2f}" for value in whole.values()))
    for part in ("trainer", "engines"):
        where.add_row(f"{part} idle", *(f"{median(s[f'idle/{part}'] for s in steps):.0%}" for steps in phases.values()))
    console.print(where)


def controller_s(step: dict[str, float]) -> float:
    """What a step took beside its phases; generation counts where the trainer waits for it."""
    phases = ("logprobs", "update", "sync", "wait_data" if "time/wait_data_s" in step else "generate")
    return step["time/step_s"] - sum(step.get(f"time/{phase}_s", 0.0) for phase in phases)


if __name__ == "__main__":
    main()
