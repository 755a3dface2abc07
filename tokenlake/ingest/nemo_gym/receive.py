"""What NeMo-Gym ended, taken into lineage by the owner of the lake: from then on the views judge it as any rollout.

A receipt names calls and holds no token: the staged deltas are committed where they lie. What it names and nobody
staged, or staged otherwise, is a failed call; the rollout then gives a placeholder, and the group still has its N rows.
Taking the same receipt again changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot
from nemo_gym.token_id_capture.records import ParentResolutionStatus, TokenEntry
from nemo_gym.token_id_capture.staging import CallRecord, RolloutReceipt

from tokenlake.errors import Conflict, InvalidInput
from tokenlake.ids import check_call_id, split_rollout_id
from tokenlake.ingest.coords import Coords
from tokenlake.ingest.import_state import Attempt, ImportState, seal_end
from tokenlake.ingest.nemo_gym._extra import EXTRA
from tokenlake.ingest.nemo_gym.carrier import lake_place
from tokenlake.ingest.nemo_gym.staging import snapshot_of
from tokenlake.store.delta import Delta
from tokenlake.store.digest import ArrayBytes, chain_hash
from tokenlake.store.lake import OwnedLake

__all__ = ["EXTRA", "receive", "receive_snapshot"]

_SELECTIONS = {"heuristic": "only_leaf"}
"""What NeMo-Gym calls a way of finding the terminal, where a lake has another word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ended:
    """One attempt as it ended."""

    rollout_id: str
    attempt: int
    calls: Mapping[str, tuple[str | None, CallRecord | TokenEntry]]
    """Response id and evidence by call id, in the order they were committed."""
    failed: str | None
    """Why it is not trained on; None: it was sealed."""
    reward: float | None
    terminal: tuple[str | None, str | None, str | None]
    """Terminal call id, how it was selected, and why it was not."""


def receive(lake: OwnedLake, receipt: RolloutReceipt, *, n: int) -> None:
    """Commit the calls of a receipt and end its rollout, one of `n` of its group.

    Raises `Conflict` for a rollout that has ended otherwise, a published group, or a group of another size.
    """
    rollout_id, attempt = lake_place(receipt.rollout_id)
    failed = receipt.failure_reason or "capture_failed" if receipt.capture_poisoned else None
    selection = receipt.terminal_selection or ""
    ended = _Ended(
        rollout_id=rollout_id,
        attempt=attempt,
        calls={record.model_call_id: (record.response_id, record) for record in receipt.manifest},
        failed=failed,
        reward=receipt.reward,
        terminal=(receipt.terminal_model_call_id, _SELECTIONS.get(selection, selection) or None, None),
    )
    _take(lake, ended, n, receipt.rollout_id)


def receive_snapshot(
    lake: OwnedLake,
    snapshot: TokenCaptureSnapshot,
    *,
    n: int,
    reward: float | None,
    terminal_response_id: str | None = None,
) -> None:
    """Commit the entries of a frozen rollout and end it; raises as `receive` does.

    Without `terminal_response_id` the terminal is the only leaf, by the lake's own rule.
    """
    rollout_id, attempt = lake_place(snapshot.rollout_id)
    calls = {entry.model_call_id: (entry.response_id, entry) for entry in snapshot.entries}
    torn = any(entry.parent_resolution == ParentResolutionStatus.UNRESOLVED for entry in snapshot.entries)
    scored = [name for name, (response_id, _) in calls.items() if response_id == terminal_response_id]
    terminal: tuple[str | None, str | None, str | None] = (None, None, None)
    if terminal_response_id is not None:
        why = "terminal_ambiguous" if scored else "terminal_unknown"
        terminal = (scored[0], "response_id", None) if len(scored) == 1 else (None, None, why)
    ended = _Ended(
        rollout_id=rollout_id,
        attempt=attempt,
        calls=calls,
        failed="incomplete" if snapshot.incomplete else "unresolved_parent" if torn else None,
        reward=reward,
        terminal=terminal,
    )
    _take(lake, ended, n, snapshot.rollout_id)


def _take(lake: OwnedLake, ended: _Ended, n: int, name: str) -> None:
    group_id, index = split_rollout_id(ended.rollout_id)
    if index >= n:
        raise InvalidInput(f"{ended.rollout_id} is outside its group of {n}")
    state = ImportState(lake)
    names = {"group_id": group_id, "rollout_id": ended.rollout_id, "attempt": ended.attempt}
    events: list[dict[str, Any]] = []
    group = state.group(group_id)
    if group is None:
        events.append({"event_type": "group_registered", "group_id": group_id, "n": n, "purpose": "train"})
    elif group.n != n:
        raise Conflict(f"group {group_id} has {group.n} rollouts, not {n}")
    known = state.attempt(ended.rollout_id, ended.attempt)
    if known is None:
        events.append({"event_type": "rollout_registered", **names})
        known = Attempt(published=group is not None and group.published)
    end = _end(ended)
    if known.ended is not None:
        if known.ended != end or known.calls.keys() - ended.calls.keys():
            raise Conflict(f"{ended.rollout_id} attempt {ended.attempt} has ended otherwise")
        return
    if known.published:
        raise Conflict(f"group {group_id} is published: its rollouts take no other end")
    for call_id, (response_id, evidence) in ended.calls.items():
        if call_id not in known.calls:
            events.append(names | _call(lake, ended, call_id, evidence, name) | {"response_id": response_id})
    lake.lineage.append_many([*events, names | _ending(ended)])


def _call(lake: OwnedLake, ended: _Ended, call_id: str, evidence: CallRecord | TokenEntry, name: str) -> dict[str, Any]:
    """The event of a call: committed where it is what the evidence says, failed where it is not."""
    failure = {"event_type": "call_failed", "call_id": check_call_id(call_id), "answered": True}
    found = lake.find_delta(ended.rollout_id, ended.attempt, call_id)
    if found is None:
        return failure | {"reason": "delta_missing"}
    delta = lake.read_delta(found[0])
    try:
        if isinstance(evidence, CallRecord) and snapshot_of(name, delta).digest != evidence.digest:
            return failure | {"reason": "digest_mismatch"}
    except InvalidInput:
        return failure | {"reason": "digest_mismatch"}
    if isinstance(evidence, TokenEntry) and evidence.parent_call_id != delta.parent_call_id:
        return failure | {"reason": "lineage_mismatch"}
    sampled = int(np.frombuffer(delta.token_mask or b"", np.uint8).sum())
    coords = Coords.of(delta, sampled, _prompt_digest(lake, ended, delta, sampled), found[0])
    return {"event_type": "call_committed", **coords.columns()}


def _prompt_digest(lake: OwnedLake, ended: _Ended, delta: Delta, sampled: int) -> bytes:
    """The chain hash of a call's prompt: of its parent, and the tokens that it carries."""
    before = None
    if delta.parent_call_id is not None:
        found = lake.find_delta(ended.rollout_id, ended.attempt, delta.parent_call_id)
        before = None if found is None else lake.read_delta(found[0]).chain_hash
    carried = bytes(delta.token_ids or b"")
    carried = carried[: len(carried) - 4 * sampled]
    return chain_hash(before, ArrayBytes(len(carried) // 4, carried))


def _end(ended: _Ended) -> tuple[str, str]:
    if ended.failed is not None:
        return "fail", ended.failed
    return seal_end(ended.reward, ended.terminal[0], ended.terminal[2])


def _ending(ended: _Ended) -> dict[str, Any]:
    if ended.failed is not None:
        return {"event_type": "rollout_failed", "reason": ended.failed}
    call_id, selection, reason = ended.terminal
    return {
        "event_type": "rollout_sealed",
        "reward": ended.reward,
        "terminal_call_id": call_id,
        "terminal_selection": selection,
        "reason": reason,
    }
