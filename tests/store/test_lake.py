"""The owner: one process, an index that can be lost, rows that are there whole or not at all (B26, B28, B30)."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from tokenlake.errors import FormatError, InvalidInput, LakeLocked, NotFound, QueryError, StorageFailed, TokenlakeError
from tokenlake.store import intake
from tokenlake.store.delta import Delta
from tokenlake.store.lake import OwnedLake
from tokenlake.store.lineage import lineage_loss
from tokenlake.store.reader import Lake
from tokenlake.store.schema import ROW

Make = Callable[..., Delta]
HERE = Path(__file__).parent


def row_table(group_id: str, n: int = 2, tokens: int = 3) -> pa.Table:
    rows = [
        {
            "schema_version": 1,
            "segment_index": 0,
            "segment_count": 1,
            "attempt": 0,
            "sample_mask": 1,
            "reward": 0.5,
            "truncated": False,
            "turns": 1,
            "sampled_tokens": 1,
            "dropped_sampled_tokens": 0,
            "published_at": 5,
            "row_digest": bytes(32),
            "sample_id": f"{group_id}_g{i}",
            "rollout_id": f"{group_id}_g{i}",
            "group_id": group_id,
            "call_ids": ["c0"],
            "prompt_ids_for_adv": [1],
            "input_ids": list(range(tokens)),
            "token_mask": [1] * tokens,
            "logprobs": [-0.5] * tokens,
        }
        for i in range(n)
    ]
    return pa.Table.from_pylist(rows, schema=ROW)


CONTENT = "SELECT call_id, token_ids, logprobs, digest FROM deltas ORDER BY call_id"
EVENTS = "SELECT event_seq, event_hash FROM lineage ORDER BY event_seq"


def fill(lake: OwnedLake, make_delta: Make) -> tuple[list[Any], ...]:
    writer = lake.delta_writer("w0")
    for i in range(5):
        place = writer.stage(make_delta(f"c{i}"))
        lake.lineage.append("call_committed", call_id=f"c{i}", rollout_id="g0_g0", byte_offset=place.byte_offset)
    lake.write_rows(row_table("g0"))
    lake.refresh()
    return content(lake)


def content(lake: OwnedLake) -> tuple[list[Any], ...]:
    rows = "SELECT sample_id, input_ids, segment FROM rows ORDER BY sample_id"
    return tuple(lake.sql(query).fetchall() for query in (CONTENT, EVENTS, rows))


def test_a_second_owner_is_refused_with_the_pid_of_the_first(lake: OwnedLake) -> None:
    code = "import sys; from tokenlake.store.lake import OwnedLake; OwnedLake.open(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, str(lake.path)], capture_output=True, text=True, check=False)
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode != 0
    assert f"lake {lake.path} is owned by process {os.getpid()}" in line
    with pytest.raises(LakeLocked):
        OwnedLake.open(lake.path)
    lake.lineage.append("policy_set")
    assert [event["event_type"] for event in lake.lineage.events()] == ["lake_opened", "policy_set"]


def test_the_first_event_of_an_owner_says_who_it_is(tmp_path: Path) -> None:
    path = tmp_path / "lake"
    for opened in (1, 2):
        OwnedLake.open(path).close()  # decides nothing, leaves no trace
        with OwnedLake.open(path) as lake:
            done = lake.lineage.append_many([{"event_type": "policy_set"}, {"event_type": "policy_set"}])
            assert [event["event_type"] for event in done] == ["policy_set", "policy_set"]
            lake.lineage.append("policy_set")
            events = list(lake.lineage.events())
        assert [event["event_type"] for event in events] == ["lake_opened", *["policy_set"] * 3] * opened
        about = json.loads(events[-4]["detail"])
        assert (about["lake_id"], about["format_version"], about["pid"]) == (lake.lake_id, 1, os.getpid())
        assert lineage_loss(path) == []


OWNER = """
from tokenlake.store.lake import OwnedLake
lake = OwnedLake.open(sys.argv[1])
writer = lake.delta_writer("w0")
for i in range(100_000):
    writer.stage(build_delta(f"c{i:06d}"))
    lake.lineage.append("call_committed", call_id=f"c{i:06d}")
    lake.refresh()
    print(i, flush=True)
"""


def test_a_killed_owner_leaves_a_lake_that_opens(tmp_path: Path) -> None:
    path = tmp_path / "lake"
    code = f"import sys; sys.path[:0] = [{str(HERE)!r}]\nfrom conftest import build_delta\n{OWNER}"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(20):
            process.stdout.readline()
        process.kill()
        acknowledged = 20 + process.stdout.read().count("\n")
    with OwnedLake.open(path) as lake:
        deltas, events, _ = content(lake)
        assert acknowledged + 1 <= len(events) <= len(deltas) + 1 <= acknowledged + 2  # one event is `lake_opened`
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []


@pytest.mark.parametrize("damage", ["deleted", "overwritten", "cut", "log", "nonsense log", "emptied"])
def test_a_lost_or_damaged_index_is_rebuilt_with_the_same_content(
    tmp_path: Path, make_delta: Make, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = tmp_path / "lake"
    with OwnedLake.open(path) as lake:
        before = fill(lake, make_delta)
    index, log = path / "index.duckdb", path / "index.duckdb.wal"
    moved = True
    if damage == "deleted":
        index.unlink()
        moved = False
    elif damage == "overwritten":
        index.write_bytes(os.urandom(64) + index.read_bytes()[64:])
    elif damage == "cut":
        index.write_bytes(index.read_bytes()[:5000])
    elif damage == "emptied":
        index.write_bytes(b"")
    else:
        killed_log(path)
        data = bytearray(log.read_bytes())
        middle = len(data) // 2
        data[middle : middle + 64] = b"\xa5" * 64
        # DuckDB passes over a log without its header: what it held is read from the Arrow files again.
        moved = damage == "log"
        log.write_bytes(data if moved else b"\xa5" * len(data))
    with caplog.at_level(logging.WARNING), OwnedLake.open(path) as lake:
        after = content(lake)
        assert (after[0], after[1][: len(before[1])], after[2]) == before
        assert (path / "index.duckdb.bad-1").exists() is moved
        assert len(caplog.records) == int(moved)


@pytest.mark.parametrize(
    "change",
    ["ALTER TABLE tl_events DROP COLUMN detail; UPDATE tl_layout SET layout = 'older'", "DROP TABLE tl_layout"],
)
def test_an_index_of_another_version_is_noticed_and_built_anew(
    tmp_path: Path, make_delta: Make, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    """Nothing is written into it that would miss the column, and no query is asked at the start."""
    path = tmp_path / "lake"
    with OwnedLake.open(path) as lake:
        before = fill(lake, make_delta)
    con = duckdb.connect(str(path / "index.duckdb"))
    con.execute(change)
    con.close()
    with caplog.at_level(logging.INFO), OwnedLake.open(path) as lake:
        after = content(lake)
        assert (after[0], after[1][: len(before[1])], after[2]) == before
    assert "another version: built anew" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO), OwnedLake.open(path):
        assert not list(path.glob("index.duckdb.bad-*"))
    assert not caplog.records


def killed_log(path: Path) -> None:
    """Leave the write-ahead log that a killed owner leaves."""
    code = (
        "import os, sys\nfrom tokenlake.store.lake import OwnedLake\nlake = OwnedLake.open(sys.argv[1])\n"
        "lake.lineage.append('policy_set')\nlake.refresh()\nos._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert (path / "index.duckdb.wal").stat().st_size > 0


def test_after_a_kill_the_index_takes_in_the_last_segment_of_lineage_and_not_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lake"
    code = (
        "import os, sys\nfrom tokenlake.store import lake as module\nmodule.LINEAGE_MAX_BYTES = 20_000\n"
        "lake = module.OwnedLake.open(sys.argv[1])\n"
        "for _ in range(40):\n    lake.lineage.append('policy_set')\n"
        "lake.refresh()\nos._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    sizes = [file.stat().st_size for file in sorted(path.glob("lineage/gate/*.arrow"))]
    assert len(sizes) > 3
    assert max(sizes[:-1]) < 20_000 + 4_000  # and the footer
    real, taken = intake.walk, [0]

    def walk(view: memoryview, start: int, end: int, *rest: Any) -> Any:
        found = real(view, start, end, *rest)
        taken[0] += found.scanned - start
        return found

    monkeypatch.setattr(intake, "walk", walk)
    with OwnedLake.open(path) as lake:
        assert taken[0] <= sizes[-1]
        assert lake.sql("SELECT count(*) FROM lineage").fetchall() == [(41,)]


def test_rebuild_gives_the_same_content(lake: OwnedLake, make_delta: Make) -> None:
    before = fill(lake, make_delta)
    con = lake.connect()
    assert lake.rebuild() > 0
    assert content(lake) == before
    con.close()


def test_the_index_holds_no_tokens(lake: OwnedLake, make_delta: Make) -> None:
    fill(lake, make_delta)
    types = lake.sql(
        "SELECT data_type FROM duckdb_columns() WHERE table_name IN (SELECT table_name FROM duckdb_tables())"
    ).fetchall()
    assert not [kind for (kind,) in types if "[]" in kind]


def test_rows_are_written_whole_or_not_at_all(lake: OwnedLake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lake.write_rows(row_table("g0")) == 0
    real = os.fsync

    def broken(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(StorageFailed):
        lake.write_rows(row_table("g1"))
    monkeypatch.setattr(os, "fsync", real)
    assert lake.sql("SELECT DISTINCT group_id FROM rows").fetchall() == [("g0",)]
    assert lake.write_rows(row_table("g1", n=600)) == 1
    assert lake.sql("SELECT group_id, segment, count(*) FROM rows GROUP BY ALL ORDER BY ALL").fetchall() == [
        ("g0", 0, 2),
        ("g1", 1, 600),
    ]
    with pytest.raises(InvalidInput):
        lake.write_rows(row_table("g2").drop_columns(["reward"]))


def test_a_damaged_row_file_shows_no_row_of_it(lake: OwnedLake) -> None:
    lake.write_rows(row_table("g0"))
    lake.write_rows(row_table("g1"))
    path = lake.path / "rows/000000.arrow"
    assert lake.sql("SELECT count(*) FROM rows").fetchall() == [(4,)]
    path.write_bytes(path.read_bytes()[:3000])
    assert lake.sql("SELECT DISTINCT group_id FROM rows").fetchall() == [("g1",)]


def test_find_delta_sees_every_writer(lake: OwnedLake, make_delta: Make) -> None:
    place = lake.delta_writer("w0").stage(make_delta("c0"))
    assert lake.find_delta("g0_g0", 0, "c0") == (place, make_delta("c0").digest)
    code = (
        f"import sys; sys.path[:0] = [{str(HERE)!r}]\nfrom conftest import build_delta\nfrom pathlib import Path\n"
        "from tokenlake.store.deltas import DeltaWriter\n"
        "writer = DeltaWriter(Path(sys.argv[1]), 'other')\nwriter.stage(build_delta('c1'))\nwriter.close()"
    )
    subprocess.run([sys.executable, "-c", code, str(lake.path)], check=True)
    found = lake.find_delta("g0_g0", 0, "c1")
    assert found is not None
    assert (found[0].writer, lake.read_delta(found[0])) == ("other", make_delta("c1"))
    assert lake.find_delta("g0_g0", 0, "c2") is None


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    OwnedLake.open(tmp_path / "lake").close()
    file = tmp_path / "lake/lake.json"
    file.write_text(file.read_text().replace('"format_version": 1', '"format_version": 2'))
    for opener in (OwnedLake.open, Lake):
        with pytest.raises(FormatError, match="format 2"):
            opener(tmp_path / "lake")


def test_what_is_no_lake_is_not_found(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(NotFound):
            Lake(path)
        with pytest.raises(NotFound):
            OwnedLake.open(path, create=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "lake.json").write_text("{")
    with pytest.raises(FormatError):
        Lake(tmp_path)


def test_a_bad_query_is_a_query_error(lake: OwnedLake) -> None:
    for query in ("SELEC 1", "SELECT * FROM nothing", "SELECT nothing FROM lineage"):
        with pytest.raises(QueryError):
            lake.sql(query)


def test_a_closed_lake_refuses(tmp_path: Path) -> None:
    lake = OwnedLake.open(tmp_path / "lake")
    lake.close()
    lake.close()
    with pytest.raises(TokenlakeError, match="closed"):
        lake.connect()
    OwnedLake.open(tmp_path / "lake").close()


@pytest.mark.parametrize("create", [True, False])
def test_a_lake_without_its_file_becomes_no_other_lake(tmp_path: Path, create: bool) -> None:
    with OwnedLake.open(tmp_path / "lake") as lake:
        lake.lineage.append("group_registered", group_id="g", n=1)
    (tmp_path / "lake/lake.json").unlink()
    with pytest.raises(FormatError, match=r"no lake\.json: restore"):
        OwnedLake.open(tmp_path / "lake", create=create)
    assert not (tmp_path / "lake/lake.json").exists()
