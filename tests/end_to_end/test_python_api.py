"""Training from Python: real runs from a script and from a notebook, and every form of the arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from datasets import Dataset
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

from skyasync import AsyncRayPPOTrainer, BaseTextEnv, train
from skyasync.observability import TRACKERS
from skyasync.registry import user_parts
from skyasync.rewards import REWARDS
from skyasync.run.experiment import BasePPOExp
from tests.docs.pages import blocks
from tests.end_to_end.parts import Sevens, train_prompts
from tests.end_to_end.runs import SETTINGS, outside_environment
from tests.examples.test_quickstart_notebook import _ThisPython

pytestmark = pytest.mark.slow

ROWS: list[dict[str, Any]] = [
    {"prompt": row["prompt"][0]["content"], "answer": "7"} for row in train_prompts()
]
SMALL = {
    key: value
    for key, value in SETTINGS.items()
    if key not in ("environment.env_class", "data.train_data")
}

#: Without a guard, and with all that it passes defined in the program itself.
SCRIPT = """
import json
import random

from skyasync import rollouts, train

rows = [{{"prompt": f"Sort: {{number}}", "wish": "7"}} for number in range(16)]
settings = {settings!r}


def reward(response, wish):
    return response[:7].count(wish) / 7


result = train({model!r}, rows, reward, steps=10, settings=settings)
episodes = rollouts(result.model, rows[:2], reward, settings=settings)
print(json.dumps([
    [row["reward/mean"] for row in result.history], result.metrics["reward/mean"], str(result.model),
    [(episode["response"], episode["reward"]) for episode in episodes],
]))
"""

CELLS = [
    """
import json, os, signal
from skyasync import EarlyStopping, TrainerCallback, evaluate, train

rows = [{"prompt": f"Sort: {number}", "wish": "7"} for number in range(16)]
program = os.getpid()

def sevens(response, wish):
    return response[:7].count(wish) / 7

class Interrupt(TrainerCallback):
    def on_step_end(self, trainer, metrics):
        metrics["mine/steps"] = trainer.global_step
        if trainer.global_step == 2:
            os.kill(program, signal.SIGINT)

class File:
    def log(self, metrics, step):
        with open("logged", "a") as file:
            file.write(f"{step}\\n")

    def close(self):
        pass
""",
    """
stopped = False
try:
    train(model, rows, sevens, steps=1000, settings=settings, callbacks=[Interrupt()])
except KeyboardInterrupt:
    stopped = True
import ray
assert stopped and not ray.is_initialized()
""",
    """
result = train(model, rows, {sevens: 1.0, "exact_match": 0.0}, plan="one_step_off", steps=10,
               settings={**settings, "trainer.run_name": "whole", "data.label_key": "wish"}, tracker=File())
rewards = [row["reward/mean"] for row in result.history]
assert len(rewards) == 10 and sum(rewards[-3:]) > sum(rewards[:3]), rewards
assert open("logged").read().split()[-1] == "10"
assert 0 < result.metrics["env/sevens"] <= 1
""",
    """
(text,) = result.generate(["Sort: 312"])
before, after = (evaluate(each, rows, sevens, settings=settings)["eval/score"] for each in (model, result.model))
assert "7" in text and after > before, (text, before, after)
""",
]


@pytest.mark.recipe
def test_a_script_without_a_guard_trains_and_its_reward_rises(
    tmp_path: Path, models: dict[str, str]
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(model=models["tied"], settings=SMALL))
    rewards, last, model, episodes = json.loads(_output(tmp_path, "script.py"))
    assert len(rewards) == 10 and rewards[-1] == last
    assert sum(rewards[-3:]) > sum(rewards[:3]), rewards
    assert (Path(model) / "model.safetensors").is_file() and Path(
        model
    ) == tmp_path / "runs" / "run" / "model"
    assert len(episodes) == 8 and all(
        reward == text[:7].count("7") / 7 for text, reward in episodes
    )


@pytest.mark.recipe
def test_the_readmes_lines_train(tmp_path: Path, models: dict[str, str]) -> None:
    of_page = {
        b.page.name: b.text
        for b in blocks()
        if b.language == "python" and "import train\n\nrows = " in b.text
    }
    assert of_page.keys() >= {"README.md", "python_api.md"}
    assert of_page["python_api.md"].startswith(of_page["README.md"])
    program = of_page["python_api.md"].replace('"Qwen/Qwen2.5-0.5B-Instruct"', repr(models["tied"]))
    (tmp_path / "readme.py").write_text(
        program.replace("steps=100", f"steps=2, settings={SMALL!r}")
    )
    (response,) = literal_eval(_output(tmp_path, "readme.py"))
    assert isinstance(response, str)
    assert len((tmp_path / "runs" / "run" / "metrics.jsonl").read_text().splitlines()) == 2


def _output(folder: Path, program: str) -> str:
    """The last line of its output."""
    return _printed(folder, program).splitlines()[-1]


def _printed(folder: Path, program: str) -> str:
    ended = subprocess.run(
        [sys.executable, program],
        cwd=folder,
        env=outside_environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


#: A reward that is the same for every response.
CONSTANT = """
import json

from skyasync import train

rows = [{{"prompt": f"Sort: {{number}}"}} for number in range(16)]
result = train({model!r}, rows, lambda response: 1.0, steps=12, settings={settings!r})
print(json.dumps([alarm.name for alarm in result.alarms]))
"""


@pytest.mark.recipe
def test_a_run_that_learns_nothing_says_so_while_it_runs_at_its_end_and_in_its_result(
    tmp_path: Path, models: dict[str, str]
) -> None:
    (tmp_path / "constant.py").write_text(CONSTANT.format(model=models["tied"], settings=SMALL))
    output = _printed(tmp_path, "constant.py")
    assert json.loads(output.splitlines()[-1])[0] == "groups_equal"
    alarm = "alarm: In 100% of the groups all samples have the same reward"
    during, _, end = output.partition("where the time of training goes")
    lines = [line for line in during.splitlines() if line.startswith("alarm: ")]
    assert len(lines) == 1 and lines[0].startswith(alarm)
    assert alarm in " ".join(end.split())
    assert "would overlap" not in output and "bottleneck" not in output


@pytest.mark.recipe
def test_a_notebook_stops_a_cell_and_trains_again(
    tmp_path: Path, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in outside_environment().items():
        monkeypatch.setenv(name, value)
    settings = {key: value for key, value in SMALL.items() if key != "trainer.run_name"}
    given = f"model, settings = {models['tied']!r}, {settings!r}"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell) for cell in (given, *CELLS)]
    )
    manager = AsyncKernelManager(kernel_spec_manager=_ThisPython())
    NotebookClient(
        notebook, km=manager, timeout=280, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    stopped = [path for path in (tmp_path / "runs").iterdir() if path.name != "whole"]
    assert [len((path / "metrics.jsonl").read_text().splitlines()) < 10 for path in stopped] == [
        True
    ]


# ---------------------------------------------------------------- the forms of the arguments


class Prepared(Exception):
    """Has the experiment that would have run."""


@pytest.fixture
def prepared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, models: dict[str, str]
) -> Callable[..., Any]:
    """``train``, which returns the experiment instead of running it, and the components registered meanwhile."""

    def run(self: BasePPOExp) -> None:
        self.prepare()
        raise Prepared(self, user_parts())

    def call(**arguments: Any) -> Any:
        before = user_parts()
        with pytest.raises(Prepared) as found:
            train(
                models["tied"],
                settings=SMALL,
                **{"prompts": ROWS, "reward": "exact_match", **arguments},
            )
        assert user_parts() == before
        return found.value.args

    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    monkeypatch.setattr(BasePPOExp, "run", run)
    monkeypatch.setitem(SMALL, "data.label_key", "answer")
    monkeypatch.chdir(tmp_path)
    return call


def rows() -> Iterator[dict[str, Any]]:
    yield from ROWS


ARGUMENTS = {
    "list": ROWS,
    "tuple": tuple(ROWS),
    "dataset": Dataset.from_list(ROWS),
    "function": rows,
    "iterator": rows(),
    "text": "rows.jsonl",
    "path": Path("rows.jsonl"),
}


@pytest.mark.parametrize("form", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_prompts_of_every_form_are_the_same_rows(prepared: Callable[..., Any], form: Any) -> None:
    experiment, _ = prepared(prompts=form, eval_prompts=ROWS[:2])
    assert [p.messages[0]["content"] for p in experiment.get_train_dataset()] == [
        row["prompt"] for row in ROWS
    ]
    assert {p.extras["label"] for p in experiment.get_train_dataset()} == {"7"}
    assert len(experiment.get_eval_dataset()) == 2


def right(response: str, answer: str) -> float:
    return float(response == answer)


class Right:
    def __call__(self, response: str, answer: str) -> float:
        return right(response, answer)


@pytest.mark.parametrize(
    "reward, names, weights",
    [
        (right, ["right"], [1]),
        (lambda response: 1.0, ["reward_function"], [1]),
        (Right(), ["Right"], [1]),
        ("exact_match", ["exact_match"], [1]),
        ([right, "exact_match", Right()], ["right", "exact_match", "Right"], [1, 1, 1]),
        ([(right, 0.5), "exact_match"], ["right", "exact_match"], [0.5, 1]),
        ({right: 1.0, "exact_match": 0.0}, ["right", "exact_match"], [1, 0]),
        ([right, right], ["right", "right_2"], [1, 1]),
    ],
)
def test_rewards_of_every_form_have_names_and_weights(
    prepared: Callable[..., Any], reward: Any, names: list[str], weights: list[float]
) -> None:
    experiment, _ = prepared(reward=reward)
    assert experiment.cfg.environment.reward_funcs == names
    assert experiment.cfg.environment.reward_weights == weights
    assert experiment.cfg.environment.env_class == "reward"


def test_classes_are_registered_for_the_run_alone(prepared: Callable[..., Any]) -> None:
    class Own(BaseTextEnv):
        step = Sevens.step

    class Mine:
        def __init__(self, context: object) -> None: ...
        def log(self, metrics: object, step: int) -> None: ...

    tracker = Mine(None)
    experiment, parts = prepared(
        reward=None, environment=Own, plan=AsyncRayPPOTrainer, tracker=[Mine, tracker]
    )
    assert (
        experiment.cfg.environment.env_class == "Own" and parts["skyasync.envs:ENVS"]["Own"] is Own
    )
    assert experiment.cfg.trainer.plan == "AsyncRayPPOTrainer"
    assert experiment.cfg.trainer.logger == ["jsonl", "Mine", "Mine_2"]
    assert parts["skyasync.observability:TRACKERS"]["Mine_2"](None) is tracker
    assert "Mine" not in TRACKERS and "Own" not in REWARDS
