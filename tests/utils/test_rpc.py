"""How work is assigned to processes, and which are replaced; the processes are fakes."""

from skyasync.utils.rpc import MAX_HUNG, RpcPool


class Stand:
    """A process that does nothing."""

    def __init__(self, number):
        self.number, self.killed = number, False

    def kill(self):
        self.killed = True


def pool(count):
    started = []

    def start():
        started.append(Stand(len(started)))
        return started[-1]

    return RpcPool(start, count, "a stand-in", 1.0), started


def test_work_is_spread_and_given_back():
    made, started = pool(2)
    taken = [made.take(key) for key in "abc"]
    assert [process.worker.number for process in taken] == [0, 1, 0]
    made.give_back(taken[0], "a")
    made.give_back(taken[2], "c")
    assert made.take("d").worker.number == 0
    assert len(started) == 2


def test_one_that_is_lost_is_replaced_at_once():
    made, _ = pool(2)
    made.take("a").kill()
    assert [process.worker.number for process in made.processes] == [2, 1]
    assert made.replaced == 1


def test_one_that_is_stuck_gets_no_new_work_and_ends_with_its_last():
    made, _ = pool(1)
    stuck = made.take("old")
    stuck.hung = MAX_HUNG
    made.look_at(stuck)
    assert made.take("new").worker.number == 1
    assert not stuck.worker.killed
    made.give_back(stuck, "old")
    assert stuck.worker.killed


def test_closing_kills_all():
    made, started = pool(3)
    made.fill()
    made.close()
    assert [process.killed for process in started] == [True] * 3
