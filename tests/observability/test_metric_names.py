"""The page of metrics is current, and has all metrics that runs log."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyasync.observability.metric_names import METRICS, entry_of, markdown

ROOT = Path(__file__).parents[2]


def test_the_written_page_is_current() -> None:
    written = (ROOT / "docs" / "metrics.md").read_text()
    assert written == markdown(), (
        "run: python -m skyasync.observability.metric_names > docs/metrics.md"
    )


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("staleness/tokens_3", "staleness/tokens_<n>"),
        ("off_policy/staleness_12/kl", "off_policy/staleness_<n>/<name>"),
        ("reward/mean/math", "reward/mean/<domain>"),
        ("time/wait_data_s", "time/wait_<what>_s"),
        ("eval/response_truncated", "eval/<name>"),
        ("eval/pass@16", "eval/pass@<n>"),
        ("eval/aime/maj@4", "eval/<set>/maj@<n>"),
        ("eval/aime/response_truncated", "eval/<set>/response_truncated"),
        ("eval/score/sums", "eval/score/<domain>"),
        ("env/quality/no_reward", "env/<function>/no_reward"),
        ("policy/loss", "policy/loss"),
        ("critic/explained_variance", "critic/explained_variance"),
    ],
)
def test_a_metric_finds_its_entry(name: str, entry: str) -> None:
    found = entry_of(name)
    assert found is not None and found.name == entry


def test_a_strange_name_has_none() -> None:
    assert entry_of("staleness/tokens_many") is None
    assert entry_of("my/score") is None


def test_every_metric_that_the_library_names_has_an_entry() -> None:
    library = (path.relative_to(ROOT) for path in (ROOT / "skyasync").rglob("*.py"))
    files = (ROOT / path for path in library if not {"interop", "metric_names.py"} & {*path.parts})
    texts = "".join(path.read_text() for path in files)
    rooms = "reward|response|dynamic_sampling|staleness|sync|rollout|throughput|idle|checkpoint|warnings|off_policy"
    rooms += "|memory|disk"
    named = set(re.findall(rf'"((?:{rooms})/[a-z_]+)"', texts))
    assert len(named) > 30
    assert sorted(name for name in named if entry_of(name) is None) == []


def test_names_are_listed_once() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
