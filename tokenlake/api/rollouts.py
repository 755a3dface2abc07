"""Groups, rollouts, attempts and calls as the gate knows them: the nouns, without a rule.

No token is here; a call costs a few hundred bytes until its group is published or its attempt superseded, then nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from tokenlake.ingest.calls import Calls
from tokenlake.ingest.resolve import AttemptLineage

__all__ = ["Attempt", "Failure", "Group", "Overflow", "Rollout", "State"]

State = Literal["open", "frozen", "sealed", "failed"]
_NONE: Mapping[Any, Any] = MappingProxyType({})
"""What most attempts have; one that has more is given a mapping of its own."""
_NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Overflow:
    """A call that was answered with an empty `length` turn because its prompt left no room."""

    call_id: str
    response_id: str | None
    parent_call_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A call that was not captured."""

    call_id: str
    reason: str
    answered: bool


@dataclass(slots=True)
class Attempt:
    """The k-th try at a rollout."""

    rollout_id: str
    attempt: int
    registered_at: int
    state: State = "open"
    lineage: AttemptLineage = field(default_factory=AttemptLineage)
    overflows: Mapping[str, Overflow] = field(default_factory=lambda: _NONE)
    failures: tuple[Failure, ...] = ()
    inflight: frozenset[str] = _NOBODY
    """Calls admitted and not yet committed, failed or refused; not durable."""
    keys: Mapping[bytes, str] = field(default_factory=lambda: _NONE)
    """Idempotency digest to the call that answered it."""
    undelivered: frozenset[str] = _NOBODY
    """Committed calls whose client was gone before their answer: leaves that do not count."""
    unsaved: tuple[dict[str, Any], ...] = ()
    """Failures of answers that were cut off and could not be written down: they poison, and are written with the end
    of the attempt."""
    landed: asyncio.Event | None = None
    """Set whenever a call in flight ends, once somebody has waited for that."""
    touched_at: int = 0
    created_by: bytes | None = None
    """Digest of the idempotency key of its registration."""
    boundary_id: str | None = None
    boundary_terminal: str | None = None
    end: dict[str, Any] | None = None
    """What ended it: `detail` of its `rollout_sealed` or `rollout_failed` event, with `reason` and `reward`."""
    closing: bool = False
    """A seal is waiting for calls in flight: nothing new is admitted."""
    committed: int = 0
    """How many calls were committed; stays when the calls themselves are released."""
    released: bool = False
    """Its group is published or a newer attempt exists: nothing can continue it, and its calls are only in the lake."""

    def leave(self, call_id: str) -> None:
        """A call is in flight no more, where it was."""
        if call_id in self.inflight:
            self.inflight = self.inflight - {call_id} or _NOBODY

    def land(self, call_id: str) -> None:
        """A call in flight ended."""
        self.leave(call_id)
        if self.landed is not None:
            self.landed.set()

    def release(self) -> None:
        """Drop what only a call or a seal would need."""
        self.released = True
        self.lineage = AttemptLineage()
        self.overflows = _NONE
        self.keys = _NONE
        self.undelivered = _NOBODY

    @property
    def calls(self) -> Calls:
        """Committed calls in commit order."""
        return self.lineage.calls

    @property
    def poison(self) -> Failure | None:
        """The first failed call that the agent saw an answer of."""
        return next((failure for failure in self.failures if failure.answered), None)

    @property
    def over(self) -> bool:
        """Whether a call that is committed now would come too late."""
        return self.released or self.end is not None

    @property
    def retry(self) -> bool:
        """Whether it failed so that another attempt may follow."""
        return self.state == "failed" and bool(self.end and self.end.get("retry"))

    @property
    def ended(self) -> bool:
        """Whether nothing more can come of it."""
        return self.state in ("sealed", "failed") and not self.retry


@dataclass(slots=True)
class Rollout:
    """One agent run of a group, through all its attempts."""

    rollout_id: str
    attempts: dict[int, Attempt] = field(default_factory=dict[int, Attempt])

    @property
    def current(self) -> Attempt:
        """The highest attempt: the one that counts."""
        return self.attempts[max(self.attempts)]


@dataclass(slots=True)
class Group:
    """The N rollouts of one prompt."""

    group_id: str
    n: int
    registered_at: int
    deadline_at: int | None
    """Microseconds since the epoch; None: whatever the policy `group_deadline_s` says."""
    purpose: str
    meta: dict[str, Any]
    weight_version: int | None
    """Published version when the group was registered."""
    created_by: tuple[bytes, bytes] | None
    """Digests of the idempotency key and of the request that registered it."""
    rollouts: dict[str, Rollout] = field(default_factory=dict[str, Rollout])
    state: Literal["open", "published", "dropped"] = "open"

    @property
    def due(self) -> bool:
        """Whether all N rollouts have ended."""
        return len(self.rollouts) == self.n and all(rollout.current.ended for rollout in self.rollouts.values())
