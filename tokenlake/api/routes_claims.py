"""Own routes of the replay buffer: claim, consume, release, rewind."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field, StrictInt, StrictStr
from starlette.requests import Request
from starlette.responses import JSONResponse

from tokenlake.api.own_route import OwnRoute, service_of
from tokenlake.api.routes_control import credential
from tokenlake.api.wire import Body, Number, read_model

__all__ = ["ClaimBody", "ConsumeBody", "ReleaseBody", "RewindBody", "router"]

router = APIRouter(prefix="/api/v1", route_class=OwnRoute)
Version = Annotated[StrictInt, Field(ge=0, lt=2**63)]


class ClaimBody(Body):
    """`POST /claims`."""

    consumer: StrictStr
    groups: StrictInt = Field(default=1, ge=1, le=4096)
    """At most this many groups are handed out."""
    current_version: Version | None = None
    """The weights that the consumer trains; the published version when absent."""
    max_staleness: Version | None = None
    """Versions; the policy when absent."""
    lease_s: Number | None = Field(default=None, gt=0, le=1e9)
    """Seconds; the setting `claim_lease_s` when absent."""


class ConsumeBody(Body):
    """`POST /claims/{claim_id}/consume`."""

    checkpoint: StrictStr


class ReleaseBody(Body):
    """`POST /claims/{claim_id}/release`; it has no fields."""


class RewindBody(Body):
    """`POST /consumers/{name}/rewind`."""

    checkpoint: StrictStr | None
    """None: back to the beginning."""


@router.post("/claims")
async def claim(request: Request) -> JSONResponse:
    """Hand out whole groups."""
    credential(request)
    service = service_of(request)
    body = await read_model(request, ClaimBody, service.settings)
    done = await asyncio.to_thread(
        service.buffer.claim,
        body.consumer,
        groups=body.groups,
        current_version=body.current_version,
        max_staleness=body.max_staleness,
        lease_s=service.settings.claim_lease_s if body.lease_s is None else body.lease_s,
        idempotency_key=request.headers.get("idempotency-key"),
    )
    return JSONResponse(asdict(done))


@router.post("/claims/{claim_id}/consume")
async def consume(request: Request, claim_id: str) -> JSONResponse:
    """The groups of a claim went into a checkpoint."""
    credential(request)
    service = service_of(request)
    body = await read_model(request, ConsumeBody, service.settings)
    return JSONResponse(asdict(await asyncio.to_thread(service.buffer.consume, claim_id, body.checkpoint)))


@router.post("/claims/{claim_id}/release")
async def release(request: Request, claim_id: str) -> JSONResponse:
    """The groups of a claim are for another member."""
    credential(request)
    service = service_of(request)
    await read_model(request, ReleaseBody, service.settings)
    return JSONResponse(asdict(await asyncio.to_thread(service.buffer.release, claim_id)))


@router.post("/consumers/{name}/rewind")
async def rewind(request: Request, name: str) -> JSONResponse:
    """A consumer goes back to a checkpoint."""
    credential(request)
    service = service_of(request)
    body = await read_model(request, RewindBody, service.settings)
    groups = await asyncio.to_thread(service.buffer.rewind, name, body.checkpoint)
    return JSONResponse({"consumer": name, "checkpoint": body.checkpoint, "groups": groups})
