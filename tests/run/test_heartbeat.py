"""A controller that does not answer for too long is killed, but not if the program itself was stopped."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from skyasync.observability.progress import ProgressReport
from skyasync.run.controller import Heartbeat

LIMIT_S = 6.0


class Controller:
    """Records calls, and whether it was killed; ``answers`` are given in turn: a report, or an error of ``ray.get``."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.waited_s, self.ended = list(answers), 0.0, False

    def remote(self, seen: int) -> Any:
        return self

    def end(self) -> None:
        self.ended = True


def get(controller: Controller, timeout: float) -> object:
    answer = controller.answers.pop(0)
    if isinstance(answer, BaseException):
        controller.waited_s += timeout
        raise answer
    return answer


@pytest.fixture(autouse=True)
def answers_without_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", get)


def heartbeat(controller: Controller, limit_s: float = LIMIT_S) -> Heartbeat:
    return Heartbeat(controller, controller, limit_s)  # type: ignore[arg-type]


REPORT = ProgressReport.__new__(ProgressReport)
SILENCE = ray.exceptions.GetTimeoutError("no answer")


def test_it_is_ended_when_it_has_been_asked_in_vain_for_so_long(
    capsys: pytest.CaptureFixture[str],
) -> None:
    controller = Controller(SILENCE, SILENCE)
    asked = heartbeat(controller)
    assert asked.ask(0) is None and not controller.ended
    assert asked.ask(0) is None and controller.ended
    assert controller.waited_s == LIMIT_S
    assert (
        "has not answered for 6 s (trainer.heartbeat_timeout_s): it is ended"
        in capsys.readouterr().err
    )


def test_an_answer_forgives_the_silence_before_it() -> None:
    controller = Controller(SILENCE, REPORT, SILENCE)
    asked = heartbeat(controller)
    assert [asked.ask(0) for _ in range(3)] == [None, REPORT, None]
    assert not controller.ended, "however long the program itself was stopped between its calls"


def test_a_failed_controller_is_not_waited_for_and_without_a_timeout_none_is_killed() -> None:
    failed = Controller(ray.exceptions.RayActorError())
    assert heartbeat(failed).ask(0) is None and not failed.ended
    slow = Controller(*[SILENCE] * 100)
    asked = heartbeat(slow, limit_s=0.0)
    assert [asked.ask(0) for _ in range(100)] == [None] * 100 and not slow.ended
