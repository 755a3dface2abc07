"""The calls of an attempt in the order to show them: depth first, each branch in a lane of its own.

A conversation of two hundred turns stays in one lane; only a fork opens another, and stands right below the call that
it leaves. The child on the terminal chain, or else the first one, goes on in its parent's lane.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Shown", "call_tree"]

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One call and where it stands."""

    call: Record
    """A record of `reads/inspect_calls`."""
    lane: int
    """How many forks it is away from the chain of its root."""
    in_cycle: bool
    """Whether its parents lead back to it."""


def call_tree(calls: Sequence[Record]) -> Iterator[Shown]:
    """Every call once; one whose parent is not there stands at the left edge, those in a cycle come last."""
    known = {call["call_id"] for call in calls}
    children: dict[str | None, list[Record]] = {}
    for call in calls:
        parent = call["parent_call_id"]
        children.setdefault(parent if parent in known and parent != call["call_id"] else None, []).append(call)
    for siblings in children.values():
        siblings.sort(key=lambda call: call["position"] is None)
    stack = [(call, 0) for call in reversed(children.get(None, []))]
    shown: set[str] = set()
    while stack:
        call, lane = stack.pop()
        if call["call_id"] in shown:
            continue
        shown.add(call["call_id"])
        yield Shown(call=call, lane=lane, in_cycle=False)
        first, *others = children.get(call["call_id"], []) or [None]
        if first is not None:
            stack.append((first, lane))
        stack += [(other, lane + 1) for other in reversed(others) if other is not None]
    yield from (Shown(call=call, lane=0, in_cycle=True) for call in calls if call["call_id"] not in shown)
