"""Statements that are planned once say what the views say, wherever what they judge comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.finalize.conftest import Field, call, group
from tokenlake.errors import NotFound
from tokenlake.finalize.publish import publish_due

DUE = "SELECT * FROM candidate_rows WHERE closed_by IS NULL ORDER BY group_id, length(sample_id), sample_id"


def judged(field: Field, *groups: str) -> pa.Table:
    """What the planned statement says of some groups, without what only it has."""
    with field.lake.planned(list(groups)) as planned:
        return planned.ask("due_rows").drop_columns(["policy", "row_digest"])


def viewed(field: Field, *groups: str) -> pa.Table:
    con = field.lake.connect(groups=list(groups))
    try:
        return con.sql(DUE).to_arrow_table()
    finally:
        con.close()


def test_the_planned_statement_says_what_the_views_say(field: Field) -> None:
    field.add(*group("old", [1.0, None]))
    assert judged(field, "old").equals(viewed(field, "old"))
    bad = [call("g_g1", "c9", [1], [2, 3], generation_logprobs=[-0.5, 0.5]), {"type": "seal", "rollout_id": "g_g1"}]
    field.add(*group("g", [1.0]), *group("h", [0.5, None, 0.25]))
    field.add({"type": "group", "group_id": "m", "n": 1}, *[each | {"rollout_id": "m_g0"} for each in bad])
    found = judged(field, "g", "h", "m", "old")
    assert (found.num_rows, judged(field, "h").num_rows) == (7, 3)
    assert found.equals(viewed(field, "g", "h", "m", "old"))
    publish_due(field.lake, groups=["h"])
    assert judged(field, "h").num_rows == 0
    assert field.lake.compact().records > 0
    before = found.filter(pc.not_equal(found.column("group_id"), "h"))
    assert judged(field, "g", "m", "old").equals(before)
    field.restart()
    assert judged(field, "g", "m", "old").equals(before)


def test_a_statement_is_planned_once(field: Field, tmp_path: Path) -> None:
    field.publish(*group("g", [1.0]))
    field.add(*group("h", [1.0]))
    profile = tmp_path / "profile.json"
    with field.lake.planned(["h"]) as planned:
        con = planned.con
        con.execute("PRAGMA enable_profiling = 'json'")
        con.execute("SET profiling_mode = 'detailed'")
        con.execute("SET profiling_output = ?", [str(profile)])
        con.execute("EXECUTE due_rows").fetchall()
        assert "join_order" not in json.loads(profile.read_text()).get("optimizer", {})
        con.execute("SELECT * FROM candidate_rows").fetchall()
        assert "join_order" in json.loads(profile.read_text())["optimizer"]


def test_an_unknown_group_is_named_and_none_is_published(field: Field) -> None:
    field.add(*group("g", [1.0]))
    with pytest.raises(NotFound, match="no group nope"):
        publish_due(field.lake, groups=["g", "nope"])
    assert field.rows("SELECT * FROM ready_rows") == []


def test_of_the_groups_asked_for_those_that_are_due_are_published(field: Field) -> None:
    field.publish(*group("done", [1.0]))
    opened = [each for each in group("open", [1.0, 0.5]) if each.get("rollout_id") != "open_g1"]
    field.add(*group("g", [1.0]), *opened)
    assert [each.group_id for each in publish_due(field.lake, groups=["open", "g", "done"])] == ["g"]
    done = publish_due(field.lake, groups=["open"], force_deadline=True)
    assert [(each.rows, each.valid, each.reasons) for each in done] == [(2, 1, {"never_sealed": 1})]
