"""Publishing: groups that are due become the rows of exactly N rollouts, once.

What a row is and whether it is valid is decided by the view `publishable_rows` and nowhere else. This module writes the
clock's decision into lineage (a slot that nobody ended before the deadline has failed), asks the view, writes the rows
durably and then appends `group_published`. A crash in between leaves a row file that no event names; the next run
writes the same rows again. Publishing twice changes nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tokenlake import sql
from tokenlake.clock import now_us
from tokenlake.errors import DamagedLake, NotFound
from tokenlake.store.lake import OwnedLake
from tokenlake.store.policy import parse_policy
from tokenlake.store.schema import ROW

__all__ = ["PublishedGroup", "publish_due", "set_policy"]

_GROUPS_AT_ONCE = 64
_publishing = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedGroup:
    """One group that this run published or dropped."""

    group_id: str
    n: int
    rows: int
    """Rows that were written: N, and more where rollouts have several segments; 0 when the group was dropped."""
    valid: int
    """Rollouts whose rows are valid."""
    reasons: Mapping[str, int]
    """Placeholder rows by reason."""
    dropped: str | None
    """Why the group was dropped instead of published; None when it was published."""


def set_policy(lake: OwnedLake, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Record the policies in force from now on: the ones in force before, changed by `settings`.

    Raises `ConfigError` for unknown names or values. Returns all policies.
    """
    found = lake.sql(sql.read("reads/policy")).fetchall()
    before: dict[str, Any] = json.loads(found[0][0]) if found else {}
    policy = parse_policy({**before, **settings})
    if policy != before:
        lake.lineage.append("policy_set", detail=json.dumps(policy, sort_keys=True))
    return policy


def publish_due(
    lake: OwnedLake, *, groups: Sequence[str] | None = None, now: int | None = None, force_deadline: bool = False
) -> list[PublishedGroup]:
    """Publish every group that is due, or those of `groups` that are.

    A group is due when all its rollouts have ended, or its deadline has passed at `now` (microseconds since the epoch;
    default: the clock). `force_deadline` takes the deadline as passed. Raises `NotFound` for an unknown group.
    """
    with _publishing:
        now = now_us() if now is None else now
        policy = set_policy(lake, {})
        wanted = _known(lake, groups)
        _expire(lake, wanted, now, 0.0 if force_deadline else policy["group_deadline_s"], force_deadline)
        due = [row[0] for row in lake.sql(sql.read("reads/due_groups"), [wanted]).fetchall()]
        published: list[PublishedGroup] = []
        for start in range(0, len(due), _GROUPS_AT_ONCE):
            published += _publish(lake, due[start : start + _GROUPS_AT_ONCE], policy, now)
        return published


def _known(lake: OwnedLake, groups: Sequence[str] | None) -> list[str] | None:
    if groups is None:
        return None
    for group_id in groups:
        if lake.sql(sql.read("reads/group"), [group_id]).fetchall() == []:
            raise NotFound(f"no group {group_id} in {lake.path}", group_id=group_id)
    return list(groups)


def _expire(lake: OwnedLake, wanted: list[str] | None, now: int, deadline_s: float | None, force: bool) -> None:
    """Write down that the slots nobody ended by their group's deadline have failed."""
    rows = lake.sql(sql.read("reads/expired_slots"), [now, deadline_s, force, wanted]).fetchall()
    events = [
        {
            "event_type": "rollout_failed",
            "group_id": group_id,
            "rollout_id": rollout_id,
            "attempt": attempt,
            "reason": reason,
        }
        for group_id, rollout_id, attempt, reason in rows
    ]
    if events:
        lake.lineage.append_many(events)


def _publish(lake: OwnedLake, due: list[str], policy: Mapping[str, Any], now: int) -> list[PublishedGroup]:
    rows, counts, drops = (
        sql.read(f"reads/{name}") for name in ("rows_to_publish", "published_counts", "dropped_groups")
    )
    dropped: dict[str, dict[str, Any]] = {}
    con = lake.connect(groups=due, query=rows + counts + drops)
    try:
        table = con.sql(rows, params=[now, due]).to_arrow_table()
        table = table.select(ROW.names).cast(ROW)
        con.register("due_rows", table)
        verdicts = con.sql(counts, params=[due]).to_arrow_table().to_pylist()
        absent = [verdict["group_id"] for verdict in verdicts if verdict["published"] == 0]
        if absent:
            found: list[dict[str, Any]] = con.sql(drops, params=[absent]).to_arrow_table().to_pylist()
            dropped = {each["group_id"]: each for each in found}
    finally:
        con.close()
    results: list[PublishedGroup] = []
    for verdict in verdicts:
        drop = dropped.get(verdict["group_id"])
        if drop is None and verdict["published"] != verdict["n"]:
            raise DamagedLake(
                f"group {verdict['group_id']} in {lake.path} would publish rows of {verdict['published']} rollouts "
                f"instead of {verdict['n']}: run `tokenlake audit`",
                group_id=verdict["group_id"],
            )
        results.append(
            PublishedGroup(
                group_id=verdict["group_id"],
                n=verdict["n"],
                rows=verdict["published_rows"],
                valid=verdict["valid"] if drop is None else drop["valid"],
                reasons=json.loads(verdict["reasons"]),
                dropped=None if drop is None else drop["drop_reason"],
            )
        )
    kept = [result.group_id for result in results if result.dropped is None]
    segment = None
    if kept:
        segment = lake.write_rows(table.filter(pc.is_in(table.column("group_id"), pa.array(kept))))
    settled = json.dumps(dict(policy), sort_keys=True)
    lake.lineage.append_many(
        [
            {"group_id": verdict["group_id"], "n": verdict["n"], "cutoff_at": now, "detail": settled}
            | (
                {
                    "event_type": "group_published",
                    "segment": segment,
                    "weight_version": verdict["group_min_wv"],
                    "weight_version_end": verdict["group_max_wv"],
                }
                if result.dropped is None
                else {"event_type": "group_dropped", "reason": result.dropped}
            )
            for verdict, result in zip(verdicts, results, strict=True)
        ]
    )
    lake.lineage.anchor()
    return results
