"""Sessions of external programs: they open a session, call the model, and score it themselves.

    trainer ── requests trajectories ──▶ slots ◀── POST /v1/sessions ── a program with the run's key
                                           └──── the score ◀── its end, with the session's key

| request                 | key           | body                                                          |
|-------------------------|---------------|---------------------------------------------------------------|
| POST /v1/sessions       | the run's     | ``task``, ``wait_s``; answered with ``api_key``, ``data``     |
| POST /v1/sessions/score | the session's | ``reward``, and ``id`` if it is that of one answer            |
| POST /v1/sessions/end   | the session's | ``reward`` or ``rewards`` by answer, ``metrics``; ``error``   |

Other systems' names for the same (``/rl/start_session``, ``/rl/set_reward``, ``/rl/end_session``)
work too.

Invariant: a session is given out only for a trajectory that the plan has requested, so that its
samples are trained under the plan's admission and staleness; a trajectory is played by one session.
One that is not ended within ``generator.episode_timeout_s`` fails, as an agent program would. So do
the free slots of a task if no session is opened for them in that time. The run's key opens sessions
and reads none; a session's key reads its own. A wrong request changes nothing: the session
continues.

| who waits           | for what             | woken by                                                            |
|---------------------|----------------------|---------------------------------------------------------------------|
| ``play``            | a session, its score | requests to open and end it; its time limit; the end of the run     |
| POST /v1/sessions   | a slot               | ``play``, which offers one; its own time limit                      |
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from skyasync.agents.api import Body, RequestError, given, number
from skyasync.agents.calls import Session
from skyasync.agents.connection_limits import read_json
from skyasync.agents.programs import AgentError, AgentScore, check_score
from skyasync.agents.server import Endpoint, key_of, same_key
from skyasync.config.keys import Key
from skyasync.errors import UserError

#: The key that opens sessions, if it is to be the same in every run.
KEY_VARIABLE = "SKYASYNC_SESSIONS_KEY"
FILE = "endpoint.json"  # in the run's folder: the endpoint's address, and this key
WAIT_S = 30.0  # of a request for a session, by default
_WAIT = Key("", float, low=0.0, high=600.0)
#: Fields for the id of an answer: OpenAI's, and those of other systems.
_ID_FIELDS = ("id", "interaction_id", "completion_id")


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class SessionSlot:
    """A trajectory that a session may play."""

    episode: str
    data: dict[str, Any]
    api_key: str
    is_eval: bool
    timeout_s: float
    taken: asyncio.Future[None] = field(default_factory=_future)
    score: asyncio.Future[AgentScore] = field(default_factory=_future)
    # By answer; "" is the reward of the whole session.
    rewards: dict[str, float] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The episode's id without the number of the sample."""
        return self.episode.rpartition("-r")[0]


class SessionBroker:
    """Gives slots to sessions, in the order in which they were requested.

    Args:
        folder: where programs find the endpoint's address and the key, readable by this user alone.

    Attributes:
        key: opens sessions, and nothing else.
    """

    def __init__(self, folder: Path | None = None) -> None:
        user_key = os.environ.get(KEY_VARIABLE)
        if not user_key and folder is None:
            problem = f"there is no run folder for the key of sessions: set {KEY_VARIABLE}"
            raise UserError(f"generator.agent_program=online: {problem}")
        self.key = user_key or secrets.token_urlsafe(32)
        self._file = folder / FILE if folder else None
        self._free: dict[str, SessionSlot] = {}  # by episode
        self._playing: dict[str, SessionSlot] = {}  # by the session's key
        self._groups: dict[str, set[str]] = {}  # group -> its episodes that are free or played
        self._tasks: dict[str, str] = {}  # group -> the task that it is reserved for, "" for none
        self._offered = asyncio.Condition()
        self._closed = False

    async def play(
        self,
        episode: str,
        data: dict[str, Any],
        base_url: str,
        api_key: str,
        *,
        is_eval: bool,
        timeout_s: float,
    ) -> AgentScore:
        """The score of the session that takes this slot.

        Raises:
            AgentError: if the session fails or is not ended in time; or if the other slots of its
                task were played, and no session was opened for this one.
        """
        # The row as JSON has it: dates, for example, become text.
        row = json.loads(json.dumps(data, default=str))
        slot = SessionSlot(
            episode,
            data=row,
            api_key=api_key,
            is_eval=is_eval,
            timeout_s=timeout_s,
        )
        self._free[episode] = slot
        self._groups.setdefault(slot.group, set()).add(episode)
        if self._tasks.get(slot.group):  # a session has begun the group: the time of others runs
            self._expire_later(slot)
        try:
            async with self._offered:
                self._offered.notify_all()
            await slot.taken
            try:
                async with asyncio.timeout(timeout_s or None):
                    return await slot.score
            except TimeoutError:
                problem = f"its session was not ended within {timeout_s:g} s (generator.episode_timeout_s)"
                raise AgentError(f"{episode}: {problem}") from None
        finally:
            self._free.pop(episode, None)
            self._playing.pop(api_key, None)
            episodes = self._groups.get(slot.group, set())
            episodes.discard(episode)
            if not episodes:  # the group has ended
                self._groups.pop(slot.group, None)
                self._tasks.pop(slot.group, None)

    async def close(self) -> None:
        """End the run: requests for a session get an error, and sessions' keys are invalid."""
        self._closed = True
        async with self._offered:
            self._offered.notify_all()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def routes(self, endpoint: Endpoint) -> Sequence[web.RouteDef]:
        """The routes of the endpoint's server that are the broker's."""
        self._endpoint = endpoint
        paths = {
            self._open_session: ("/v1/sessions", "/v1/rl/start_session", "/rl/start_session"),
            self._score_session: ("/v1/sessions/score", "/v1/rl/set_reward", "/rl/set_reward"),
            self._end_session: ("/v1/sessions/end", "/v1/rl/end_session", "/rl/end_session"),
        }
        return [web.post(path, handler) for handler, aliases in paths.items() for path in aliases]

    def publish_address(self, base_url: str) -> None:
        """Tell the programs where the endpoint listens."""
        if self._file is not None:
            # A new file, readable by this user alone from its beginning.
            self._file.unlink(missing_ok=True)
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump({"base_url": base_url, "sessions_key": self.key}, file)
        print(
            f"sessions are opened at {base_url}/sessions, by the key in {self._file or KEY_VARIABLE}",
            flush=True,
        )

    def _next(self, task: str) -> SessionSlot | None:
        """The first free slot of the task's group; else the first of a group without a task.

        Sessions without a task share the groups that no task has.
        """
        slots = self._free.values()  # oldest first
        if not task:
            return next((slot for slot in slots if not self._tasks.get(slot.group)), None)
        for slot in slots:
            if self._tasks.get(slot.group) == task:
                return slot
        return next((slot for slot in slots if slot.group not in self._tasks), None)

    def _expire_later(self, slot: SessionSlot) -> None:
        """Fail a free slot of a group that has a task, unless a session takes it in time."""
        task = self._tasks[slot.group]

        def expire() -> None:
            if not slot.taken.done():
                problem = f"no session was opened for it within {slot.timeout_s:g} s of the first of task {task!r}"
                slot.taken.set_exception(
                    AgentError(f"{slot.episode}: {problem} (generator.episode_timeout_s)")
                )

        if slot.timeout_s:  # 0: no limit
            asyncio.get_running_loop().call_later(slot.timeout_s, expire)

    # ------------------------------------------------------------ over HTTP

    async def _open_session(self, request: web.Request) -> web.Response:
        if not same_key(key_of(request), self.key):
            problem = "sessions are opened with the run's key (sessions_key in endpoint.json of its folder)"
            raise RequestError(problem, code="invalid_api_key", status=401)
        body = await _body(request, {"task", "task_id", "wait_s", "group_size", "api_key"})
        if body.get("group_size", 1) != 1 or body.get("api_key"):
            raise RequestError(
                "a session is opened alone, with a key of the endpoint's choice", "group_size"
            )
        task = given(body, "task", str, "a name", "") or given(body, "task_id", str, "a name", "")
        wait_s = number(body, "wait_s", _WAIT)
        if wait_s is None:
            wait_s = WAIT_S
        slot = None
        async with self._offered:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._offered.wait_for(
                        lambda: self._closed or self._next(task) is not None
                    )
                # Under the lock of the condition: no other request can take it in between.
                slot = self._next(task)
            if slot is None:
                problem = "the trainer asks for no trajectory at present: try again"
                raise RequestError(problem, code="no_session_wanted", status=503)
            del self._free[slot.episode]
            self._playing[slot.api_key] = slot
            slot.taken.set_result(None)
            if slot.group not in self._tasks:
                self._tasks[slot.group] = task
                if task:
                    # The group waits for all of its slots: those that no session takes must fail.
                    for free_slot in self._free.values():
                        if free_slot.group == slot.group:
                            self._expire_later(free_slot)
        return web.json_response(
            {
                "id": slot.episode,
                "session_id": slot.episode,
                "api_key": slot.api_key,
                "base_url": self._endpoint.base_url,
                "data": slot.data,
                "is_eval": slot.is_eval,
                "timeout_s": slot.timeout_s,
            }
        )

    async def _score_session(self, request: web.Request) -> web.Response:
        with self._played(request) as (session, slot):
            body = await _body(request, {"reward", *_ID_FIELDS})
            answer = ""  # the whole session
            for name in reversed(_ID_FIELDS):
                if body.get(name) is not None:
                    answer = str(body[name])
            if answer:
                _check_answers(session, [answer])
            slot.rewards[answer] = _checked({"reward": body.get("reward")}).reward
            return web.json_response({"id": slot.episode, "calls": len(session.recorder.calls)})

    async def _end_session(self, request: web.Request) -> web.Response:
        with self._played(request) as (session, slot):
            body = await _body(request, {"reward", "rewards", "metrics", "error"})
            session.settle()  # streams that are still open are calls that may have a reward
            error: AgentError | None = None
            score = AgentScore()
            if body.get("error") is not None:
                message = given(body, "error", str, "a text")
                error = AgentError(f"{slot.episode}: the program reports: {message:.500}")
            else:
                score = _scored(body, slot)
                _check_answers(session, score.rewards)
                if not session.recorder.calls:
                    raise RequestError(
                        "the session has made no call of the model: there is nothing to score"
                    )
            session.over = True
            self._playing.pop(slot.api_key, None)
            if not slot.score.done():
                if error is None:
                    slot.score.set_result(score)
                else:
                    slot.score.set_exception(error)
            return web.json_response({"id": slot.episode, "calls": len(session.recorder.calls)})

    @contextmanager
    def _played(self, request: web.Request) -> Iterator[tuple[Session, SessionSlot]]:
        """The session whose key the request has, and its slot."""
        with self._endpoint.entered(request) as session:
            slot = self._playing.get(session.api_key)
            if slot is None:  # its time has just run out
                raise RequestError("the session has ended", code="invalid_api_key", status=401)
            yield session, slot


def _scored(body: Body, slot: SessionSlot) -> AgentScore:
    """The score of a session, from the request that ends it and those that came before."""
    rewards: dict[Any, Any] = dict(slot.rewards)
    reward = body.get("reward", rewards.pop("", None))
    rewards.update(given(body, "rewards", dict, "an object of an answer's id -> its reward", {}))
    if reward is not None and rewards:
        raise RequestError(
            "the session has both a reward and rewards of its answers: give one of them", "reward"
        )
    if reward is None and not rewards:
        raise RequestError(
            "the session has no reward: give reward, or rewards by the answers' ids", "reward"
        )
    if reward is None:  # rewards of answers take its place
        reward = 0.0
    score = _checked({"reward": reward, "metrics": body.get("metrics")})
    checked = {str(name): _checked({"reward": value}).reward for name, value in rewards.items()}
    return AgentScore(score.reward, score.metrics, checked)


def _checked(result: object) -> AgentScore:
    """The result as ``check_score`` reads it. Raises ``RequestError`` instead of its error."""
    try:
        return check_score(result)
    except ValueError as error:
        raise RequestError(
            str(error).replace("the program returned", "the request has"), "reward"
        ) from error


def _check_answers(session: Session, names: Iterable[str]) -> None:
    """Raises ``RequestError`` for a name that is not the id of an answer."""
    answers = {call.id for call in session.recorder.calls}
    for name in names:
        if name not in answers:
            raise RequestError(
                f"{name} is the id of none of the session's {len(answers)} answers", "id"
            )


async def _body(request: web.Request, fields: set[str]) -> Body:
    """The body of a request. Raises ``RequestError`` if it has another field."""
    body = await read_json(request) if request.can_read_body else {}
    for name in body:
        if name not in fields:
            raise RequestError(
                f"unknown field {name}; known are {', '.join(sorted(fields))}",
                name,
                "unknown_parameter",
            )
    return body
