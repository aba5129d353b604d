import json

import pytest

from skyasync.errors import UserError
from skyasync.observability import RunDirectory, default_run_name
from skyasync.observability.jsonl import read_rows, replace_text
from skyasync.observability.run_dir import shown
from tests.full_disk import files_end_at


def test_a_taken_name_gets_a_number(tmp_path):
    assert [RunDirectory(tmp_path, "run").name for _ in range(3)] == ["run", "run-2", "run-3"]


def test_resuming_uses_the_same_folder_and_makes_a_missing_one(tmp_path):
    first = RunDirectory(tmp_path, "run")
    assert RunDirectory(tmp_path, "run", resume=True).path == first.path
    assert RunDirectory(tmp_path, "new", resume=True).path.is_dir()


def test_a_path_is_shown_from_the_working_folder_if_it_is_inside_and_else_whole(
    tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown(tmp_path / "here" / "runs" / "a") == "runs/a"
    assert shown(tmp_path / "runs" / "a") == str(tmp_path / "runs" / "a")


@pytest.mark.parametrize("name", ["", "  ", ".", "..", "../other", "a/../.."])
def test_a_name_cannot_lead_out_of_the_root(tmp_path, name):
    with pytest.raises(UserError, match="must name a folder inside"):
        RunDirectory(tmp_path / "runs", name)
    assert not list(tmp_path.iterdir())


def test_the_files_lie_in_the_folder_even_if_the_working_directory_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = RunDirectory("runs", "a")
    monkeypatch.chdir("/")
    files = [run.metrics, run.config, run.samples, run.timeline, run.reward_plot, run.checkpoints]
    assert [str(file.relative_to(tmp_path / "runs" / "a")) for file in files] == [
        "metrics.jsonl", "config.yaml", "samples.jsonl", "timeline.json", "reward.png", "checkpoints",
    ]  # fmt: skip


def test_the_configuration_is_kept_as_given(tmp_path):
    run = RunDirectory(tmp_path, "run")
    replace_text(run.config, "trainer:\n  seed: 1\n")
    replace_text(run.config, "trainer:\n  seed: 2\n")
    assert run.config.read_text() == "trainer:\n  seed: 2\n"
    assert list(run.path.iterdir()) == [run.config]


def test_a_resumed_run_replaces_the_samples_of_redone_steps(tmp_path):
    first = RunDirectory(tmp_path, "run")
    for step in (1, 2, 3):
        first.write_samples(step, [{"text": f"old {step}"}, {"text": f"also {step}"}])
    with first.samples.open("a") as file:
        file.write('{"step": 4, "te')  # the crash
    second = RunDirectory(tmp_path, "run", resume=True)
    second.write_samples(3, [{"text": "grün"}])
    second.write_samples(3, [{"text": "held out"}])
    rows = [json.loads(line) for line in second.samples.read_text().splitlines()]
    assert [(row["step"], row["text"]) for row in rows] == [
        (1, "old 1"), (1, "also 1"), (2, "old 2"), (2, "also 2"), (3, "grün"), (3, "held out"),
    ]  # fmt: skip


def test_text_with_line_separators_of_unicode_is_read_whole_and_kept_on_resume(tmp_path):
    texts = [f"before{separator}behind" for separator in "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\n"]
    run = RunDirectory(tmp_path, "run")
    for step, text in enumerate(texts):
        run.write_samples(step, [{"text": text}])
    assert [row["text"] for row in read_rows(run.samples)] == texts
    resumed = RunDirectory(tmp_path, "run", resume=True)
    resumed.write_samples(len(texts), [{"text": "new"}])
    assert [row["text"] for row in read_rows(run.samples)] == [*texts, "new"]


def test_half_a_surrogate_pair_ends_no_run(tmp_path):
    run = RunDirectory(tmp_path, "run")
    run.write_samples(1, [{"label": "a\ud83d", "emoji": "\N{PARTY POPPER}"}])
    assert read_rows(run.samples) == [{"step": 1, "label": "a?", "emoji": "\N{PARTY POPPER}"}]


def test_samples_that_do_not_fit_on_the_disk_leave_no_torn_line(tmp_path):
    run = RunDirectory(tmp_path, "run")
    run.write_samples(1, [{"text": "first"}])
    with files_end_at(run.samples.stat().st_size + 10), pytest.raises(OSError, match="too large"):
        run.write_samples(2, [{"text": "second"}, {"text": "third"}])
    run.write_samples(3, [{"text": "fourth"}])
    assert [json.loads(line)["text"] for line in run.samples.read_text().splitlines()] == [
        "first",
        "fourth",
    ]


def test_a_ledger_line_that_failed_on_a_full_disk_is_written_later(tmp_path):
    run = RunDirectory(tmp_path, "run")
    run.write_ledger(1, {"trained": ["e0-i0"]})
    with files_end_at(run.ledger.stat().st_size + 10):
        for step in (2, 3):
            with pytest.raises(OSError, match="too large"):
                run.write_ledger(step, {"trained": [f"e0-i{step}"]})
    run.write_ledger(4, {"trained": ["e0-i4"]})
    assert [json.loads(line)["step"] for line in run.ledger.read_text().splitlines()] == [
        1,
        2,
        3,
        4,
    ]


def test_a_full_disk_does_not_take_the_place_of_the_error_that_ended_a_run(tmp_path, caplog):
    run = RunDirectory(tmp_path, "run")
    with files_end_at(2):
        run.save_error("what ended it")
    assert list(run.path.iterdir()) == [], "an incomplete file would be taken for the whole"
    assert "error.txt was not written: " in caplog.text and "too large" in caplog.text


def test_a_file_that_cannot_be_replaced_stays_and_leaves_no_scratch(tmp_path):
    run = RunDirectory(tmp_path, "run")
    replace_text(run.config, "old")
    with files_end_at(2), pytest.raises(OSError, match="too large"):
        replace_text(run.config, "new and longer")
    assert [path.name for path in run.path.iterdir()] == [
        "config.yaml"
    ] and run.config.read_text() == "old"


def test_the_default_name_begins_with_the_plan():
    assert default_run_name("one_step_off").startswith("one_step_off-20")
