"""What publishing groups comes to: their rows and verdicts, as the views say, asked in this process or in another.

A judgement changes nothing. Whoever sees the lake's files as far as the event `upto` gives the same one, to the last
byte, so it may be made anywhere, lost and made again; the lake's owner alone writes it down.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from tokenlake.errors import DamagedLake
from tokenlake.store.planned import Planned
from tokenlake.store.schema import ROW

__all__ = ["Judgement", "Judges", "PublishedGroup", "judge", "shards"]

_GROUPS_AT_ONCE = 64
_VERDICT = ("group_id", "rollout_id", "reason", "n", "valid_rows", "drop_reason", "group_min_wv", "group_max_wv")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedGroup:
    """What publishing one group comes to, or came to."""

    group_id: str
    n: int
    rows: int
    """N, and more where rollouts have several segments; 0 when the group is dropped."""
    valid: int
    """Rollouts whose rows are valid."""
    reasons: Mapping[str, int]
    """Placeholder rows by reason."""
    dropped: str | None
    """Why the group is dropped instead of published; None when it is not."""
    group_min_wv: int | None
    """The oldest weight version of its valid rows; None: unknown."""
    group_max_wv: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Groups in the order of their ids, and the rows of those that are not dropped."""

    groups: tuple[PublishedGroup, ...]
    rows: pa.Table
    """Columns as in `ROW`; those of groups that are dropped are there too."""
    policy: str | None
    """The policies by which they were judged, as they stand in lineage; None: none were set."""


class Lake(Protocol):
    """What is asked: a lake that is owned, or one that is read."""

    path: Path

    def planned(self, groups: Sequence[str]) -> AbstractContextManager[Planned]:
        """The statements that are planned once, over these groups."""
        ...


class Judges(Protocol):
    """Who judges."""

    def __call__(self, due: Sequence[str], *, now: int, upto: int) -> Iterator[Judgement]:
        """Judgements of due groups, a shard each, in the order of their ids, by a lake read up to its event `upto`."""
        ...


def shards(due: Sequence[str], most: int = _GROUPS_AT_ONCE) -> Iterator[Sequence[str]]:
    """Due groups in stretches of at most `most`, and never more than are judged at once."""
    size = max(1, min(most, _GROUPS_AT_ONCE))
    return (due[start : start + size] for start in range(0, len(due), size))


def judge(lake: Lake, groups: Sequence[str], now: int) -> Judgement:
    """Judge those of some groups that are due, at `now` (microseconds since the epoch); the others are left out.

    Raises `DamagedLake` where a group would not have the rows of its N rollouts.
    """
    with lake.planned(groups) as planned:
        found = planned.ask("due_rows")
    by_group: dict[str, list[dict[str, Any]]] = {}
    for row in found.select(_VERDICT).to_pylist():
        by_group.setdefault(row["group_id"], []).append(row)
    rows = found.append_column("published_at", pa.array([now] * len(found), pa.int64()))
    return Judgement(
        groups=tuple(_group(lake, group_id, each) for group_id, each in by_group.items()),
        rows=rows.select(ROW.names).cast(ROW),
        policy=found.column("policy")[0].as_py() if len(found) else None,
    )


def _group(lake: Lake, group_id: str, rows: Sequence[Mapping[str, Any]]) -> PublishedGroup:
    first = rows[0]
    rollouts = len({row["rollout_id"] for row in rows})
    if rollouts != first["n"]:
        raise DamagedLake(
            f"group {group_id} in {lake.path} would publish rows of {rollouts} rollouts instead of {first['n']}: run "
            "`tokenlake audit`",
            group_id=group_id,
        )
    kept = rows if first["drop_reason"] is None else ()
    return PublishedGroup(
        group_id=group_id,
        n=first["n"],
        rows=len(kept),
        valid=first["valid_rows"],
        reasons=dict(Counter(row["reason"] for row in kept if row["reason"] is not None)),
        dropped=first["drop_reason"],
        group_min_wv=first["group_min_wv"],
        group_max_wv=first["group_max_wv"],
    )
