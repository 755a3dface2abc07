"""Nothing but this lake can be reached from a query, and no query outlives its limits or whoever asked."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import tokenlake
from tests.api.conftest import Door, Opener
from tests.cases.conftest import CaseLake, call, fail, group, seal
from tokenlake.errors import Deadline, InvalidInput, QueryError, TooLarge

FILES = (
    "FROM '{file}'",
    'FROM "{file}"',
    "SELECT * FROM read_csv('{file}')",
    "SELECT * FROM read_csv_auto(['{file}'])",
    "SELECT * FROM sniff_csv('{file}')",
    "SELECT * FROM read_text('{file}')",
    "SELECT * FROM read_blob('{file}')",
    "SELECT * FROM read_json('{file}')",
    "SELECT * FROM read_json_objects('{file}')",
    "SELECT * FROM read_ndjson('{file}')",
    "SELECT * FROM read_parquet('{file}')",
    "SELECT * FROM parquet_scan('{file}')",
    "SELECT * FROM parquet_metadata('{file}')",
    "SELECT * FROM read_duckdb('{file}')",
    "SELECT * FROM glob('{folder}/*')",
    "SELECT * FROM query('FROM read_text(''{file}'')')",
    "SELECT * FROM query_table('{file}')",
    "SELECT (SELECT content FROM read_text('{file}'))",
    "WITH t AS (FROM read_text('{file}')) FROM t",
    "EXPLAIN ANALYZE SELECT * FROM read_text('{file}')",
    "SELECT * FROM read_text('https://127.0.0.1:9/x')",
    "SELECT * FROM read_parquet('s3://bucket/x')",
    "COPY (SELECT 1) TO '{out}'",
    "COPY lineage TO '{out}' (FORMAT parquet)",
    "EXPLAIN ANALYZE COPY (SELECT 1) TO '{out}'",
    "EXPORT DATABASE '{out}'",
    "IMPORT DATABASE '{folder}'",
    "ATTACH '{out}'",
    "ATTACH '{file}' AS other",
    "USE other",
    "INSTALL httpfs",
    "LOAD httpfs",
    "LOAD '{file}'",
    "FORCE INSTALL json FROM community",
    "SET enable_external_access = true",
    "SET lock_configuration = false",
    "SET GLOBAL memory_limit = '100GB'",
    "SET allowed_directories = ['/']",
    "SET python_enable_replacements = true",
    "RESET enable_external_access",
    "PRAGMA enable_profiling",
    "PRAGMA database_list",
    "PRAGMA threads = 64",
    "CALL enable_logging()",
    "SELECT getenv('HOME')",
    "SELECT * FROM duckdb_secrets()",
    "CREATE SECRET (TYPE s3)",
    "CREATE TABLE t AS SELECT 1",
    "CREATE TEMP TABLE t AS SELECT 1",
    "CREATE MACRO m() AS 1",
    "CREATE OR REPLACE VIEW ready_rows AS SELECT 1",
    "INSERT INTO tl_events SELECT * FROM tl_events",
    "DELETE FROM tl_events",
    "UPDATE tl_rows SET group_id = 'x'",
    "DROP VIEW ready_rows",
    "EXPLAIN ANALYZE DELETE FROM tl_events",
    "WITH gone AS (DELETE FROM tl_events RETURNING *) FROM gone",
    "BEGIN",
    "CHECKPOINT",
    "VACUUM",
    "PREPARE p AS SELECT 1",
    "SELECT 1; SELECT 2",
    "SELECT 1; COPY (SELECT 1) TO '{out}'",
    "FROM variable_of_this_process",
    "SELECT * FROM arrow_scan(NULL, NULL, NULL)",
    "SELECT * FROM pandas_scan(NULL)",
    "SELECT * FROM python_map_function(NULL)",
)
"""None of these may answer. `{file}` exists and holds a secret; `{out}` does not exist and must not afterwards."""

SECRET = "what-the-query-must-not-see"


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "secret.csv").write_text(f"secret\n{SECRET}\n")
    return {"file": str(folder / "secret.csv"), "out": str(folder / "out"), "folder": str(folder)}


@pytest.fixture
def asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> CaseLake:
    case = CaseLake(tmp_path / "lake", capsys)
    case.take(group("g7", 2), call("g7_g0", "c0", [1, 2], [3]), seal("g7_g0", 1.0), fail("g7_g1", "broken"))
    case.finalize()
    return case


def test_a_query_in_python_reaches_nothing_but_the_lake(asked: CaseLake, places: dict[str, str]) -> None:
    variable_of_this_process = pa.table({"secret": [SECRET]})
    lake = tokenlake.open(asked.path)
    try:
        for attack in FILES:
            with pytest.raises(QueryError) as refused:
                lake.fetch(attack.format(**places))
            with pytest.raises((QueryError, duckdb.Error)):
                lake.sql(attack.format(**places)).fetchall()
            assert SECRET not in refused.value.message, attack
        assert len(lake.sql("SELECT * FROM ready_rows").fetchall()) == 2
    finally:
        lake.close()
    assert variable_of_this_process.num_rows
    assert not Path(places["out"]).exists()


def test_a_query_over_http_reaches_nothing_but_the_lake(door: Door, places: dict[str, str]) -> None:
    before = door.client.sql("SELECT count(*) AS n FROM lineage")
    for attack in FILES:
        with pytest.raises(InvalidInput) as refused:
            door.client.sql(attack.format(**places))
        assert SECRET not in refused.value.message, attack
    assert door.client.sql("SELECT count(*) AS n FROM lineage") == before
    assert not Path(places["out"]).exists()


@pytest.mark.parametrize("attack", ["FROM '{file}'", "SELECT * FROM read_text('{file}')", "COPY (SELECT 1) TO '{out}'"])
def test_a_query_on_the_command_line_reaches_nothing_but_the_lake(
    asked: CaseLake, places: dict[str, str], attack: str
) -> None:
    status, out, err = asked.run("sql", "--lake", str(asked.path), attack.format(**places))
    assert (status, out) == (2, "")
    assert SECRET not in err
    assert not Path(places["out"]).exists()


def test_a_place_outside_the_lake_is_no_place(asked: CaseLake, tmp_path: Path) -> None:
    """The functions behind the relations read segments of this lake only."""
    (writer,) = (asked.path / "deltas").iterdir()
    lake = tokenlake.open(asked.path)
    try:
        ask = (
            "SELECT tl_has_delta(?, segment, byte_offset, byte_length, batch_row, rollout_id, attempt, call_id) "
            "FROM tl_places"
        )
        assert lake.sql(ask, [writer.name]).fetchall() == [(True,)]
        for name in (f"../deltas/{writer.name}", str(writer), "x" * 5000, "a\0b", "..", ""):
            assert lake.sql(ask, [name]).fetchall() == [(False,)]
    finally:
        lake.close()


def test_a_connection_of_ones_own_is_a_free_duckdb(asked: CaseLake, places: dict[str, str]) -> None:
    lake = tokenlake.open(asked.path)
    try:
        for _ in range(2):
            con = lake.connect()
            assert con.execute("SELECT secret FROM read_csv(?)", [places["file"]]).fetchall() == [(SECRET,)]
            assert con.execute("SELECT count(*) FROM ready_rows").fetchall() == [(2,)]
            con.execute("CREATE TEMP TABLE mine AS SELECT 1")
            con.close()
            assert lake.sql("SELECT count(*) FROM ready_rows").fetchall() == [(2,)]
    finally:
        lake.close()


SLOW = (
    "SELECT count(*) FROM range(1000000000000)",
    "SELECT count(*) FROM range(100000000) a, range(100000000) b",
    "WITH RECURSIVE r AS (SELECT 1 AS a UNION ALL SELECT a + 1 FROM r) SELECT count(*) FROM r",
    "SELECT sum(len(range(10000000 + range % 7))) FROM range(1000000)",
)
LARGE = (
    "SELECT len(range(300000000))",
    "SELECT list(range) FROM range(100000000)",
    "SELECT len(repeat('x', 1500000000))",
    "SELECT max(a) FROM (SELECT range AS a, repeat('x', 1000) AS b FROM range(10000000) ORDER BY hash(range), b)",
)


def test_a_query_ends_with_its_time_or_memory_and_the_next_one_runs(opened: Opener) -> None:
    with opened(sql_timeout_s=0.5, sql_memory_bytes=700_000_000) as door:
        for text in SLOW:
            with pytest.raises((Deadline, TooLarge)):
                door.client.sql(text)
        with pytest.raises(Deadline):
            door.client.sql(SLOW[0])
        for text in LARGE:
            with pytest.raises((TooLarge, Deadline)):
                door.client.sql(text)
        assert door.client.sql("SELECT 1 AS one")["rows"] == [{"one": 1}]


def test_memory_beyond_the_limit_is_said(opened: Opener) -> None:
    with opened(sql_memory_bytes=700_000_000) as door, pytest.raises(TooLarge, match="sql_memory_bytes"):
        door.client.sql(LARGE[0])


def test_an_answer_holds_at_most_so_many_bytes(opened: Opener) -> None:
    with opened(sql_max_bytes=100_000) as door:
        found = door.client.sql("SELECT repeat('x', 1000) AS x FROM range(1000)")
        assert found["truncated"]
        assert 0 < len(found["rows"]) < 100
        assert not door.client.sql("SELECT 1")["truncated"]


def children() -> set[int]:
    """Processes that run queries below this one."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
            line = path.with_name("cmdline").read_bytes()
        except OSError:
            continue
        if int(words[1]) == os.getpid() and b"tokenlake.store.query_worker" in line and words[0] != "Z":
            found.add(int(path.parent.name))
    return found


def test_a_query_ends_when_its_client_leaves(opened: Opener) -> None:
    with opened(sql_timeout_s=500, control_deadline_s=500, sql_processes=1) as door:
        door.client.sql("SELECT 1")
        (worker,) = children()
        body = json.dumps({"sql": SLOW[0]}).encode()
        host, port = door.url.removeprefix("http://").split(":")
        head = f"POST /api/v1/sql HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {door.running.token}\r\n"
        with socket.create_connection((host, int(port))) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            while door.service.sql_workers._idle:
                threading.Event().wait(0.01)
        # One process, so this waits for the query before it: it ends at once only because that one was ended.
        assert door.client.sql("SELECT 1 AS one")["rows"] == [{"one": 1}]
        assert worker not in children()
    assert children() == set()


def test_a_worker_does_not_see_the_services_secrets(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENLAKE_TOKEN", SECRET)
    with opened() as door:
        door.client.sql("SELECT 1")
        for worker in children():
            assert SECRET.encode() not in Path(f"/proc/{worker}/environ").read_bytes()


def test_a_worker_ends_with_its_service(asked: CaseLake) -> None:
    command = [sys.executable, "-m", "tokenlake.store.query_worker", str(asked.path), "700000000"]
    worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert b"ready" in worker.stdout.readline()
    request: Any = b'{"id": 1, "sql": "SELECT count(*) FROM range(1000000000000)", "params": [], "max_rows": 1, '
    worker.stdin.write(request + b'"max_bytes": 1000}\n')
    worker.stdin.close()
    assert worker.wait(60) == 0
    worker.stdout.close()


def test_a_query_sees_what_was_committed_before_it(door: Door) -> None:
    for number in range(3):
        door.register(f"g{number}")
        assert door.client.sql("SELECT count(*) AS n FROM groups")["rows"] == [{"n": number + 1}]
