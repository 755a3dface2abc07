"""What the trainer's side is told about a rollout: receipts and states, never a token or a log-probability."""

from __future__ import annotations

from typing import Any

from tokenlake.api.rollouts import Attempt, Call, Failure, Group, Rollout
from tokenlake.api.terminal import Terminal
from tokenlake.store.schema import PLACEHOLDER_REASONS

__all__ = ["failure_reason", "group_state", "receipt_of", "rollout_state"]


def receipt_of(attempt: Attempt, terminal: Terminal, reward: float, *, incomplete: bool) -> dict[str, Any]:
    """The receipt of a seal."""
    poison = attempt.poison
    reason = failure_reason(poison) if poison else "incomplete" if incomplete else terminal.reason
    return {
        "rollout_id": attempt.rollout_id,
        "attempt": attempt.attempt,
        "reward": reward,
        "terminal_call_id": terminal.call_id,
        "terminal_selection": terminal.selection,
        "manifest": [_entry(call) for call in attempt.calls.values()],
        "poisoned": poison is not None,
        "reason": reason,
    }


def failure_reason(failure: Failure) -> str:
    """The placeholder reason of an answered call that failed."""
    return failure.reason if failure.reason in PLACEHOLDER_REASONS else "capture_failed"


def rollout_state(rollout: Rollout, group: Group) -> dict[str, Any]:
    """State of a rollout's current attempt."""
    attempt = rollout.current
    poison = attempt.poison
    reason = failure_reason(poison) if poison else None
    if reason is None and attempt.end is not None:
        reason = attempt.end.get("reason")
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
        "overflowed_calls": len(attempt.overflows),
        "verdict": "placeholder" if reason else "valid" if attempt.state == "sealed" else "open",
        "reason": reason,
        "reward": None if attempt.end is None else attempt.end.get("reward"),
        "boundary_id": attempt.boundary_id,
        "manifest": [_entry(call) for call in attempt.calls.values()],
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
        "parent_call_id": call.node.parent and call.node.parent.call_id,
        "prev_len": call.prev_len,
        "delta_len": call.delta_len,
        "cum_len": call.node.cum_len,
        "weight_version": call.weight_version,
        "weight_version_end": call.weight_version_end,
        "mode": call.mode,
        "digest": call.digest.hex(),
    }
