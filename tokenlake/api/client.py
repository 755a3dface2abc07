"""The REST client: what a trainer or an environment process says to a service.

Every call has a deadline, so a dead service is an error and never a silence. A request that did not arrive, or whose
answer was lost, is sent again for `retry_s`, where sending it twice comes to the same as once: registrations and claims
carry an `Idempotency-Key`, made up where none is given. Errors are those of `tokenlake.errors`: `Conflict`, `NotFound`,
`Unauthorized` and so on, as the service meant them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx
import pyarrow as pa

from tokenlake.api.results import (
    AuditReport,
    Boundary,
    Ended,
    GroupPage,
    GroupState,
    Published,
    Receipt,
    RegisteredGroup,
    RolloutState,
    Slot,
    SqlResult,
    WeightVersion,
)
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

__all__ = ["AsyncClient", "Client"]

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


def _read(response: httpx.Response) -> Any:
    if response.is_success:
        return response.json()
    raise _error(response)


def _error(response: httpx.Response) -> TokenlakeError:
    try:
        error: dict[str, Any] = response.json()["error"]
        message: str = error["message"]
        detail: dict[str, Any] = error.get("detail") or {}
    except (ValueError, KeyError, TypeError):
        message, detail = response.text[:200], {}
    kind = _ERRORS.get(response.status_code, TokenlakeError)
    return kind(f"{message} ({response.request.method} {response.request.url.path})", **detail)


def _table(response: httpx.Response) -> tuple[pa.Table, str | None]:
    if not response.is_success:
        raise _error(response)
    return pa.ipc.open_stream(response.content).read_all(), response.headers.get("x-next-after")


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _key(idempotency_key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": secrets.token_hex(16) if idempotency_key is None else idempotency_key}


def _path(*parts: str) -> str:
    return "/api/v1/" + "/".join(quote(part, safe="") for part in parts)


def _headers(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


class _Request:
    """One request, as both clients send it."""

    __slots__ = ("headers", "json", "method", "params", "path", "repeatable")

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
        self.repeatable = repeatable
        self.method = method
        self.path = path
        self.json = json
        self.params = params
        self.headers = headers


def _group(group_id: str, n: int, deadline_s: float | None, purpose: str, meta: Any, key: str | None) -> _Request:
    body = _given(n=n, deadline_s=deadline_s, purpose=purpose, meta=meta)
    return _Request("PUT", _path("groups", group_id), body, headers=_key(key))


def _seal(rollout_id: str, fields: dict[str, Any]) -> _Request:
    return _Request("POST", _path("rollouts", rollout_id, "seal"), _given(**fields))


def _rows(group_id: str | None, after: str | None, limit: int | None) -> _Request:
    params = _given(group_id=group_id, after=after, limit=limit)
    return _Request("GET", _path("rows"), params=params, headers={"Accept": _STREAM})


def _claim(
    consumer: str, groups: int, version: int | None, staleness: int | None, lease_s: float | None, key: str | None
) -> _Request:
    body = _given(consumer=consumer, groups=groups, current_version=version, max_staleness=staleness, lease_s=lease_s)
    return _Request("POST", _path("claims"), body, headers=_key(key))


def _consume(claim_id: str, checkpoint: str) -> _Request:
    return _Request("POST", _path("claims", claim_id, "consume"), {"checkpoint": checkpoint})


def _rewind(consumer: str, checkpoint: str | None) -> _Request:
    return _Request("POST", _path("consumers", consumer, "rewind"), {"checkpoint": checkpoint}, repeatable=False)


class _Tries:
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

    def pause(self, request: _Request) -> float | None:
        """Seconds to wait before sending it again; None: not again."""
        pause, self._pause = self._pause, min(2 * self._pause, 1.0)
        return pause if request.repeatable and time.monotonic() + pause < self._until else None


class Client:
    """A blocking client. `token` is the control token, or a rollout's control capability for that rollout alone."""

    def __init__(self, base_url: str, token: str, *, deadline_s: float = 60.0, retry_s: float = 5.0) -> None:
        self._times = (deadline_s, retry_s)
        self._http = httpx.Client(base_url=base_url, headers=_headers(token))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _send(self, request: _Request) -> httpx.Response:
        tries = _Tries(*self._times)
        while True:
            try:
                return self._http.request(
                    request.method,
                    request.path,
                    json=request.json,
                    params=request.params,
                    headers=request.headers,
                    timeout=tries.left,
                )
            except httpx.TimeoutException as error:
                raise Deadline(f"{self._http.base_url} did not answer in time") from error
            except httpx.TransportError as error:
                pause = tries.pause(request)
                if pause is None:
                    raise EngineFailed(f"{self._http.base_url} cannot be reached: {error}") from error
            time.sleep(pause)

    def register_group(
        self,
        group_id: str,
        n: int,
        *,
        deadline_s: float | None = None,
        purpose: str = "train",
        meta: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> RegisteredGroup:
        """Register a group; answers a `base_url` and capabilities for each rollout."""
        return _read(self._send(_group(group_id, n, deadline_s, purpose, meta, idempotency_key)))

    def register_attempt(self, rollout_id: str, number: int, *, idempotency_key: str | None = None) -> Slot:
        """Register the next attempt of a rollout."""
        path = _path("rollouts", rollout_id, "attempts", str(number))
        return _read(self._send(_Request("PUT", path, headers=_key(idempotency_key))))

    def freeze(
        self, rollout_id: str, *, attempt: int | None = None, terminal_response_id: str | None = None
    ) -> Boundary:
        """End generation before the verifier runs."""
        body = _given(attempt=attempt, terminal_response_id=terminal_response_id)
        return _read(self._send(_Request("POST", _path("rollouts", rollout_id, "freeze"), body)))

    def seal(
        self,
        rollout_id: str,
        *,
        reward: float,
        attempt: int | None = None,
        terminal_response_id: str | None = None,
        terminal_call_id: str | None = None,
        scored_text: str | None = None,
        boundary_id: str | None = None,
    ) -> Receipt:
        """End a rollout with its reward; answers the receipt."""
        fields = {
            "reward": reward,
            "attempt": attempt,
            "terminal_response_id": terminal_response_id,
            "terminal_call_id": terminal_call_id,
            "scored_text": scored_text,
            "boundary_id": boundary_id,
        }
        return _read(self._send(_seal(rollout_id, fields)))

    def fail(self, rollout_id: str, *, reason: str, attempt: int | None = None, retry: bool = False) -> Ended:
        """End a rollout without a reward; with `retry` the slot waits for another attempt."""
        body = _given(reason=reason, attempt=attempt, retry=retry)
        return _read(self._send(_Request("POST", _path("rollouts", rollout_id, "fail"), body)))

    def rollout(self, rollout_id: str) -> RolloutState:
        """State of a rollout."""
        return _read(self._send(_Request("GET", _path("rollouts", rollout_id))))

    def group(self, group_id: str) -> GroupState:
        """State of a group."""
        return _read(self._send(_Request("GET", _path("groups", group_id))))

    def groups(self, *, after: str | None = None, limit: int | None = None) -> GroupPage:
        """A page of groups in order of their ids; `next` is the cursor of the next page."""
        return _read(self._send(_Request("GET", _path("groups"), params=_given(after=after, limit=limit))))

    def audit(self) -> AuditReport:
        """Everything verified again from the bytes: findings by kind."""
        return _read(self._send(_Request("GET", _path("audit"))))

    def workers(self) -> list[dict[str, Any]]:
        """Capture workers with the weight version that each has loaded."""
        return _read(self._send(_Request("GET", _path("workers"))))["workers"]

    def publish(self, group_id: str) -> Published:
        """Publish a group now."""
        return _read(self._send(_Request("POST", _path("groups", group_id, "publish"))))

    def abort(self, group_id: str) -> GroupState:
        """Give a group up."""
        return _read(self._send(_Request("POST", _path("groups", group_id, "abort"))))

    def rows(
        self, *, group_id: str | None = None, after: str | None = None, limit: int | None = None
    ) -> tuple[pa.Table, str | None]:
        """A page of ready rows, and the cursor of the next page."""
        return _table(self._send(_rows(group_id, after, limit)))

    def claim(
        self,
        consumer: str,
        *,
        groups: int = 1,
        current_version: int | None = None,
        max_staleness: int | None = None,
        lease_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Take up to `groups` whole groups: `claim_id` (None without any), `groups`, `deadline_at`."""
        terms = (groups, current_version, max_staleness, lease_s, idempotency_key)
        return _read(self._send(_claim(consumer, *terms)))

    def consume(self, claim_id: str, *, checkpoint: str) -> dict[str, Any]:
        """Say that a claim's groups went into this checkpoint."""
        return _read(self._send(_consume(claim_id, checkpoint)))

    def release(self, claim_id: str) -> dict[str, Any]:
        """Give a claim's groups back."""
        return _read(self._send(_Request("POST", _path("claims", claim_id, "release"))))

    def rewind(self, consumer: str, *, checkpoint: str | None) -> dict[str, Any]:
        """Give back what a consumer took after a checkpoint (None: everything); answers these `groups`."""
        return _read(self._send(_rewind(consumer, checkpoint)))

    def sql(self, text: str, params: list[Any] | None = None) -> SqlResult:
        """A read-only query: `columns`, `rows`, `truncated`."""
        return _read(self._send(_Request("POST", _path("sql"), {"sql": text, "params": params or []})))

    def set_weight_version(self, version: int) -> WeightVersion:
        """Announce the trainer's published version; answers what each worker has loaded."""
        return _read(self._send(_Request("PUT", _path("weight_version"), {"version": version})))


class AsyncClient:
    """The same, for an event loop."""

    def __init__(self, base_url: str, token: str, *, deadline_s: float = 60.0, retry_s: float = 5.0) -> None:
        self._times = (deadline_s, retry_s)
        self._http = httpx.AsyncClient(base_url=base_url, headers=_headers(token))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _send(self, request: _Request) -> httpx.Response:
        tries = _Tries(*self._times)
        while True:
            try:
                return await self._http.request(
                    request.method,
                    request.path,
                    json=request.json,
                    params=request.params,
                    headers=request.headers,
                    timeout=tries.left,
                )
            except httpx.TimeoutException as error:
                raise Deadline(f"{self._http.base_url} did not answer in time") from error
            except httpx.TransportError as error:
                pause = tries.pause(request)
                if pause is None:
                    raise EngineFailed(f"{self._http.base_url} cannot be reached: {error}") from error
            await asyncio.sleep(pause)

    async def register_group(
        self,
        group_id: str,
        n: int,
        *,
        deadline_s: float | None = None,
        purpose: str = "train",
        meta: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> RegisteredGroup:
        """Register a group; answers a `base_url` and capabilities for each rollout."""
        return _read(await self._send(_group(group_id, n, deadline_s, purpose, meta, idempotency_key)))

    async def register_attempt(self, rollout_id: str, number: int, *, idempotency_key: str | None = None) -> Slot:
        """Register the next attempt of a rollout."""
        path = _path("rollouts", rollout_id, "attempts", str(number))
        return _read(await self._send(_Request("PUT", path, headers=_key(idempotency_key))))

    async def freeze(
        self, rollout_id: str, *, attempt: int | None = None, terminal_response_id: str | None = None
    ) -> Boundary:
        """End generation before the verifier runs."""
        body = _given(attempt=attempt, terminal_response_id=terminal_response_id)
        return _read(await self._send(_Request("POST", _path("rollouts", rollout_id, "freeze"), body)))

    async def seal(
        self,
        rollout_id: str,
        *,
        reward: float,
        attempt: int | None = None,
        terminal_response_id: str | None = None,
        terminal_call_id: str | None = None,
        scored_text: str | None = None,
        boundary_id: str | None = None,
    ) -> Receipt:
        """End a rollout with its reward; answers the receipt."""
        fields = {
            "reward": reward,
            "attempt": attempt,
            "terminal_response_id": terminal_response_id,
            "terminal_call_id": terminal_call_id,
            "scored_text": scored_text,
            "boundary_id": boundary_id,
        }
        return _read(await self._send(_seal(rollout_id, fields)))

    async def fail(self, rollout_id: str, *, reason: str, attempt: int | None = None, retry: bool = False) -> Ended:
        """End a rollout without a reward; with `retry` the slot waits for another attempt."""
        body = _given(reason=reason, attempt=attempt, retry=retry)
        return _read(await self._send(_Request("POST", _path("rollouts", rollout_id, "fail"), body)))

    async def rollout(self, rollout_id: str) -> RolloutState:
        """State of a rollout."""
        return _read(await self._send(_Request("GET", _path("rollouts", rollout_id))))

    async def group(self, group_id: str) -> GroupState:
        """State of a group."""
        return _read(await self._send(_Request("GET", _path("groups", group_id))))

    async def groups(self, *, after: str | None = None, limit: int | None = None) -> GroupPage:
        """A page of groups in order of their ids; `next` is the cursor of the next page."""
        return _read(await self._send(_Request("GET", _path("groups"), params=_given(after=after, limit=limit))))

    async def audit(self) -> AuditReport:
        """Everything verified again from the bytes: findings by kind."""
        return _read(await self._send(_Request("GET", _path("audit"))))

    async def workers(self) -> list[dict[str, Any]]:
        """Capture workers with the weight version that each has loaded."""
        return _read(await self._send(_Request("GET", _path("workers"))))["workers"]

    async def publish(self, group_id: str) -> Published:
        """Publish a group now."""
        return _read(await self._send(_Request("POST", _path("groups", group_id, "publish"))))

    async def abort(self, group_id: str) -> GroupState:
        """Give a group up."""
        return _read(await self._send(_Request("POST", _path("groups", group_id, "abort"))))

    async def rows(
        self, *, group_id: str | None = None, after: str | None = None, limit: int | None = None
    ) -> tuple[pa.Table, str | None]:
        """A page of ready rows, and the cursor of the next page."""
        return _table(await self._send(_rows(group_id, after, limit)))

    async def claim(
        self,
        consumer: str,
        *,
        groups: int = 1,
        current_version: int | None = None,
        max_staleness: int | None = None,
        lease_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> dict[str, Any]:
        """Take up to `groups` whole groups: `claim_id` (None without any), `groups`, `deadline_at`."""
        terms = (groups, current_version, max_staleness, lease_s, idempotency_key)
        return _read(await self._send(_claim(consumer, *terms)))

    async def consume(self, claim_id: str, *, checkpoint: str) -> dict[str, Any]:
        """Say that a claim's groups went into this checkpoint."""
        return _read(await self._send(_consume(claim_id, checkpoint)))

    async def release(self, claim_id: str) -> dict[str, Any]:
        """Give a claim's groups back."""
        return _read(await self._send(_Request("POST", _path("claims", claim_id, "release"))))

    async def rewind(self, consumer: str, *, checkpoint: str | None) -> dict[str, Any]:
        """Give back what a consumer took after a checkpoint (None: everything); answers these `groups`."""
        return _read(await self._send(_rewind(consumer, checkpoint)))

    async def sql(self, text: str, params: list[Any] | None = None) -> SqlResult:
        """A read-only query: `columns`, `rows`, `truncated`."""
        return _read(await self._send(_Request("POST", _path("sql"), {"sql": text, "params": params or []})))

    async def set_weight_version(self, version: int) -> WeightVersion:
        """Announce the trainer's published version; answers what each worker has loaded."""
        return _read(await self._send(_Request("PUT", _path("weight_version"), {"version": version})))
