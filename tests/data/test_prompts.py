"""The prompt stream: shuffled by the seed alone, complete, resumable anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyasync.config.schema import Config
from skyasync.data.prompts import ENDLESS, PromptStream
from skyasync.errors import UserError
from tests.rollout.episodes import prompt

SIZES = {
    "size": st.integers(1, 30),
    "batch": st.integers(1, 12),
    "seed": st.integers(0, 5),
    "total": st.integers(0, 90),
}


def ids(stream, position=0):
    cursor, batches = stream.cursor(position), []
    while prompts := cursor.take(stream._batch_size).prompts:
        batches.append([prompt.id for prompt in prompts])
    return batches


def make(size, batch, seed, total):
    return PromptStream([prompt(row) for row in range(size)], batch, seed, total)


@given(**SIZES)
def test_every_epoch_is_a_permutation_and_no_prompt_is_lost(size, batch, seed, total):
    found = [i for part in ids(make(size, batch, seed, total)) for i in part]
    assert len(found) == total
    for epoch in range(total // size):
        assert sorted(i.row for i in found[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert [i.epoch for i in found] == [position // size for position in range(total)]


@given(position=st.integers(0, 100), **SIZES)
def test_the_stream_is_a_function_of_seed_and_position(size, batch, seed, total, position):
    whole = [i for part in ids(make(size, 1, seed, total)) for i in part]
    used = make(size, batch, seed, total)
    ids(used)  # earlier reads have no influence
    assert [i for part in ids(used, position) for i in part] == whole[position:]
    assert [used.prompt(p).id for p in range(total)] == whole


@given(position=st.integers(0, 100), **SIZES)
def test_batches_are_full_but_the_last_and_as_many_as_announced(size, batch, seed, total, position):
    stream = make(size, batch, seed, total)
    lengths = [len(part) for part in ids(stream, position)]
    assert all(length == batch for length in lengths[:-1])
    assert all(0 < length <= batch for length in lengths)
    assert len(lengths) == stream.steps(position)


@given(**SIZES)
def test_a_batch_has_the_positions_of_its_prompts(size, batch, seed, total):
    stream, position, resumed = make(size, batch, seed, total), 0, []
    while (left := stream.cursor(position).take(batch)).prompts:
        resumed.append([p.id for p in left.prompts])
        assert left.positions == tuple(range(position, position + len(left.prompts)))
        position += len(left.prompts)
    assert resumed == ids(stream)


def test_epochs_and_seeds_have_orders_of_their_own():
    stream = make(30, 30, 0, 60)
    first, second = ids(stream)
    assert [i.row for i in first] != [i.row for i in second]
    assert ids(make(30, 30, 1, 60))[0] != first


def test_what_a_prompt_says_travels_with_it():
    stream = PromptStream([prompt(0, "mine", answer=3)], 1, 0, 2)
    found = stream.prompt(1)
    assert (found.id.epoch, found.id.row, found.env_class, found.extras) == (
        1,
        0,
        "mine",
        {"answer": 3},
    )


def test_an_empty_dataset_is_refused_with_its_key():
    with pytest.raises(UserError, match=r"data\.train_data"):
        PromptStream([], 4, 0, 8)


def test_a_runs_stream_is_the_one_that_the_configuration_asks_for():
    cfg = Config()
    cfg.trainer.train_batch_size, cfg.trainer.seed, cfg.trainer.epochs = 4, 7, 3
    dataset = [prompt(row, domain="sums" if row < 2 else "") for row in range(10)]
    assert ids(PromptStream.of_run(cfg, dataset)) == ids(PromptStream(dataset, 4, 7, 30))
    cfg.trainer.epochs = 0
    assert ids(PromptStream.of_run(cfg, dataset)) == ids(PromptStream(dataset, 4, 7, 10))
    cfg.trainer.max_training_steps = 2
    cfg.environment.domains = {"sums": {"proportion": 0.5}}
    assert ids(PromptStream.of_run(cfg, dataset)) == ids(
        PromptStream(dataset, 4, 7, 8, {"sums": 0.5})
    )


@pytest.mark.parametrize(
    "epochs, steps, mode, total, line",
    [
        (0, 0, "filter", 10, ""),
        (3, 0, "filter", 30, ""),
        (0, 2, "filter", 8, ""),
        (0, 9, "filter", 36, "trainer.max_training_steps=9 goes 3.6 times through the 10 training prompts"),
        (3, 9, "filter", 30, "the data ends before trainer.max_training_steps=9: trainer.epochs=3 of 10 prompts are 8 "
                             "steps of 4 (trainer.epochs=0 goes through it as often as the steps take)"),
        (3, 8, "filter", 30, ""),
        (3, 7, "filter", 28, ""),
        (0, 9, "refill", ENDLESS, "trainer.max_training_steps=9 goes 3.6 times through the 10 training prompts"),
        (0, 0, "refill", 10, ""),
        (3, 2, "refill", 30, ""),
    ],
)  # fmt: skip
def test_steps_win_unless_epochs_are_set_and_a_line_says_where_the_data_is_short(
    epochs, steps, mode, total, line, caplog
):
    cfg = Config()
    trainer = cfg.trainer
    trainer.train_batch_size, trainer.epochs, trainer.max_training_steps = 4, epochs, steps
    trainer.algorithm.dynamic_sampling.mode = mode
    assert PromptStream.of_run(cfg, [prompt(row) for row in range(10)]).total == total
    assert caplog.messages == ([line] if line else [])


@pytest.mark.parametrize(
    "epochs, batch, total", [(0, 4, 24 + 14 * 4), (0, 8, 24 + 14 * 8), (5, 8, 50)]
)
def test_a_resumed_run_has_the_steps_that_are_left_of_batches_of_any_size(epochs, batch, total):
    cfg = Config()
    cfg.trainer.train_batch_size, cfg.trainer.epochs, cfg.trainer.max_training_steps = (
        batch,
        epochs,
        20,
    )
    stream = PromptStream.of_run(cfg, [prompt(row) for row in range(10)])
    stream.resumed(cfg.trainer, 6, 24)
    assert stream.total == total
