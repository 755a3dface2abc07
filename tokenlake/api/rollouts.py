"""Groups, rollouts, attempts and calls as the gate knows them: the nouns, without a rule.

No token is here; a call costs a few hundred bytes until its group is published or its attempt superseded, then nothing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenlake.ingest.resolve import AttemptLineage, Node

__all__ = ["Attempt", "Call", "Failure", "Group", "Overflow", "Rollout", "State"]

State = Literal["open", "frozen", "sealed", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One committed call."""

    node: Node
    response_id: str | None
    prev_len: int
    delta_len: int
    sampled_tokens: int
    mode: str
    cause: str | None
    """Why it is a root; None of a call with a parent."""
    weight_version: int | None
    weight_version_end: int | None
    digest: bytes
    prompt_digest: bytes | None
    text_digest: bytes
    request_digest: bytes | None
    idempotency_digest: bytes | None


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
    calls: dict[str, Call] = field(default_factory=dict[str, Call])
    """Committed calls in commit order."""
    overflows: dict[str, Overflow] = field(default_factory=dict[str, Overflow])
    failures: list[Failure] = field(default_factory=list[Failure])
    inflight: set[str] = field(default_factory=set[str])
    """Calls admitted and not yet committed, failed or refused; not durable."""
    keys: dict[bytes, str] = field(default_factory=dict[bytes, str])
    """Idempotency digest to the call that answered it."""
    undelivered: set[str] = field(default_factory=set[str])
    """Committed calls whose client was gone before their answer: leaves that do not count."""
    unsaved: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
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

    def land(self, call_id: str) -> None:
        """A call in flight ended."""
        self.inflight.discard(call_id)
        if self.landed is not None:
            self.landed.set()

    def release(self) -> None:
        """Drop what only a call or a seal would need."""
        self.released = True
        self.lineage = AttemptLineage()
        self.calls = {}
        self.overflows = {}
        self.keys = {}
        self.undelivered = set()

    @property
    def poison(self) -> Failure | None:
        """The first failed call that the agent saw an answer of."""
        return next((failure for failure in self.failures if failure.answered), None)

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
