"""The model routes: captured calls under a rollout's prefix, and a plain proxy beside it.

Under the prefix only the call routes and `GET` exist. A `GET` passes through and records nothing. Calls without the
prefix need the control token and are never captured.
"""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tokenlake.api.auth import bearer
from tokenlake.api.chat import Answer
from tokenlake.api.flight import Flight
from tokenlake.api.own_route import service_of
from tokenlake.api.registration import key_digest
from tokenlake.api.service import Service
from tokenlake.api.wire import read_json
from tokenlake.errors import InvalidInput, NotFound, Unauthorized
from tokenlake.ids import check_rollout_id
from tokenlake.ingest.fingerprint import json_digest

__all__ = ["router"]

router = APIRouter()
_PREFIXES = ("/ng-rollout/{rollout_id}", "/ng-rollout/{rollout_id}/training-token-capture")
_CLIENT_GONE = 499
_MAX_KEY = 512


def _presented(request: Request) -> str | None:
    return bearer(request.headers.get("authorization"), request.headers.get("x-api-key"))


def _authorized(request: Request, rollout_id: str) -> int:
    """The attempt that this agent may call."""
    service = service_of(request)
    if service.control.rollout(check_rollout_id(rollout_id)) is None:
        raise NotFound(f"no rollout {rollout_id}", rollout_id=rollout_id)
    return service.capabilities.data(_presented(request), rollout_id)


async def captured_chat(request: Request, rollout_id: str) -> Response:
    """One captured chat completion."""
    service = service_of(request)
    number = _authorized(request, rollout_id)
    body = await read_json(request, service.settings.max_body_bytes)
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _MAX_KEY:
        raise InvalidInput(f"Idempotency-Key must have 1 to {_MAX_KEY} characters", field="Idempotency-Key")
    rollout = service.control.rollout(rollout_id)
    attempt = rollout and rollout.attempts.get(number)
    if attempt is None or (key is None and "x-stainless-retry-count" not in request.headers):
        attempt = service.gate.admit(rollout_id, number)
    flight = Flight(
        attempt=attempt,
        request=service.chat.request(body),
        dialect=service.chat,
        request_digest=json_digest(body),
        idempotency_digest=None if key is None else key_digest(rollout_id, number, key),
    )
    retries = request.headers.get("x-stainless-retry-count", "0")
    answer = await _while_connected(request, service, flight, sdk_retry=retries.isdigit() and int(retries) > 0)
    return Response(status_code=_CLIENT_GONE) if answer is None else JSONResponse(service.chat.body(answer))


for _prefix in _PREFIXES:
    router.add_api_route(f"{_prefix}/v1/chat/completions", captured_chat, methods=["POST"])


async def _while_connected(request: Request, service: Service, flight: Flight, *, sdk_retry: bool) -> Answer | None:
    """The answer, or None when the client hung up before it was ready."""
    call = asyncio.create_task(service.gate.call(flight, sdk_retry=sdk_retry))
    hung_up = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({call, hung_up}, return_when=asyncio.FIRST_COMPLETED)
        if hung_up.done() and not hung_up.cancelled():
            await service.gate.client_gone(flight)
            await asyncio.wait({call})
            # Nobody is there to be told: what came of it is recorded.
            call.exception()
            return None
        return call.result()
    except asyncio.CancelledError:
        await asyncio.shield(asyncio.ensure_future(service.gate.client_gone(flight)))
        raise
    finally:
        hung_up.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def plain_chat(request: Request) -> Response:
    """A chat completion for the trainer's side: same engine, never captured."""
    service = service_of(request)
    _require_control(request)
    body = await read_json(request, service.settings.max_body_bytes)
    return JSONResponse(service.chat.body(await service.gate.plain(service.chat.request(body))))


router.add_api_route("/v1/chat/completions", plain_chat, methods=["POST"])


def _require_control(request: Request) -> None:
    if not service_of(request).capabilities.is_control(_presented(request)):
        raise Unauthorized("unprefixed model routes need the control token")


def _read(service: Service, path: str) -> dict[str, Any]:
    """What the engine answers to a `GET`."""
    model = {"id": service.engine.name, "object": "model", "created": int(time.time()), "owned_by": "tokenlake"}
    if path == "v1/models":
        return {"object": "list", "data": [model]}
    if path == f"v1/models/{service.engine.name}":
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
    _authorized(request, rollout_id)
    return JSONResponse(_read(service_of(request), path.removeprefix("training-token-capture/")))


async def captured_other(request: Request, rollout_id: str, path: str) -> Response:
    """Anything else under a rollout's prefix is refused, so that nothing is served uncaptured by accident."""
    _authorized(request, rollout_id)
    raise NotFound(f"{request.method} /{path} is not served under a rollout's prefix")


router.add_api_route("/ng-rollout/{rollout_id}/{path:path}", captured_get, methods=["GET"])
router.add_api_route("/ng-rollout/{rollout_id}/{path:path}", captured_other, methods=["POST", "PUT", "PATCH", "DELETE"])


async def plain_get(request: Request, path: str) -> Response:
    """A `GET` of the plain proxy."""
    _require_control(request)
    return JSONResponse(_read(service_of(request), f"v1/{path}"))


router.add_api_route("/v1/{path:path}", plain_get, methods=["GET"])
