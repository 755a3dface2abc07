"""Publishing: groups that are due become the rows of exactly N rollouts, once.

What a row is and whether it is valid is decided by the view `publishable_rows` and nowhere else. This module writes the
clock's decision into lineage (a slot that nobody ended before the deadline has failed), has the view asked, here or by
other processes, writes the rows durably and then appends `group_published`. A crash in between leaves a row file that
no event names; the next run writes the same rows again. Publishing twice changes nothing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tokenlake import sql
from tokenlake.clock import now_us
from tokenlake.errors import DamagedLake, NotFound
from tokenlake.finalize.judge import Judgement, Judges, PublishedGroup, judge, shards
from tokenlake.store.lake import OwnedLake
from tokenlake.store.policy import parse_policy
from tokenlake.store.query import fetch

__all__ = ["PublishedGroup", "publish_due", "set_policy"]

_publishing = threading.Lock()


def set_policy(lake: OwnedLake, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Record the policies in force from now on: the ones in force before, changed by `settings`.

    Raises `ConfigError` for unknown names or values. Returns all policies.
    """
    found = lake.sql(sql.read("reads/policy")).fetchall()
    return _set_policy(lake, found[0][0] if found else None, settings)


def _set_policy(lake: OwnedLake, in_force: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    before: dict[str, Any] = {} if in_force is None else json.loads(in_force)
    policy = parse_policy({**before, **settings})
    if policy != before:
        lake.lineage.append("policy_set", detail=json.dumps(policy, sort_keys=True))
    return policy


def publish_due(
    lake: OwnedLake,
    *,
    groups: Sequence[str] | None = None,
    now: int | None = None,
    force_deadline: bool = False,
    judges: Judges | None = None,
) -> list[PublishedGroup]:
    """Publish every group that is due, or those of `groups` that are.

    A group is due when all its rollouts have ended, or its deadline has passed at `now` (microseconds since the epoch;
    default: the clock). `force_deadline` takes the deadline as passed. `judges`: who judges them; default: this
    process. Raises `NotFound` for an unknown group.
    """
    with _publishing:
        now = now_us() if now is None else now
        wanted = None if groups is None else sorted(set(groups))
        published: list[PublishedGroup] = []
        at_once = None
        if wanted is not None and judges is None and len([*shards(wanted)]) == 1:
            # Nearly always all of them are due, which judging them tells as well.
            at_once = judge(lake, wanted, now)
            wanted = _left(wanted, at_once.groups)
        _check_known(lake, wanted)
        if at_once is not None and at_once.groups:
            _write(lake, at_once, _set_policy(lake, at_once.policy, {}), now)
            published += at_once.groups
            if not wanted:
                return published
        policy = set_policy(lake, {})
        due = [] if wanted is None else _due(lake, wanted)
        if wanted is None or len(due) < len(wanted):
            # Some slot is open still, or all groups are asked for.
            _expire(lake, wanted, now, 0.0 if force_deadline else policy["group_deadline_s"], force_deadline)
            due = _due(lake, wanted)
        for judgement in (judges or _here(lake))(due, now=now, upto=lake.lineage.head):
            _write(lake, judgement, policy, now)
            published += judgement.groups
        for group_id in _left(due, published):
            raise DamagedLake(
                f"group {group_id} in {lake.path} is due and has no rows: run `tokenlake audit`", group_id=group_id
            )
        return sorted(published, key=lambda group: group.group_id)


def _here(lake: OwnedLake) -> Judges:
    """Judging in this process, each shard when it is asked for."""

    def judges(due: Sequence[str], *, now: int, upto: int) -> Iterator[Judgement]:  # noqa: ARG001  # its own events
        return (judge(lake, shard, now) for shard in shards(due))

    return judges


def _left(groups: Sequence[str], published: Sequence[PublishedGroup]) -> list[str]:
    done = {group.group_id for group in published}
    return [group_id for group_id in groups if group_id not in done]


def _check_known(lake: OwnedLake, groups: Sequence[str] | None) -> None:
    for group_id in groups or ():
        if lake.sql(sql.read("reads/group"), [group_id]).fetchall() == []:
            raise NotFound(f"no group {group_id} in {lake.path}", group_id=group_id)


def _due(lake: OwnedLake, wanted: list[str] | None) -> list[str]:
    return fetch(lake, sql.read("reads/due_groups"), [wanted], groups=wanted).column("group_id").to_pylist()


def _expire(lake: OwnedLake, wanted: list[str] | None, now: int, deadline_s: float | None, force: bool) -> None:
    """Write down that the slots nobody ended by their group's deadline have failed."""
    expired = fetch(lake, sql.read("reads/expired_slots"), [now, deadline_s, force, wanted], groups=wanted).to_pylist()
    if expired:
        lake.lineage.append_many([{"event_type": "rollout_failed", **slot} for slot in expired])


def _write(lake: OwnedLake, judgement: Judgement, policy: Mapping[str, Any], now: int) -> None:
    """Write down what was judged: rows first, then the events that make them count."""
    kept = [group.group_id for group in judgement.groups if group.dropped is None]
    segment = None
    if kept:
        # Also where all are kept: a copy has nothing but zeros under a NULL, so that equal rows are equal files.
        rows = judgement.rows
        segment = lake.write_rows(rows.filter(pc.is_in(rows.column("group_id"), pa.array(kept))))
    settled = json.dumps(dict(policy), sort_keys=True)
    lake.lineage.append_many(
        [
            {"group_id": group.group_id, "n": group.n, "cutoff_at": now, "detail": settled}
            | (
                {
                    "event_type": "group_published",
                    "segment": segment,
                    "weight_version": group.group_min_wv,
                    "weight_version_end": group.group_max_wv,
                }
                if group.dropped is None
                else {"event_type": "group_dropped", "reason": group.dropped}
            )
            for group in judgement.groups
        ]
    )
    lake.lineage.anchor()
