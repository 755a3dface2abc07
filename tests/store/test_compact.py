"""Compaction: fewer and larger batches, the same answers for everyone, whatever interrupts it."""

import dataclasses
import errno
import math
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.ipc as ipc
import pytest

from tokenlake.errors import Conflict, LakeLocked, NotFound, StorageFailed
from tokenlake.store import backup, compact, recover
from tokenlake.store.backup import back_up
from tokenlake.store.compact import Compaction
from tokenlake.store.delta import Delta
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.lake import OwnedLake
from tokenlake.store.lock import SEGMENTS_LOCK, DirectoryLock
from tokenlake.store.reader import Lake
from tokenlake.store.retention import retire_named

Make = Callable[..., Delta]
CONTENT = "SELECT * FROM deltas ORDER BY rollout_id, call_id"


def fill(lake: OwnedLake, make_delta: Make, *, writers: int = 2, calls: int = 40, first: int = 0) -> None:
    """Calls of 4 rollouts, interleaved over writers, each committed."""
    for i in range(first, first + calls):
        writer = lake.delta_writer(f"w{i % writers}")
        delta = make_delta(f"c{i:04d}", rollout_id=f"g{i % 2}_g{i // 2 % 2}", n=i % 7, first=i, staged_at=10**15 + i)
        place = writer.stage(delta)
        lake.lineage.append(
            "call_committed",
            rollout_id=delta.rollout_id,
            attempt=0,
            call_id=delta.call_id,
            digest=delta.digest,
            writer=place.writer,
            segment=place.segment,
            byte_offset=place.byte_offset,
            byte_length=place.byte_length,
            batch_row=place.batch_row,
        )


def segments(lake: OwnedLake) -> list[str]:
    return sorted(str(path.relative_to(lake.path / "deltas")) for path in lake.path.glob("deltas/*/*.arrow"))


def test_compaction_changes_no_answer_and_lays_a_rollout_together(lake: OwnedLake, make_delta: Make) -> None:
    fill(lake, make_delta)
    before = lake.sql(CONTENT).to_arrow_table()
    done = lake.compact()
    assert (done.replaced, done.written, done.records, done.retired) == (2, 1, 40, 0)
    assert done.bytes_after < done.bytes_before / 5
    assert segments(lake) == ["_compacted/000000.arrow"]
    assert lake.sql(CONTENT).to_arrow_table().equals(before)
    with ipc.open_file(lake.path / "deltas/_compacted/000000.arrow") as file:
        assert file.num_record_batches == 1
        rollouts = file.read_all().column("rollout_id").to_pylist()
    assert rollouts == sorted(rollouts)
    assert lake.sql(
        "SELECT writer, segment, detail::JSON->'replaced' FROM lineage WHERE event_type = 'segment_replaced'"
    ).fetchall() == [("_compacted", 0, '{"w0":[0],"w1":[0]}')]
    assert lake.compact() == Compaction()
    with Lake(lake.path) as reader:
        assert reader.sql(CONTENT).to_arrow_table().equals(before)
        assert reader.sql("SELECT * FROM lake_findings").fetchall() == []


@pytest.mark.parametrize("mapped", [True, False])
def test_compaction_is_invisible_to_a_reader_that_is_open(lake: OwnedLake, make_delta: Make, mapped: bool) -> None:
    fill(lake, make_delta)
    with Lake(lake.path) as reader:
        before = reader.sql(CONTENT).to_arrow_table()
        lake.compact()
        if not mapped:
            reader._index(locked=True).maps.clear()
        assert reader.sql(CONTENT).to_arrow_table().equals(before)
        fill(lake, make_delta, calls=40, first=40)
        lake.compact()
        if not mapped:
            reader._index(locked=True).maps.clear()
        assert reader.sql(CONTENT).to_arrow_table().equals(before)
        reader.refresh()
        assert reader.sql("SELECT count(*), count(DISTINCT call_id) FROM deltas").fetchall() == [(80, 80)]


@pytest.mark.parametrize("compactions", [1, 2])
def test_a_connection_that_knows_older_places_reads_on_after_a_refresh(
    lake: OwnedLake, make_delta: Make, compactions: int
) -> None:
    """As a group does that is being judged while upkeep runs: its connection has places of its own."""
    fill(lake, make_delta)
    con = lake.connect(groups=["g0"])
    before = con.execute(CONTENT).fetchall()
    for round_ in range(compactions):
        fill(lake, make_delta, first=40 * (round_ + 1))
        assert lake.compact().records > 0
        lake.refresh()
        assert con.execute(CONTENT).fetchall() == before
    con.close()


def test_a_segment_that_goes_while_it_is_listed_is_read_where_it_went(
    lake: OwnedLake, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that opens during a compaction sees every record, in the old segments or in the new one."""
    fill(lake, make_delta)
    from tokenlake.store import intake

    real, calls = intake.segment_numbers, [0]

    for at in range(1, 14):

        def numbers(directory: Path, at: int = at) -> list[int]:
            found = real(directory)
            calls[0] += 1
            if calls[0] == at:
                lake.compact()
            return found

        fill(lake, make_delta, calls=4, first=40 * at)
        calls[0] = 0
        with monkeypatch.context() as patched:
            patched.setattr(intake, "segment_numbers", numbers)
            with Lake(lake.path) as reader:
                assert reader.sql("SELECT count(*) FROM deltas").fetchall() == [(40 + 4 * at,)]


def test_a_place_that_lineage_names_is_read_after_compaction(lake: OwnedLake, make_delta: Make) -> None:
    writer = lake.delta_writer("w0")
    fill(lake, make_delta, writers=1)
    places = [lake.find_delta(f"g{i % 2}_g{i // 2 % 2}", 0, f"c{i:04d}") for i in range(40)]
    lake.compact()
    for i, found in enumerate(places):
        assert found is not None
        assert lake.read_delta(found[0]).call_id == f"c{i:04d}"
        moved = writer.find(f"g{i % 2}_g{i // 2 % 2}", 0, f"c{i:04d}")
        assert moved is not None
        assert moved[0].writer == "_compacted"


def test_places_are_read_at_once_in_their_order(lake: OwnedLake, make_delta: Make) -> None:
    fill(lake, make_delta, calls=8)
    old = [found[0] for i in range(8) if (found := lake.find_delta(f"g{i % 2}_g{i // 2 % 2}", 0, f"c{i:04d}"))]
    with Lake(lake.path) as reader:
        lake.compact()
        fill(lake, make_delta, calls=2, first=8)
        new = [found[0] for i in range(8, 10) if (found := lake.find_delta(f"g{i % 2}_g0", 0, f"c{i:04d}"))]
        places = [new[1], *old[::-1], new[0]]
        wanted = ["c0009", *(f"c{i:04d}" for i in range(7, -1, -1)), "c0008"]
        for either in (lake, reader):
            assert [delta.call_id for delta in either.read_deltas(places)] == wanted
            assert either.read_deltas([]) == []
            with pytest.raises(NotFound, match="no readable delta at byte 0 of deltas/w0"):
                either.read_deltas([*places, dataclasses.replace(new[0], byte_offset=0)])


def test_a_key_that_was_compacted_is_still_taken(lake: OwnedLake, make_delta: Make) -> None:
    lake.delta_writer("w0").stage(make_delta("c0"))
    lake.compact()
    place = lake.delta_writer("w0").stage(make_delta("c0"))
    assert place.writer == "_compacted"
    with pytest.raises(Conflict):
        lake.delta_writer("w0").stage(make_delta("c0", digest=bytes(32)))
    lake.close()
    with OwnedLake.open(lake.path) as again:
        assert again.delta_writer("w0").stage(make_delta("c0")) == place


def test_no_number_is_given_twice(lake: OwnedLake, make_delta: Make) -> None:
    place = lake.delta_writer("w0").stage(make_delta("c0"))
    lake.compact()
    lake.close()
    with OwnedLake.open(lake.path) as again:
        assert again.delta_writer("w0").stage(make_delta("c1")).segment == place.segment + 1


def test_a_damaged_segment_is_left_as_it_is(lake: OwnedLake, make_delta: Make) -> None:
    fill(lake, make_delta)
    lake.delta_writer("w0").roll()
    lake.refresh()
    path = lake.path / "deltas/w0/000000.arrow"
    data = bytearray(path.read_bytes())
    at = data.index(b"c0004") - 300
    data[at : at + 400] = b"\xff" * 400
    path.write_bytes(data)
    before = lake.sql(CONTENT).to_arrow_table()
    assert before.num_rows < 40
    assert lake.compact().replaced == 1
    assert path.read_bytes() == bytes(data)
    assert lake.sql(CONTENT).to_arrow_table().equals(before)


def test_of_identical_copies_one_is_kept_and_of_damaged_ones_both(lake: OwnedLake, make_delta: Make) -> None:
    first, second = lake.delta_writer("w0"), lake.delta_writer("w1")
    first.stage(make_delta("c0"))
    second.stage(make_delta("c0", staged_at=10**15 * 2))
    assert lake.compact().records == 1
    nan = {"logprobs": struct.pack("<8f", *[0.0] * 4, *[math.nan] * 4), "digest": bytes(32)}
    first.stage(make_delta("c2", **nan))
    second.stage(make_delta("c2", staged_at=10**15 * 2, **nan))
    assert lake.compact().records == 2
    assert len(segments(lake)) == 1
    first.stage(make_delta("c1"))
    ids = make_delta("c1").token_ids
    assert ids is not None
    second.stage(make_delta("c1", token_ids=bytes(len(ids)), staged_at=10**15 * 2))
    before = repr(lake.sql(CONTENT).fetchall())
    lake.compact()
    assert repr(lake.sql(CONTENT).fetchall()) == before
    kept = segments(lake)
    assert kept == ["_compacted/000002.arrow", "w0/000002.arrow"]
    assert lake.compact() == Compaction()
    assert segments(lake) == kept


@pytest.mark.parametrize("step", ["renamed", "recorded", "partly removed"])
def test_a_compaction_that_a_crash_interrupted_is_finished(
    lake: OwnedLake, make_delta: Make, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    fill(lake, make_delta)
    before = lake.sql(CONTENT).to_arrow_table()

    class Crash(BaseException):
        pass

    real = os.unlink

    def crash(*_: Any, **__: Any) -> None:
        raise Crash

    def unlink(path: Any) -> None:
        if "w1" in str(path):
            raise Crash
        real(path)

    with monkeypatch.context() as patched:
        if step == "renamed":
            patched.setattr(lake.lineage, "append", crash)
        else:
            patched.setattr(os, "unlink", crash if step == "recorded" else unlink)
        with pytest.raises(Crash):
            lake.compact()
    with Lake(lake.path) as reader:
        assert reader.sql(CONTENT).to_arrow_table().equals(before)
    lake.close()
    with OwnedLake.open(lake.path) as again:
        assert segments(again) == ["_compacted/000000.arrow"]
        assert again.sql(CONTENT).to_arrow_table().equals(before)
        events = "SELECT count(*) FROM lineage WHERE event_type = 'segment_replaced'"
        assert again.sql(events).fetchall() == [(1,)]


def test_a_full_disk_changes_nothing(lake: OwnedLake, make_delta: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(lake, make_delta)
    for writer in ("w0", "w1"):
        lake.delta_writer(writer).roll()
    before = segments(lake)

    def full(fd: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(StorageFailed):
            lake.compact()
    assert segments(lake) == before
    assert list(lake.path.glob("deltas/_compacted/*.tmp")) == []
    assert lake.compact().records == 40


def test_an_index_that_cannot_be_written_is_held_in_memory_and_asked_again(
    lake: OwnedLake, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(lake, make_delta)

    def broken(*_: Any) -> bool:
        raise duckdb.TransactionException("Failed to commit: Could not write file")

    with monkeypatch.context() as patched:
        patched.setattr(compact.Compactor, "worth", broken)
        with pytest.raises(StorageFailed, match="not compacted"):
            lake.compact()
    assert lake.compact().records == 40


def test_small_compacted_segments_are_merged_but_not_each_time(lake: OwnedLake, make_delta: Make) -> None:
    written = 0
    for i in range(16):
        fill(lake, make_delta, calls=40, first=40 * i)
        written += lake.compact().records
    assert lake.sql("SELECT count(*) FROM deltas").fetchall() == [(640,)]
    assert len(segments(lake)) <= 8
    assert written <= 640 * 6


def test_a_segment_of_a_writer_in_another_process_is_compacted_under_it(lake: OwnedLake, make_delta: Make) -> None:
    other = DeltaWriter(lake.path, "remote", segment_max_bytes=1)
    for i in range(5):
        other.stage(make_delta(f"c{i}"))
    assert lake.compact().records == 4
    assert other.stage(make_delta("c0")).writer == "_compacted"
    assert other.stage(make_delta("c5")).segment == 5
    other.close()
    assert lake.sql("SELECT count(*) FROM deltas").fetchall() == [(6,)]


def test_a_writer_that_starts_while_its_segments_are_compacted_makes_none_of_them_anew(
    lake: OwnedLake, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = DeltaWriter(lake.path, "other")
    writer.stage(make_delta("c0"))
    writer.close()
    listed = recover.segment_numbers

    def then_compacted(directory: Path) -> list[int]:
        numbers = listed(directory)
        assert lake.compact().replaced == 1
        return numbers

    monkeypatch.setattr(recover, "segment_numbers", then_compacted)
    DeltaWriter(lake.path, "other").close()
    assert segments(lake) == ["_compacted/000000.arrow"]


def test_compaction_waits_for_a_backup(lake: OwnedLake, make_delta: Make) -> None:
    fill(lake, make_delta)
    backup = DirectoryLock(lake.path / SEGMENTS_LOCK, "segments", shared=True)
    with pytest.raises(LakeLocked):
        lake.compact()
    backup.release()
    assert lake.compact().records == 40


def test_a_start_removes_nothing_while_a_backup_is_made(
    lake: OwnedLake, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an interrupted compaction left to remove may be just what the backup copies."""
    fill(lake, make_delta)
    before = lake.sql(CONTENT).to_arrow_table()
    with monkeypatch.context() as patched:
        patched.setattr(compact.Compactor, "_remove", lambda *_: False)
        lake.compact()
    lake.close()
    left = segments(lake)
    assert len(left) == 3
    backup = DirectoryLock(lake.path / SEGMENTS_LOCK, "segments", shared=True)
    with OwnedLake.open(lake.path) as again:
        assert segments(again) == left
        assert again.sql(CONTENT).to_arrow_table().equals(before)
        backup.release()
        again.compact()
        assert segments(again) == ["_compacted/000000.arrow"]
        assert again.sql(CONTENT).to_arrow_table().equals(before)


def test_a_backup_that_the_disk_refuses_leaves_nothing_and_is_made_again(
    lake: OwnedLake, make_delta: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(lake, make_delta, calls=4)
    target = lake.path.with_name("copy")
    copy = backup._copy

    def full(path: Path, *rest: Any) -> int:
        if "deltas" in path.parts:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return copy(path, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(backup, "_copy", full)
        with pytest.raises(StorageFailed, match="No space left"):
            back_up(lake.path, target)
    assert [*lake.path.parent.iterdir()] == [lake.path]
    back_up(lake.path, target)
    with Lake(target) as reader:
        assert len(reader.sql(CONTENT).fetchall()) == 4


def test_a_backup_waits_for_compaction(lake: OwnedLake, make_delta: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(lake, make_delta)
    copied = threading.Event()
    thread = threading.Thread(target=lambda: (back_up(lake.path, lake.path.with_name("copy")), copied.set()))
    real = compact.write_batches

    def slow(*arguments: Any) -> None:
        thread.start()
        assert not copied.wait(0.2)
        real(*arguments)

    monkeypatch.setattr(compact, "write_batches", slow)
    assert lake.compact().records == 40
    thread.join()
    with Lake(lake.path.with_name("copy")) as copy:
        assert copy.sql(CONTENT).fetchall() == lake.sql(CONTENT).fetchall()


def test_compaction_with_nothing_to_do_keeps_nobody_away(lake: OwnedLake, make_delta: Make) -> None:
    fill(lake, make_delta, calls=4)
    backup = DirectoryLock(lake.path / SEGMENTS_LOCK, "segments", shared=True)
    assert lake.compact(min_records=5) == Compaction()
    backup.release()
    assert lake.compact(min_records=4).records == 4


def test_a_query_that_knows_what_retention_removed_ends_in_an_error_and_not_without_it(
    lake: OwnedLake, make_delta: Make
) -> None:
    """Its transaction is older than the refresh by which the others know why a delta is gone."""
    fill(lake, make_delta)
    for name in ("g0", "g1"):
        lake.lineage.append("group_registered", group_id=name, n=2)
        lake.lineage.append("group_dropped", group_id=name, n=2, reason="aborted")
    with Lake(lake.path) as reader:
        con = reader.connect()
        con.execute("BEGIN")
        assert con.execute("SELECT count(*) FROM tl_places").fetchall() == [(40,)]
        retire_named(lake, groups=["g0"])
        reader.refresh()
        with pytest.raises(duckdb.Error, match="was removed by retention while a query ran"):
            con.execute("SELECT count(*) FROM deltas").fetchall()
        con.execute("ROLLBACK")
        assert con.execute("SELECT count(*) FROM deltas").fetchall() == [(20,)]
        con.close()
