"""How programs outside of the run open, score and end their sessions, over HTTP.

| request                 | key           | body                                                          |
|-------------------------|---------------|---------------------------------------------------------------|
| POST /v1/sessions       | the run's     | ``task``, ``wait_s``; answered with ``api_key``, ``data``     |
| POST /v1/sessions/score | the session's | ``reward``, and ``id`` where it is that of one answer         |
| POST /v1/sessions/end   | the session's | ``reward`` or ``rewards`` by answer, ``metrics``; ``error``   |

AReaL's names for the same (``/rl/start_session``, ``/rl/set_reward``, ``/rl/end_session``) are understood too.

Invariant: the run's key opens sessions and sees none; a session's key sees its own. What is wrong in a request changes
nothing: the session goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aiohttp import web

from skyasync.config.keys import Key
from skyasync.endpoint.agent_process import AgentError, Score, check_score
from skyasync.endpoint.forms.fields import given, number
from skyasync.endpoint.forms.inner import Body, RequestError
from skyasync.endpoint.online import Lobby, Place
from skyasync.endpoint.sending import body_of
from skyasync.endpoint.server import Endpoint, key_of, same
from skyasync.endpoint.session import Session

PATIENCE_S = 30.0  # that a request for a session waits, if it says nothing
_PATIENCE = Key("", float, low=0.0, high=600.0)


class Sessions:
    """The handlers."""

    def __init__(self, lobby: Lobby, endpoint: Endpoint) -> None:
        self._lobby, self._endpoint = lobby, endpoint

    def routes(self) -> Sequence[web.RouteDef]:
        places = {
            self._open: ("/v1/sessions", "/v1/rl/start_session", "/rl/start_session"),
            self._score: ("/v1/sessions/score", "/v1/rl/set_reward", "/rl/set_reward"),
            self._end: ("/v1/sessions/end", "/v1/rl/end_session", "/rl/end_session"),
        }
        return [web.post(path, handler) for handler, paths in places.items() for path in paths]

    async def _open(self, request: web.Request) -> web.Response:
        if not same(key_of(request), self._lobby.key):
            problem = "sessions are opened with the run's key (sessions_key in endpoint.json of its folder)"
            raise RequestError(problem, code="invalid_api_key", status=401)
        body = await _body(request, {"task", "task_id", "wait_s", "group_size", "api_key"})
        if body.get("group_size", 1) != 1 or body.get("api_key"):
            raise RequestError("a session is opened alone, with a key of the endpoint's choice", "group_size")
        task = given(body, "task", str, "a name", None) or given(body, "task_id", str, "a name", "")
        patience = number(body, "wait_s", _PATIENCE)
        place = await self._lobby.open(task, PATIENCE_S if patience is None else patience)
        if place is None:
            problem = "the trainer asks for no trajectory at present: try again"
            raise RequestError(problem, code="no_session_wanted", status=503)
        url = self._endpoint.base_url
        told: Body = {"id": place.episode, "session_id": place.episode, "api_key": place.api_key, "base_url": url}
        return web.json_response({**told, "data": place.data, "is_eval": place.is_eval, "timeout_s": place.timeout_s})

    async def _score(self, request: web.Request) -> web.Response:
        with self._playing(request) as (session, place):
            body = await _body(request, {"reward", "id", "interaction_id", "completion_id"})
            names = [body[name] for name in ("id", "interaction_id", "completion_id") if body.get(name) is not None]
            answer = str(names[0]) if names else ""
            if answer:
                _check_answers(session, [answer])
            place.rewards[answer] = _checked({"reward": body.get("reward")}).reward
            return web.json_response({"id": place.episode, "calls": len(session.recorder.calls)})

    async def _end(self, request: web.Request) -> web.Response:
        with self._playing(request) as (session, place):
            body = await _body(request, {"reward", "rewards", "metrics", "error"})
            session.settle()
            if (failed := given(body, "error", str, "a text", None)) is not None:
                score: Score | AgentError = AgentError(f"{place.episode}: the program says: {failed:.500}")
            else:
                score = _scored(body, place)
                _check_answers(session, list(score.rewards))
                if not session.recorder.calls:
                    raise RequestError("the session has made no call of the model: there is nothing to score")
            session.over = True
            self._lobby.end(place, score)
            return web.json_response({"id": place.episode, "calls": len(session.recorder.calls)})

    @contextmanager
    def _playing(self, request: web.Request) -> Iterator[tuple[Session, Place]]:
        with self._endpoint.entered(request) as session:
            place = self._lobby.of(session.api_key)
            if place is None:  # its time has just run out
                raise RequestError("the session has ended", code="invalid_api_key", status=401)
            yield session, place


def _scored(body: Body, place: Place) -> Score:
    """What the session has been given, at its end or before."""
    rewards = {**{name: value for name, value in place.rewards.items() if name}, **given(body, "rewards", dict, "an "
               "object of an answer's id -> its reward", {})}  # fmt: skip
    reward = body.get("reward", place.rewards.get(""))
    if reward is not None and rewards:
        raise RequestError("the session has both a reward and rewards of its answers: give one of them", "reward")
    if reward is None and not rewards:
        raise RequestError("the session has no reward: give reward, or rewards by the answers' ids", "reward")
    metrics = _checked({"reward": 0.0 if reward is None else reward, "metrics": body.get("metrics")})
    by_answer = {str(name): _checked({"reward": value}).reward for name, value in rewards.items()}
    return Score(metrics.reward, metrics.metrics, by_answer)


def _checked(said: object) -> Score:
    try:
        return check_score(said)
    except ValueError as error:
        raise RequestError(str(error).replace("the program returned", "the request has"), "reward") from error


def _check_answers(session: Session, names: Sequence[str]) -> None:
    known = {call.id for call in session.recorder.calls}
    for name in names:
        if name not in known:
            raise RequestError(f"{name} is the id of none of the session's {len(known)} answers", "id")


async def _body(request: web.Request, known: set[str]) -> Body:
    body = await body_of(request) if request.can_read_body else {}
    for name in body:
        if name not in known:
            raise RequestError(f"unknown field {name}; known are {', '.join(sorted(known))}", name, "unknown_parameter")
    return body
