"""The ledger: durable, then folded, whoever still waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tokenlake.api.control import Control
from tokenlake.api.ledger import Ledger
from tokenlake.errors import InvalidInput, StorageFailed, TokenlakeError
from tokenlake.store.lake import OwnedLake

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


def group(name: str, n: int = 1) -> dict[str, Any]:
    return {"event_type": "group_registered", "group_id": name, "n": n}


def test_what_comes_during_a_write_is_written_together_and_folded_in_order(lake: OwnedLake) -> None:
    control, log = Control(), Held(lake)

    async def run() -> list[Any]:
        ledger = Ledger(log, control)
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
        ledger = Ledger(Broken(), control)
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
        ledger = Ledger(lake.lineage, control)
        return await asyncio.gather(*(ledger.append(group(f"g{k}")) for k in range(4)), return_exceptions=True)

    first, wrong, *others = asyncio.run(run())
    assert (first, others) == (None, [None, None])
    assert isinstance(wrong, ZeroDivisionError)
    assert list(control.groups) == ["g0", "g2", "g3"]
