"""The model routes where an upstream stands behind them: plain calls and reads go straight through.

`beside` stands in front of the gate's own routes: unprefixed model routes (for the control token) and `GET` under a
rollout's prefix. `instead` is added with `--capture off`: the calls under the prefix go through too, and are recorded
nowhere. A rollout still decides who may call and until when.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from urllib.parse import unquote_to_bytes

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from tokenlake.api.credentials import authorized_attempt, require_control
from tokenlake.api.own_route import service_of
from tokenlake.api.wire import read_bytes
from tokenlake.clock import now_us
from tokenlake.errors import NotFound
from tokenlake.ids import mint_call_id

__all__ = ["beside", "instead"]

beside = APIRouter()
instead = APIRouter()
_PREFIX = re.compile(rb"^/ng-rollout/[^/]+(?:/training-token-capture(?=/))?")
_DOOR = "training-token-capture/"
_CALLS = ("v1/chat/completions", "v1/responses", "v1/messages", "v1/messages/count_tokens")
_OWN = "v1/tokenlake/"
_METHODS = ["POST", "PUT", "PATCH", "DELETE"]


async def _passed(request: Request, raw_path: bytes, done: Callable[[], None] | None = None) -> Response:
    service = service_of(request)
    if service.proxy is None:
        raise NotFound("no upstream stands behind this service")
    body = await read_bytes(request, service.settings)
    return service.proxy.forward(request, raw_path, body, done=done)


def _raw_path(request: Request) -> bytes:
    raw: bytes = request.scope.get("raw_path") or request.url.path.encode()
    return raw.partition(b"?")[0]


async def read_through(request: Request, rollout_id: str, path: str) -> Response:
    """A `GET` under a rollout's prefix: passes through, records nothing."""
    authorized_attempt(request, rollout_id)
    if path.removeprefix(_DOOR).startswith(_OWN):
        raise NotFound("what a capture worker says of itself is not for agents")
    raw = _PREFIX.sub(b"", _raw_path(request))
    if unquote_to_bytes(raw) != f"/{path.removeprefix(_DOOR)}".encode():
        raise NotFound("an encoded slash in a rollout's prefix is not passed on")
    return await _passed(request, raw)


async def plain(request: Request, path: str) -> Response:  # noqa: ARG001 - part of the route
    """An unprefixed model route: the upstream's answer, for the trainer's side only."""
    require_control(request)
    return await _passed(request, _raw_path(request))


async def uncaptured(request: Request, rollout_id: str, path: str) -> Response:
    """A model call of a rollout that nobody captures; it counts as in flight until its last byte."""
    service = service_of(request)
    number = authorized_attempt(request, rollout_id)
    called = path.removeprefix(_DOOR)
    if request.method != "POST" or called not in _CALLS:
        raise NotFound(f"{request.method} /{path} is not served under a rollout's prefix")
    attempt = service.gate.admit(rollout_id, number)
    call_id = mint_call_id()
    attempt.inflight |= {call_id}

    def done() -> None:
        attempt.touched_at = now_us()
        attempt.land(call_id)

    with ExitStack() as failed:
        failed.callback(done)
        answer = await _passed(request, f"/{called}".encode(), done)
        failed.pop_all()
    return answer


beside.add_api_route("/ng-rollout/{rollout_id}/{path:path}", read_through, methods=["GET"])
beside.add_api_route("/v1/{path:path}", plain, methods=["GET", *_METHODS])
instead.add_api_route("/ng-rollout/{rollout_id}/{path:path}", uncaptured, methods=_METHODS)
