"""What was taken in of the groups that are open, so that judging one of them asks no table and waits for none.

A group is known from its registration on, which comes before all else of it, until it is closed. Where anything was
taken back or came twice, groups are forgotten, and the index is asked instead: what it says is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tokenlake.store.intake import Change
from tokenlake.store.planned import EVENTS, PLACES

__all__ = ["Recent"]

_MANY = 16_384
"""Events that come at once only when a lake is read from its start."""
_PIECES = 16
_CLOSING = {"group_published", "group_dropped"}
_OF_NO_GROUP = {"policy_set", "model_registered"}


class _Group:
    def __init__(self) -> None:
        self.events: list[pa.RecordBatch] = []
        self.places: dict[tuple[Any, ...], tuple[Any, ...]] = {}


class Recent:
    """Events and places by group. Not thread-safe."""

    def __init__(self, shared: pa.Table) -> None:
        """`shared`: the events of no group that judging needs, as they are known so far."""
        self._shared = shared.cast(EVENTS).to_batches()
        self._groups: dict[str, _Group] = {}

    def add(self, change: Change, *, restarted: bool) -> None:
        """Take in what a refresh found; `restarted`: what an earlier segment of lineage held may have been refused."""
        if restarted or any(kind != "rows" for kind, _, _ in change.gone) or _count(change) > _MANY:
            self._groups.clear()
        else:
            for batch in change.events:
                self._add_events(batch.select(EVENTS.names))
            for batch in change.places:
                for place in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    self._add_place(place)
            return
        for batch in change.events:
            self._add_shared(batch.select(EVENTS.names))

    def of(self, groups: Sequence[str]) -> tuple[pa.Table, pa.Table] | None:
        """Events and places of some groups, as `Planned` takes them; None where one of them is not known."""
        known = [self._groups.get(group_id) for group_id in groups]
        found = [each for each in known if each is not None]
        if len(found) < len(known):
            return None
        events = [*self._shared, *(batch for group in found for batch in group.events)]
        places = [place for group in found for place in group.places.values()]
        columns = list(zip(*places, strict=True)) or [()] * len(PLACES)
        arrays = [pa.array(column, field.type) for column, field in zip(columns, PLACES, strict=True)]
        return pa.Table.from_batches(events, EVENTS), pa.Table.from_arrays(arrays, schema=PLACES)

    def _add_events(self, batch: pa.RecordBatch) -> None:
        types, owners = batch.column("event_type").to_pylist(), _owners(batch)
        for kind, group_id in zip(types, owners, strict=True):
            if kind == "group_registered" and group_id is not None:
                self._groups.setdefault(group_id, _Group())
        rows: dict[str, list[int]] = {}
        for row, group_id in enumerate(owners):
            if group_id in self._groups:
                rows.setdefault(group_id, []).append(row)
        for group_id, taken in rows.items():
            events = self._groups[group_id].events
            events.append(batch.take(pa.array(taken, pa.int32())))
            if len(events) > _PIECES:
                events[:] = pa.Table.from_batches(events).combine_chunks().to_batches()
        for kind, group_id in zip(types, owners, strict=True):
            if kind in _CLOSING and group_id is not None:
                self._groups.pop(group_id, None)
        self._add_shared(batch)

    def _add_shared(self, batch: pa.RecordBatch) -> None:
        rows = [row for row, kind in enumerate(batch.column("event_type").to_pylist()) if kind in _OF_NO_GROUP]
        if rows:
            self._shared.append(batch.take(pa.array(rows, pa.int32())))

    def _add_place(self, place: tuple[Any, ...]) -> None:
        *where, rollout_id, attempt, call_id, digest, _ = place
        group_id = _group_of(rollout_id)
        group = self._groups.get(group_id)
        if group is None:
            return
        key = (rollout_id, attempt, call_id, digest)
        if key in group.places:
            # Which of two copies stands for both is the index's to say.
            del self._groups[group_id]
            return
        group.places[key] = (*where, rollout_id, attempt, call_id, group_id, False)


def _count(change: Change) -> int:
    return sum(batch.num_rows for batch in (*change.events, *change.places))


def _owners(batch: pa.RecordBatch) -> list[str | None]:
    """The group of each event, as the index says it."""
    pairs = zip(batch.column("group_id").to_pylist(), batch.column("rollout_id").to_pylist(), strict=True)
    return [
        group_id if group_id is not None or rollout_id is None else _group_of(rollout_id)
        for group_id, rollout_id in pairs
    ]


def _group_of(rollout_id: str) -> str:
    at = rollout_id.rfind("_g")
    return rollout_id[:at] if at >= 0 else rollout_id[:-1]
