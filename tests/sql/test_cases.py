"""Every view over small relations, written down in case folders: `<view>/<case>/{<relation>.json, expect.json}`.

`expect.json` is the rows, in any order, with the columns that matter; or `{"only": {column: value}, "rows": [...]}` to
look at some of the view's rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sql.records import connect, read_relations
from tokenlake import sql
from tokenlake.store.schema import EVENT_TYPES
from tokenlake.store.views import ordered_views

HERE = Path(__file__).parent
CASES = sorted(path.parent for path in HERE.glob("*/*/expect.json"))


def key(row: dict[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, default=str)


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    return value


@pytest.mark.parametrize("folder", CASES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_view_says_what_its_case_expects(folder: Path) -> None:
    expect = json.loads((folder / "expect.json").read_text())
    only, wanted = ({}, expect) if isinstance(expect, list) else (expect["only"], expect["rows"])
    con = connect(read_relations(folder))
    cursor = con.execute(f"SELECT * FROM {folder.parent.name}")
    names = [column[0] for column in cursor.description or ()]
    found = [dict(zip(names, map(plain, values), strict=True)) for values in cursor.fetchall()]
    found = [row for row in found if all(row[name] == value for name, value in only.items())]
    columns = list(wanted[0]) if wanted else names
    found = [{name: row[name] for name in columns} for row in found]
    assert sorted(map(key, found)) == sorted(map(key, wanted))


def test_no_other_event_lies_in_the_range_of_the_events_of_groups() -> None:
    between = {name for name in EVENT_TYPES if "group_dropped" <= name <= "group_registered"}
    assert between == {"group_registered", "group_published", "group_dropped"}


def test_every_view_has_a_case() -> None:
    con = connect({"lineage": [], "deltas": [], "rows": [], "lake_findings": []})
    views = {row[0] for row in con.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()}
    assert views == {folder.parent.name for folder in CASES}
    macros = [name for name in ordered_views() if " MACRO " in sql.read(name)]
    assert len(views) + len(macros) == len(ordered_views())
