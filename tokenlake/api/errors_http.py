"""Errors on the wire: one table from error classes to statuses, one shape for own routes, one for each dialect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from tokenlake.api.dialects.anthropic import anthropic_error
from tokenlake.api.dialects.chat import openai_error
from tokenlake.errors import (
    Busy,
    CaptureFailed,
    Conflict,
    ContextOverflow,
    DamagedLake,
    Deadline,
    EngineFailed,
    Forbidden,
    InvalidInput,
    NotFound,
    StorageFailed,
    TokenlakeError,
    TooLarge,
    Unauthorized,
)

__all__ = ["INTERNAL", "STATUSES", "agent_message", "error_response", "is_model_path", "plain_error", "status_of"]

STATUSES: dict[type[TokenlakeError], tuple[int, str]] = {
    InvalidInput: (400, "invalid_input"),
    ContextOverflow: (400, "context_overflow"),
    Unauthorized: (401, "unauthorized"),
    Forbidden: (403, "forbidden"),
    NotFound: (404, "not_found"),
    Conflict: (409, "conflict"),
    TooLarge: (413, "too_large"),
    Busy: (429, "busy"),
    CaptureFailed: (503, "capture_failed"),
    EngineFailed: (503, "engine_failed"),
    StorageFailed: (503, "storage_failed"),
    DamagedLake: (503, "damaged_lake"),
    Deadline: (504, "deadline"),
}
"""Status and type of each error; a subclass has its base's, any other error is 500 `internal`."""

INTERNAL = "something went wrong here; the log of the service says what"
"""What a client learns of a bug of ours."""

_STORAGE = "the call cannot be stored now: try again later"
_UPSTREAM = "the engine could not answer this call ({}): try again later"

_BY_STATUS = {
    400: "invalid_input",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    422: "invalid_input",
}
_ANTHROPIC = "/v1/messages"
_FINAL = ("unauthorized", "forbidden", "conflict", "capture_failed", "not_found")


def status_of(error: TokenlakeError) -> tuple[int, str]:
    """Status and type of an error."""
    return next((STATUSES[cls] for cls in type(error).__mro__ if cls in STATUSES), (500, "internal"))


def agent_message(error: TokenlakeError) -> str:
    """What an agent learns of an error: nothing of the folders and addresses behind the service, which errors name."""
    if isinstance(error, StorageFailed | DamagedLake):
        return _STORAGE
    reason = str(error.detail.get("reason"))
    return _UPSTREAM.format(reason) if reason.startswith("upstream_") else error.message


def is_model_path(path: str) -> bool:
    """Whether errors on this path are the dialect's: the model routes, with and without a rollout's prefix."""
    return path.startswith(("/ng-rollout/", "/v1/"))


def error_response(path: str, error: TokenlakeError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error as the client of this path reads it."""
    status, kind = status_of(error)
    if isinstance(error, Busy):
        headers = {**(headers or {}), "Retry-After": str(math.ceil(error.detail["retry_after_s"]))}
    message = agent_message(error) if is_model_path(path) else error.message
    return plain_error(path, status, message, error.detail, kind=kind, headers=headers)


def plain_error(
    path: str,
    status: int,
    message: str,
    detail: Mapping[str, Any],
    *,
    kind: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error that has no class of ours: of routing, validation, or unexpected."""
    kind = kind or _BY_STATUS.get(status, "internal")
    if not is_model_path(path):
        body = {"error": {"type": kind, "message": message, "detail": dict(detail)}}
        return JSONResponse(body, status, dict(headers or {}))
    field = detail.get("field")
    # SDKs repeat a 409 or 5xx by themselves; what cannot become right is not worth it.
    stop = {"x-should-retry": "false"} if kind in _FINAL else {}
    shape = anthropic_error if _ANTHROPIC in path else openai_error
    return JSONResponse(shape(status, kind, message, field), status, {**(headers or {}), **stop})
