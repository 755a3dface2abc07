"""The fold: lineage events in, the state of every open group out.

`Control.apply` is the only code that changes this state, for an event that was just appended and for one that a
restarted gate reads back, so both come to the same. Groups that are closed stay only while there is room: the lake
has them all.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from tokenlake.api.rollouts import Attempt, Failure, Group, Overflow, Rollout, State
from tokenlake.ids import split_rollout_id
from tokenlake.ingest.calls import Call, Node
from tokenlake.ingest.fingerprint import text_digest
from tokenlake.store.delta import Place

__all__ = ["UNDELIVERED", "Control", "Event"]

UNDELIVERED = "answer_undelivered"
"""Reason of a `call_failed` about a committed call: nobody waited for its answer. With `{"delivered": true}` as its
detail it takes that back: a retry got the answer."""

Event = Mapping[str, Any]
"""Columns of a lineage event; times are microseconds since the epoch."""


class Control:
    """Every open group of a lake, and the `closed_groups` that closed or were asked for last.

    Not thread-safe: the service's event loop owns it.
    """

    def __init__(self, closed_groups: int = 1024) -> None:
        self.groups: dict[str, Group] = {}
        self._room = closed_groups
        self._closed: OrderedDict[str, None] = OrderedDict()
        self.evicted: set[str] = set()
        """Groups that closed and had to go since `Archive` last brought the index up to date."""
        self.weight_version: int | None = None
        self.workers: dict[str, dict[str, Any]] = {}
        self.policy: dict[str, Any] = {}
        self.model: dict[str, Any] | None = None

    def rollout(self, rollout_id: str) -> Rollout | None:
        """The rollout of this id; None when its group or it is unknown."""
        group = self.groups.get(split_rollout_id(rollout_id)[0])
        return group and group.rollouts.get(rollout_id)

    def call(self, rollout_id: str, attempt: int, call_id: str) -> Call | None:
        """The committed call, as long as something can continue it."""
        rollout = self.rollout(rollout_id)
        found = rollout and rollout.attempts.get(attempt)
        return found and found.calls.get(call_id)

    def apply(self, event: Event) -> None:
        """Fold one event."""
        handler = _HANDLERS.get(event["event_type"])
        if handler is not None:
            handler(self, event)

    def used(self, group_id: str) -> None:
        """A closed group was just used; the one that was not for longest may have to go."""
        self._closed[group_id] = None
        self._closed.move_to_end(group_id)
        while len(self._closed) > self._room:
            oldest, _ = self._closed.popitem(last=False)
            del self.groups[oldest]
            self.evicted.add(oldest)


def _attempt(control: Control, event: Event) -> Attempt | None:
    rollout = control.rollout(event["rollout_id"])
    return rollout and rollout.attempts.get(event.get("attempt") or 0)


def _group_registered(control: Control, event: Event) -> None:
    key = event.get("idempotency_digest")
    group = Group(
        group_id=event["group_id"],
        n=event["n"],
        registered_at=event["at"],
        deadline_at=event.get("deadline_at"),
        purpose=event.get("purpose") or "train",
        meta=_detail(event),
        weight_version=event.get("weight_version"),
        created_by=None if key is None else (key, event["request_digest"]),
    )
    control.groups.setdefault(group.group_id, group)


def _rollout_registered(control: Control, event: Event) -> None:
    name, attempt = event["rollout_id"], event.get("attempt") or 0
    group = control.groups.get(split_rollout_id(name)[0])
    if group is None:
        return
    rollout = group.rollouts.setdefault(name, Rollout(name))
    if attempt in rollout.attempts:
        return
    for older in rollout.attempts.values():
        older.release()
    rollout.attempts[attempt] = Attempt(
        name, attempt, event["at"], touched_at=event["at"], created_by=event.get("idempotency_digest")
    )


def _call_committed(control: Control, event: Event) -> None:
    attempt = _attempt(control, event)
    if attempt is None or event["call_id"] in attempt.calls or attempt.released:
        return
    detail = _detail(event)
    seed = detail.get("seed")
    attempt.lineage.commit(_call(event, detail, attempt), seed=bytes.fromhex(seed) if seed else None)
    attempt.committed += 1
    attempt.touched_at = event["at"]
    attempt.leave(event["call_id"])
    if detail.get("poison"):
        attempt.failures += (Failure(call_id=event["call_id"], reason=detail["poison"], answered=True),)
    key = event.get("idempotency_digest")
    if key is not None:
        attempt.keys = {**attempt.keys, key: event["call_id"]}


def _call_failed(control: Control, event: Event) -> None:
    attempt = _attempt(control, event)
    if attempt is None:
        return
    if event.get("reason") == UNDELIVERED:
        if _detail(event).get("delivered"):
            attempt.undelivered -= {event["call_id"]}
        elif event["call_id"] in attempt.calls:
            attempt.undelivered |= {event["call_id"]}
        return
    answered = bool(event.get("answered"))
    attempt.failures += (Failure(call_id=event["call_id"], reason=event.get("reason") or "unknown", answered=answered),)
    attempt.touched_at = event["at"]
    attempt.leave(event["call_id"])
    attempt.lineage.failed(answered=answered)


def _call_overflowed(control: Control, event: Event) -> None:
    attempt = _attempt(control, event)
    if attempt is None or attempt.released:
        return
    overflow = Overflow(
        call_id=event["call_id"], response_id=event.get("response_id"), parent_call_id=event.get("parent_call_id")
    )
    attempt.overflows = {**attempt.overflows, overflow.call_id: overflow}
    attempt.touched_at = event["at"]
    attempt.leave(event["call_id"])
    detail = _detail(event)
    parent = attempt.calls.get(overflow.parent_call_id or "")
    if event.get("fingerprint") and "preamble" in detail:
        attempt.lineage.overflow(
            overflow.call_id,
            parent and parent.node,
            fingerprint=event["fingerprint"],
            context=event["context_digest"],
            preamble=bytes.fromhex(detail["preamble"]),
            reasoning=_reasoning(detail),
        )


def _rollout_frozen(control: Control, event: Event) -> None:
    attempt = _attempt(control, event)
    if attempt is not None and attempt.state == "open":
        attempt.state = "frozen"
        attempt.boundary_id = _detail(event).get("boundary_id")
        attempt.boundary_terminal = event.get("terminal_call_id")


def _rollout_sealed(control: Control, event: Event) -> None:
    _end(control, event, "sealed")


def _rollout_failed(control: Control, event: Event) -> None:
    _end(control, event, "failed")


def _end(control: Control, event: Event, state: State) -> None:
    attempt = _attempt(control, event)
    if attempt is None or (attempt.end is not None and not attempt.retry):
        return
    attempt.state = state
    attempt.end = {
        "terminal": event.get("terminal_call_id"),
        "calls": attempt.committed,
        "poisoned": attempt.poison is not None,
        "placeholder": event.get("reason"),
        **_detail(event),
        "terminal_selection": event.get("terminal_selection"),
        "reason": event.get("reason"),
        "reward": event.get("reward"),
    }


def _group_closed(control: Control, event: Event) -> None:
    group = control.groups.get(event["group_id"])
    if group is None:
        return
    group.state = "published" if event["event_type"] == "group_published" else "dropped"
    for rollout in group.rollouts.values():
        for attempt in rollout.attempts.values():
            if attempt.end is None:
                attempt.state, attempt.end = "failed", {"reason": "never_sealed"}
            attempt.release()
    control.used(group.group_id)


def _weight_version(control: Control, event: Event) -> None:
    control.weight_version = event.get("weight_version")


def _worker(control: Control, event: Event) -> None:
    detail = _detail(event)
    control.workers[detail.get("worker_id") or event.get("writer") or ""] = {
        **detail,
        "loaded_weight_version": event.get("weight_version"),
        "registered_at": event["at"],
    }


def _policy(control: Control, event: Event) -> None:
    control.policy = _detail(event)


def _model(control: Control, event: Event) -> None:
    control.model = _detail(event)


def _detail(event: Event) -> dict[str, Any]:
    text = event.get("detail")
    return json.loads(text) if text else {}


def _reasoning(detail: Mapping[str, Any]) -> tuple[tuple[int, bytes], ...]:
    return tuple((turn, bytes.fromhex(digest)) for turn, digest in detail.get("reasoning", ()))


def _call(event: Event, detail: Mapping[str, Any], attempt: Attempt) -> Call:
    parent = event.get("parent_call_id")
    if parent is not None and parent not in attempt.calls:
        parent = None
    node = Node(
        call_id=event["call_id"],
        parent_call_id=parent,
        before=None if parent is None else attempt.calls.behind(parent),
        root_call_id=event.get("root_call_id") or event["call_id"],
        depth=event.get("depth") or 0,
        cum_len=event["cum_len"],
        chain_hash=event["chain_hash"],
        fingerprint=event.get("fingerprint") or event["chain_hash"],
        context=event.get("context_digest") or b"",
        preamble=bytes.fromhex(detail.get("preamble", "")),
        turns=detail.get("turns", 0),
        reasoning=_reasoning(detail),
        place=None
        if event.get("writer") is None
        else Place(
            writer=event["writer"],
            segment=event["segment"],
            byte_offset=event["byte_offset"],
            byte_length=event["byte_length"],
            batch_row=event["batch_row"],
        ),
    )
    return Call(
        node=node,
        response_id=event.get("response_id"),
        prev_len=event["prev_len"],
        delta_len=event["delta_len"],
        sampled_tokens=event["sampled_tokens"],
        mode=event["mode"],
        cause=event.get("reason"),
        weight_version=event.get("weight_version"),
        weight_version_end=event.get("weight_version_end"),
        digest=event["digest"],
        prompt_digest=event.get("prompt_digest"),
        text_digest=text_digest(event.get("served_text") or ""),
        request_digest=event.get("request_digest"),
    )


_HANDLERS: dict[str, Callable[[Control, Event], None]] = {
    "group_registered": _group_registered,
    "rollout_registered": _rollout_registered,
    "call_committed": _call_committed,
    "call_failed": _call_failed,
    "call_overflowed": _call_overflowed,
    "rollout_frozen": _rollout_frozen,
    "rollout_sealed": _rollout_sealed,
    "rollout_failed": _rollout_failed,
    "group_published": _group_closed,
    "group_dropped": _group_closed,
    "weight_version_published": _weight_version,
    "worker_registered": _worker,
    "policy_set": _policy,
    "model_registered": _model,
}
