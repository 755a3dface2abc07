"""What publishing groups comes to: their rows and verdicts, as the views say, asked in this process or in another.

A judgement changes nothing. Whoever sees the lake's files as far as the event `upto` gives the same one, to the last
byte, so it may be made anywhere, lost and made again; the lake's owner alone writes it down.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import duckdb
import pyarrow as pa

from tokenlake import sql
from tokenlake.errors import DamagedLake
from tokenlake.store.schema import ROW

__all__ = ["Judgement", "Judges", "PublishedGroup", "judge", "shards"]

_GROUPS_AT_ONCE = 64
_ROWS, _COUNTS, _DROPS = (
    sql.read(f"reads/{name}") for name in ("rows_to_publish", "published_counts", "dropped_groups")
)


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
    """Columns as in `ROW`."""


class Lake(Protocol):
    """What is asked: a lake that is owned, or one that is read."""

    path: Path

    def connect(self, *, groups: Sequence[str], query: str) -> duckdb.DuckDBPyConnection:
        """A connection with the views that `query` names, over these groups."""
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


def judge(lake: Lake, due: Sequence[str], now: int) -> Judgement:
    """Judge groups that are due at `now` (microseconds since the epoch).

    Raises `DamagedLake` where a group would not have the rows of its N rollouts.
    """
    dropped: dict[str, dict[str, Any]] = {}
    con = lake.connect(groups=due, query=_ROWS + _COUNTS + _DROPS)
    try:
        rows = con.sql(_ROWS, params=[now, due]).to_arrow_table().select(ROW.names).cast(ROW)
        con.register("due_rows", rows)
        counts = con.sql(_COUNTS, params=[due]).to_arrow_table().to_pylist()
        absent = [count["group_id"] for count in counts if count["published"] == 0]
        if absent:
            found: list[dict[str, Any]] = con.sql(_DROPS, params=[absent]).to_arrow_table().to_pylist()
            dropped = {each["group_id"]: each for each in found}
    finally:
        con.close()
    return Judgement(groups=tuple(_group(lake, count, dropped.get(count["group_id"])) for count in counts), rows=rows)


def _group(lake: Lake, count: Mapping[str, Any], drop: Mapping[str, Any] | None) -> PublishedGroup:
    if drop is None and count["published"] != count["n"]:
        raise DamagedLake(
            f"group {count['group_id']} in {lake.path} would publish rows of {count['published']} rollouts instead of "
            f"{count['n']}: run `tokenlake audit`",
            group_id=count["group_id"],
        )
    return PublishedGroup(
        group_id=count["group_id"],
        n=count["n"],
        rows=count["published_rows"],
        valid=count["valid"] if drop is None else drop["valid"],
        reasons=json.loads(count["reasons"]),
        dropped=None if drop is None else drop["drop_reason"],
        group_min_wv=count["group_min_wv"],
        group_max_wv=count["group_max_wv"],
    )
