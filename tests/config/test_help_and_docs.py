"""Help and the generated pages agree with the loader."""

import subprocess
import sys
from pathlib import Path

import pytest

from skyasync.config import Config, ConfigError, load_config
from skyasync.config.keys import Keys
from skyasync.errors import UserError
from skyasync.interop.system import systems

KEYS = Keys.of(Config)
DOCS = Path(__file__).parents[2] / "docs"


def help_text(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        load_config(arguments)
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_key_with_its_sentence(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_text([flag], capsys)
    words = " ".join(text.split())
    assert all(f"{key.path} " in words for key in KEYS)
    assert all(" ".join(key.doc.split()) in words for key in KEYS)


def test_help_for_a_group_shows_that_group_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(
        help_text(["--help", "generator.sampling_params", "trainer.seed=1"], capsys).split()
    )
    assert "generator.sampling_params.top_p float = 1.0" in text
    assert "Greater than 0 and at most 1." in text
    assert "generator.eval_sampling_params" not in text
    assert "trainer.seed" not in text


def test_help_for_one_key_lists_the_names_it_may_take(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(help_text(["--help", "generator.backend"], capsys).split())
    assert (
        "One of: auto, sglang_server, transformers, vllm, vllm_server, or module:attribute."
        in words
    )
    words = " ".join(help_text(["--help", "trainer.logger"], capsys).split())
    assert "jsonl" in words.split("One of:")[1]


def test_help_for_something_that_does_not_exist_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no such group or key: did you mean trainer\.algorithm\?"):
        load_config(["--help", "trainer.algoritm"])


def test_every_key_has_a_sentence() -> None:
    assert [key.path for key in KEYS if not key.doc.strip().endswith(".")] == []


def test_no_key_is_both_given_and_refused_for_a_foreign_name() -> None:
    with pytest.raises(ConfigError, match="that is how verl spells it"):
        load_config(["trainer.seed=1", "actor_rollout_ref.actor.optim.lr=1e-6"])


@pytest.mark.parametrize(
    ("module", "page"),
    [("skyasync.config", "configuration.md"), ("skyasync.interop", "coming_from.md")]
    + [(f"skyasync.interop {name}", f"migration/{name}.md") for name in systems()],
)
def test_the_written_page_is_current(module: str, page: str) -> None:
    made = subprocess.run(
        [sys.executable, "-m", *module.split()],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (DOCS / page).read_text() == made.stdout, f"run: python -m {module} > docs/{page}"
