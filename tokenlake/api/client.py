"""The REST client: what a trainer or an environment process says to a service.

Every call has a deadline, so a dead service is an error and never a silence. A request that did not arrive, or whose
answer was lost, is sent again for `retry_s`, where sending it twice comes to the same as once: registrations and claims
carry an `Idempotency-Key`, made up where none is given. Errors are those of `tokenlake.errors`: `Conflict`, `NotFound`,
`Unauthorized` and so on, as the service meant them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import httpx
import pyarrow as pa

from tokenlake.api import client_requests as ask
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

__all__ = ["AsyncClient", "Client"]


class Client:
    """A blocking client. `token` is the control token, or a rollout's control capability for that rollout alone."""

    def __init__(self, base_url: str, token: str, *, deadline_s: float = 60.0, retry_s: float = 5.0) -> None:
        self._times = (deadline_s, retry_s)
        self._http = httpx.Client(base_url=base_url, headers=ask.headers(token))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _send(self, request: ask.Request) -> httpx.Response:
        tries = ask.Tries(*self._times)
        while True:
            try:
                return self._http.request(**request.fields, timeout=tries.left)
            except httpx.TransportError as error:
                pause = tries.again(request, self._http.base_url, error)
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
        return ask.read(self._send(ask.register_group(group_id, n, deadline_s, purpose, meta, idempotency_key)))

    def register_attempt(self, rollout_id: str, number: int, *, idempotency_key: str | None = None) -> Slot:
        """Register the next attempt of a rollout."""
        return ask.read(self._send(ask.register_attempt(rollout_id, number, idempotency_key)))

    def freeze(
        self, rollout_id: str, *, attempt: int | None = None, terminal_response_id: str | None = None
    ) -> Boundary:
        """End generation before the verifier runs."""
        return ask.read(self._send(ask.freeze(rollout_id, attempt, terminal_response_id)))

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
        request = ask.seal(
            rollout_id,
            reward=reward,
            attempt=attempt,
            terminal_response_id=terminal_response_id,
            terminal_call_id=terminal_call_id,
            scored_text=scored_text,
            boundary_id=boundary_id,
        )
        return ask.read(self._send(request))

    def fail(self, rollout_id: str, *, reason: str, attempt: int | None = None, retry: bool = False) -> Ended:
        """End a rollout without a reward; with `retry` the slot waits for another attempt."""
        request = ask.fail(rollout_id, reason=reason, attempt=attempt, retry=retry)
        return ask.read(self._send(request))

    def rollout(self, rollout_id: str) -> RolloutState:
        """State of a rollout."""
        return ask.read(self._send(ask.at("GET", "rollouts", rollout_id)))

    def group(self, group_id: str) -> GroupState:
        """State of a group."""
        return ask.read(self._send(ask.at("GET", "groups", group_id)))

    def groups(self, *, after: str | None = None, limit: int | None = None) -> GroupPage:
        """A page of groups in order of their ids; `next` is the cursor of the next page."""
        return ask.read(self._send(ask.groups(after, limit)))

    def audit(self) -> AuditReport:
        """Everything verified again from the bytes: findings by kind."""
        return ask.read(self._send(ask.at("GET", "audit")))

    def workers(self) -> list[dict[str, Any]]:
        """Capture workers with the weight version that each has loaded."""
        return ask.read(self._send(ask.at("GET", "workers")))["workers"]

    def publish(self, group_id: str) -> Published:
        """Publish a group now."""
        return ask.read(self._send(ask.at("POST", "groups", group_id, "publish")))

    def abort(self, group_id: str) -> GroupState:
        """Give a group up."""
        return ask.read(self._send(ask.at("POST", "groups", group_id, "abort")))

    def rows(
        self, *, group_id: str | None = None, after: str | None = None, limit: int | None = None
    ) -> tuple[pa.Table, str | None]:
        """A page of ready rows, and the cursor of the next page."""
        return ask.read_table(self._send(ask.rows(group_id, after, limit)))

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
        request = ask.claim(
            consumer,
            idempotency_key,
            groups=groups,
            current_version=current_version,
            max_staleness=max_staleness,
            lease_s=lease_s,
        )
        return ask.read(self._send(request))

    def consume(self, claim_id: str, *, checkpoint: str) -> dict[str, Any]:
        """Say that a claim's groups went into this checkpoint."""
        return ask.read(self._send(ask.consume(claim_id, checkpoint)))

    def release(self, claim_id: str) -> dict[str, Any]:
        """Give a claim's groups back."""
        return ask.read(self._send(ask.at("POST", "claims", claim_id, "release")))

    def rewind(self, consumer: str, *, checkpoint: str | None) -> dict[str, Any]:
        """Give back what a consumer took after a checkpoint (None: everything); answers these `groups`."""
        return ask.read(self._send(ask.rewind(consumer, checkpoint)))

    def sql(self, text: str, params: list[Any] | None = None) -> SqlResult:
        """A read-only query: `columns`, `rows`, `truncated`."""
        return ask.read(self._send(ask.sql(text, params)))

    def set_weight_version(self, version: int) -> WeightVersion:
        """Announce the trainer's published version; answers what each worker has loaded."""
        return ask.read(self._send(ask.at("PUT", "weight_version", json={"version": version})))


class AsyncClient:
    """The same, for an event loop."""

    def __init__(self, base_url: str, token: str, *, deadline_s: float = 60.0, retry_s: float = 5.0) -> None:
        self._times = (deadline_s, retry_s)
        self._http = httpx.AsyncClient(base_url=base_url, headers=ask.headers(token))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def _send(self, request: ask.Request) -> httpx.Response:
        tries = ask.Tries(*self._times)
        while True:
            try:
                return await self._http.request(**request.fields, timeout=tries.left)
            except httpx.TransportError as error:
                pause = tries.again(request, self._http.base_url, error)
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
        return ask.read(await self._send(ask.register_group(group_id, n, deadline_s, purpose, meta, idempotency_key)))

    async def register_attempt(self, rollout_id: str, number: int, *, idempotency_key: str | None = None) -> Slot:
        """Register the next attempt of a rollout."""
        return ask.read(await self._send(ask.register_attempt(rollout_id, number, idempotency_key)))

    async def freeze(
        self, rollout_id: str, *, attempt: int | None = None, terminal_response_id: str | None = None
    ) -> Boundary:
        """End generation before the verifier runs."""
        return ask.read(await self._send(ask.freeze(rollout_id, attempt, terminal_response_id)))

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
        request = ask.seal(
            rollout_id,
            reward=reward,
            attempt=attempt,
            terminal_response_id=terminal_response_id,
            terminal_call_id=terminal_call_id,
            scored_text=scored_text,
            boundary_id=boundary_id,
        )
        return ask.read(await self._send(request))

    async def fail(self, rollout_id: str, *, reason: str, attempt: int | None = None, retry: bool = False) -> Ended:
        """End a rollout without a reward; with `retry` the slot waits for another attempt."""
        request = ask.fail(rollout_id, reason=reason, attempt=attempt, retry=retry)
        return ask.read(await self._send(request))

    async def rollout(self, rollout_id: str) -> RolloutState:
        """State of a rollout."""
        return ask.read(await self._send(ask.at("GET", "rollouts", rollout_id)))

    async def group(self, group_id: str) -> GroupState:
        """State of a group."""
        return ask.read(await self._send(ask.at("GET", "groups", group_id)))

    async def groups(self, *, after: str | None = None, limit: int | None = None) -> GroupPage:
        """A page of groups in order of their ids; `next` is the cursor of the next page."""
        return ask.read(await self._send(ask.groups(after, limit)))

    async def audit(self) -> AuditReport:
        """Everything verified again from the bytes: findings by kind."""
        return ask.read(await self._send(ask.at("GET", "audit")))

    async def workers(self) -> list[dict[str, Any]]:
        """Capture workers with the weight version that each has loaded."""
        return ask.read(await self._send(ask.at("GET", "workers")))["workers"]

    async def publish(self, group_id: str) -> Published:
        """Publish a group now."""
        return ask.read(await self._send(ask.at("POST", "groups", group_id, "publish")))

    async def abort(self, group_id: str) -> GroupState:
        """Give a group up."""
        return ask.read(await self._send(ask.at("POST", "groups", group_id, "abort")))

    async def rows(
        self, *, group_id: str | None = None, after: str | None = None, limit: int | None = None
    ) -> tuple[pa.Table, str | None]:
        """A page of ready rows, and the cursor of the next page."""
        return ask.read_table(await self._send(ask.rows(group_id, after, limit)))

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
        request = ask.claim(
            consumer,
            idempotency_key,
            groups=groups,
            current_version=current_version,
            max_staleness=max_staleness,
            lease_s=lease_s,
        )
        return ask.read(await self._send(request))

    async def consume(self, claim_id: str, *, checkpoint: str) -> dict[str, Any]:
        """Say that a claim's groups went into this checkpoint."""
        return ask.read(await self._send(ask.consume(claim_id, checkpoint)))

    async def release(self, claim_id: str) -> dict[str, Any]:
        """Give a claim's groups back."""
        return ask.read(await self._send(ask.at("POST", "claims", claim_id, "release")))

    async def rewind(self, consumer: str, *, checkpoint: str | None) -> dict[str, Any]:
        """Give back what a consumer took after a checkpoint (None: everything); answers these `groups`."""
        return ask.read(await self._send(ask.rewind(consumer, checkpoint)))

    async def sql(self, text: str, params: list[Any] | None = None) -> SqlResult:
        """A read-only query: `columns`, `rows`, `truncated`."""
        return ask.read(await self._send(ask.sql(text, params)))

    async def set_weight_version(self, version: int) -> WeightVersion:
        """Announce the trainer's published version; answers what each worker has loaded."""
        return ask.read(await self._send(ask.at("PUT", "weight_version", json={"version": version})))
