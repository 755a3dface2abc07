"""`tokenlake diff`: where the published rows of two lakes differ, without a service and group by group.

Rows are matched by group, place in it and segment. Two runs of the same tasks have other group ids: where no id is in
both lakes, groups are matched by the prompt they share (`prompt_ids_for_adv`), in the order of their ids.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice, zip_longest
from typing import Any, cast

import pyarrow as pa

from tokenlake import sql
from tokenlake.api.output import write_table
from tokenlake.errors import ConfigError
from tokenlake.store.query import fetch
from tokenlake.store.reader import Lake

__all__ = ["Difference", "diff", "row_differences"]

Row = Mapping[str, Any]
_ARRAYS = ("input_ids", "token_mask", "prompt_ids_for_adv")
_AT_ONCE = 64
"""Groups whose rows are read together."""

_VALUES = ("sample_mask", "reason", "reward", "weight_version_min", "weight_version_max", "turns", "truncated")
_SCHEMA = pa.schema(
    [
        ("row_a", pa.string()),
        ("row_b", pa.string()),
        ("what", pa.string()),
        ("position", pa.int64()),
        ("detail", pa.string()),
        ("delta", pa.float64()),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One way in which two rows differ."""

    row_a: str | None
    """`sample_id`, with `/segment` for a later segment; None: only the other lake has it."""
    row_b: str | None
    what: str
    """A column, or `missing`."""
    position: int | None = None
    """Where arrays first differ, from 0."""
    detail: str | None = None
    delta: float | None = None
    """The largest difference of two log-probabilities."""


def diff(arguments: argparse.Namespace) -> int:
    """`tokenlake diff`: 0 the same rows, 1 they differ, 2 nothing to compare."""
    if not arguments.tolerance >= 0:
        raise ConfigError("--tolerance is a number of at least 0")
    with Lake(arguments.lake_a) as a, Lake(arguments.lake_b) as b:
        found: list[Difference] = []
        compared = 0
        pairs = _pairs(a, b, arguments.group)
        while chunk := list(islice(pairs, _AT_ONCE)):
            rows_a, rows_b = (_rows(lake, [pair[side] for pair in chunk]) for side, lake in enumerate((a, b)))
            for group_a, group_b in chunk:
                mine, others = rows_a.get(group_a, {}), rows_b.get(group_b, {})
                for key in sorted(mine.keys() | others.keys()):
                    compared += 1
                    found += row_differences(mine.get(key), others.get(key), tolerance=arguments.tolerance)
    if not compared:
        sys.stderr.write("tokenlake: nothing to compare: neither lake has a published row\n")
        return 2
    columns = [[getattr(each, field.name) for each in found] for field in fields(Difference)]
    table = pa.Table.from_arrays([pa.array(c, f.type) for c, f in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA)
    write_table(table, arguments.format, sys.stdout.buffer)
    rows = len({(each.row_a, each.row_b) for each in found})
    sys.stderr.write(f"compared {compared} rows: {rows} differ, {compared - rows} are the same\n")
    return 1 if found else 0


def row_differences(a: Row | None, b: Row | None, *, tolerance: float = 0.0) -> Iterator[Difference]:
    """Where two rows differ; one that is absent is `missing`."""
    differs = partial(Difference, row_a=_name(a), row_b=_name(b))
    if a is None or b is None:
        yield differs(what="missing", detail=f"only in {'LAKE_B' if a is None else 'LAKE_A'}")
        return
    for name in _VALUES:
        if a[name] != b[name]:
            yield differs(what=name, detail=f"{a[name]} and {b[name]}")
    for name in _ARRAYS:
        at = _first(a[name], b[name])
        if at is not None:
            yield differs(what=name, position=at, detail=f"{len(a[name])} and {len(b[name])} tokens")
    pairs = list(enumerate(zip(a["logprobs"], b["logprobs"], strict=False)))
    apart = [(abs(x - y), at) for at, (x, y) in pairs if not abs(x - y) <= tolerance]
    if apart:
        largest = max(gap for gap, _ in apart)
        count = f"{len(apart)} of {len(pairs)}"
        yield differs(what="logprobs", position=apart[0][1], detail=count, delta=largest)


def _name(row: Row | None) -> str | None:
    if row is None:
        return None
    return row["sample_id"] + (f"/{row['segment_index']}" if row["segment_index"] else "")


def _first(a: list[int], b: list[int]) -> int | None:
    """The first position at which two arrays differ; the shorter one's end where one continues the other."""
    return next((at for at, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)


def _pairs(a: Lake, b: Lake, group: str | None) -> Iterator[tuple[str | None, str | None]]:
    groups_a, groups_b = (_groups(lake, group) for lake in (a, b))
    if {*groups_a} & {*groups_b} or not groups_a or not groups_b:
        for name in sorted({*groups_a} | {*groups_b}):
            yield name if name in groups_a else None, name if name in groups_b else None
        return
    waiting: dict[tuple[int, ...], list[str]] = {}
    for name, prompt in _prompts(b, groups_b):
        waiting.setdefault(prompt, []).append(name)
    for name, prompt in _prompts(a, groups_a):
        same = waiting.get(prompt)
        yield name, same.pop(0) if same else None
    for names in waiting.values():
        yield from ((None, name) for name in names)


def _groups(lake: Lake, group: str | None) -> list[str]:
    return fetch(lake, sql.read("reads/diff_groups"), [group]).column("group_id").to_pylist()


def _prompts(lake: Lake, groups: Sequence[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each group with the prompt that its rows share."""
    for start in range(0, len(groups), _AT_ONCE):
        found = _rows(lake, groups[start : start + _AT_ONCE])
        for name in groups[start : start + _AT_ONCE]:
            rows = found.get(name)
            yield name, tuple(rows[min(rows)]["prompt_ids_for_adv"]) if rows else ()


def _rows(lake: Lake, groups: Sequence[str | None]) -> dict[str | None, dict[tuple[int, int], Row]]:
    """The rows of some groups, each by its place and segment."""
    names = [name for name in groups if name is not None]
    found: dict[str | None, dict[tuple[int, int], Row]] = {}
    for row in cast("list[Row]", fetch(lake, sql.read("reads/ready_rows_of"), [names], groups=names).to_pylist()):
        place = (int(row["rollout_id"].rpartition("_g")[2]), row["segment_index"])
        found.setdefault(row["group_id"], {})[place] = row
    return found
