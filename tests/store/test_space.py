"""The floor of free disk, bytes and inodes: deltas stop at it, events and rows at half of it, reading never."""

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.store.test_lake import row_table
from tokenlake.errors import StorageFailed
from tokenlake.store.delta import Delta
from tokenlake.store.lake import OwnedLake

Make = Callable[..., Delta]


class Disk:
    """A disk with as many free bytes and inodes as it is told; without `files` it does not count those."""

    free = 0
    inodes = 0
    files = 0


@pytest.fixture
def disk(lake: OwnedLake, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk()
    monkeypatch.setattr(
        os,
        "statvfs",
        lambda _: SimpleNamespace(f_bavail=made.free, f_frsize=1, f_files=made.files, f_favail=made.inodes),
    )
    lake.space.floor = 1000
    yield made
    made.free, made.files = 10_000, 0


@pytest.mark.parametrize(
    ("free", "inodes", "refused"),
    [
        (1000, 256, []),
        (999, 256, ["delta"]),
        (500, 256, ["delta"]),
        (499, 256, ["delta", "event", "rows"]),
        (0, 256, ["delta", "event", "rows"]),
        (1000, 255, ["delta"]),
        (1000, 128, ["delta"]),
        (1000, 127, ["delta", "event", "rows"]),
    ],
)
def test_what_is_refused_below_the_floor(
    lake: OwnedLake, make_delta: Make, disk: Disk, free: int, inodes: int, refused: list[str]
) -> None:
    steps: dict[str, Callable[[], Any]] = {
        "delta": lambda: lake.delta_writer("w0").stage(make_delta("c0")),
        "event": lambda: lake.lineage.append("policy_set"),
        "rows": lambda: lake.write_rows(row_table("g0")),
    }
    disk.free, disk.inodes, disk.files = free, inodes, 1000
    found: list[str] = []
    for name, step in steps.items():
        try:
            step()
        except StorageFailed as error:
            found.append(f"{name}: {error.detail['reason']}")
    assert found == [f"{name}: disk_full" for name in refused]
    assert lake.sql("SELECT count(*) FROM deltas").fetchall() == [(int("delta" not in refused),)]
    disk.free, disk.files = 1000, 0
    for step in steps.values():
        step()


def test_room_is_made_below_the_floor(lake: OwnedLake, make_delta: Make, disk: Disk) -> None:
    disk.free = 1000
    for i in range(4):
        lake.delta_writer("w0").stage(make_delta(f"c{i}"))
    disk.free = 500
    assert lake.compact().records == 4


def test_without_a_floor_the_disk_is_not_asked(lake: OwnedLake, make_delta: Make, disk: Disk) -> None:
    lake.space.floor = 0
    lake.delta_writer("w0").stage(make_delta("c0"))
    lake.lineage.append("policy_set")


def test_a_disk_that_does_not_answer_is_a_storage_failure(
    lake: OwnedLake, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "statvfs", gone)
    with pytest.raises(StorageFailed, match="Input/output error"):
        lake.lineage.append("policy_set")
