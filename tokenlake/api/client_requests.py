"""Requests of the REST client: what each call says, how an answer is read, how long is tried. No connection here."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx
import pyarrow as pa

from tokenlake.errors import (
    Busy,
    Conflict,
    Deadline,
    EngineFailed,
    Forbidden,
    InvalidInput,
    NotFound,
    TokenlakeError,
    TooLarge,
    Unauthorized,
)

__all__ = [
    "Request",
    "Tries",
    "at",
    "claim",
    "consume",
    "fail",
    "freeze",
    "groups",
    "headers",
    "read",
    "read_table",
    "register_attempt",
    "register_group",
    "rewind",
    "rows",
    "seal",
    "sql",
]

_FIRST_PAUSE_S = 0.05
_STREAM = "application/vnd.apache.arrow.stream"
_ERRORS: dict[int, type[TokenlakeError]] = {
    400: InvalidInput,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: InvalidInput,
    429: Busy,
    503: EngineFailed,
    504: Deadline,
}


class Request:
    """One request, as both clients send it."""

    __slots__ = ("fields", "repeatable")

    def __init__(
        self,
        method: str,
        path: str,
        json: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        repeatable: bool = True,
    ) -> None:
        self.fields: dict[str, Any] = {
            "method": method,
            "url": path,
            "json": json,
            "params": params,
            "headers": headers,
        }
        """The arguments of `request` of either kind of httpx client."""
        self.repeatable = repeatable
        """Whether sending it twice comes to the same as once."""


class Tries:
    """How long one call may take, and when to send it again."""

    def __init__(self, deadline_s: float, retry_s: float) -> None:
        now = time.monotonic()
        self._end = now + deadline_s
        self._until = now + min(retry_s, deadline_s)
        self._pause = _FIRST_PAUSE_S

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return max(0.001, self._end - time.monotonic())

    def again(self, request: Request, base_url: httpx.URL, error: httpx.TransportError) -> float:
        """Seconds until it is sent again after `error`; raises `Deadline` or `EngineFailed` where it is not."""
        if isinstance(error, httpx.TimeoutException):
            raise Deadline(f"{base_url} did not answer in time") from error
        pause, self._pause = self._pause, min(2 * self._pause, 1.0)
        if not request.repeatable or time.monotonic() + pause >= self._until:
            raise EngineFailed(f"{base_url} cannot be reached: {error}") from error
        return pause


def headers(token: str) -> dict[str, str]:
    """The headers of every request."""
    return {"Authorization": f"Bearer {token}"}


def read(response: httpx.Response) -> Any:
    """The JSON of an answer; raises the error that the service meant."""
    if response.is_success:
        return response.json()
    raise _error(response)


def read_table(response: httpx.Response) -> tuple[pa.Table, str | None]:
    """The rows of an answer, and the cursor of the next page; raises as `read` does."""
    if not response.is_success:
        raise _error(response)
    return pa.ipc.open_stream(response.content).read_all(), response.headers.get("x-next-after")


def at(method: str, *parts: str, json: Mapping[str, Any] | None = None, **more: Any) -> Request:
    """A request to one of our own routes, named by the parts of its path."""
    return Request(method, "/api/v1/" + "/".join(quote(part, safe="") for part in parts), json, **more)


def register_group(
    group_id: str, n: int, deadline_s: float | None, purpose: str, meta: Mapping[str, Any] | None, key: str | None
) -> Request:
    """A new group; its `Idempotency-Key` is made up where none is given."""
    body = _given(n=n, deadline_s=deadline_s, purpose=purpose, meta=meta)
    return at("PUT", "groups", group_id, json=body, headers=_key(key))


def register_attempt(rollout_id: str, number: int, key: str | None) -> Request:
    """A new attempt; its `Idempotency-Key` is made up where none is given."""
    return at("PUT", "rollouts", rollout_id, "attempts", str(number), headers=_key(key))


def freeze(rollout_id: str, attempt: int | None, terminal_response_id: str | None) -> Request:
    """The end of generation."""
    body = _given(attempt=attempt, terminal_response_id=terminal_response_id)
    return at("POST", "rollouts", rollout_id, "freeze", json=body)


def seal(rollout_id: str, **fields: Any) -> Request:
    """The end of a rollout with its reward. Raises `InvalidInput` for one that JSON has no number for."""
    if not math.isfinite(fields["reward"]):
        raise InvalidInput("reward must be a finite number: fail a rollout that has none", field="reward")
    return at("POST", "rollouts", rollout_id, "seal", json=_given(**fields))


def fail(rollout_id: str, **fields: Any) -> Request:
    """The end of a rollout without a reward."""
    return at("POST", "rollouts", rollout_id, "fail", json=_given(**fields))


def groups(after: str | None, limit: int | None) -> Request:
    """A page of groups."""
    return at("GET", "groups", params=_given(after=after, limit=limit))


def rows(group_id: str | None, after: str | None, limit: int | None) -> Request:
    """A page of ready rows, as Arrow."""
    params = _given(group_id=group_id, after=after, limit=limit)
    return at("GET", "rows", params=params, headers={"Accept": _STREAM})


def claim(consumer: str, key: str | None, **terms: Any) -> Request:
    """A claim; its `Idempotency-Key` is made up where none is given."""
    return at("POST", "claims", json=_given(consumer=consumer, **terms), headers=_key(key))


def consume(claim_id: str, checkpoint: str) -> Request:
    """A claim's groups went into a checkpoint."""
    return at("POST", "claims", claim_id, "consume", json={"checkpoint": checkpoint})


def rewind(consumer: str, checkpoint: str | None) -> Request:
    """Back to a checkpoint; sent twice it could give back what was claimed in between."""
    return at("POST", "consumers", consumer, "rewind", json={"checkpoint": checkpoint}, repeatable=False)


def sql(text: str, params: list[Any] | None) -> Request:
    """A query."""
    return at("POST", "sql", json={"sql": text, "params": params or []})


def _error(response: httpx.Response) -> TokenlakeError:
    try:
        error: dict[str, Any] = response.json()["error"]
        message: str = error["message"]
        detail: dict[str, Any] = error.get("detail") or {}
    except (ValueError, KeyError, TypeError):
        message, detail = response.text[:200], {}
    kind = _ERRORS.get(response.status_code, TokenlakeError)
    return kind(f"{message} ({response.request.method} {response.request.url.path})", **detail)


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _key(idempotency_key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": secrets.token_hex(16) if idempotency_key is None else idempotency_key}
