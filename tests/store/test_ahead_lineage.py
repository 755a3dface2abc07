"""Lineage that is written ahead: of events that are written together a loss of power leaves all or none."""

import errno
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest

from tokenlake.errors import StorageFailed
from tokenlake.store.backup import back_up
from tokenlake.store.footer import footer_start
from tokenlake.store.lake import OwnedLake
from tokenlake.store.lineage import LineageLog, lineage_loss, read_events
from tokenlake.store.reader import Lake

EVENTS = "SELECT detail FROM lineage WHERE event_type = 'policy_set' ORDER BY event_seq"
PAGE = 4096


def log_of(root: Path) -> Path:
    return root / "lineage/gate/000000.arrow"


def test_events_take_the_place_of_zeros_and_those_of_one_append_are_one_message(root: Path) -> None:
    log = LineageLog(root, "gate")
    log.append("policy_set", detail="0")
    before = log_of(root).read_bytes()
    many = [[{"event_type": "policy_set", "detail": f"{k} {i}"} for i in range(k)] for k in range(1, 4)]
    outcomes = log.append_each(many)
    after = log_of(root).read_bytes()
    assert len(after) == len(before)
    assert [[event["detail"] for event in outcome] for outcome in outcomes if isinstance(outcome, list)] == [
        [event["detail"] for event in batch] for batch in many
    ]
    batches = ipc.open_stream(pa.py_buffer(after[8:])).read_all().to_batches()
    assert [len(batch) for batch in batches] == [1, 6]
    log.close()
    assert ipc.open_file(log_of(root)).read_all().num_rows == 7
    assert lineage_loss(root) == []


@pytest.mark.parametrize("seed", range(12))
def test_of_events_written_together_a_loss_of_power_leaves_all_or_none(root: Path, seed: int) -> None:
    log = LineageLog(root, "gate")
    log.append("policy_set", detail="kept")
    path = log_of(root)
    durable = path.read_bytes()
    log.append_each([[{"event_type": "policy_set", "detail": f"{k} " + "x" * 300 * seed}] for k in range(9)])
    written = path.read_bytes()
    log._lock.release()
    pages = random.Random(seed)
    left = [pages.choice((durable, written))[at : at + PAGE] for at in range(0, len(written), PAGE)]
    path.write_bytes(b"".join(left))

    with Lake(root) as lake:
        seen = lake.sql(EVENTS).fetchall()
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []
    assert seen[0] == ("kept",)
    assert len(seen) in (1, 10)
    assert lineage_loss(root) == []
    with OwnedLake.open(root) as owner:
        owner.lineage.append("policy_set", detail="next")
        assert owner.sql(EVENTS).fetchall() == [*seen, ("next",)]
        assert owner.sql("SELECT * FROM lake_findings").fetchall() == []
    assert lineage_loss(root) == []


def test_an_index_forgets_an_event_that_was_not_safe_when_the_power_went(root: Path) -> None:
    """Of a log that nobody opens again: a reader starts from what another one knew."""
    other = LineageLog(root, "other")
    with OwnedLake.open(root) as lake:
        other.append("policy_set", detail="kept")
        path = root / "lineage/other/000000.arrow"
        durable = path.read_bytes()
        other.append("policy_set", detail="lost")
        assert lake.sql(EVENTS).fetchall() == [("kept",), ("lost",)]
    with path.open("r+b") as file:
        file.write(durable)
    with OwnedLake.open(root) as lake:
        assert lake.sql(EVENTS).fetchall() == [("kept",)]
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []
    other.close()


@pytest.mark.parametrize("rows", [1, 2])
def test_an_index_forgets_an_event_of_which_the_power_left_a_part(root: Path, rows: int) -> None:
    """Its message has its length, and zeros where its body begins or from the middle of a letter on."""
    log = LineageLog(root, "other")
    log.append("policy_set", detail="kept")
    path = root / "lineage/other/000000.arrow"
    durable = path.read_bytes()
    log.append_many([{"event_type": "policy_set", "detail": "a" + "é" * 9000}] * rows)
    written = path.read_bytes()
    log._lock.release()
    for cut in (2 * PAGE, 4 * PAGE):
        path.write_bytes(written)
        with OwnedLake.open(root) as lake:
            assert len(lake.sql(EVENTS).fetchall()) == 1 + rows
        path.write_bytes(written[:cut] + durable[cut:])
        with OwnedLake.open(root) as lake:
            assert lake.sql(EVENTS).fetchall() == [("kept",)]


def test_what_tore_at_the_begin_of_a_segment_hides_no_event_before_it(root: Path) -> None:
    """The numbers of its events are zeros then, and the first of a segment bounds the segments before it."""
    log = LineageLog(root, "gate", segment_max_bytes=20_000)
    log.append("policy_set", detail="kept" * 4000)
    log.append_many([{"event_type": "policy_set", "detail": "lost"}] * 40)
    log._lock.release()
    path = root / "lineage/gate/000001.arrow"
    data = bytearray(path.read_bytes())
    sector = data.index((1).to_bytes(8, "little") + (2).to_bytes(8, "little")) // 512 * 512
    data[sector : sector + 512] = bytes(512)
    path.write_bytes(data)
    assert [event["detail"][:4] for event in read_events(root, "gate")] == ["kept"]
    assert lineage_loss(root) == []


def test_a_footer_of_which_the_power_left_a_part_is_none(root: Path) -> None:
    """It names no record in the middle, and which event is the last one is known from it."""
    log = LineageLog(root, "gate")
    log.append_many([{"event_type": "policy_set", "detail": "kept"}] * 2)
    log.append("policy_set", detail="last")
    log._segments.seal()
    log._lock.release()
    data = bytearray(log_of(root).read_bytes())
    begin = (footer_start(memoryview(data)) or 0) // 512 * 512 + 512
    data[begin:-10] = bytes(len(data) - 10 - begin)
    # All that stands before the end of the stream was safe: a loss of power did not do this.
    log_of(root).write_bytes(data.replace(b"last", b"lost"))
    again = LineageLog(root, "gate")
    assert again.head == 2
    again.close()
    assert ipc.open_file(log_of(root)).read_all().num_rows == 3


def test_a_backup_has_no_event_without_those_before_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system hands a file out page by page, and two events may be written between two of them."""
    log = LineageLog(root, "gate")
    log.append("policy_set", detail="x" * 5000)
    real, begun = os.read, log.head

    def page_by_page(fd: int, size: int) -> bytes:
        page = real(fd, min(size, PAGE))
        if log.head == begun and os.lseek(fd, 0, os.SEEK_CUR) > log._segments.position[1]:
            log.append("policy_set", detail="in two pages")
            log.append("policy_set", detail="in others")
        return page

    monkeypatch.setattr(os, "read", page_by_page)
    back_up(root, root.with_name("copy"))
    monkeypatch.undo()
    assert lineage_loss(root.with_name("copy")) == []
    with OwnedLake.open(root.with_name("copy")) as lake:
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []
        assert lake.sql("SELECT length(detail) FROM lineage WHERE event_type = 'policy_set'").fetchall() == [(5000,)]
    log.close()


def test_who_looked_on_at_a_refused_event_and_at_the_begin_of_the_next_segment_forgets_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = LineageLog(root, "gate")
    log.append("policy_set", detail="kept")
    write = os.pwrite
    with Lake(root) as lake:

        def refuse(fd: int) -> None:
            monkeypatch.setattr(os, "fdatasync", os.fsync)
            lake.refresh()
            assert lake.sql(EVENTS).fetchall() == [("kept",), ("refused",)]
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def looked_at(fd: int, data: Any, offset: int) -> int:
            lake.refresh()
            return write(fd, data, offset)

        monkeypatch.setattr(os, "fdatasync", refuse)
        with pytest.raises(StorageFailed):
            log.append("policy_set", detail="refused")
        monkeypatch.setattr(os, "pwrite", looked_at)
        log.append("policy_set", detail="next")
        monkeypatch.undo()
        lake.refresh()
        assert lake.sql(EVENTS).fetchall() == [("kept",), ("next",)]
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []
    log.close()
