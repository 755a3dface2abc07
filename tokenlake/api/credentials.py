"""Who asks on a model route: an agent for its rollout, or the holder of the control token."""

from __future__ import annotations

from starlette.requests import Request

from tokenlake.api.auth import bearer
from tokenlake.api.own_route import service_of
from tokenlake.api.trail import note
from tokenlake.errors import NotFound, Unauthorized
from tokenlake.ids import check_rollout_id

__all__ = ["authorized_attempt", "require_control"]


def authorized_attempt(request: Request, rollout_id: str) -> int:
    """The attempt that this agent may call; raises `NotFound`, `Unauthorized` and, of requests too many, `Busy`."""
    service = service_of(request)
    try:
        number = service.capabilities.data(_presented(request), check_rollout_id(rollout_id))
    except Unauthorized:
        if service.control.rollout(rollout_id) is None:
            raise NotFound(f"no rollout {rollout_id}", rollout_id=rollout_id) from None
        raise
    note(rollout_id=rollout_id, attempt=number)
    service.limits.count(rollout_id)
    return number


def require_control(request: Request) -> None:
    """Raise `Unauthorized` unless the caller holds the control token."""
    if not service_of(request).capabilities.is_control(_presented(request)):
        raise Unauthorized("unprefixed model routes need the control token")


def _presented(request: Request) -> str | None:
    return bearer(request.headers.get("authorization"), request.headers.get("x-api-key"))
