import json
import logging
import struct

import pytest

from skyasync.observability import plots


def a_run(folder, steps=12, stale=True):
    folder.mkdir(parents=True)
    rows = [{"step": 0, "eval/score": 0.5}]
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "reward/mean": 0.5 + step / 100,
            "eval/score": None if step % 5 else 0.5 + step / 90,
        }
        if stale:
            row |= {"staleness/mean": 1.0, "staleness/min": 0.0, "staleness/max": 2.0}
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def png_size(path):
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


@pytest.mark.parametrize("stale", [True, False])
def test_the_picture_of_a_run_is_wide_enough_for_a_readme(tmp_path, stale):
    run = a_run(tmp_path / "a", stale=stale)
    assert plots.plot_reward(run / "metrics.jsonl", run / "reward.png")
    assert png_size(run / "reward.png") == (1200, 675)
    assert sorted(file.name for file in run.iterdir()) == ["metrics.jsonl", "reward.png"]


def test_a_picture_that_cannot_be_drawn_is_one_warning_and_the_old_one_stays(tmp_path, caplog):
    out = tmp_path / "reward.png"
    out.write_bytes(b"old")
    bad = tmp_path / "metrics.jsonl"
    bad.write_text('{"step": 1, "reward/mean": "high"}\n')
    with caplog.at_level(logging.WARNING, logger=plots.logger.name):
        assert not plots.plot_reward(bad, out)
        assert not plots.plot_reward(tmp_path / "absent.jsonl", out)
    messages = [
        record.getMessage() for record in caplog.records if record.name == plots.logger.name
    ]
    assert (
        len(messages) == 2
        and "not drawn: ValueError" in messages[0]
        and "no metrics in" in messages[1]
    )
    assert out.read_bytes() == b"old"


def test_smoothing_keeps_a_straight_line_and_flattens_noise():
    line = [float(value) for value in range(50)]
    assert plots.smooth(line) == line
    noisy = [float(index % 2) for index in range(50)]
    assert max(plots.smooth(noisy)[5:-5]) < 0.7
    assert plots.smooth([]) == []
