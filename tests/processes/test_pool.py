"""Who gets which process, and which are replaced; the processes are stand-ins."""

import threading

from skyasync.processes.pool import MOST_HUNG, Pool


class Stand:
    """A process that does nothing."""

    def __init__(self, look_at, number):
        self.look_at, self.number, self.keys, self.lost, self.hung = look_at, number, set(), None, 0
        self.ready, self.killed = True, False

    @property
    def idle(self):
        return not self.keys

    def kill(self):
        self.killed, self.lost = True, RuntimeError("killed")
        self.look_at(self)


def pool(count):
    started = []

    def start(look_at):
        started.append(Stand(look_at, len(started)))
        return started[-1]

    return Pool(start, count), started


def test_work_is_spread_and_given_back():
    made, started = pool(2)
    taken = [made.take(key) for key in "abc"]
    assert [process.number for process in taken] == [0, 1, 0]
    made.give_back(taken[0], "a")
    made.give_back(taken[2], "c")
    assert made.take("d").number == 0
    assert len(started) == 2


def test_one_that_is_lost_is_replaced_at_once():
    made, _ = pool(2)
    made.take("a").kill()
    assert [process.number for process in made.processes] == [2, 1]
    assert made.replaced == 1


def test_one_that_is_stuck_gets_no_new_work_and_ends_with_its_last():
    made, _ = pool(1)
    stuck = made.take("old")
    stuck.hung = MOST_HUNG
    made.look_at(stuck)
    assert made.take("new").number == 1
    assert not stuck.killed
    made.give_back(stuck, "old")
    assert stuck.killed


def test_those_who_want_one_alone_share_none_and_wait_for_the_next_that_is_free():
    made, started = pool(2)
    inside, most, lock = [], [], threading.Lock()

    def work():
        for _ in range(50):
            with made.alone() as process:
                with lock:
                    inside.append(process.number)
                    most.append(len(inside))
                    assert inside.count(process.number) == 1
                with lock:
                    inside.remove(process.number)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(most) == 400
    assert max(most) <= 2
    assert len(started) <= 2


def test_one_alone_is_enough_where_nobody_else_asks():
    made, started = pool(8)
    for _ in range(3):
        with made.alone() as process:
            assert process.number == 0
    assert len(started) == 1


def test_what_is_lost_while_somebody_has_it_is_replaced_for_the_next():
    made, _ = pool(1)
    with made.alone() as process:
        process.kill()
    with made.alone() as process:
        assert process.number == 1


def test_closing_kills_all():
    made, started = pool(3)
    made.fill()
    made.close()
    assert [process.killed for process in started] == [True] * 3
