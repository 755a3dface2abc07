"""The ledger: durable, then folded, whoever still waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenlake.api.control import Control
from tokenlake.api.ledger import Ledger, LineageWriter
from tokenlake.api.metrics import Metrics
from tokenlake.errors import CaptureFailed, Conflict, InvalidInput, StorageFailed, TokenlakeError
from tokenlake.ingest.capture import CaptureCore
from tokenlake.store.delta import Delta, Place
from tokenlake.store.deltas import DeltaWriter
from tokenlake.store.lake import OwnedLake
from tokenlake.store.schema import PLACE

Batches = Sequence[Sequence[Mapping[str, Any]]]


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[OwnedLake]:
    with OwnedLake.open(tmp_path / "lake") as opened:
        yield opened


class Held:
    """A log whose first write waits."""

    def __init__(self, lake: OwnedLake) -> None:
        self.lake = lake
        self.writes: list[int] = []
        self.go_on = threading.Event()

    def append_each(self, batches: Batches) -> list[list[dict[str, Any]] | TokenlakeError]:
        self.writes.append(len(batches))
        assert self.go_on.wait(30)
        return self.lake.lineage.append_each(batches)


def ledger_of(log: LineageWriter, lake: OwnedLake, control: Control) -> Ledger:
    return Ledger(log, lake.delta_writer("w"), control, Metrics())


def group(name: str, n: int = 1) -> dict[str, Any]:
    return {"event_type": "group_registered", "group_id": name, "n": n}


def test_what_comes_during_a_write_is_written_together_and_folded_in_order(lake: OwnedLake) -> None:
    control, log = Control(), Held(lake)

    async def run() -> list[Any]:
        ledger = ledger_of(log, lake, control)
        tasks = [asyncio.create_task(ledger.append(group(f"g{k}"))) for k in range(4)]
        odd = asyncio.create_task(ledger.append({"event_type": "group_registered", "nonsense": 1}))
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.sleep(0)
        log.go_on.set()
        return await asyncio.gather(*tasks, odd, return_exceptions=True)

    *done, cancelled, odd = asyncio.run(run())
    assert (done, log.writes) == ([None] * 3, [1, 4])
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(odd, InvalidInput)
    assert list(control.groups) == ["g0", "g1", "g2", "g3"]


@pytest.mark.parametrize("error", [StorageFailed("the disk is full"), ZeroDivisionError("a bug")])
def test_what_concerns_a_whole_write_reaches_everyone_and_the_next_is_written(
    lake: OwnedLake, error: Exception
) -> None:
    control = Control()

    class Broken:
        def append_each(self, batches: Batches) -> list[list[dict[str, Any]] | TokenlakeError]:
            if batches[0][0]["group_id"] == "g0":
                raise error
            return lake.lineage.append_each(batches)

    async def run() -> list[Any]:
        ledger = ledger_of(Broken(), lake, control)
        return await asyncio.gather(*(ledger.append(group(f"g{k}")) for k in range(3)), return_exceptions=True)

    assert asyncio.run(run()) == [error, None, None]
    assert list(control.groups) == ["g1", "g2"]


def test_an_event_that_cannot_be_folded_concerns_nobody_else(lake: OwnedLake, monkeypatch: pytest.MonkeyPatch) -> None:
    control = Control()
    fold = control.apply

    def apply(event: Mapping[str, Any]) -> None:
        if event["group_id"] == "g1":
            raise ZeroDivisionError("a bug")
        fold(event)

    monkeypatch.setattr(control, "apply", apply)

    async def run() -> list[Any]:
        ledger = ledger_of(lake.lineage, lake, control)
        return await asyncio.gather(*(ledger.append(group(f"g{k}")) for k in range(4)), return_exceptions=True)

    first, wrong, *others = asyncio.run(run())
    assert (first, others) == (None, [None, None])
    assert isinstance(wrong, ZeroDivisionError)
    assert list(control.groups) == ["g0", "g2", "g3"]


class Captured:
    """A call that is what it is told to be."""

    def __init__(self, call_id: str, *, wrong: Exception | None = None, late: bool = False) -> None:
        self.name = ("g_g0", 0, call_id)
        self.wrong, self.late = wrong, late

    def delta(self) -> Delta:
        if self.wrong is not None:
            raise self.wrong
        core = CaptureCore(Nowhere())
        ticket = core.begin(rollout_id="g_g0", attempt=0, call_id=self.name[2])
        _, delta = core.build(
            ticket,
            prompt_token_ids=[1, 2],
            token_ids=[3],
            logprobs=[-0.5],
            finish_reason="stop",
            weight_version=1,
            weight_version_end=1,
        )
        assert delta is not None
        return delta

    def committed(self, place: Place) -> dict[str, Any] | None:
        names = dict(zip(("rollout_id", "attempt", "call_id"), self.name, strict=True))
        return None if self.late else {**names, **place.columns()}


class Nowhere:
    def stage(self, delta: Delta) -> Place:
        raise AssertionError(delta)


def test_what_is_captured_together_is_staged_then_committed_and_each_is_told_its_own(lake: OwnedLake) -> None:
    control, log, deltas = Control(), Held(lake), Counted(lake.delta_writer("w"))
    bug, refused = ZeroDivisionError("a bug"), CaptureFailed("no", reason="logprobs_missing")

    async def run() -> list[Any]:
        ledger = Ledger(log, deltas, control, Metrics())
        records = [Captured("c0"), Captured("c1", wrong=bug), Captured("c2", wrong=refused)]
        records += [Captured("c3", late=True), Captured("c4")]
        tasks = [asyncio.create_task(ledger.append(group("g")))]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(ledger.capture(record)) for record in records]
        twice = asyncio.create_task(ledger.capture(Captured("c0")))
        await asyncio.sleep(0)
        log.go_on.set()
        return await asyncio.gather(*tasks, twice, return_exceptions=True)

    _, first, *failed, late, last, twice = asyncio.run(run())
    assert (failed, late) == ([bug, refused], None)
    assert isinstance(twice, Conflict)
    assert (deltas.written, log.writes) == ([3], [1, 5 - len(failed)])
    assert [event["event_seq"] for event in (first, last)] == [2, 3], "1 is the group's, and before it the log's own"
    places = [Place(**{name: event[name] for name in PLACE.names}) for event in (first, last)]
    assert [delta.call_id for delta in lake.read_deltas(places)] == ["c0", "c4"]


class Counted:
    """A writer that says how many deltas each of its writes had."""

    def __init__(self, writer: DeltaWriter) -> None:
        self.writer = writer
        self.written: list[int] = []

    def stage_each(self, deltas: Sequence[Delta]) -> list[Place | TokenlakeError]:
        self.written.append(len(deltas))
        return self.writer.stage_each(deltas)


@pytest.mark.parametrize("error", [StorageFailed("full", reason="disk_full"), ZeroDivisionError("a bug")])
def test_deltas_that_no_disk_takes_are_failed_captures_and_events_beside_them_are_written(
    lake: OwnedLake, error: Exception
) -> None:
    control = Control()

    class Full:
        def stage_each(self, deltas: Sequence[Delta]) -> list[Place | TokenlakeError]:
            raise error

    async def run() -> list[Any]:
        ledger = Ledger(lake.lineage, Full(), control, Metrics())
        ledger._writing = True
        tasks = [asyncio.create_task(each) for each in (ledger.capture(Captured("c0")), ledger.append(group("g0")))]
        await asyncio.sleep(0)
        ledger._write()
        return await asyncio.gather(*tasks, return_exceptions=True)

    failed, written = asyncio.run(run())
    assert written is None
    assert list(control.groups) == ["g0"]
    if isinstance(error, StorageFailed):
        assert isinstance(failed, CaptureFailed)
        assert failed.detail["reason"] == "disk_full"
    else:
        assert failed is error
