"""Any order of what a lake can go through, against a model of what was acknowledged.

A killed owner is the folder as it lies at that moment, with a torn write behind it; the dead owner's handles stay open
until the end. Readers are opened on the way and must never see less than before, but for what retention removed.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, precondition, rule

from tests.long import either
from tests.store.conftest import build_delta
from tests.store.test_lake import row_table
from tokenlake.errors import Conflict, LakeLocked
from tokenlake.store.backup import back_up
from tokenlake.store.lake import OwnedLake
from tokenlake.store.lineage import lineage_loss
from tokenlake.store.reader import Lake
from tokenlake.store.retention import retire_named

GROUPS = ("g0", "g1", "g2")
DELTAS = "SELECT call_id, digest FROM deltas"
EVENTS = "SELECT event_seq, event_hash FROM lineage"
ROWS = "SELECT group_id, count(*) FROM rows GROUP BY group_id"

Content = tuple[dict[str, bytes], dict[int, bytes], dict[str, int]]


def content(lake: OwnedLake | Lake) -> Content:
    deltas, events, rows = (lake.sql(query).fetchall() for query in (DELTAS, EVENTS, ROWS))
    assert len(deltas) == len(dict(deltas)), "a record is there twice"
    return dict(deltas), dict(events), dict(rows)


class LakeMachine(RuleBasedStateMachine):
    """One lake through its lives."""

    staged: Bundle[str] = Bundle("staged")

    @initialize()
    def begin(self) -> None:
        self.base = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        self.lives = 0
        self.path = self.base / "life0"
        self.lake = OwnedLake.open(self.path, segment_max_bytes=9_000)
        self.dead: list[OwnedLake] = []
        self.deltas: dict[str, tuple[str, bytes]] = {}
        self.events: dict[int, bytes] = {}
        self.rows: dict[str, int] = {}
        self.retired: set[str] = set()
        self.readers: list[tuple[Lake, Content]] = []
        for name in GROUPS:
            self.append("group_registered", group_id=name, n=2)

    def teardown(self) -> None:
        if hasattr(self, "base"):
            for reader, _ in self.readers:
                reader.close()
            for lake in (*self.dead, self.lake):
                lake.close()
            shutil.rmtree(self.base)

    def append(self, kind: str, **columns: Any) -> None:
        event = self.lake.lineage.append(kind, **columns)
        self.events[event["event_seq"]] = event["event_hash"]

    @rule(target=staged, writer=st.sampled_from(("w0", "w1")), group=st.sampled_from(GROUPS), n=st.integers(0, 60))
    def stage(self, writer: str, group: str, n: int) -> Any:
        if group in self.retired:
            # It is closed: a gate has no call of it staged. What is staged all the same goes with the next compaction.
            return multiple()
        name = f"c{len(self.deltas):03}"
        delta = build_delta(name, rollout_id=f"{group}_g0", n=n)
        self.lake.delta_writer(writer).stage(delta)
        self.deltas[name] = (group, delta.digest)
        return f"{name} {writer} {group} {n}"

    @rule(call=staged)
    def stage_again(self, call: str) -> None:
        name, writer, group, n = call.split()
        if group in self.retired:
            return
        delta = build_delta(name, rollout_id=f"{group}_g0", n=int(n))
        place = self.lake.delta_writer(writer).stage(delta)
        assert self.lake.read_delta(place).digest == delta.digest
        with pytest.raises(Conflict):
            self.lake.delta_writer(writer).stage(build_delta(name, rollout_id=f"{group}_g0", digest=bytes(32)))

    @rule(call=consumes(staged))
    def commit(self, call: str) -> None:
        name, _, group, _ = call.split()
        found = self.lake.find_delta(f"{group}_g0", 0, name)
        if found is None:
            assert group in self.retired
            return
        place, digest = found
        named = {"rollout_id": f"{group}_g0", "attempt": 0, "call_id": name, "digest": digest}
        self.append(
            "call_committed",
            **named,
            **{key: getattr(place, key) for key in ("writer", "segment", "byte_offset", "byte_length", "batch_row")},
        )
        assert self.lake.read_delta(place).call_id == name

    @rule(group=st.sampled_from(GROUPS))
    def publish(self, group: str) -> None:
        if group not in self.rows:
            segment = self.lake.write_rows(row_table(group))
            self.append("group_published", group_id=group, segment=segment, n=2)
            self.lake.lineage.anchor()
            self.rows[group] = 2

    @rule()
    def compact(self) -> None:
        self.lake.compact()

    @rule(group=st.sampled_from(GROUPS))
    def gc(self, group: str) -> None:
        if group not in self.rows:
            with pytest.raises(Conflict, match="still open"):
                retire_named(self.lake, groups=[group])
            return
        retire_named(self.lake, groups=[group])
        self.retired.add(group)

    @rule()
    def backup(self) -> None:
        copy = self.base / "copy"
        back_up(self.path, copy)
        with Lake(copy) as reader:
            self.same(content(reader))
        shutil.rmtree(copy)

    @rule()
    def reopen(self) -> None:
        self.lake.close()
        self.lake = OwnedLake.open(self.path, segment_max_bytes=9_000)

    @rule(torn=st.integers(0, 400), index=st.booleans())
    def kill(self, torn: int, index: bool) -> None:
        self.lives += 1
        after = self.base / f"life{self.lives}"
        shutil.copytree(self.path, after)
        for folder in (*after.glob("deltas/w*"), after / "lineage/gate"):
            for path in sorted(folder.glob("*.arrow"))[-1:]:
                data = path.read_bytes()
                if not data.endswith(b"ARROW1"):
                    end = -(-len(data.rstrip(bytes(1))) // 8) * 8
                    with path.open("r+b") as file:
                        file.seek(end)
                        file.write(data[max(0, end - 600) : end][:torn])
        if not index:
            (after / "index.duckdb").unlink()
            (after / "index.duckdb.wal").unlink(missing_ok=True)
        self.dead.append(self.lake)
        self.path = after
        self.lake = OwnedLake.open(after, segment_max_bytes=9_000)
        for reader, _ in self.readers:
            reader.close()
        self.readers = []

    @rule()
    def a_second_owner_is_refused(self) -> None:
        with pytest.raises(LakeLocked):
            OwnedLake.open(self.path)

    @precondition(lambda self: len(self.readers) < 3)
    @rule()
    def open_reader(self) -> None:
        reader = Lake(self.path)
        seen = content(reader)
        self.same(seen)
        self.readers.append((reader, seen))

    @precondition(lambda self: self.readers)
    @rule(which=st.integers(0, 2), refresh=st.booleans())
    def read(self, which: int, refresh: bool) -> None:
        reader, before = self.readers[which % len(self.readers)]
        if not refresh:
            assert content(reader) == before
            return
        reader.refresh()
        after = content(reader)
        self.same(after)
        kept = {name for name in before[0] if self.deltas[name][0] not in self.retired}
        assert kept <= set(after[0])
        assert before[1].items() <= after[1].items()
        assert before[2].items() <= after[2].items()
        self.readers[which % len(self.readers)] = (reader, after)

    @rule()
    def audit(self) -> None:
        self.same(content(self.lake))
        assert self.lake.sql("SELECT * FROM lake_findings").fetchall() == []
        assert lineage_loss(self.path) == []
        assert not list(self.path.rglob("*.tmp"))

    def same(self, seen: Content) -> None:
        """Exactly what was acknowledged: no record less, none more, none twice."""
        deltas, events, rows = seen
        assert deltas == {name: digest for name, (group, digest) in self.deltas.items() if group not in self.retired}
        assert self.events.items() <= events.items()
        assert sorted(events) == list(range(len(events)))
        assert rows == self.rows


LakeMachine.TestCase.settings = settings(
    max_examples=either(5, 40),
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestLakeMachine = pytest.mark.slow(LakeMachine.TestCase)


def test_threads_on_one_lake_get_their_own_answers(lake: OwnedLake) -> None:
    """B29: 8 threads fetch by id while 2 stage and 1 publishes and compacts; every query has a cursor of its own."""
    for i in range(40):
        lake.delta_writer(f"w{i % 2}").stage(build_delta(f"c{i:02}", n=i))
    wrong: list[Any] = []
    stop = threading.Event()

    def ask(k: int, reader: Lake) -> None:
        for i in range(either(10, 60)):
            wanted = (i * 7 + k) % 40
            for each in (lake, reader):
                query = "SELECT call_id, len(token_ids) FROM deltas WHERE call_id = ?"
                found = each.sql(query, [f"c{wanted:02}"]).fetchall()
                if found != [(f"c{wanted:02}", wanted)]:
                    wrong.append((k, wanted, found))

    def stage(k: int) -> None:
        i = 0
        while not stop.is_set():
            lake.delta_writer(f"w{k}").stage(build_delta(f"more{k}{i}"))
            i += 1

    def publish() -> None:
        i = 0
        while not stop.is_set():
            lake.write_rows(row_table(f"g{i}"))
            lake.compact()
            i += 1

    with Lake(lake.path) as reader:
        busy = [threading.Thread(target=stage, args=(k,)) for k in range(2)] + [threading.Thread(target=publish)]
        asking = [threading.Thread(target=ask, args=(k, reader)) for k in range(8)]
        for thread in (*busy, *asking):
            thread.start()
        for thread in asking:
            thread.join()
        stop.set()
        for thread in busy:
            thread.join()
    assert wrong == []
