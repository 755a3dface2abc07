"""Own routes that change something: groups, attempts, freeze, seal, fail, publish, weight versions, workers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse

from tokenlake.api.auth import bearer
from tokenlake.api.own_route import OwnRoute, service_of
from tokenlake.api.receipts import group_state
from tokenlake.api.rollouts import Attempt
from tokenlake.api.service import Service
from tokenlake.api.trail import note
from tokenlake.api.wire import FailBody, FreezeBody, GroupBody, SealBody, VersionBody, WorkerBody, read_model
from tokenlake.errors import Forbidden, InvalidInput
from tokenlake.ids import check_group_id, check_rollout_id, split_rollout_id

__all__ = ["router"]

router = APIRouter(prefix="/api/v1", route_class=OwnRoute)


def credential(request: Request, rollout_id: str | None = None) -> int | None:
    """The attempt that the caller may command, None: any; raises `Unauthorized` before anything of the body is read."""
    presented = bearer(request.headers.get("authorization"))
    attempt = service_of(request).capabilities.control(presented, rollout_id)
    note(rollout_id=rollout_id, attempt=attempt)
    return attempt


def _attempt(own: int | None, named: int | None) -> int | None:
    """The attempt a command is about: a capability implies its own and reaches no other."""
    if own is None:
        return named
    if named is not None and named != own:
        raise Forbidden(f"this capability is of attempt {own}", attempt=own)
    return own


def _registration(request: Request, service: Service, rollout_id: str, attempt: int) -> dict[str, Any]:
    base = str(request.base_url).rstrip("/")
    return {
        "rollout_id": rollout_id,
        "attempt": attempt,
        "base_url": f"{base}/ng-rollout/{rollout_id}/v1",
        "data_capability": service.capabilities.mint(rollout_id, attempt, "data"),
        "control_capability": service.capabilities.mint(rollout_id, attempt, "control"),
    }


@router.put("/groups/{group_id}")
async def put_group(request: Request, group_id: str) -> JSONResponse:
    """Register a group of N rollouts; create-only."""
    credential(request)
    service = service_of(request)
    note(group_id=check_group_id(group_id))
    body = await read_model(request, GroupBody, service.settings)
    await service.archive.recall(group_id)
    group, new = await service.registrar.register_group(
        group_id,
        n=body.n,
        deadline_s=body.deadline_s,
        purpose=body.purpose,
        meta=body.meta,
        idempotency_key=request.headers.get("idempotency-key"),
    )
    rollouts = [_registration(request, service, name, 0) for name in group.rollouts]
    return JSONResponse({"group_id": group_id, "n": group.n, "rollouts": rollouts}, 201 if new else 200)


@router.put("/rollouts/{rollout_id}/attempts/{number}")
async def put_attempt(request: Request, rollout_id: str, number: str) -> JSONResponse:
    """Register the next attempt; the older ones are closed."""
    credential(request)
    service = service_of(request)
    if not (number.isascii() and number.isdigit() and len(number) < 8):
        raise InvalidInput("attempt must be a whole number", field="attempt")
    await service.archive.recall(split_rollout_id(rollout_id)[0])
    attempt, new = await service.registrar.register_attempt(
        rollout_id, int(number), idempotency_key=request.headers.get("idempotency-key")
    )
    return JSONResponse(_registration(request, service, rollout_id, attempt.attempt), 201 if new else 200)


@router.post("/rollouts/{rollout_id}/freeze")
async def freeze(request: Request, rollout_id: str) -> JSONResponse:
    """No further calls of this attempt."""
    own = credential(request, check_rollout_id(rollout_id))
    service = service_of(request)
    body = await read_model(request, FreezeBody, service.settings)
    await service.archive.recall(split_rollout_id(rollout_id)[0])
    attempt = await service.lifecycle.freeze(
        rollout_id,
        attempt=_attempt(own, body.attempt),
        terminal_call_id=body.terminal_call_id,
        terminal_response_id=body.terminal_response_id,
    )
    return JSONResponse(
        {
            "rollout_id": rollout_id,
            "attempt": attempt.attempt,
            "state": attempt.state,
            "boundary_id": attempt.boundary_id,
            "terminal_call_id": attempt.boundary_terminal,
            "calls": attempt.committed,
        }
    )


@router.post("/rollouts/{rollout_id}/seal")
async def seal(request: Request, rollout_id: str) -> JSONResponse:
    """End an attempt with its reward; answers the receipt."""
    own = credential(request, check_rollout_id(rollout_id))
    service = service_of(request)
    body = await read_model(request, SealBody, service.settings)
    await service.archive.recall(split_rollout_id(rollout_id)[0])
    with service.traces.span("seal"):
        receipt = await service.lifecycle.seal(
            rollout_id,
            reward=body.reward,
            attempt=_attempt(own, body.attempt),
            terminal_call_id=body.terminal_call_id,
            terminal_response_id=body.terminal_response_id,
            scored_text=body.scored_text,
            boundary_id=body.boundary_id,
        )
    return JSONResponse(receipt)


@router.post("/rollouts/{rollout_id}/fail")
async def fail(request: Request, rollout_id: str) -> JSONResponse:
    """End an attempt without a reward."""
    own = credential(request, check_rollout_id(rollout_id))
    service = service_of(request)
    body = await read_model(request, FailBody, service.settings)
    await service.archive.recall(split_rollout_id(rollout_id)[0])
    attempt: Attempt = await service.lifecycle.fail(
        rollout_id, reason=body.reason, attempt=_attempt(own, body.attempt), retry=body.retry
    )
    return JSONResponse(
        {
            "rollout_id": rollout_id,
            "attempt": attempt.attempt,
            "state": attempt.state,
            "reason": body.reason,
            "retry": attempt.retry,
        }
    )


@router.get("/rollouts/{rollout_id}")
async def get_rollout(request: Request, rollout_id: str) -> JSONResponse:
    """State of a rollout; no tokens."""
    credential(request, check_rollout_id(rollout_id))
    return JSONResponse(await service_of(request).rollout(rollout_id))


@router.post("/groups/{group_id}/publish")
async def publish(request: Request, group_id: str) -> JSONResponse:
    """Publish a group now, whatever of it has ended."""
    credential(request)
    service = service_of(request)
    await service.archive.recall(check_group_id(group_id))
    done = await service.publisher.publish_now(group_id)
    return JSONResponse(
        {
            "group_id": done.group_id,
            "n": done.n,
            "valid": done.valid,
            "reasons": dict(done.reasons),
            "state": "published" if done.dropped is None else "dropped",
            "dropped": done.dropped,
        }
    )


@router.post("/groups/{group_id}/abort")
async def abort(request: Request, group_id: str) -> JSONResponse:
    """Give a group up: it will never be published."""
    credential(request)
    service = service_of(request)
    await service.archive.recall(check_group_id(group_id))
    group = await service.lifecycle.abort_group(group_id)
    return JSONResponse(group_state(group, None))


@router.put("/weight_version")
async def put_weight_version(request: Request) -> JSONResponse:
    """The trainer's published version."""
    credential(request)
    service = service_of(request)
    body = await read_model(request, VersionBody, service.settings)
    return JSONResponse(await service.set_weight_version(body.version))


@router.put("/workers/{worker_id}")
async def put_worker(request: Request, worker_id: str) -> JSONResponse:
    """Register a capture worker, or renew what is known of it."""
    credential(request)
    service = service_of(request)
    body = await read_model(request, WorkerBody, service.settings)
    await service.register_worker(check_group_id(worker_id), body.url, body.loaded_weight_version, body.meta)
    return JSONResponse({"worker_id": worker_id, **service.control.workers[worker_id]})


@router.get("/workers")
async def get_workers(request: Request) -> JSONResponse:
    """Capture workers with the weight version that each has loaded."""
    credential(request)
    return JSONResponse({"workers": await service_of(request).workers()})
