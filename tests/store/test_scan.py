"""All deltas past DuckDB: the same records as the relation `deltas` has, in its order, with its columns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tokenlake.errors import InvalidInput
from tokenlake.store.delta import Delta
from tokenlake.store.lake import OwnedLake
from tokenlake.store.reader import Lake
from tokenlake.store.retention import retire_named
from tokenlake.store.scan import DELTAS

Make = Callable[..., Delta]


@pytest.fixture
def path(tmp_path: Path, make_delta: Make) -> Path:
    """Calls of two writers, more than are read one by one; a part is compacted, and one call was staged twice."""
    with OwnedLake.open(tmp_path / "lake") as lake:
        for i in range(150):
            lake.delta_writer(f"w{i % 2}").stage(delta(make_delta, i))
            if i == 70:
                lake.compact()
        lake.delta_writer("w2").stage(delta(make_delta, 149))
    return tmp_path / "lake"


def delta(make: Make, i: int) -> Delta:
    odd = {"logprob_nulls": (1,), "extras": '{"a":1}', "weight_version_spans": ((3, 0, 1),)} if i % 40 == 7 else {}
    return make(f"c{i}", rollout_id=f"g{i % 3}_g{i % 2}", n=i % 5 + 2, first=i, staged_at=10**15 + i, **odd)


def scanned(lake: Lake, **choice: Any) -> list[dict[str, Any]]:
    return lake.scan_deltas(**choice).read_all().to_pylist()


def queried(lake: Lake, query: str = "SELECT * FROM deltas") -> list[dict[str, Any]]:
    return lake.fetch(query).to_pylist()


def test_a_scan_gives_what_the_relation_has(path: Path) -> None:
    with Lake(path) as lake:
        found = scanned(lake)
        assert found == queried(lake)
        assert (len(found), list(found[0])) == (150, DELTAS.names)
        assert [*lake.fetch("SELECT * FROM deltas").schema.names] == DELTAS.names


def test_a_scan_of_groups_and_columns_gives_those(path: Path) -> None:
    with Lake(path) as lake:
        where = "WHERE group_id IN ('g0', 'g2')"
        columns = ["logprobs", "group_id", "finish_reason"]
        assert scanned(lake, groups=["g2", "g0"]) == queried(lake, f"SELECT * FROM deltas {where}")
        assert scanned(lake, columns=columns) == queried(lake, f"SELECT {', '.join(columns)} FROM deltas")
        assert scanned(lake, columns=["group_id"], groups=["g1"]) == [{"group_id": "g1"}] * 50
        assert scanned(lake, groups=[]) == []
        with pytest.raises(InvalidInput, match="no column tokens"):
            lake.scan_deltas(columns=["call_id", "tokens"])


@pytest.mark.parametrize("choice", [{"groups": "g"}, {"columns": "call_id"}])
def test_a_text_where_a_list_belongs_is_refused(path: Path, choice: dict[str, str]) -> None:
    with Lake(path) as lake, pytest.raises(InvalidInput, match="is a list"):
        lake.scan_deltas(**choice)


@pytest.mark.parametrize("first", [2**63 - 64, 2**62, 2**40, 0, 4, -100, -(2**63)])
def test_a_place_outside_of_every_record_holds_none(path: Path, first: int) -> None:
    """Among others that are read at once, and of any length: what 64 bits add up to leads nowhere."""
    at = "CASE WHEN i % 2 = 0 THEN byte_offset ELSE ?1 + i END, CASE WHEN i % 2 = 0 THEN byte_length ELSE ?2 END"
    there = "SELECT * FROM tl_places WHERE writer = 'w1' ORDER BY byte_offset LIMIT 1"
    asked = f"i % 2 AS odd, tl_has_delta('w1', segment, {at}, 0, rollout_id, 0, call_id) AS found"
    query = (
        f"SELECT count(*) FILTER (found), sum(odd) FILTER (found) FROM (SELECT {asked} FROM range(64) r (i), ({there}))"
    )
    with Lake(path) as lake:
        for length in (2**31 - 1, 5000, 2064, 8, 0, -1, -(2**31)):
            assert lake.sql(query, [first, length]).fetchall() == [(32, 0)], length


def test_a_scan_leaves_out_what_cannot_be_read(path: Path) -> None:
    with Lake(path) as lake:
        for segment, records in (("w0/000001", 3), ("_compacted/000000", 0)):
            file = path / f"deltas/{segment}.arrow"
            before = len(scanned(lake))
            file.write_bytes(file.read_bytes().replace(b"stop", b"st\xffp", 3))
            assert scanned(lake) == queried(lake)
            if records:
                assert len(scanned(lake)) == before - records
            else:
                assert len(scanned(lake)) < before - 3


def test_a_scan_goes_on_where_compaction_moved_what_it_knew(path: Path) -> None:
    with Lake(path) as lake:
        reader = lake.scan_deltas(columns=["call_id"])
        with OwnedLake.open(path, create=False) as owner:
            assert owner.compact().replaced > 0
        assert reader.read_all().to_pylist() == queried(lake, "SELECT call_id FROM deltas")


def test_a_scan_knows_what_is_there_at_the_last_refresh(path: Path, make_delta: Make) -> None:
    with Lake(path) as lake:
        with OwnedLake.open(path, create=False) as owner:
            owner.delta_writer("w9").stage(make_delta("new", rollout_id="g9_g0"))
        assert len(scanned(lake)) == 150
        lake.refresh()
        assert [row["call_id"] for row in scanned(lake, groups=["g9"])] == ["new"]


def test_a_scan_goes_on_over_what_retention_removed_and_a_refresh_forgot(path: Path) -> None:
    with Lake(path) as lake, OwnedLake.open(path) as owner:
        wanted = scanned(lake)
        under_way = lake.scan_deltas()
        owner.lineage.append_many([{"event_type": "group_registered", "group_id": "g0", "n": 1}])
        owner.lineage.append_many([{"event_type": "group_dropped", "group_id": "g0", "n": 1, "reason": "aborted"}])
        assert retire_named(owner, groups=["g0"]).compaction.retired == 50
        owner.compact()
        lake.refresh()
        assert under_way.read_all().to_pylist() == wanted
        assert len(scanned(lake)) == 100
