"""The lineage log: chained, atomic, durable, and never silently short."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc as ipc
import pytest

from tests.crash.child import fork
from tokenlake.errors import DamagedLake, FormatError, InvalidInput, StorageFailed
from tokenlake.store.digest import ZERO_HASH, event_hash
from tokenlake.store.encode import encode_event
from tokenlake.store.lake import OwnedLake
from tokenlake.store.lineage import LineageLog, lineage_loss
from tokenlake.store.reader import Lake
from tokenlake.store.schema import LINEAGE


def segment(root: Path, number: int = 0) -> Path:
    return root / "lineage" / "gate" / f"{number:06d}.arrow"


def test_events_are_chained_and_come_back(root: Path) -> None:
    log = LineageLog(root, "gate")
    first = log.append("policy_set", detail="{}", reason=None)
    more = log.append_many([{"event_type": "group_registered", "group_id": f"g{i}", "n": 4} for i in range(3)])
    assert (first["event_seq"], first["prev_hash"], "reason" in first) == (0, ZERO_HASH, False)
    assert [event["event_seq"] for event in more] == [1, 2, 3]
    events = list(log.events())
    assert events == [first, *more]
    log.close()
    last = ZERO_HASH
    for event in events:
        assert event["prev_hash"] == last
        last = event_hash(last, {k: v for k, v in event.items() if k not in ("prev_hash", "event_hash")})
        assert event["event_hash"] == last
    assert [event["at"] for event in events] == sorted({event["at"] for event in events})
    again = LineageLog(root, "gate")
    assert again.append("policy_set")["prev_hash"] == last
    again.close()
    assert lineage_loss(root) == []
    with ipc.open_file(segment(root)) as file:
        assert file.schema.equals(LINEAGE)
        assert file.read_all().num_rows == 4


def test_anchors_written_at_once_are_whole_and_name_an_event_that_is_there(root: Path) -> None:
    log = LineageLog(root, "gate")
    log.append("policy_set")
    wrong: list[str] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        try:
            for _ in range(30):
                log.append("policy_set")
                log.anchor()
        except StorageFailed as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []
    assert lineage_loss(root) == []
    log.close()


def test_a_refused_event_keeps_nothing_and_harms_nobody(root: Path) -> None:
    log = LineageLog(root, "gate")
    for bad in ({"nonsense": 1}, {"attempt": 2**40}, {"attempt": "x"}, {"group_id": 5}):
        with pytest.raises(InvalidInput):
            log.append("policy_set", **bad)
        with pytest.raises(InvalidInput):
            log.append_many([{"event_type": "policy_set"}, {"event_type": "policy_set", **bad}])
    assert log.append("policy_set")["event_seq"] == 0
    log.close()
    assert lineage_loss(root) == []


def test_batches_share_a_sync_and_a_refused_one_takes_no_part(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LineageLog(root, "gate", opening={"event_type": "lake_opened"})
    syncs: list[int] = []
    monkeypatch.setattr(os, "fdatasync", syncs.append)
    good, two = [{"event_type": "policy_set"}], [{"event_type": "policy_set", "attempt": k} for k in range(2)]
    wrong = [[{"event_type": "policy_set"}, {"event_type": "policy_set", **bad}] for bad in ({"odd": 1}, {"n": "x"})]
    outcomes = log.append_each([good, wrong[0], two, wrong[1], [], good])
    assert len(syncs) == 1
    seqs = [outcome if isinstance(outcome, InvalidInput) else [e["event_seq"] for e in outcome] for outcome in outcomes]
    assert [seqs[0], seqs[2], seqs[4], seqs[5]] == [[1], [2, 3], [], [4]]
    assert all(isinstance(seqs[at], InvalidInput) for at in (1, 3))
    monkeypatch.undo()
    log.close()
    assert lineage_loss(root) == []
    assert [event["event_seq"] for event in LineageLog(root, "gate").events()] == [0, 1, 2, 3, 4]


def test_threads_append_one_unbroken_chain(root: Path) -> None:
    log = LineageLog(root, "gate")

    def work(k: int) -> None:
        for i in range(10):
            log.append("call_failed", call_id=f"t{k}c{i}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert lineage_loss(root) == []
    assert len({event["call_id"] for event in LineageLog(root, "gate").events()}) == 160


def test_a_failed_sync_breaks_no_chain(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = LineageLog(root, "gate")
    log.append("policy_set", detail="1")
    real = os.fdatasync

    def broken(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", broken)
    with pytest.raises(StorageFailed):
        log.append("policy_set", detail="2")
    monkeypatch.setattr(os, "fdatasync", real)
    assert log.append("policy_set", detail="3")["event_seq"] == 1
    log.close()
    assert [event["detail"] for event in log.events()] == ["1", "3"]
    assert lineage_loss(root) == []
    with Lake(root) as lake:
        assert lake.sql("SELECT detail FROM lineage ORDER BY event_seq").fetchall() == [("1",), ("3",)]
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []


@pytest.mark.parametrize("refused", [["2"], ["2", "3"]], ids=["once", "twice"])
@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed"])
def test_a_refused_event_never_comes_back(root: Path, refused: list[str], closed: bool) -> None:
    """The sync fails after every byte was written, nothing follows, and the log is opened again."""

    def work(_: int) -> None:
        log = LineageLog(root, "gate")
        log.append("policy_set", detail="1")

        def broken(fd: int) -> None:
            raise OSError(5, "Input/output error")

        os.fdatasync, real = broken, os.fdatasync
        for detail in refused:
            with pytest.raises(StorageFailed):
                log.append("policy_set", detail=detail)
        os.fdatasync = real
        if closed:
            log.close()

    assert fork(work) == ([], 0)
    log = LineageLog(root, "gate")
    assert [event["detail"] for event in log.events()] == ["1"]
    assert log.append("policy_set", detail="4")["event_seq"] == 1
    log.close()
    assert lineage_loss(root) == []
    with Lake(root) as lake:
        assert lake.sql("SELECT event_seq, detail FROM lineage ORDER BY ALL").fetchall() == [(0, "1"), (1, "4")]
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []


def test_a_log_cut_at_a_batch_boundary_is_loss(root: Path) -> None:
    """B24, the silent kind: a shorter log reads clean, its anchor tells."""
    log = LineageLog(root, "gate")
    log.append("policy_set", detail="1")
    _, size = log._segments.position
    log.append("policy_set", detail="2")
    log.close()
    data = segment(root).read_bytes()
    segment(root).write_bytes(data[:size])
    assert lineage_loss(root) == ["lineage/gate ends at event 0, but event 1 was anchored"]
    with Lake(root) as lake:
        assert lake.sql("SELECT kind, place FROM lake_findings").fetchall() == [("lineage_lost", "lineage/gate")]
    with pytest.raises(DamagedLake):
        OwnedLake.open(root)
    segment(root).write_bytes(data)
    with OwnedLake.open(root) as owned:
        assert owned.sql("SELECT count(*) FROM lineage").fetchall() == [(2,)]


@pytest.mark.parametrize("tail", [bytes(16), b"\xc3" * 16, b"~" * 16], ids=["zeros", "no text", "text"])
def test_an_event_that_is_whole_in_form_and_torn_in_content_never_stands(root: Path, tail: bytes) -> None:
    """As a file system leaves it that makes a file longer before it writes the bytes."""
    log = LineageLog(root, "gate")
    log.append("policy_set", detail="kept")
    log.append("policy_set", detail="x" * 64)
    _, end = log._segments.position
    whole = segment(root).read_bytes()
    log.close()
    (root / "lineage/gate/head.json").unlink()
    segment(root).write_bytes(whole[: end - 16] + tail)
    again = LineageLog(root, "gate")
    assert [event["detail"] for event in again.events()] == ["kept"]
    assert again.append("policy_set", detail="next")["event_seq"] == 1
    again.close()
    assert lineage_loss(root) == []
    with Lake(root) as lake:
        assert lake.sql("SELECT detail FROM lineage ORDER BY event_seq").fetchall() == [("kept",), ("next",)]
        assert lake.sql("SELECT * FROM lake_findings").fetchall() == []


@pytest.mark.parametrize("lost", ["a bit", "a letter", "a sector"])
def test_a_last_event_that_rotted_is_told_and_one_that_tore_is_not(
    root: Path, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A loss of power takes whole sectors; what is there in full and has changed was written once, and said so."""
    log = LineageLog(root, "gate")
    log.append("policy_set", detail="kept")
    _, start = log._segments.position
    log.append("policy_set", detail="x" * 2000)
    _, end = log._segments.position
    log._lock.release()
    data = bytearray(segment(root).read_bytes())
    at = data.index(b"x" * 2000) + 1000
    if lost != "a sector":
        data[at] ^= 1 if lost == "a bit" else 0x80
    else:
        at -= at % 512
        data[at : at + 512] = bytes(512)
    segment(root).write_bytes(data)
    again = LineageLog(root, "gate")
    assert [event["detail"] for event in again.events()] == ["kept"]
    again.close()
    kept = segment(root).with_suffix(".left-out")
    assert kept.exists() is ("left out" in caplog.text) is (lost != "a sector")
    assert lost == "a sector" or kept.read_bytes() == data[start:end]
    assert lineage_loss(root) == []


def test_an_anchor_of_another_log_is_loss(root: Path) -> None:
    log = LineageLog(root, "gate")
    log.append("policy_set", detail="1")
    log.close()
    head = root / "lineage/gate/head.json"
    head.write_text(json.dumps({**json.loads(head.read_text()), "event_hash": "00" * 32}))
    assert lineage_loss(root) == ["lineage/gate: event 0 is not the one that was anchored"]
    for rotten in ("not json", "[]", "7", '{"event_seq": "0"}'):
        head.write_text(rotten)
        with Lake(root) as lake:
            assert lake.sql("SELECT kind FROM lake_findings").fetchall() == [("lineage_lost",)]
        assert lineage_loss(root) == ["lineage/gate ends at event 0, but event None was anchored"]
        LineageLog(root, "gate").close()
        assert lineage_loss(root) == []


def test_a_missing_segment_is_a_broken_chain(root: Path) -> None:
    log = LineageLog(root, "gate", segment_max_bytes=1)
    for i in range(3):
        log.append("policy_set", detail=str(i))
    log.close()
    segment(root, 1).unlink()
    assert lineage_loss(root) == ["lineage/gate: event 2 does not follow 0"]
    with Lake(root) as lake:
        assert lake.sql("SELECT kind, detail FROM lake_findings").fetchall() == [
            ("lineage_broken", "event 2 does not follow event 0")
        ]


def test_an_event_of_a_newer_schema_is_refused_by_name(root: Path) -> None:
    log = LineageLog(root, "gate")
    event = log.append("policy_set")
    log.close()
    data = segment(root).read_bytes()
    message = encode_event(event)
    at = data.index(message)
    segment(root).write_bytes(data[:at] + encode_event({**event, "schema_version": 2}) + data[at + len(message) :])
    with pytest.raises(FormatError, match="schema 2"):
        Lake(root)
    with pytest.raises(FormatError, match="schema 2"):
        list(LineageLog(root, "gate").events())


def test_a_segment_of_an_older_schema_reads_with_nulls(root: Path) -> None:
    log = LineageLog(root, "gate")
    event = log.append("policy_set", detail="{}")
    log.close()
    older = LINEAGE.remove(LINEAGE.get_field_index("prompt_digest"))
    columns = {name: [event.get(name)] for name in older.names}
    with ipc.new_file(segment(root), older) as file:
        file.write_batch(pa.RecordBatch.from_pydict(columns, schema=older))
    with Lake(root) as lake:
        assert lake.sql("SELECT detail, prompt_digest FROM lineage").fetchall() == [("{}", None)]


def test_who_gives_what_no_column_holds_takes_nobody_with_him(root: Path) -> None:
    good = {"event_type": "policy_set", "detail": "good"}
    bad = [{"detail": "\ud800"}, {"cum_len": 2**63}, {"attempt": 1.0}, {"digest": b"short"}, {"reward": "1"}]
    log = LineageLog(root, "gate")
    outcomes = log.append_each([[good], *([good, {**good, **each}] for each in bad), [], [good]])
    first, *refused, empty, last = outcomes
    assert [type(each) for each in refused] == [InvalidInput] * len(bad)
    assert isinstance(first, list)
    assert isinstance(last, list)
    assert empty == []
    assert [event["event_seq"] for event in [*first, *last]] == [0, 1]
    assert list(log.events()) == [*first, *last]
    log.close()


def test_an_event_is_hashed_as_its_columns_hold_it(root: Path) -> None:
    """After a kill the last one counts where it has the hash of its content."""
    log = LineageLog(root, "gate")
    log.append("rollout_sealed", reward=1, temperature=0)
    log._lock.release()
    assert LineageLog(root, "gate").head == 0


def test_events_are_written_without_pandas(tmp_path: Path) -> None:
    """pyarrow imports it where it is installed, which the first one who writes would wait for."""
    code = """
import sys
from tokenlake.store.lake import OwnedLake
with OwnedLake.open(sys.argv[1]) as lake:
    lake.lineage.append_many([{"event_type": "policy_set", "detail": "1"}, {"event_type": "policy_set"}])
    print("pandas" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "lake")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "False\n"


def test_an_event_that_is_written_while_the_log_is_closed_is_there_or_refused(
    root: Path, while_closing: Callable[..., Any]
) -> None:
    log = LineageLog(root, "gate")
    log.append("policy_set")
    while_closing(log.close, lambda: log.append("policy_set"))
    log._closed = False  # as for a call that looked before
    with pytest.raises(StorageFailed, match="was closed meanwhile"):
        log.append("policy_set")
    assert [event["event_seq"] for event in log.events()] == [0, 1]
    assert lineage_loss(root) == []


def test_an_event_that_an_interrupt_left_is_never_written_over(root: Path, interrupted: Callable[..., None]) -> None:
    """Nobody acknowledged it: the next event takes its number, also for who has read it."""
    log = LineageLog(root, "gate")
    log.append("policy_set", detail="a")
    interrupted(lambda: log.append("policy_set", detail="b" * 5000))
    said = "SELECT event_seq, detail FROM lineage ORDER BY event_seq"
    with Lake(root) as reader:
        assert len(reader.sql(said).fetchall()) == 2
        log.append("policy_set", detail="c")
        log.append("policy_set", detail="d")
        log.close()
        reader.refresh()
        assert reader.sql(said).fetchall() == [(0, "a"), (1, "c"), (2, "d")]
        assert reader.sql("SELECT * FROM lake_findings").fetchall() == []
    assert lineage_loss(root) == []
