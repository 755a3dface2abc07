"""The model routes: captured calls under a rollout's prefix, and a plain proxy beside it.

Under the prefix only the call routes, token counting and `GET` exist. A `GET` passes through and records nothing. Calls
without the prefix need the control token and are never captured.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import Scope

from tokenlake.api.credentials import authorized_attempt, require_control
from tokenlake.api.dialects.dialect import Dialect
from tokenlake.api.exchange import Exchange
from tokenlake.api.flight import Flight
from tokenlake.api.own_route import service_of
from tokenlake.api.registration import key_digest
from tokenlake.api.rollouts import Attempt
from tokenlake.api.service import Service
from tokenlake.api.trail import note
from tokenlake.api.wire import read_json
from tokenlake.errors import InvalidInput, NotFound
from tokenlake.ingest.fingerprint import json_digest

__all__ = ["calls", "plain_calls", "router"]

calls: list[Route] = []
"""Captured calls; they go before every other route."""
router = APIRouter()
plain_calls = APIRouter()
"""Calls without a prefix, answered by the gate."""
_PREFIXES = ("/ng-rollout/{rollout_id}", "/ng-rollout/{rollout_id}/training-token-capture")
_DIALECTS: dict[str, Callable[[Service], Dialect]] = {
    "/v1/chat/completions": lambda service: service.chat,
    "/v1/responses": lambda service: service.responses,
    "/v1/messages": lambda service: service.anthropic,
}
_COUNT = "/v1/messages/count_tokens"
_TRANSPORT = ("stream", "stream_options")
"""How an answer travels, not what is asked: the same call with and without them."""
_RETRY = "x-stainless-retry-count"
_MAX_KEY = 512


def _attempt(service: Service, rollout_id: str, number: int) -> Attempt | None:
    rollout = service.control.rollout(rollout_id)
    return rollout and rollout.attempts.get(number)


class _CallRoute(Route):
    """A captured call, asked for more than all else together: matched first, and read by hand."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As any route; the log says which one it was."""
        match, found = super().matches(scope)
        return match, {**found, "route": self}


def _captured(read: Callable[[Service], Dialect]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def captured(request: Request) -> Response:
        service = service_of(request)
        rollout_id: str = request.path_params["rollout_id"]
        dialect = read(service)
        number = authorized_attempt(request, rollout_id)
        with ExitStack() as held:
            held.enter_context(service.slots.one())
            body = await read_json(request, service.settings)
            key = request.headers.get("idempotency-key")
            if key is not None and not 0 < len(key) <= _MAX_KEY:
                raise InvalidInput(f"Idempotency-Key must have 1 to {_MAX_KEY} characters", field="Idempotency-Key")
            attempt = _attempt(service, rollout_id, number)
            if attempt is None or (key is None and _RETRY not in request.headers):
                attempt = service.gate.admit(rollout_id, number)
            asked = dialect.request(body)
            exchange = Exchange(request, dialect, asked, service.settings.stream_keep_alive_s)
            flight = Flight(
                attempt=attempt,
                request=asked,
                dialect=dialect,
                request_digest=json_digest({name: value for name, value in body.items() if name not in _TRANSPORT}),
                idempotency_digest=None if key is None else key_digest(rollout_id, number, key),
                sink=exchange.sink,
            )
            note(dialect=dialect.name, call_id=flight.call_id)
            retries = request.headers.get(_RETRY, "")
            sdk_retry = retries.isascii() and retries.isdigit() and retries.strip("0") != ""
            call = service.gate.call(flight, sdk_retry=sdk_retry)
            call = service.slots.during(held.pop_all(), call)
        return await exchange.respond(call, lambda: service.gate.client_gone(flight))

    return captured


def _plain(read: Callable[[Service], Dialect]) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def plain(request: Request) -> Response:
        service = service_of(request)
        require_control(request)
        dialect = read(service)
        with ExitStack() as held:
            held.enter_context(service.slots.one())
            asked = dialect.request(await read_json(request, service.settings))
            exchange = Exchange(request, dialect, asked, service.settings.stream_keep_alive_s)
            call = service.slots.during(held.pop_all(), service.gate.plain(asked, exchange.sink))
        return await exchange.respond(call)

    return plain


async def _count(request: Request, attempt: Attempt | None) -> Response:
    service = service_of(request)
    body = await read_json(request, service.settings)
    return JSONResponse({"input_tokens": await service.gate.count(service.anthropic.conversation(body), attempt)})


async def captured_count(request: Request, rollout_id: str) -> Response:
    """How long the prompt of a call would be; records nothing."""
    number = authorized_attempt(request, rollout_id)
    return await _count(request, _attempt(service_of(request), rollout_id, number))


async def plain_count(request: Request) -> Response:
    """How long a prompt would be, for the trainer's side."""
    require_control(request)
    return await _count(request, None)


for _path, _read in _DIALECTS.items():
    plain_calls.add_api_route(_path, _plain(_read), methods=["POST"])
    calls += [_CallRoute(prefix + _path, _captured(_read), methods=["POST"]) for prefix in _PREFIXES]
router.add_api_route(_COUNT, plain_count, methods=["POST"])
for _prefix in _PREFIXES:
    router.add_api_route(_prefix + _COUNT, captured_count, methods=["POST"])


def _found(request: Request, path: str) -> dict[str, Any]:
    """What the engine answers to a `GET`; its models as the SDK that asks knows them."""
    service = service_of(request)
    now = datetime.now(UTC)
    name = service.engine.name
    if "anthropic-version" in request.headers:
        model = {"type": "model", "id": name, "display_name": name, "created_at": now.strftime("%Y-%m-%dT%H:%M:%SZ")}
        models = {"data": [model], "has_more": False, "first_id": name, "last_id": name}
    else:
        model = {"id": name, "object": "model", "created": int(now.timestamp()), "owned_by": "tokenlake"}
        models = {"object": "list", "data": [model]}
    if path == "v1/models":
        return models
    if path == f"v1/models/{name}":
        return model
    if path in ("version", "v1/version"):
        return {"version": _version()}
    if path in ("health", "v1/health"):
        return {"status": "ok"}
    raise NotFound(f"nothing at GET /{path}")


def _version() -> str:
    try:
        return version("tokenlake")
    except PackageNotFoundError:
        return "unknown"


async def captured_get(request: Request, rollout_id: str, path: str) -> Response:
    """A `GET` under a rollout's prefix: passes through, records nothing."""
    authorized_attempt(request, rollout_id)
    return JSONResponse(_found(request, path.removeprefix("training-token-capture/")))


async def captured_other(request: Request, rollout_id: str, path: str) -> Response:
    """Anything else under a rollout's prefix is refused, so that nothing is served uncaptured by accident."""
    authorized_attempt(request, rollout_id)
    raise NotFound(f"{request.method} /{path} is not served under a rollout's prefix")


router.add_api_route("/ng-rollout/{rollout_id}/{path:path}", captured_get, methods=["GET"])
router.add_api_route("/ng-rollout/{rollout_id}/{path:path}", captured_other, methods=["POST", "PUT", "PATCH", "DELETE"])


async def plain_get(request: Request, path: str) -> Response:
    """A `GET` of the plain proxy."""
    require_control(request)
    return JSONResponse(_found(request, f"v1/{path}"))


router.add_api_route("/v1/{path:path}", plain_get, methods=["GET"])
