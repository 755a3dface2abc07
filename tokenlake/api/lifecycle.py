"""How attempts and groups end: freeze, seal, fail, give up.

Each command checks the state, makes the event durable, then folds it; repeating a command with the same arguments
repeats its answer, with others it is a conflict. Commands of one group run one after the other.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Awaitable, Callable
from typing import Any

from tokenlake.api.control import Control
from tokenlake.api.ledger import Ledger
from tokenlake.api.receipts import manifest_of, placeholder_of, receipt_of
from tokenlake.api.registration import GroupLocks
from tokenlake.api.rollouts import Attempt, Group, Rollout
from tokenlake.api.settings import Settings
from tokenlake.api.terminal import Terminal, find_terminal
from tokenlake.errors import Conflict, InvalidInput, NotFound
from tokenlake.ids import split_rollout_id
from tokenlake.ingest.fingerprint import json_digest

__all__ = ["Lifecycle"]

Stored = Callable[[Attempt], Awaitable[list[dict[str, Any]]]]
"""Reads the manifest of an attempt from the lake."""
Ended = Callable[[str], None]
"""Told the group of a rollout that just ended."""


class Lifecycle:
    """Commands over `Control`; `ended` is called when a group may be due."""

    def __init__(
        self, control: Control, ledger: Ledger, settings: Settings, locks: GroupLocks, *, stored: Stored, ended: Ended
    ) -> None:
        self._control = control
        self._ledger = ledger
        self._settings = settings
        self._locks = locks
        self._stored = stored
        self._ended = ended

    async def freeze(
        self,
        rollout_id: str,
        *,
        attempt: int | None,
        terminal_call_id: str | None = None,
        terminal_response_id: str | None = None,
    ) -> Attempt:
        """No further calls; raises `Conflict` while one is in flight or when the terminal is not one."""
        async with self._locks.of(split_rollout_id(rollout_id)[0]):
            found = self._current(rollout_id, attempt)
            named = terminal_call_id is not None or terminal_response_id is not None
            terminal = (
                find_terminal(found, call_id=terminal_call_id, response_id=terminal_response_id) if named else None
            )
            if found.state == "frozen":
                if terminal is not None and terminal.named != found.boundary_terminal:
                    raise Conflict(f"{rollout_id} is frozen with another terminal")
                return found
            self._must_be_open(found)
            if found.inflight or found.closing:
                raise Conflict(f"{rollout_id} has calls in flight: try again", in_flight=len(found.inflight))
            if terminal is not None and terminal.call_id is None:
                raise Conflict(f"the terminal of {rollout_id} is not one of its calls", reason=terminal.reason)
            terminal_id = terminal and terminal.named
            boundary = hashlib.sha256(
                json_digest([rollout_id, found.attempt, terminal_id, list(found.calls)])
            ).hexdigest()[:32]
            found.closing = True
            try:
                await self._ledger.append(
                    {
                        **_names(found),
                        "event_type": "rollout_frozen",
                        "terminal_call_id": terminal_id,
                        "terminal_selection": terminal and terminal.selection,
                        "detail": json.dumps({"boundary_id": boundary}),
                    }
                )
            finally:
                found.closing = False
            return found

    async def seal(
        self,
        rollout_id: str,
        *,
        reward: float,
        attempt: int | None,
        terminal_call_id: str | None = None,
        terminal_response_id: str | None = None,
        scored_text: str | None = None,
        boundary_id: str | None = None,
    ) -> dict[str, Any]:
        """End an attempt with its reward; returns the receipt, and the same one for the same arguments."""
        if not math.isfinite(reward):
            raise InvalidInput("reward must be a finite number", field="reward")
        request = json_digest([reward, terminal_call_id, terminal_response_id, scored_text, boundary_id]).hex()
        group_id = split_rollout_id(rollout_id)[0]
        async with self._locks.of(group_id):
            found = self._current(rollout_id, attempt)
            if found.state == "sealed" and found.end is not None:
                if found.end.get("request") != request:
                    raise Conflict(f"{rollout_id} was sealed with other arguments")
                return receipt_of(found, await self.manifest(found))
            self._check_boundary(found, boundary_id)
            if found.state != "frozen":
                self._must_be_open(found)
            self._open_group(group_id)
            found.closing = True
            try:
                landed = await self._wait_for_calls(found)
                if found.end is not None or found.released:
                    raise Conflict(f"{rollout_id} was ended meanwhile")
                terminal = self._terminal(found, terminal_call_id, terminal_response_id, scored_text)
                detail = {
                    "request": request,
                    "terminal": terminal.call_id,
                    "calls": found.committed,
                    "poisoned": found.poison is not None,
                    "placeholder": placeholder_of(found, terminal, incomplete=not landed),
                }
                await self._ledger.append(
                    *found.unsaved,
                    {
                        **_names(found),
                        "event_type": "rollout_sealed",
                        "reward": reward,
                        "terminal_call_id": terminal.named,
                        "terminal_selection": terminal.selection,
                        "reason": "incomplete" if not landed else terminal.reason,
                        "detail": json.dumps(detail),
                    },
                )
                found.unsaved = ()
                receipt = receipt_of(found, manifest_of(found))
            finally:
                found.closing = False
        self._ended(group_id)
        return receipt

    async def manifest(self, attempt: Attempt) -> list[dict[str, Any]]:
        """The calls of an attempt, from the lake once its group is published."""
        return await self._stored(attempt) if attempt.released else manifest_of(attempt)

    async def fail(self, rollout_id: str, *, reason: str, attempt: int | None, retry: bool) -> Attempt:
        """End an attempt without a reward; idempotent."""
        group_id = split_rollout_id(rollout_id)[0]
        async with self._locks.of(group_id):
            found = self._current(rollout_id, attempt)
            gives_up = found.retry and not retry
            if found.state == "failed" and found.end is not None and not gives_up:
                if (found.end.get("reason"), found.retry) != (reason, retry):
                    raise Conflict(f"{rollout_id} has failed otherwise: {found.end.get('reason')}")
                return found
            if found.state == "sealed":
                raise Conflict(f"{rollout_id} is sealed")
            self._open_group(group_id)
            await self._ledger.append(
                *found.unsaved,
                {
                    **_names(found),
                    "event_type": "rollout_failed",
                    "reason": reason,
                    "detail": json.dumps({"retry": True}) if retry else None,
                },
            )
        self._ended(group_id)
        return found

    async def abort_group(self, group_id: str) -> Group:
        """Give a group up: it will never be published; idempotent."""
        async with self._locks.of(group_id):
            group = self.group(group_id)
            if group.state == "published":
                raise Conflict(f"group {group_id} is published", group_id=group_id)
            if group.state == "open":
                await self._ledger.append(
                    {"event_type": "group_dropped", "group_id": group_id, "n": group.n, "reason": "aborted"}
                )
            return group

    def group(self, group_id: str) -> Group:
        """A known group, or `NotFound`."""
        group = self._control.groups.get(group_id)
        if group is None:
            raise NotFound(f"no group {group_id}", group_id=group_id)
        return group

    def _rollout(self, rollout_id: str) -> Rollout:
        rollout = self._control.rollout(rollout_id)
        if rollout is None:
            raise NotFound(f"no rollout {rollout_id}", rollout_id=rollout_id)
        return rollout

    def _current(self, rollout_id: str, attempt: int | None) -> Attempt:
        """The attempt a command means; raises `Conflict` for a superseded one or when it has to be named."""
        rollout = self._rollout(rollout_id)
        if attempt is None:
            if len(rollout.attempts) > 1:
                raise Conflict(f"{rollout_id} has several attempts: name one", attempts=sorted(rollout.attempts))
            return rollout.current
        if attempt not in rollout.attempts:
            raise NotFound(f"no attempt {attempt} of {rollout_id}", rollout_id=rollout_id)
        if rollout.attempts[attempt] is not rollout.current:
            raise Conflict(f"attempt {attempt} of {rollout_id} is superseded by {rollout.current.attempt}")
        return rollout.current

    def _open_group(self, group_id: str) -> None:
        group = self.group(group_id)
        if group.state != "open":
            raise Conflict(f"group {group_id} is {group.state}", group_id=group_id)

    @staticmethod
    def _must_be_open(attempt: Attempt) -> None:
        if attempt.state != "open":
            raise Conflict(f"{attempt.rollout_id} is {attempt.state}", state=attempt.state)

    def _check_boundary(self, attempt: Attempt, boundary_id: str | None) -> None:
        mode = self._control.policy.get("boundary", "off")
        if mode == "required" and (attempt.state != "frozen" or boundary_id is None):
            raise Conflict(f"{attempt.rollout_id} must be frozen first and sealed with its boundary_id")
        if mode != "off" and boundary_id is not None and boundary_id != attempt.boundary_id:
            raise Conflict(f"this boundary_id is not the one {attempt.rollout_id} was frozen with")

    async def _wait_for_calls(self, attempt: Attempt) -> bool:
        """Whether every call landed in time."""
        deadline = asyncio.get_running_loop().time() + self._settings.seal_wait_s
        while attempt.inflight:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                return False
            attempt.landed = attempt.landed or asyncio.Event()
            attempt.landed.clear()
            try:
                await asyncio.wait_for(attempt.landed.wait(), left)
            except TimeoutError:
                return False
        return True

    @staticmethod
    def _terminal(attempt: Attempt, call_id: str | None, response_id: str | None, scored_text: str | None) -> Terminal:
        if attempt.boundary_terminal is None:
            return find_terminal(attempt, call_id=call_id, response_id=response_id, scored_text=scored_text)
        frozen = find_terminal(attempt, call_id=attempt.boundary_terminal)
        if call_id is not None or response_id is not None:
            named = find_terminal(attempt, call_id=call_id, response_id=response_id)
            if named.call_id != frozen.call_id:
                raise Conflict(f"{attempt.rollout_id} is frozen with another terminal")
        return find_terminal(attempt, call_id=attempt.boundary_terminal, scored_text=scored_text)


def _names(attempt: Attempt) -> dict[str, Any]:
    return {
        "group_id": split_rollout_id(attempt.rollout_id)[0],
        "rollout_id": attempt.rollout_id,
        "attempt": attempt.attempt,
    }
