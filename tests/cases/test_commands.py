"""The commands as a user meets them: formats, exit codes, one-line errors, and damage that must be seen."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenlake
from tests.cases.conftest import CaseLake, call, fail, group, seal
from tokenlake.api.cli import main
from tokenlake.errors import QueryError
from tokenlake.store.lake import OwnedLake

G = "g7_g0"


@pytest.fixture
def filled(case: CaseLake) -> CaseLake:
    """Two groups: one published with a placeholder, one still open."""
    case.take(
        group("g7", 2),
        call(G, "c0", [70001, 70002], [70003, 9], generation_logprobs=[-0.1, -0.2]),
        call(G, "c1", [70001, 70002, 70003, 9, 5], [6, 9], weight_version=8),
        seal(G, 1.0, terminal_call_id="c1"),
        fail("g7_g1", "my own words"),
        group("open", 1),
        call("open_g0", "c0", [1], [2]),
    )
    case.finalize()
    return case


def test_rows_as_json_lines_hold_every_column_and_exact_floats(filled: CaseLake) -> None:
    valid, placeholder = filled.rows()
    assert valid["input_ids"] == [70001, 70002, 70003, 9, 5, 6, 9]
    assert struct.pack("<2f", *valid["logprobs"][2:4]) == struct.pack("<2f", -0.1, -0.2)
    assert (valid["group_min_wv"], valid["group_max_wv"]) == (7, 8)
    assert (placeholder["reason"], placeholder["reward"]) == ("rollout_failed", None)
    assert filled.sql("SELECT detail FROM rollouts WHERE rollout_id = 'g7_g1'") == [("my own words",)]


def test_rows_in_arrow_and_parquet_are_the_same_rows(filled: CaseLake, tmp_path: Path) -> None:
    expected = [row["input_ids"] for row in filled.rows()]
    for form in ("arrow", "parquet"):
        out = tmp_path / f"rows.{form}"
        status, _, err = filled.run("rows", "--lake", str(filled.path), "--format", form, "--out", str(out))
        assert status == 0, err
        table = pa.ipc.open_stream(out).read_all() if form == "arrow" else pq.read_table(out)
        assert table.column("input_ids").to_pylist() == expected


def test_a_group_that_is_not_published_has_no_rows_and_that_is_no_error(filled: CaseLake) -> None:
    assert filled.rows("open") == []


def test_the_version_is_that_which_lineage_names(filled: CaseLake, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    ((detail,),) = filled.sql("SELECT detail FROM lineage WHERE event_type = 'lake_opened' LIMIT 1")
    assert capsys.readouterr().out == json.loads(detail)["tokenlake"] + "\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["rows", "--group", "nope"], "no group nope"),
        (["inspect", "nope_g0"], "nope_g0"),
        (["inspect", "no-such-form"], "rollout_id is not valid"),
        (["finalize", "--group", "nope"], "no group nope"),
        (["finalize", "--policy", "nonsense=1"], "nonsense"),
        (["finalize", "--policy", "mixed_weight_version=perhaps"], "mixed_weight_version"),
        (["sql", "SELEC 1"], "SELEC"),
        (["sql", "SELECT * FROM nowhere"], "nowhere"),
        (["sql", "DELETE FROM lineage"], "read-only"),
        (["sql", "COPY (SELECT 1) TO 'x.csv'"], "read-only"),
        (["import", "no-such-file.jsonl"], "no-such-file.jsonl"),
        *((["export", "rows", "--every", every], "above 0") for every in ("-1", "0", "nan", "inf")),
        (["worker", "--engine", "tiny", "--port", "99999"], "not from 0 to 65535"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(filled: CaseLake, arguments: list[str], why: str) -> None:
    command, *rest = arguments
    status, out, err = filled.run(command, "--lake", str(filled.path), *rest)
    assert status == 2
    assert out == ""
    assert err.startswith("tokenlake: ")
    assert err.count("\n") == 1
    assert why in err


def test_reading_commands_say_that_there_is_no_lake(case: CaseLake, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nowhere", tmp_path / "empty"):
        for command in (["rows"], ["sql", "SELECT 1"], ["audit"], ["inspect", G], ["finalize"], ["rebuild"]):
            status, _, err = case.run(command[0], "--lake", str(path), *command[1:])
            assert status == 2, command
            assert str(path) in err
            assert err.count("\n") == 1
    assert not (tmp_path / "nowhere").exists()


def test_finalize_counts_rollouts_also_where_a_chain_is_a_row(case: CaseLake) -> None:
    case.take(group("g"), call("g_g0", "a", [1], [2]), call("g_g0", "b", [3], [4]))
    case.take(seal("g_g0", terminal_call_id="a"))
    status, out, _ = case.run("finalize", "--lake", str(case.path), "--policy", "rows=segments")
    assert (status, out.splitlines()[0]) == (0, "g: 1 rollouts, 1 valid")
    assert [row["input_ids"] for row in case.rows()] == [[1, 2], [3, 4]]


def test_an_interval_is_printed_as_iso_8601(filled: CaseLake) -> None:
    query = "SELECT to_months(14) + to_days(3) + to_microseconds(-1500000) AS gap, INTERVAL 0 DAY AS none"
    status, out, _ = filled.run("sql", "--lake", str(filled.path), "--format", "jsonl", query)
    assert (status, json.loads(out)) == (0, {"gap": "P14M3DT-1.5S", "none": "P0M0DT0S"})


@pytest.mark.parametrize("form", ["table", "jsonl", "csv", "arrow"])
def test_sql_prints_each_format(filled: CaseLake, form: str) -> None:
    query = "SELECT group_id, n FROM groups ORDER BY group_id"
    path = filled.path.parent / "out"
    done = subprocess.run(
        [sys.executable, "-m", "tokenlake.api.cli", "sql", "--lake", str(filled.path), "--format", form, query],
        capture_output=True,
        check=True,
    )
    path.write_bytes(done.stdout)
    if form == "arrow":
        assert pa.ipc.open_stream(path).read_all().to_pylist() == [
            {"group_id": "g7", "n": 2},
            {"group_id": "open", "n": 1},
        ]
    elif form == "jsonl":
        assert [json.loads(line)["n"] for line in done.stdout.splitlines()] == [2, 1]
    elif form == "csv":
        assert done.stdout == b"group_id,n\ng7,2\nopen,1\n"
    else:
        assert b"(2 rows)" in done.stdout


def test_an_audit_of_a_healthy_lake_finds_nothing(filled: CaseLake) -> None:
    status, findings = filled.audit()
    assert (status, [f for f in findings if f["severity"] == "fault"]) == (0, [])


def test_an_audit_that_looked_at_nothing_does_not_say_all_is_well(case: CaseLake) -> None:
    """B52 (v)."""
    OwnedLake.open(case.path).close()
    status, _, err = case.run("audit", "--lake", str(case.path))
    assert status == 2
    assert "0 records checked" in err


def test_one_flipped_token_on_disk_is_found_and_named(filled: CaseLake) -> None:
    (segment,) = filled.path.glob("deltas/*/*.arrow")
    data = segment.read_bytes()
    segment.write_bytes(data.replace(struct.pack("<i", 70003), struct.pack("<i", 70004)))
    status, findings = filled.audit()
    assert status == 1
    assert {"c0"} <= {f["call_id"] for f in findings}
    assert ("c0", "digest_mismatch") in filled.sql("SELECT call_id, reason FROM call_checks WHERE NOT ok")


def test_an_open_reader_sees_the_damage_too(filled: CaseLake) -> None:
    """No cached verdict: the views recompute from the bytes."""
    lake = tokenlake.open(filled.path)
    query = "SELECT call_id FROM call_verdicts WHERE NOT ok"
    assert lake.sql(query).fetchall() == []
    (segment,) = filled.path.glob("deltas/*/*.arrow")
    with segment.open("r+b") as file:
        position = file.read().index(struct.pack("<f", -0.2))
        file.seek(position)
        file.write(struct.pack("<f", -0.3))
    assert lake.sql(query).fetchall() == [("c0",)]
    lake.close()


def test_a_changed_row_is_found(filled: CaseLake) -> None:
    (segment,) = filled.path.glob("rows/*.arrow")
    data = segment.read_bytes()
    assert data.count(struct.pack("<d", 1.0)) >= 1
    segment.write_bytes(data.replace(struct.pack("<d", 1.0), struct.pack("<d", 0.5)))
    status, findings = filled.audit()
    assert status == 1
    assert any(f["rollout_id"] == G for f in findings)


def test_a_missing_segment_is_loss(filled: CaseLake) -> None:
    for segment in filled.path.glob("deltas/*/*.arrow"):
        segment.unlink()
    status, findings = filled.audit()
    assert status == 1
    assert {"c0", "c1"} <= {f["call_id"] for f in findings}


def test_finalize_twice_gives_the_same_rows(filled: CaseLake) -> None:
    before = filled.rows()
    assert "published 0 groups" in filled.finalize()
    assert filled.rows() == before


def test_the_index_can_be_lost_and_everything_is_the_same(filled: CaseLake) -> None:
    """B30 (iii)."""
    before = (filled.rows(), filled.sql("SELECT * FROM linear_rows ORDER BY rollout_id"))
    for file in filled.path.glob("index.duckdb*"):
        file.unlink()
    assert filled.run("rebuild", "--lake", str(filled.path))[0] == 0
    assert (filled.rows(), filled.sql("SELECT * FROM linear_rows ORDER BY rollout_id")) == before
    assert "published 0 groups" in filled.finalize()


def test_reading_works_beside_an_owner_and_writing_is_refused(filled: CaseLake) -> None:
    """B28."""
    owner = OwnedLake.open(filled.path)
    try:
        assert len(filled.rows()) == 2
        assert filled.audit()[0] == 0
        for command in (["finalize"], ["rebuild"], ["import", str(filled.write(group("x")))]):
            status, _, err = filled.run(command[0], "--lake", str(filled.path), *command[1:])
            assert status == 2
            assert str(filled.path) in err
            assert err.count("\n") == 1
    finally:
        owner.close()


def test_inspect_shows_the_tree_and_the_verdict(filled: CaseLake) -> None:
    status, out, _ = filled.run("inspect", "--lake", str(filled.path), G)
    assert status == 0
    for word in ("c0", "c1", "valid", "reward", "terminal"):
        assert word in out
    status, out, _ = filled.run("inspect", "--lake", str(filled.path), "g7_g1")
    assert status == 0
    assert "rollout_failed" in out
    assert "my own words" in out


def test_a_python_reader_is_read_only_and_says_so(filled: CaseLake) -> None:
    lake = tokenlake.open(filled.path)
    with pytest.raises(QueryError):
        lake.sql("SELECT * FROM nowhere")
    found: Any = lake.sql("SELECT sample_id FROM ready_rows WHERE group_id = ? ORDER BY 1", ["g7"])
    assert found.fetchall() == [("g7_g0",), ("g7_g1",)]
    lake.close()
