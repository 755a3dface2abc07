"""What runs in the background goes on after anything, says what broke, and never works against a command."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.api.conftest import Door, Opener
from tests.api.test_chat import U5, U6, ask, echo
from tests.api.test_gate import chat
from tests.api.test_lifecycle import wait_for
from tests.api.test_upkeep import OFTEN, folders, metric
from tokenlake import clock
from tokenlake.api import publisher
from tokenlake.errors import Conflict
from tokenlake.finalize.publish import publish_due
from tokenlake.ingest.tiny import TinyEngine


def readiness(door: Door) -> tuple[int, Any]:
    answer = door.request("GET", "/readyz", token=None)
    return answer.status_code, answer.json()


def state(door: Door, group_id: str) -> str:
    return door.service.control.groups[group_id].state


def test_a_group_that_breaks_publishing_is_named_and_keeps_no_other_from_it(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = True

    def odd(lake: Any, *, groups: list[str], **more: Any) -> Any:
        if broken and "odd" in groups:
            raise KeyError("nobody foresaw this")
        return publish_due(lake, groups=groups, **more)

    monkeypatch.setattr(publisher, "publish_due", odd)
    for name in ("odd", "sound"):
        door.register(name)
        door.client.fail(f"{name}_g0", reason="environment_failed")
    wait_for(door, lambda: state(door, "sound") == "published")
    assert state(door, "odd") == "open"
    assert metric(door, 'finalize_failures_total{error="KeyError"}') >= 1
    assert "nobody foresaw this" in caplog.text
    assert readiness(door) == (200, {"status": "ready"})
    broken = False
    wait_for(door, lambda: state(door, "odd") == "published")


def test_upkeep_that_breaks_is_counted_and_tried_again(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(**_: Any) -> None:
        raise KeyError("nobody foresaw this")

    with opened(**OFTEN) as door:
        agent = door.agent(door.register()[0])
        with monkeypatch.context() as patch:
            patch.setattr(door.service.lake, "compact", broken)
            for _ in range(2):
                ask(agent, [U5])
            wait_for(door, lambda: metric(door, 'upkeep_failures_total{error="KeyError"}') >= 1)
        wait_for(door, lambda: folders(door) == {"_compacted"})
    assert "nobody foresaw this" in caplog.text


@pytest.mark.parametrize(("task", "fault"), [("_task", "publisher_stopped"), ("_upkeep", "housekeeper_stopped")])
def test_a_task_that_ended_all_the_same_is_no_longer_ready(door: Door, task: str, fault: str) -> None:
    door.on_loop(getattr(door.service, task).cancel)
    wait_for(door, getattr(door.service, task).done)
    assert readiness(door) == (503, {"status": "not_ready", "faults": [fault]})


def test_an_engine_that_is_dead_is_not_ready_and_its_calls_fail_at_once(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threading.excepthook", lambda _: None)

    def ended(*_: Any) -> None:
        raise SystemExit

    engine = TinyEngine()
    with opened(engine=engine) as door:
        (rollout,) = door.register()
        assert readiness(door)[0] == 200
        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "prefill", ended)
            assert chat(door, rollout, [U5]).status_code == 503
        assert readiness(door) == (503, {"status": "not_ready", "faults": ["engine_stopped"]})
        refused = chat(door, rollout, [U5])
        assert (refused.status_code, "not running" in refused.text) == (503, True)
        assert [event["reason"] for event in door.events("call_failed")] == ["engine_failed", "engine_stopped"]
        assert not door.request("GET", "/api/v1/workers").json()["workers"][0]["healthy"]


COMMANDS: dict[str, Callable[[Door], Any]] = {
    "seal": lambda door: door.client.seal("g_g0", reward=1.0),
    "freeze": lambda door: door.client.freeze("g_g0"),
    "fail": lambda door: door.client.fail("g_g0", reason="environment_failed", retry=True),
    "attempt": lambda door: door.client.register_attempt("g_g0", 1),
    "abort": lambda door: door.client.abort("g"),
    "register": lambda door: door.client.register_group("g", 1),
}


def test_a_command_finds_a_group_that_is_being_published_closed(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is sent after the rows were judged and before the group is published: it must not be acknowledged."""
    door.register()
    writing, go_on = threading.Event(), threading.Event()
    write = door.service.lake.write_rows

    def slow(rows: Any) -> Any:
        writing.set()
        assert go_on.wait(30)
        return write(rows)

    monkeypatch.setattr(door.service.lake, "write_rows", slow)
    with ThreadPoolExecutor(len(COMMANDS) + 1) as pool:
        published = pool.submit(door.client.publish, "g")
        assert writing.wait(30)
        sent = {name: pool.submit(command, door) for name, command in COMMANDS.items()}
        lock = door.service.publisher._locks.of("g")
        wait_for(door, lambda: len(lock._waiters or ()) == len(COMMANDS))
        assert door.client.rollout("g_g0")["state"] == "open", "reading does not wait"
        go_on.set()
        assert published.result()["n"] == 1
        for name, answer in sent.items():
            assert isinstance(answer.exception(), Conflict), name
    kinds = [event["event_type"] for event in door.events() if event["event_type"].startswith(("group", "rollout"))]
    assert kinds == ["group_registered", "rollout_registered", "rollout_failed", "group_published"]
    assert door.request("GET", "/api/v1/audit").json()["healthy"]


@pytest.mark.parametrize("days", [-400, 400])
def test_a_clock_that_somebody_sets_ends_nothing_and_keeps_nothing_open(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    with opened(rollout_ttl_s=1000.0) as door:
        (rollout,) = door.register("g", deadline_s=1000.0)
        first = ask(door.agent(rollout), [U5])
        real = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: real() + days * 86_400_000_000_000)
        ask(door.agent(rollout), [U5, echo(first), U6])
        door.register("soon", deadline_s=0.01)
        wait_for(door, lambda: state(door, "soon") == "published")
        assert state(door, "g") == "open"
        one, two = door.events("call_committed")
        assert one["call_id"] < two["call_id"]
        assert one["at"] < two["at"] < clock.now_us()
        assert door.client.seal("g_g0", reward=1.0)["reason"] is None
