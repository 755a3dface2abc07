"""The service keeps its lake in shape by itself, and nobody who uses it notices."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest

from tests.api.conftest import Door, Opener
from tests.api.test_chat import U5, U6, ask, echo
from tests.api.test_gate import chat
from tests.api.test_http import published
from tests.api.test_lifecycle import wait_for
from tokenlake.api.settings import Settings
from tokenlake.errors import ConfigError
from tokenlake.store import compact
from tokenlake.store.lock import SEGMENTS_LOCK, DirectoryLock
from tokenlake.store.reader import Lake
from tokenlake.store.retention import Retention

CONTENT = "SELECT * FROM deltas ORDER BY call_id"
OFTEN = {"compact_every_s": 0.02, "compact_min_records": 2}


def folders(door: Door) -> set[str]:
    return {path.parent.name for path in door.service.lake.path.glob("deltas/*/*.arrow")}


def groups(door: Door) -> list[str]:
    return [name for (name,) in door.service.lake.sql("SELECT DISTINCT group_id FROM deltas ORDER BY 1").fetchall()]


def metric(door: Door, name: str) -> float:
    lines = door.request("GET", "/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith((name + " ", name + "{")))


def test_a_service_compacts_by_itself_and_its_calls_go_on(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tokenlake"), opened(prefix_cache_bytes=1, **OFTEN) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        first = ask(agent, [U5])
        second = ask(agent, [U5, echo(first), U6])
        wait_for(door, lambda: folders(door) == {"_compacted"})
        with Lake(door.service.lake.path) as reader:
            before = reader.sql(CONTENT).to_arrow_table()
            third = ask(agent, [U5, echo(first), U6, echo(second), U5])
            ask(agent, [U5, echo(first), U6, echo(second), U5, echo(third), U6])
            wait_for(door, lambda: metric(door, "upkeep_compacted_records_total") >= 4)
            assert reader.sql(CONTENT).to_arrow_table().equals(before)
        assert [event["mode"] for event in door.events("call_committed")] == ["text", *["token_in"] * 3]
        assert door.client.seal("g_g0", reward=1.0)["reason"] is None
        assert metric(door, "upkeep_freed_bytes_total") > 0
        assert metric(door, "upkeep_seconds_count") >= 2
        assert door.request("GET", "/api/v1/audit").json()["healthy"]
    assert "2 records kept, 0 removed" in caplog.text


def test_compaction_waits_for_enough_records(opened: Opener) -> None:
    with opened(compact_every_s=1000, compact_min_records=3) as door:
        agent = door.agent(door.register()[0])
        for _ in range(2):
            ask(agent, [U5])
        door.service.housekeeper._once(None)
        assert folders(door) == {"embedded"}
        ask(agent, [U5])
        door.service.housekeeper._once(None)
        assert folders(door) == {"_compacted"}


def test_versions_that_are_kept_may_be_more_than_there_were(opened: Opener) -> None:
    with opened(compact_every_s=1000, retain_versions=10) as door:
        door.request("PUT", "/api/v1/weight_version", {"version": 3}).raise_for_status()
        assert door.service.housekeeper._rule() == Retention(below_version=0)


def test_without_an_interval_nothing_is_done(opened: Opener) -> None:
    with opened(compact_every_s=None, retain_closed_s=0.001) as door:
        assert door.service._upkeep is not None
        wait_for(door, door.service._upkeep.done)
        published(door, 1, "g")
        assert folders(door) == {"embedded"}


@pytest.mark.parametrize(
    ("settings", "left"),
    [
        ({}, ["new", "old", "open"]),
        ({"retain_closed_s": 0.001}, ["open"]),
        ({"retain_closed_s": 3600}, ["new", "old", "open"]),
        ({"retain_versions": 1}, ["new", "open"]),
        ({"retain_versions": 2}, ["new", "old", "open"]),
        ({"retain_closed_s": 0.001, "retain_versions": 1}, ["new", "open"]),
        ({"retain_closed_s": 0.001, "retain_until": "consumed"}, ["new", "open"]),
    ],
)
def test_what_retention_removes(opened: Opener, settings: dict[str, Any], left: list[str]) -> None:
    """Of two published groups the older one was consumed; rows and what is open stay."""
    with opened(compact_every_s=0.02, **settings) as door:
        for version, name in ((8, "old"), (9, "new")):
            door.engine.weight_version = version
            door.request("PUT", "/api/v1/weight_version", {"version": version}).raise_for_status()
            published(door, 1, name)
            if name == "old":
                claim = door.post("/api/v1/claims", {"consumer": "t0", "groups": 1}).json()
                door.post(f"/api/v1/claims/{claim['claim_id']}/consume", {"checkpoint": "s1"}).raise_for_status()
        ask(door.agent(door.register("open")[0]), [U5])
        runs = metric(door, "upkeep_seconds_count")
        wait_for(door, lambda: metric(door, "upkeep_seconds_count") >= runs + 2)
        assert groups(door) == left
        assert metric(door, "upkeep_retired_groups_total") == 3 - len(left)
        assert len(door.request("GET", "/api/v1/rows").json()["rows"]) == 2
        assert door.request("GET", "/api/v1/audit").json()["healthy"]


def test_a_model_call_does_not_wait_for_a_compaction(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go_on = threading.Event(), threading.Event()
    real = compact.write_batches

    def slow(*arguments: Any) -> None:
        reached.set()
        assert go_on.wait(30)
        real(*arguments)

    monkeypatch.setattr(compact, "write_batches", slow)
    with opened(**OFTEN) as door:
        rollouts = door.register(n=3)
        for rollout in rollouts[:2]:
            chat(door, rollout, [U5]).raise_for_status()
        assert reached.wait(30)
        chat(door, rollouts[2], [U5]).raise_for_status()
        for name in ("g_g0", "g_g1", "g_g2"):
            door.client.seal(name, reward=1.0)
        wait_for(door, lambda: door.service.control.groups["g"].state == "published")
        assert folders(door) == {"embedded"}
        go_on.set()
        wait_for(door, lambda: "_compacted" in folders(door))


def test_a_run_that_a_backup_keeps_away_is_tried_again(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    with opened(**OFTEN) as door:
        backup = DirectoryLock(door.service.lake.path / SEGMENTS_LOCK, "segments", shared=True)
        agent = door.agent(door.register()[0])
        for _ in range(2):
            ask(agent, [U5])
        wait_for(door, lambda: metric(door, 'upkeep_failures_total{error="LakeLocked"}') >= 1)
        assert folders(door) == {"embedded"}
        backup.release()
        wait_for(door, lambda: folders(door) == {"_compacted"})
    assert "tried again" in caplog.text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("compact_every_s", 0),
        ("compact_min_records", 1.5),
        ("retain_closed_s", -1),
        ("retain_versions", 0.5),
        ("retain_until", "never"),
    ],
)
def test_a_wrong_setting_is_refused_at_start(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Settings.parse({name: value})
