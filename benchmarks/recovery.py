"""The cost of a failed engine, and of a failed worker: killed in the middle of a rollout, three
times a run.

    uv run -m benchmarks.recovery [key=value ...] [--plans sync fully_async] [--backends
    transformers]

The first command's model and task, two engines. Per run in which engines are killed:

- step: median seconds of a step with both engines;
- step with a failure: seconds of the slowest step with a failure, including requests that continued
  at the other engine;
- one engine: median seconds of the steps in which one engine worked alone while the other one's
  process started (which takes CPU time from both, the more the fewer cores there are);
- recovery: seconds from the detection of the failure until the replacement engine takes requests:
  its process, imports, model, and the verified weights;
- lost: additional seconds of all steps from the failure to the recovery, compared with as many
  usual ones, per failure.

Per run in which one worker is killed, medians:

- resumes: seconds from the detection of the failure until the next rollout can begin;
- start, load: of these, seconds until the new processes have the model, and to load the checkpoint;
- first start: seconds of the command's first start of the workers, during the start of the engines;
- again: repeated steps, those since the newest checkpoint (one is saved every five steps).

Every prompt must be in the run's ledger once, and every step in its metrics.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.step_ends import step_times
from skyasync import BasePPOExp, TrainerCallback, load_config
from skyasync.config.schema import Config
from skyasync.observability.jsonl import append_rows, read_rows
from skyasync.trainer.extensions.prompt_ledger import audit

if TYPE_CHECKING:
    from skyasync.workers.dispatch import RayWorkerDispatch

KILLS = (6, 18, 30)  # after these steps
STEPS = 40
CKPT_INTERVAL = 5
DELAY_S = 0.1  # from the end of a step into the next one's rollout
ENGINE = "_EngineActor"
WORKER = "PolicyWorker"
TIMES = "times.jsonl"  # in the run's folder, if one worker is killed


class Kill(TrainerCallback):
    """Each kill once, although its step may be repeated."""

    def __init__(self, actor_class: str) -> None:
        self._actor_class = actor_class

    def on_start(self, trainer: Any) -> None:
        _note(trainer.run_dir.path, what="goes on", took_s=0.0)

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        mark = trainer.run_dir.path / f"killed-{trainer.global_step}"
        if trainer.global_step in KILLS and not mark.exists():
            mark.touch()
            threading.Timer(DELAY_S, _kill_newest, [self._actor_class]).start()


def _kill_newest(actor_class: str) -> None:
    import ray

    actors = ray._private.state.actors().values()
    running = [a for a in actors if a["ActorClassName"] == actor_class and a["State"] == "ALIVE"]
    os.kill(max(running, key=lambda actor: actor["StartTime"])["Pid"], signal.SIGKILL)


def _note(folder: Path, what: str, took_s: float) -> None:
    append_rows(folder / TIMES, [{"step": 0, "what": what, "time": time.time(), "took_s": took_s}])


class Killed(BasePPOExp):
    def __init__(self, cfg: Config, actor_class: str) -> None:
        super().__init__(cfg)
        self._actor_class = actor_class

    def get_callbacks(self) -> list[TrainerCallback]:
        return [Kill(self._actor_class)]

    def get_dispatch(self) -> RayWorkerDispatch:
        began = time.time()
        dispatch = super().get_dispatch()
        assert self.run_dir is not None
        folder = self.run_dir.path
        dispatch.start = _timed(dispatch.start, folder, "start", began)  # type: ignore[method-assign]
        dispatch.load = _timed(dispatch.load, folder, "load")  # type: ignore[method-assign]
        return dispatch


Call = Callable[..., Awaitable[None]]


def _timed(call: Call, folder: Path, what: str, began: float | None = None) -> Call:
    """Records the duration of a call, or the time since ``began`` when it returns."""

    async def timed(*args: Any) -> None:
        since = began or time.time()
        await call(*args)
        _note(folder, what, time.time() - since)

    return timed


@contextmanager
def _folder_of_a_run(
    plan: str, backend: str, actor_class: str, options: list[str]
) -> Iterator[Path]:
    """The folder of a run with every prompt and step once."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            f"trainer.plan={plan}",
            f"generator.backend={backend}",
            "generator.num_inference_engines=2",
        ]
        arguments += [
            f"trainer.runs_dir={folder}",
            "trainer.run_name=run",
            f"trainer.max_training_steps={STEPS}",
        ]
        arguments += [
            "trainer.epochs=99",
            "trainer.eval_before_train=false",
            "trainer.eval_interval=0",
        ]
        arguments += [
            "generator.max_engine_restarts=9",
            "trainer.max_restarts=9",
            "trainer.terminal=lines",
            *options,
        ]
        Killed(
            load_config(["--config", "examples/tiny/config.yaml", *arguments]), actor_class
        ).run()
        run = Path(folder, "run")
        ledger = audit(read_rows(run / "ledger.jsonl"))
        assert all(len(ends) == 1 for ends in ledger.values()), "a prompt was trained twice"
        assert [row["step"] for row in read_rows(run / "metrics.jsonl") if row["step"] > 0] == list(
            range(1, STEPS + 1)
        )
        yield run


def engines(plan: str, backend: str, options: list[str]) -> str:
    """One run in which engines are killed; its row of the table."""
    with _folder_of_a_run(plan, backend, ENGINE, options) as run:
        rows = [row for row in read_rows(run / "metrics.jsonl") if row["step"] > 0]
    took = step_times(rows)
    away = {
        row["step"] for row in rows if row.get("engines/deaths", 0) > row.get("engines/restarts", 0)
    }
    back = {row["step"] for row in rows if "engines/recovery_s" in row}
    hit = {kill + 1 for kill in KILLS}
    usual = median(
        seconds for step, seconds in took.items() if step > 3 and step not in away | back | hit
    )
    lost = sum(took[step] - usual for step in away | back | hit) / len(KILLS)
    alone = [took[step] for step in away - hit]
    recovery = ", ".join(f"{row['engines/recovery_s']:.1f}" for row in rows if row["step"] in back)
    cells = [
        f"{usual:.2f} s",
        f"{max(took[step] for step in hit):.2f} s",
        f"{median(alone):.2f} s" if alone else "-",
    ]
    return (
        f"| `{plan}` | {backend} | " + " | ".join([*cells, f"{recovery} s", f"{lost:.2f} s"]) + " |"
    )


def workers(plan: str, backend: str, options: list[str]) -> str:
    """One run in which one worker is killed; its row of the table."""
    settings = [f"trainer.ckpt_interval={CKPT_INTERVAL}", *options]
    with _folder_of_a_run(plan, backend, WORKER, settings) as run:
        noticed = [row["time"] for row in read_rows(run / "restarts.jsonl")]
        times = read_rows(run / TIMES)
    assert len(noticed) == len(KILLS)
    went_on = [row["time"] for row in times if row["what"] == "goes on"][1:]
    start, load = (
        [row["took_s"] for row in times if row["what"] == what] for what in ("start", "load")
    )
    goes_on = median(then - when for when, then in zip(noticed, went_on, strict=True))
    again = median(kill % CKPT_INTERVAL for kill in KILLS)
    seconds = (goes_on, median(start[1:]), median(load), start[0])
    return (
        f"| `{plan}` | {backend} | "
        + " | ".join(f"{each:.2f} s" for each in seconds)
        + f" | {again} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", nargs="+", default=["sync", "fully_async"])
    parser.add_argument("--backends", nargs="+", default=["transformers"])
    arguments, options = parser.parse_known_args()
    tables = {
        engines: [
            "| plan | engine | step | step with a failure | one engine | recovery | lost |",
            "|---|---|---|---|---|---|---|",
        ],
        workers: [
            "| plan | engine | resumes | start | load | first start | again |",
            "|---|---|---|---|---|---|---|",
        ],
    }
    for row, lines in tables.items():
        for backend in arguments.backends:
            lines += map(partial(row, backend=backend, options=options), arguments.plans)
    print("\n".join([*tables[engines], "", *tables[workers]]), flush=True)


if __name__ == "__main__":
    main()
