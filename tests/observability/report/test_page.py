"""The page about a run: self-contained, complete if there is data, and without empty charts otherwise."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from skyasync.__main__ import command
from skyasync.observability.report.charts import Chart, Line, sections, tokens_by_staleness
from skyasync.observability.report.figures import draw, last_steps, read_spans
from skyasync.observability.report.page import page, sample_steps, write_report
from skyasync.observability.run_dir import status_file
from tests.observability.report.folders import make_run, sample

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """The nesting of elements, and all links out of the page."""

    VOID = frozenset({"meta", "input", "br", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        links = [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]
        self.outside += [link for link in links if not link.startswith("#")]
        self.outside += [tag] if tag in ("script", "link", "iframe") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Of an element without contents."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def whole(run: Path) -> str:
    return page([run])


def test_a_page_is_whole_in_itself(whole: str) -> None:
    read = Page(whole)
    assert read.open == []
    assert read.outside == []
    assert "url(http" not in whole and "@import" not in whole


def test_every_section_has_its_pictures(whole: str) -> None:
    for title in ("Reward and score", "Reward by domain", "KL divergence", "Clipped and masked tokens",
                  "Tokens by staleness", "Log-ratio by staleness", "Response length", "Throughput", "Idle shares",
                  "Seconds per step"):  # fmt: skip
        assert f"<h3>{title}</h3>" in whole
    assert whole.count("<svg") == 18  # one of them the timeline
    assert "Timeline of the last steps" in whole


def test_the_step_size_under_staleness_is_drawn_if_it_is_controlled() -> None:
    title = "Step size under staleness"
    for rows, drawn in (
        ([{"staleness_control/lr_scale": 0.5}], True),
        ([{"policy/lr": 0.5}], False),
    ):
        assert (
            title in [chart.title for section in sections(rows) for chart in section.charts]
        ) is drawn


def test_the_staleness_bound_is_drawn_if_it_is_controlled() -> None:
    rows = [{"staleness_control/lr_scale": 0.5, "staleness_control/max_staleness": 2.0}]
    charts = {chart.title: chart for section in sections(rows) for chart in section.charts}
    assert [line.metric for line in charts["Staleness bound"].lines] == [
        "staleness_control/max_staleness"
    ]
    assert "Staleness bound" not in [
        chart.title for section in sections(rows[:0]) for chart in section.charts
    ]


def test_a_picture_without_data_says_what_would_fill_it(whole: str) -> None:
    entropy = whole[whole.index("<li><b>Entropy</b>") :][:300]
    assert "trainer.algorithm.use_entropy_loss=true" in entropy
    assert "<h3>Entropy</h3>" not in whole  # no empty card
    assert Page(whole).open == []


def test_colours_are_the_pages_own_so_that_dark_is_dark(whole: str) -> None:
    pictures = "".join(re.findall(r"<svg.*?</svg>", whole, flags=re.DOTALL))
    assert re.findall(r"#[0-9a-fA-F]{6}", pictures) == []
    assert "prefers-color-scheme: dark" in whole


def test_names_within_pictures_are_not_shared(whole: str) -> None:
    clips = re.findall(r'<clipPath id="([^"]+)"', whole)
    assert len(clips) == len(set(clips)) > 5


def test_samples_show_their_tokens_and_nothing_of_theirs_is_taken_for_markup(whole: str) -> None:
    assert "Sort &lt;b&gt;31&lt;/b&gt;" in whole and "&lt;i&gt;" in whole and "<b>31" not in whole
    assert "version 1" in whole and "engine -0.500 · trainer -0.900" in whole
    assert 'class="t env" title="from the environment"' in whole
    assert "right answer: &lt;b&gt;13&lt;/b&gt;" in whole


def test_settings_are_those_that_differ(whole: str) -> None:
    changed = whole[whole.index('<table class="settings">') :].partition("<details ")[0]
    assert "trainer.plan" in changed and "mine.strength" in changed
    assert "trainer.seed" not in changed
    assert re.search(
        r"trainer\.plan.*>command line<.*Set by the recipe.*mine\.strength.*>recipe<",
        changed,
        flags=re.DOTALL,
    )


def test_a_run_that_has_just_started_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "config.yaml").write_text("trainer:\n  plan: sync\n")
    made = page([tmp_path / "new"])
    assert "No step has been logged yet." in made and "<svg" not in made
    assert Page(made).open == []


def test_a_run_that_was_cut_off_has_a_page_that_says_so_first(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "cut", error="RuntimeError: no more <memory>")
    for name in ("metrics.jsonl", "samples.jsonl", "timeline.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text[: len(text) * 2 // 3])
    made = page([folder])
    assert made.count("<svg") == 18
    assert "The run failed: RuntimeError: no more &lt;memory&gt;" in made
    assert 'class="badge failed"' in made


def test_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = make_run(
        tmp_path / "second",
        settings="trainer:\n  plan: sync\n  max_training_steps: 12\n  seed: 42\n",
    )
    made = page([run, other])
    assert "2 runs compared" in made and ">first</td>" in made and ">second</td>" in made
    differ = made[made.index("Settings in which the runs differ") :]
    assert (
        "trainer.plan" in differ and "one_step_off" in differ and "max_training_steps" not in differ
    )
    assert Page(made).open == []


def test_names_that_matplotlib_reads_as_its_own_stay_as_they_are() -> None:
    """Labels that begin with an underscore are hidden by default, and dollars enclose formulas."""
    chart, rows = (
        Chart("Reward", (Line("reward", "from $x_{ to $y"),)),
        [{"step": 1, "reward": 0.5}],
    )
    assert "from $x_{ to $y" in draw(chart, {"one": rows})
    compared = draw(chart, {"_first": rows, "_second": rows})
    assert "_first" in compared and "_second" in compared
    histogram = draw(
        Chart("Tokens", (), kind="histogram"),
        {name: [{"staleness/tokens_1": 2.0}] for name in "_$"},
    )
    assert "> _<" in histogram and ">$<" in histogram


def test_a_page_that_cannot_be_made_is_a_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert not write_report(run / "nowhere")
    assert "report.html was not made" in caplog.text


def test_the_command_writes_the_page_and_says_where(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command(["report", str(run)])
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    assert (run / "report.html").stat().st_size < 1_000_000


def test_the_page_names_the_engine_and_why_it_was_chosen(run: Path) -> None:
    with status_file(run, "transformers (generator.backend=auto: vLLM is not installed)"):
        assert "engine <b>transformers</b> (generator.backend=auto: vLLM is not installed)" in page(
            [run]
        )


def test_the_page_of_a_running_run_reloads(tmp_path: Path) -> None:
    with status_file(tmp_path):
        assert '<meta http-equiv="refresh" content="30">' in page([tmp_path], refresh_s=30)
    assert "http-equiv" not in page([tmp_path], refresh_s=30)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["runs/nowhere"], "there is no folder runs/nowhere: name a run's folder"),
        (["."], ". is not a run's folder: it has neither metrics.jsonl nor config.yaml"),
        (["--every", "soon", "."], "--every soon: not a number of seconds above 0"),
        (["--oot=x"], "unknown option --oot: did you mean --out?"),
    ],
)
def test_wrong_arguments_are_one_line(
    argv: list[str],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        command(["report", *argv])
    assert line in capsys.readouterr().err


def test_samples_are_the_first_a_middle_and_the_last() -> None:
    assert [step.number for step in sample_steps([sample(step) for step in range(1, 10)])] == [
        1,
        5,
        9,
    ]
    (only,) = sample_steps([sample(4)])
    assert only.samples[0].gap == pytest.approx(0.4)
    assert [token.strength for token in only.samples[0].tokens] == [0.0, pytest.approx(0.63), 0.0]


def test_a_sample_shows_its_images_and_loads_nothing_else(tmp_path: Path) -> None:
    url = "data:image/jpeg;base64,aGk="
    folder, row = (
        make_run(tmp_path / "run"),
        sample(1) | {"images": [url, "https://example.org/a.png"]},
    )
    (folder / "samples.jsonl").write_text(json.dumps(row) + "\n")
    assert Page(page([folder])).outside == [url]


def test_the_timeline_shows_the_last_steps(run: Path) -> None:
    spans = last_steps(read_spans(run / "timeline.json"), steps=2)
    assert {span.step for span in spans if span.name == "train"} == {11, 12}
    assert {span.track for span in spans} <= {"trainer", "rollout"}


def test_ages_are_added_up() -> None:
    assert tokens_by_staleness(
        [{"staleness/tokens_1": 2.0}, {"staleness/tokens_1": 3.0, "staleness/tokens_0": None}]
    ) == {1: 5.0}


def test_every_picture_says_what_would_fill_it() -> None:
    for part in sections([]):
        assert all(chart.missing.endswith(".") for chart in part.charts)
