"""What the trainer's side is told about a rollout: receipts and states, never a token or a log-probability."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenlake.api.rollouts import Attempt, Failure, Group, Rollout
from tokenlake.api.terminal import Terminal
from tokenlake.ingest.calls import Call
from tokenlake.store.schema import PLACEHOLDER_REASONS

__all__ = ["entry_of", "failure_reason", "group_state", "manifest_of", "placeholder_of", "receipt_of", "rollout_state"]

_ENTRY = (
    "call_id",
    "parent_call_id",
    "prev_len",
    "delta_len",
    "cum_len",
    "weight_version",
    "weight_version_end",
    "mode",
)


def receipt_of(attempt: Attempt, manifest: list[dict[str, Any]]) -> dict[str, Any]:
    """The receipt of a sealed attempt, from what its seal wrote down."""
    end = attempt.end or {}
    return {
        "rollout_id": attempt.rollout_id,
        "attempt": attempt.attempt,
        "reward": end["reward"],
        "terminal_call_id": end["terminal"],
        "terminal_selection": end["terminal_selection"],
        "manifest": manifest[: end["calls"]],
        "poisoned": end["poisoned"],
        "reason": end["placeholder"],
    }


def placeholder_of(attempt: Attempt, terminal: Terminal, *, incomplete: bool) -> str | None:
    """Why the row of an attempt that is being sealed will be a placeholder, as far as the gate knows."""
    poison = attempt.poison
    return failure_reason(poison) if poison else "incomplete" if incomplete else terminal.reason


def manifest_of(attempt: Attempt) -> list[dict[str, Any]]:
    """The committed calls of an attempt that still has them."""
    return [_entry(call) for call in attempt.calls.values()]


def entry_of(event: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest entry of a `call_committed` event."""
    return {**{name: event.get(name) for name in _ENTRY}, "digest": event["digest"].hex()}


def failure_reason(failure: Failure) -> str:
    """The placeholder reason of an answered call that failed."""
    return failure.reason if failure.reason in PLACEHOLDER_REASONS else "capture_failed"


def rollout_state(
    rollout: Rollout, group: Group, manifest: list[dict[str, Any]], judged: dict[str, Any] | None
) -> dict[str, Any]:
    """State of a rollout's current attempt; `judged` is the views' verdict on one that has ended."""
    attempt = rollout.current
    verdict = judged or {"verdict": "open", "reason": None}
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": group.group_id,
        "group_state": group.state,
        "attempt": attempt.attempt,
        "attempts": sorted(rollout.attempts),
        "state": attempt.state,
        "retry": attempt.retry,
        "calls": attempt.committed,
        "in_flight": len(attempt.inflight),
        "failed_calls": [
            {"call_id": failure.call_id, "reason": failure.reason, "answered": failure.answered}
            for failure in attempt.failures
        ],
        "verdict": verdict["verdict"],
        "reason": verdict["reason"],
        "reward": None if attempt.end is None else attempt.end.get("reward"),
        "terminal_call_id": None if attempt.end is None else attempt.end.get("terminal"),
        "boundary_id": attempt.boundary_id,
        "manifest": manifest,
    }


def group_state(group: Group, published: dict[str, Any] | None) -> dict[str, Any]:
    """State of a group; `published` is what publishing it found."""
    states = [rollout.current.state for rollout in group.rollouts.values()]
    return {
        "group_id": group.group_id,
        "state": group.state,
        "n": group.n,
        "purpose": group.purpose,
        "meta": group.meta,
        "registered_at": group.registered_at,
        "deadline_at": group.deadline_at,
        "dispatch_weight_version": group.weight_version,
        "rollouts": {state: states.count(state) for state in ("open", "frozen", "sealed", "failed")},
        "valid": None,
        "group_min_wv": None,
        "group_max_wv": None,
        **(published or {}),
    }


def _entry(call: Call) -> dict[str, Any]:
    return {
        "call_id": call.node.call_id,
        "parent_call_id": call.node.parent_call_id,
        "prev_len": call.prev_len,
        "delta_len": call.delta_len,
        "cum_len": call.node.cum_len,
        "weight_version": call.weight_version,
        "weight_version_end": call.weight_version_end,
        "mode": call.mode,
        "digest": call.digest.hex(),
    }
