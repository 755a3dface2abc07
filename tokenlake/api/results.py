"""What the control routes answer, as the client's types: plain dictionaries with known keys, and no token in any."""

from __future__ import annotations

from typing import Any, TypedDict

__all__ = [
    "AuditReport",
    "Boundary",
    "Ended",
    "Entry",
    "GroupPage",
    "GroupState",
    "Published",
    "Receipt",
    "RegisteredGroup",
    "RolloutState",
    "Slot",
    "SqlResult",
    "WeightVersion",
]


class Slot(TypedDict):
    """One attempt that may be called."""

    rollout_id: str
    attempt: int
    base_url: str
    """For the agent's SDK."""
    data_capability: str
    """For the agent: calls of this attempt and nothing else."""
    control_capability: str
    """For its environment: freeze, seal, fail and read this rollout."""


class RegisteredGroup(TypedDict):
    """A group that was just registered."""

    group_id: str
    n: int
    rollouts: list[Slot]


class Boundary(TypedDict):
    """A frozen attempt."""

    rollout_id: str
    attempt: int
    state: str
    boundary_id: str
    terminal_call_id: str | None
    calls: int


class Entry(TypedDict):
    """One call of a receipt; lengths in tokens."""

    call_id: str
    parent_call_id: str | None
    prev_len: int
    delta_len: int
    cum_len: int
    weight_version: int | None
    weight_version_end: int | None
    mode: str
    digest: str


class Receipt(TypedDict):
    """A sealed attempt."""

    rollout_id: str
    attempt: int
    reward: float
    terminal_call_id: str | None
    terminal_selection: str | None
    manifest: list[Entry]
    poisoned: bool
    reason: str | None
    """Why its row will be a placeholder, as far as the gate knows."""


class Ended(TypedDict):
    """An attempt that failed."""

    rollout_id: str
    attempt: int
    state: str
    reason: str
    retry: bool


class RolloutState(TypedDict):
    """A rollout's current attempt."""

    rollout_id: str
    group_id: str
    group_state: str
    attempt: int
    attempts: list[int]
    state: str
    retry: bool
    calls: int
    in_flight: int
    failed_calls: list[dict[str, Any]]
    verdict: str
    reason: str | None
    reward: float | None
    terminal_call_id: str | None
    boundary_id: str | None
    manifest: list[Entry]


class GroupState(TypedDict):
    """A group; times in microseconds since the epoch."""

    group_id: str
    state: str
    n: int
    purpose: str
    meta: dict[str, Any]
    registered_at: int
    deadline_at: int | None
    dispatch_weight_version: int | None
    rollouts: dict[str, int]
    valid: int | None
    group_min_wv: int | None
    group_max_wv: int | None


class GroupPage(TypedDict):
    """Some groups."""

    groups: list[GroupState]
    next: str | None


class Published(TypedDict):
    """What publishing a group came to."""

    group_id: str
    n: int
    valid: int
    reasons: dict[str, int]
    state: str
    dropped: str | None


class WeightVersion(TypedDict):
    """The published version, and what each worker has loaded."""

    version: int
    workers: list[dict[str, Any]]


class SqlResult(TypedDict):
    """Rows of a query."""

    columns: list[dict[str, str]]
    rows: list[dict[str, Any]]
    truncated: bool


class AuditReport(TypedDict):
    """Findings of an audit."""

    healthy: bool
    kinds: dict[str, int]
    findings: list[dict[str, Any]]
    total: int
