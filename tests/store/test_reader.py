"""Readers: beside a live owner, in threads and child processes, at the cost of what they ask (B28, B29, B49)."""

import copy
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import duckdb
import pytest

import tokenlake
from tests.long import either
from tokenlake.errors import Conflict, NotFound, TokenlakeError
from tokenlake.store.backup import back_up
from tokenlake.store.delta import Delta
from tokenlake.store.lake import OwnedLake
from tokenlake.store.reader import Lake
from tokenlake.store.views import needed_views

Make = Callable[..., Delta]
THREADS = "SELECT current_setting('threads'), current_setting('external_threads')"


@pytest.fixture
def filled(lake: OwnedLake, make_delta: Make) -> OwnedLake:
    """12 groups of 2 rollouts of 3 calls."""
    writer = lake.delta_writer("w0")
    for group in range(12):
        lake.lineage.append("group_registered", group_id=f"g{group}", n=2)
        for rollout in range(2):
            for call in range(3):
                name = f"g{group}_g{rollout}"
                writer.stage(make_delta(f"{name}c{call}", rollout_id=name, first=100 * group + call))
                lake.lineage.append("call_committed", rollout_id=name, call_id=f"{name}c{call}")
    return lake


def test_a_line_of_comment_names_no_view(filled: OwnedLake) -> None:
    assert needed_views("-- what: rollouts of groups\n  -- and ready_rows\nSELECT 1 -- a\n FROM x") == ()
    quoted = "SELECT 'a -- b' AS name, count(*)\n-- of\nFROM group_records"
    assert needed_views(quoted)[-1] == "views/group_records"
    with tokenlake.open(filled.path) as reader:
        assert reader.sql(quoted).fetchall() == [("a -- b", 12)]


def test_a_reader_of_much_runs_as_many_threads_as_duckdb_would(
    filled: OwnedLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that there are more, so that a fold is cut into more parts; those are nobody's."""
    with duckdb.connect(":memory:") as con, tokenlake.open(filled.path) as reader:
        usual, own = con.sql(THREADS).fetchall()[0]
        assert reader.sql(THREADS).fetchall() == [(usual, own)]
        monkeypatch.setattr("tokenlake.store.reader._MANY", 1)
        with tokenlake.open(filled.path) as other:
            threads, external = other.sql(THREADS).fetchall()[0]
            assert other.sql("SELECT count(*) FROM checked_calls").fetchall() == [(72,)]
        assert threads > usual
        assert threads - external == usual - own


def test_a_reader_beside_the_owner_sees_what_was_acknowledged(filled: OwnedLake, make_delta: Make) -> None:
    with tokenlake.open(filled.path) as reader:
        assert reader.lake_id == filled.lake_id
        assert reader.sql("SELECT count(*) FROM deltas").fetchall() == [(72,)]
        con = reader.connect()
        filled.delta_writer("w1").stage(make_delta("new"))
        filled.lineage.append("call_committed", call_id="new")
        assert con.execute("SELECT count(*) FROM lineage WHERE call_id = 'new'").fetchall() == [(0,)]
        reader.refresh()
        assert con.execute("SELECT count(*) FROM lineage WHERE call_id = 'new'").fetchall() == [(1,)]
        assert con.execute("SELECT count(*) FROM deltas").fetchall() == [(73,)]
        con.close()


def test_a_filter_costs_only_its_records(filled: OwnedLake) -> None:
    with Lake(filled.path) as reader:
        for query, cost in (
            ("SELECT token_ids FROM deltas WHERE rollout_id = 'g3_g1'", 3),
            ("SELECT logprobs, digest FROM deltas WHERE rollout_id = 'g3_g1' AND call_id = 'g3_g1c2'", 1),
            ("SELECT count(*) FROM deltas", 72),
            ("SELECT sum(len(token_ids)), max(digest) FROM deltas", 72),
            ("SELECT d.token_ids FROM deltas AS d JOIN (SELECT 'g3_g1' AS r) AS w ON d.rollout_id = w.r", 3),
        ):
            before = reader.decoded
            reader.sql(query).fetchall()
            assert reader.decoded - before == cost, query
        con = reader.connect(groups=["g3", "g11"])
        before = reader.decoded
        assert con.execute("SELECT count(*), sum(len(token_ids)) FROM deltas").fetchall() == [(12, 48)]
        assert reader.decoded - before == 12
        assert con.execute("SELECT DISTINCT group_id FROM lineage WHERE n IS NOT NULL ORDER BY 1").fetchall() == [
            ("g11",),
            ("g3",),
        ]
        con.close()
        assert reader.sql("SELECT count(*) FROM deltas").fetchall() == [(72,)]


def test_damage_after_opening_changes_what_is_read(filled: OwnedLake) -> None:
    place = filled.find_delta("g5_g0", 0, "g5_g0c1")
    assert place is not None
    with Lake(filled.path) as reader:
        query = "SELECT call_id, token_ids FROM deltas WHERE rollout_id = 'g5_g0' ORDER BY 1"
        before = reader.sql(query).fetchall()
        with (filled.path / "deltas/w0/000000.arrow").open("r+b") as file:
            file.seek(place[0].byte_offset)
            original = file.read(place[0].byte_length)
            at = original.index(bytes([0xF5, 1, 0, 0]))
            file.seek(place[0].byte_offset + at)
            file.write(b"\x00")
            file.flush()
            after = reader.sql(query).fetchall()
            assert [row for row in after if row not in before] == [("g5_g0c1", [256, 502, 503, 504])]
            file.seek(place[0].byte_offset + original.index(b"g5_g0c1"))
            file.write(b"X")
            file.flush()
            assert reader.sql(query).fetchall() == [before[0], before[2]]


def test_a_segment_cut_under_a_reader_does_not_break_it(filled: OwnedLake) -> None:
    with Lake(filled.path) as reader:
        assert reader.sql("SELECT count(*) FROM deltas").fetchall() == [(72,)]
        os.truncate(filled.path / "deltas/w0/000000.arrow", 20_000)
        found = reader.sql("SELECT count(*), sum(len(token_ids)) FROM deltas").fetchall()[0]
        assert 0 < found[0] < 10
        reader.refresh()
        assert reader.sql("SELECT count(*), sum(len(token_ids)) FROM deltas").fetchall()[0] == found


@pytest.mark.slow
def test_every_thread_gets_its_own_answers(filled: OwnedLake, make_delta: Make) -> None:
    """B29: 8 threads fetch 300 rows each by id (the long form) while 2 stage."""
    fetches = either(100, 300)
    reader = Lake(filled.path)
    wrong: list[object] = []
    answers: list[int] = []
    stop = threading.Event()

    def stage(k: int) -> None:
        writer = filled.delta_writer(f"s{k}")
        i = 0
        while not stop.is_set():
            writer.stage(make_delta(f"s{k}c{i}", rollout_id="g99_g0"))
            i += 1
            if i % 50 == 0:
                reader.refresh()

    def fetch(k: int) -> None:
        con = reader.connect()
        for i in range(fetches):
            call = f"g{(i + k) % 12}_g{i % 2}c{i % 3}"
            found = con.execute("SELECT call_id, token_ids[1] FROM deltas WHERE call_id = ?", [call]).fetchall()
            if found != [(call, 100 * ((i + k) % 12) + i % 3)]:
                wrong.append((call, found))
            answers.append(1)
        con.close()

    stagers = [threading.Thread(target=stage, args=(k,)) for k in range(2)]
    fetchers = [threading.Thread(target=fetch, args=(k,)) for k in range(8)]
    for thread in (*stagers, *fetchers):
        thread.start()
    for thread in fetchers:
        thread.join()
    stop.set()
    for thread in stagers:
        thread.join()
    reader.close()
    assert (len(answers), wrong) == (8 * fetches, [])


def _count(reader: Lake) -> int:
    return reader.sql("SELECT count(*) FROM deltas").fetchall()[0][0]


def _child(reader: Lake, end: Connection) -> None:
    end.send(_count(reader))
    end.close()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_reader_works_in_a_child_process(filled: OwnedLake, method: str) -> None:
    with Lake(filled.path) as reader:
        assert _count(copy.copy(reader)) == 72  # through `__reduce__`, as pickling
        if method != "fork":
            script = (
                "import multiprocessing, sys\nfrom tokenlake.store.reader import Lake\n"
                "def work(lake): return lake.sql('SELECT count(*) FROM deltas').fetchall()[0][0]\n"
                "if __name__ == '__main__':\n"
                f"    with multiprocessing.get_context({method!r}).Pool(1) as pool:\n"
                "        print(pool.apply(work, (Lake(sys.argv[1]),)))\n"
            )
            file = filled.path.parent / "child.py"
            file.write_text(script)
            package = str(Path(tokenlake.__file__).parents[1])
            done = subprocess.run(
                [sys.executable, str(file), str(filled.path)],
                env={**os.environ, "PYTHONPATH": package},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.stdout.split() == ["72"], done.stderr
            return
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_child, args=(reader, theirs))
        process.start()
        assert ours.poll(60)
        assert ours.recv() == 72
        process.join()
        ours.close()
        theirs.close()
        assert process.exitcode == 0
        assert _count(reader) == 72


def _write(lake: OwnedLake, make_delta: Make, end: Connection) -> None:
    refused = 0
    writer = lake.delta_writer
    for attempt in (
        lambda: writer("w0"),
        lambda: lake.lineage.append("policy_set"),
        lake.connect,
        lake.close,
    ):
        try:
            attempt()
        except TokenlakeError as error:
            refused += "cannot be used in its child" in error.message
    end.send(refused)
    end.close()


def _stage(stage: Callable[[Delta], object], delta: Delta, end: Connection) -> None:
    try:
        stage(delta)
    except TokenlakeError as error:
        end.send(error.message)
    end.close()


def test_an_inherited_owner_refuses_every_use_and_the_parent_goes_on(filled: OwnedLake, make_delta: Make) -> None:
    ours, theirs = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=_write, args=(filled, make_delta, theirs))
    process.start()
    assert ours.poll(60)
    assert ours.recv() == 4
    process.join()
    writer = filled.delta_writer("w0")
    process = fork.Process(target=_stage, args=(writer.stage, make_delta("child"), theirs))
    process.start()
    assert ours.poll(60)
    assert "cannot be used in its child" in ours.recv()
    process.join()
    ours.close()
    theirs.close()
    writer.stage(make_delta("parent"))
    found = filled.sql("SELECT call_id FROM deltas WHERE call_id IN ('child', 'parent')").fetchall()
    assert found == [("parent",)]


def test_a_fork_does_not_keep_the_lake_locked(tmp_path: Path) -> None:
    """A child that outlives its parent lets go of the inherited locks."""
    script = (
        "import os, sys, time\nfrom tokenlake.store.lake import OwnedLake\nlake = OwnedLake.open(sys.argv[1])\n"
        "lake.delta_writer('w0')\n"
        "if os.fork() == 0:\n    sys.stdin.read()\n    os._exit(0)\n"
        "print('forked', flush=True)\nos._exit(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "lake")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"forked\n"
        assert process.wait(60) == 0
        with OwnedLake.open(tmp_path / "lake") as lake:
            lake.delta_writer("w0")


def test_a_forked_child_that_ends_as_any_program_does_is_no_crash(filled: OwnedLake) -> None:
    """DuckDB joins its threads when it is freed, and a child has none of them."""
    filled.close()
    script = (
        "import os, sys\nfrom tokenlake.store.lake import OwnedLake\nfrom tokenlake.store.reader import Lake\n"
        "lake, reader = OwnedLake.open(sys.argv[1]), Lake(sys.argv[1])\n"
        "answer = lambda: reader.sql('SELECT count(*) FROM deltas').fetchall()\n"
        "before, own = answer(), reader.connect()\n"
        "child = os.fork()\n"
        "if child == 0:\n    sys.exit(7 if answer() == before else 8)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "lake.lineage.append('policy_set')\nlake.refresh()\nprint(answer() == before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, filled.path], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["7", "True"], done.stderr


@pytest.mark.parametrize("how", ["moved", "another lake", "an older copy"])
def test_a_lake_that_goes_or_is_replaced_under_a_reader_is_told(
    filled: OwnedLake, make_delta: Make, tmp_path: Path, how: str
) -> None:
    """It is not taken for an empty one, and what another folder holds is never added to what was read."""
    path, copy = filled.path, tmp_path / "copy"
    if how == "another lake":
        OwnedLake.open(copy).close()
    else:
        back_up(path, copy)
    with OwnedLake.open(copy) as other:
        other.lineage.append("policy_set", detail="{}")
    filled.close()
    with OwnedLake.open(path) as lake:
        lake.lineage.append("group_registered", group_id="g99", n=1)
        lake.delta_writer("w0").stage(make_delta("c99", rollout_id="g99_g0"))
    with Lake(path) as reader, Lake(copy) as wanted:
        before = reader.sql("SELECT event_seq, event_hash FROM lineage ORDER BY ALL").fetchall()
        path.rename(tmp_path / "aside")
        if how == "moved":
            with pytest.raises(NotFound, match="no lake at"):
                reader.refresh()
        copy.rename(path)
        if how == "another lake":
            with pytest.raises(Conflict, match="is another lake by now"):
                reader.refresh()
        if how != "an older copy":
            assert reader.sql("SELECT event_seq, event_hash FROM lineage ORDER BY ALL").fetchall() == before
            return
        reader.refresh()
        for name in ("lineage", "deltas", "rows", "lake_findings"):
            assert reader.sql(f"SELECT * FROM {name} ORDER BY ALL").fetchall() == (
                wanted.sql(f"SELECT * FROM {name} ORDER BY ALL").fetchall()
            )
