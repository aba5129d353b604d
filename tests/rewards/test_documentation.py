"""The pages about judges, instructions and evaluation list what exists, and their examples load."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from skyasync import load_config
from skyasync.config.schema.judges import judges_of, table
from skyasync.rewards.instruction_following import CONSTRAINTS, instruction_following, parameters

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join(
    (DOCS / name).read_text()
    for name in ("judges.md", "reference/instruction_following.md", "evaluation.md")
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_the_table_of_a_judges_settings_is_current() -> None:
    assert table() in PAGE, "print(skyasync.config.schema.judges.table())"


def test_every_instruction_is_listed_with_its_arguments() -> None:
    rows = [
        f"| `{name}` | {', '.join(f'`{each}`' for each in parameters(name))} |"
        for name in CONSTRAINTS
    ]
    assert [row for row in rows if row not in PAGE] == []


def test_the_configurations_load(tmp_path: Path) -> None:
    loaded = []
    for number, text in enumerate(blocks("yaml")):
        assert isinstance(yaml.safe_load(text), dict)
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        loaded.append(load_config([f"--config={file}", "trainer.policy.model.path=a/b"]))
    judges, sets = loaded
    assert judges_of(judges.environment.judges)["style"].parser == "score"
    assert sets.trainer.eval_k == [1, 8, 16] and set(sets.data.val_sets) == {"gsm8k", "aime"}


def test_the_row_of_the_page_has_a_reward() -> None:
    (text,) = blocks("json")
    row = json.loads(text)
    row.pop("prompt")
    assert instruction_following("Rhine and Ob and Po", **row)["reward"] == 1.0
