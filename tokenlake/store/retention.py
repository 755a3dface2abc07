"""Retention: the deltas of closed groups go, their rows and their lineage stay.

What goes is first named by `retired` events, durably; then compaction writes the segments anew without it. From the
event on, an absent delta is retired and no fault. A crash in between leaves records that the next run removes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tokenlake import sql
from tokenlake.clock import now_us
from tokenlake.errors import ConfigError, Conflict, NotFound
from tokenlake.ids import split_rollout_id
from tokenlake.store.compact import Compaction
from tokenlake.store.lake import OwnedLake
from tokenlake.store.query import fetch

__all__ = ["Retention", "Retired", "retire", "retire_named"]

_EVENTS_AT_ONCE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which closed groups lose their deltas: those that meet every condition that is set.

    Raises `ConfigError` for an age or a version that is none.
    """

    older_than_s: float | None = None
    """Seconds since the group was closed."""
    below_version: int | None = None
    """The newest weight version of the group is below this one; an unknown version never is."""
    consumed: bool = False
    """Some consumer has consumed the group's rows and not given them back."""

    def __post_init__(self) -> None:
        if self.older_than_s is not None and not 0 <= self.older_than_s < math.inf:
            raise ConfigError(f"an age is a number of seconds of at least 0, not {self.older_than_s}")
        if self.below_version is not None and not 0 <= self.below_version < 1 << 63:
            raise ConfigError(f"a weight version is a whole number of at least 0, not {self.below_version}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """What one run retired."""

    groups: tuple[str, ...]
    """Groups all of whose deltas go."""
    rollouts: tuple[str, ...] = ()
    """Rollouts that were named one by one."""
    compaction: Compaction
    """What removing them came to."""


def retire(lake: OwnedLake, rule: Retention, *, now: int | None = None, min_records: int = 0) -> Retired:
    """Retire the groups that a rule names, at `now` (microseconds since the epoch; default: the clock).

    `min_records`: as of `OwnedLake.compact`, which follows.
    Raises `ConfigError` for a rule without a condition, which would name every group.
    """
    if rule == Retention():
        raise ConfigError("retention without a condition would remove every delta: give one, or name the groups")
    before = None
    if rule.older_than_s is not None:
        before = int(max(0.0, (now_us() if now is None else now) - rule.older_than_s * 1e6))
    found = lake.sql(sql.read("reads/retirable"), [before, rule.below_version, rule.consumed]).fetchall()
    groups = [group_id for (group_id,) in found]
    given = {name: getattr(rule, name) for name in rule.__slots__}
    detail = {name: value for name, value in given.items() if value is not None and value is not False}
    return _retire(lake, groups, [], json.dumps(detail, sort_keys=True), min_records)


def retire_named(lake: OwnedLake, *, groups: Sequence[str] = (), rollouts: Sequence[str] = ()) -> Retired:
    """Retire groups and rollouts by name; what is retired already stays so.

    Raises `NotFound` for an unknown group or rollout, `Conflict` for one that is still open: publish or abort it first.
    """
    split = {rollout: split_rollout_id(rollout) for rollout in rollouts}
    wanted = sorted({*groups, *(group for group, _ in split.values())})
    found = fetch(lake, sql.read("reads/group_closings"), [wanted], groups=wanted)
    known = {row["group_id"]: row for row in found.to_pylist()}
    for name in wanted:
        if name not in known:
            raise NotFound(f"no group {name} in {lake.path}", group_id=name)
        if known[name]["closed_by"] is None:
            raise Conflict(f"group {name} is still open: publish or abort it first", group_id=name)
    for rollout, (group, index) in split.items():
        if index >= (known[group]["n"] or 0):
            raise NotFound(f"group {group} has no rollout {rollout} in {lake.path}", rollout_id=rollout)
    fresh = [name for name in sorted({*groups}) if not known[name]["whole"]]
    alone = [
        rollout
        for rollout, (owner, _) in sorted(split.items())
        if owner not in groups and not known[owner]["whole"] and rollout not in known[owner]["rollouts"]
    ]
    return _retire(lake, fresh, alone, json.dumps({"named": True}))


def _retire(
    lake: OwnedLake, groups: Sequence[str], rollouts: Sequence[str], detail: str, min_records: int = 0
) -> Retired:
    events = [{"event_type": "retired", "group_id": name, "detail": detail} for name in groups]
    events += [{"event_type": "retired", "rollout_id": name, "detail": detail} for name in rollouts]
    for start in range(0, len(events), _EVENTS_AT_ONCE):
        lake.lineage.append_many(events[start : start + _EVENTS_AT_ONCE])
    if events:
        lake.lineage.anchor()
    done = lake.compact(min_records=min_records)
    return Retired(groups=tuple(groups), rollouts=tuple(rollouts), compaction=done)
