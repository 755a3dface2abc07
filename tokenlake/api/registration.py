"""How groups and attempts begin: create-only, repeatable with the same idempotency key."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from weakref import WeakValueDictionary

from tokenlake.api.control import Control
from tokenlake.api.ledger import Ledger
from tokenlake.api.rollouts import Attempt, Group
from tokenlake.clock import now_us
from tokenlake.errors import Busy, Conflict, NotFound
from tokenlake.ids import rollout_id as make_rollout_id
from tokenlake.ids import split_rollout_id
from tokenlake.ingest.fingerprint import json_digest

__all__ = ["GroupLocks", "Registrar", "key_digest"]

_RETRY_AFTER_S = 1


class GroupLocks:
    """One lock for the commands of each group, for as long as somebody holds or awaits it."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, group_id: str) -> asyncio.Lock:
        """The lock of a group; the caller keeps it alive."""
        lock = self._held.get(group_id)
        if lock is None:
            lock = self._held[group_id] = asyncio.Lock()
        return lock


class Registrar:
    """Registers groups and attempts."""

    def __init__(self, control: Control, ledger: Ledger, locks: GroupLocks) -> None:
        self._control = control
        self._ledger = ledger
        self._locks = locks
        self._registering = 0

    async def register_group(
        self,
        group_id: str,
        *,
        n: int,
        deadline_s: float | None,
        purpose: str,
        meta: dict[str, Any],
        idempotency_key: str | None,
    ) -> tuple[Group, bool]:
        """The group, and whether it is new.

        Raises `Conflict` when it exists and this is not the same request, `Busy` while `max_open_groups` are open.
        """
        request = json_digest({"n": n, "deadline_s": deadline_s, "purpose": purpose, "meta": meta})
        key = None if idempotency_key is None else key_digest(group_id, 0, idempotency_key)
        async with self._locks.of(group_id):
            known = self._control.groups.get(group_id)
            if known is not None:
                if key is not None and known.created_by == (key, request):
                    return known, False
                raise Conflict(f"group {group_id} exists", group_id=group_id)
            if deadline_s is None:
                deadline_s = self._control.policy.get("group_deadline_s")
            events: list[dict[str, Any]] = [
                {
                    "event_type": "group_registered",
                    "group_id": group_id,
                    "n": n,
                    "deadline_at": None if deadline_s is None else now_us() + int(deadline_s * 1e6),
                    "purpose": purpose,
                    "weight_version": self._control.weight_version,
                    "request_digest": None if key is None else request,
                    "idempotency_digest": key,
                    "detail": json.dumps(meta, sort_keys=True) if meta else None,
                }
            ]
            events += [_registered(group_id, make_rollout_id(group_id, index), 0) for index in range(n)]
            if purpose == "train":
                self._reserve()
            self._registering += purpose == "train"
            try:
                await self._ledger.append(*events)
            finally:
                self._registering -= purpose == "train"
            return self._control.groups[group_id], True

    def _reserve(self) -> None:
        """Refuse a group to train on while as many as the policy allows are neither published nor given up."""
        most = self._control.policy.get("max_open_groups")
        if most is None:
            return
        groups = self._control.groups.values()
        now = self._registering + sum(group.state == "open" and group.purpose == "train" for group in groups)
        if now >= most:
            raise Busy(f"{now} groups are open, max_open_groups is {most}: wait", retry_after_s=_RETRY_AFTER_S)

    async def register_attempt(
        self, rollout_id: str, number: int, *, idempotency_key: str | None = None
    ) -> tuple[Attempt, bool]:
        """A new attempt, which closes the older ones; raises `Conflict` when it exists or is not the next."""
        group_id = split_rollout_id(rollout_id)[0]
        key = None if idempotency_key is None else key_digest(rollout_id, number, idempotency_key)
        async with self._locks.of(group_id):
            rollout = self._control.rollout(rollout_id)
            if rollout is None:
                raise NotFound(f"no rollout {rollout_id}", rollout_id=rollout_id)
            state = self._control.groups[group_id].state
            if state != "open":
                raise Conflict(f"group {group_id} is {state}", group_id=group_id)
            known = rollout.attempts.get(number)
            if known is not None and key is not None and known.created_by == key:
                return known, False
            following = max(rollout.attempts) + 1
            if number != following:
                raise Conflict(f"attempt {number} of {rollout_id} is not the next one: {following}", next=following)
            await self._ledger.append({**_registered(group_id, rollout_id, number), "idempotency_digest": key})
            return rollout.attempts[number], True


def key_digest(scope: str, attempt: int, key: str) -> bytes:
    """What is kept of an idempotency key."""
    return json_digest([scope, attempt, key])


def _registered(group_id: str, rollout_id: str, attempt: int) -> dict[str, Any]:
    return {
        "event_type": "rollout_registered",
        "group_id": group_id,
        "rollout_id": rollout_id,
        "attempt": attempt,
    }
