"""Threads for calls that may hang. Jobs wait for events, never for a time."""

import threading
from contextlib import contextmanager

from skyasync.utils.rpc_server import DaemonThreads, separate_limit

PATIENCE_S = 20.0


@contextmanager
def threads(work, max_threads=64, limit_s=PATIENCE_S):
    """Running threads, and a way to wait for the answer to a job."""
    answers, changed = {}, threading.Condition()

    def answer(job, result):
        with changed:
            assert job not in answers, "answered twice"
            answers[job] = result
            changed.notify_all()

    def wait_for(job):
        with changed:
            assert changed.wait_for(lambda: job in answers, PATIENCE_S), f"no answer to {job}"
            return answers[job]

    found = DaemonThreads(work, answer, max_threads=max_threads, limit_s=limit_s)
    try:
        yield found, wait_for
    finally:
        found.close()


def test_jobs_start_in_order_and_each_is_answered_once():
    started = []
    with threads(lambda job: started.append(job) or -job, max_threads=1) as (pool, wait_for):
        pool.submit(range(1000))
        assert [wait_for(job) for job in range(1000)] == [-job for job in range(1000)]
    assert started == list(range(1000))


def test_jobs_that_wait_for_each_other_all_run_at_once():
    everybody = threading.Barrier(50)
    with threads(lambda job: everybody.wait(PATIENCE_S)) as (pool, wait_for):
        pool.submit(range(50))
        assert sorted(wait_for(job) for job in range(50)) == list(range(50))


def test_a_quick_job_overtakes_one_that_waits():
    free = threading.Event()
    with threads(lambda job: free.wait(PATIENCE_S) if job == "slow" else "done") as (
        pool,
        wait_for,
    ):
        pool.submit(["slow", "quick"])
        assert wait_for("quick") == "done"
        free.set()
        assert wait_for("slow") is True


def test_a_job_that_computes_for_ever_does_not_stop_the_others():
    stop = False

    def work(job):
        while job == "endless" and not stop:
            pass
        return "done"

    with threads(work) as (pool, wait_for):
        pool.submit(["endless", "quick"])
        assert wait_for("quick") == "done"
        stop = True


def test_jobs_that_hang_are_answered_for_and_their_threads_replaced():
    free = threading.Event()
    with threads(
        lambda job: free.wait(PATIENCE_S) if job < 3 else "done", max_threads=2, limit_s=0.1
    ) as (
        pool,
        wait_for,
    ):
        pool.submit(range(6))
        assert [wait_for(job) for job in range(6)] == [None, None, None, "done", "done", "done"]
        assert pool.hung == 3
        free.set()


def test_a_wait_with_a_limit_of_its_own_does_not_count_and_what_follows_it_does():
    free = threading.Event()
    hangs = threading.Event()

    def work(job):
        with separate_limit():
            free.wait(PATIENCE_S)
        if job == "hangs afterwards":
            hangs.wait(PATIENCE_S)
        return "done"

    with threads(work, limit_s=0.1) as (pool, wait_for):
        pool.submit(["waits", "hangs afterwards"])
        hangs.wait(0.5)  # five times the limit
        assert pool.hung == 0
        free.set()
        assert wait_for("waits") == "done"
        assert wait_for("hangs afterwards") is None
        hangs.set()
