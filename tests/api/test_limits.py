"""Rates of requests, and the distribution that a run is pinned to."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.api.conftest import TOKEN, Door, Opener
from tests.api.stub_upstream import PATHS as UPSTREAM_PATHS
from tests.api.stub_upstream import stub_upstream
from tests.api.test_chat import U5
from tests.api.test_gate import chat
from tests.api.test_http import published
from tests.api.test_lifecycle import wait_for
from tests.api.test_upstream import backend
from tokenlake.api.cli import main
from tokenlake.api.limits import Limits
from tokenlake.api.settings import Settings
from tokenlake.errors import Busy, ConfigError


def test_a_rate_lets_its_allowance_through_and_then_one_at_a_time() -> None:
    now = [1000.0]
    limits = Limits(6, None, lambda: now[0])
    for _ in range(6):
        limits.count("g_g0")
    with pytest.raises(Busy) as refused:
        limits.count("g_g0")
    assert refused.value.detail["retry_after_s"] == pytest.approx(10)
    limits.count("g_g1")
    now[0] += 10
    limits.count("g_g0")
    with pytest.raises(Busy):
        limits.count("g_g0")
    now[0] += 60
    for _ in range(6):
        limits.count("g_g0")


def test_who_has_to_wait_is_never_told_no_time_at_all() -> None:
    now = [0.0]
    limits = Limits(60, None, lambda: now[0])
    for _ in range(60):
        limits.count("g_g0")
    now[0] = 0.999
    with pytest.raises(Busy, match="wait 1 s"):
        limits.count("g_g0")


def test_what_is_refused_for_one_limit_does_not_count_for_the_other() -> None:
    limits = Limits(1, 3, lambda: 0.0)
    limits.count("g_g0")
    for _ in range(5):
        with pytest.raises(Busy):
            limits.count("g_g0")
    limits.count("g_g1")
    limits.count("g_g2")
    with pytest.raises(Busy, match="this service"):
        limits.count("g_g3")


def test_rates_of_the_past_are_forgotten() -> None:
    now = [0.0]
    limits = Limits(60, None, lambda: now[0])
    for index in range(10_000):
        now[0] += 1
        limits.count(f"g_g{index}")
    assert len(limits._spent) < 5000


def test_a_rollout_that_asks_too_often_is_told_when_to_come_back(opened: Opener) -> None:
    with opened(rollout_requests_per_minute=2) as door:
        first, second = door.register(n=2)
        assert [chat(door, first, [U5]).status_code for _ in range(3)] == [200, 200, 429]
        refused = chat(door, first, [U5])
        assert 0 < int(refused.headers["retry-after"]) <= 30
        assert refused.json()["error"]["code"] == "busy"
        assert chat(door, second, [U5]).status_code == 200
        assert len(door.engine.prompts) == 3
        door.client.seal("g_g1", reward=1.0)


def test_all_rollouts_together_may_have_a_limit(opened: Opener) -> None:
    with opened(service_requests_per_minute=3) as door:
        rollouts = door.register(n=4)
        assert [chat(door, rollout, [U5]).status_code for rollout in rollouts] == [200, 200, 200, 429]


ASKED = {"temperature": 0.3, "top_p": 0.4, "top_k": 5}


PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}
PINS = [
    ({}, (0.3, 0.4, 5)),
    ({"pin_temperature": 1.0, "pin_top_p": 1.0, "pin_top_k": 0}, (1.0, 1.0, 0)),
    ({"pin_temperature": 0}, (0.0, 0.4, 5)),
]


def sampled(door: Door, path: str, token: str) -> Any:
    body = {"input": "a"} if path.endswith("responses") else {"messages": [U5], "max_tokens": 9}
    door.post(path, {**body, **ASKED}, token=token).raise_for_status()
    params = door.engine.params[-1]
    return params.temperature, params.top_p, params.top_k


@pytest.mark.parametrize(("pins", "wanted"), PINS)
@pytest.mark.parametrize("dialect", PATHS)
def test_what_a_harness_asks_for_does_not_change_a_pinned_distribution(
    opened: Opener, dialect: str, pins: dict[str, Any], wanted: tuple[float, float, int]
) -> None:
    with opened(**pins) as door:
        (rollout,) = door.register()
        assert sampled(door, f"/ng-rollout/g_g0{PATHS[dialect]}", rollout["data_capability"]) == wanted
        assert sampled(door, PATHS[dialect], TOKEN) == wanted
        (event,) = door.events("call_committed")
        assert (event["temperature"], event["top_p"], event["top_k"]) == wanted


@pytest.mark.parametrize(("pins", "wanted"), PINS[1:])
@pytest.mark.parametrize("route", ["completions", "generate"])
def test_pins_act_on_an_upstream_too(
    opened: Opener, route: str, pins: dict[str, Any], wanted: tuple[float, float, int]
) -> None:
    with stub_upstream() as stub:
        stub.missing = {path for name, path in UPSTREAM_PATHS.items() if name != route}
        with opened(engine=backend(stub.url, **pins), **pins) as door:
            (rollout,) = door.register()
            for path, token in (("/ng-rollout/g_g0/v1", rollout["data_capability"]), ("/v1", TOKEN)):
                stub.bodies.clear()
                asked = {"messages": [U5], **ASKED}
                door.post(f"{path}/chat/completions", asked, token=token).raise_for_status()
                (given,) = stub.bodies
                assert (given["temperature"], given["top_p"], given.get("top_k", 0)) == wanted
            (event,) = door.events("call_committed")
            assert (event["temperature"], event["top_p"], event["top_k"]) == wanted


def test_pins_that_cannot_act_are_refused_at_start(opened: Opener, tmp_path: Path, capsys: Any) -> None:
    with stub_upstream() as stub:
        arguments = ["serve", "--lake", str(tmp_path / "none"), "--upstream", stub.url, "--capture", "off"]
        assert main([*arguments, "--set", "pin_temperature=1", "--set", "pin_top_k=0"]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("tokenlake: pin_temperature, pin_top_k cannot act with --capture off")
        assert (said.err.count("\n"), said.out, stub.asked) == (1, "", [])
        off = backend(stub.url, "off")
        with pytest.raises(ConfigError, match="pin_top_p cannot act"), opened(engine=off, pin_top_p=1.0):
            pass


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pin_temperature", -0.1),
        ("pin_temperature", 2.1),
        ("pin_temperature", "1"),
        ("pin_top_p", 0),
        ("pin_top_p", 1.5),
        ("pin_top_k", -1),
        ("pin_top_k", 1.5),
        ("pin_top_k", True),
        ("rollout_requests_per_minute", 0),
        ("service_requests_per_minute", 0.5),
        ("pin_temperature", float("nan")),
        ("call_deadline_s", float("nan")),
    ],
)
def test_a_wrong_pin_or_limit_is_refused_at_start(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Settings.parse({name: value})


def test_a_body_that_does_not_arrive_is_given_up(opened: Opener) -> None:
    with opened(body_deadline_s=0.1) as door:
        (rollout,) = door.register()
        host, port = door.url.removeprefix("http://").split(":")
        head = (
            f"POST /ng-rollout/g_g0/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
            f"x-api-key: {rollout['data_capability']}\r\nContent-Length: 100\r\n\r\n"
        )
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(head.encode() + b'{"messages"')
            assert connection.recv(4096).startswith(b"HTTP/1.1 504")
        assert chat(door, rollout, [U5]).is_success


def test_a_service_says_how_long_it_took_to_be_ready(opened: Opener, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tick_s=1000) as door:
        chat(door, door.register(n=3)[0], [U5])
    with caplog.at_level(logging.INFO, "tokenlake"), opened() as door:
        assert "3 open rollouts, 7 events folded" in caplog.text
        line = next(x for x in door.request("GET", "/metrics").text.splitlines() if x.startswith("gate_start_seconds "))
        assert 0 < float(line.split()[1]) < 60


class Disk:
    """What the disk of the lake says is free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free = 1 << 40
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=self.free, f_frsize=1, f_files=0))


SPEAKERS = {
    "chat/completions": {"messages": [U5]},
    "responses": {"input": "5"},
    "messages": {"messages": [U5], "max_tokens": 9},
}


@pytest.mark.parametrize("dialect", SPEAKERS)
def test_a_disk_below_its_floor_takes_no_call_and_gives_every_answer(
    opened: Opener, monkeypatch: pytest.MonkeyPatch, dialect: str
) -> None:
    disk = Disk(monkeypatch)
    with opened(min_free_bytes=1000) as door:
        (rollout,) = published(door, 1, "old")
        (rollout,) = door.register()
        asked = len(door.engine.prompts)

        def call() -> Any:
            path = f"/ng-rollout/g_g0/v1/{dialect}"
            return door.post(path, {"model": "m", **SPEAKERS[dialect]}, token=rollout["data_capability"])

        for free in (999, 0):
            disk.free = free
            refused = call()
            assert refused.status_code == 503
            assert ("storage_failed" in refused.text) is (dialect != "messages")  # Anthropic has no such word
            assert "stored now" in refused.json()["error"]["message"]
            assert str(door.service.lake.path) not in refused.text, "an agent learns no folder of this machine"
            assert len(door.engine.prompts) == asked
            assert door.request("GET", "/api/v1/rows").json()["rows"]
            assert door.request("GET", "/api/v1/audit").json()["healthy"]
            assert door.post("/api/v1/sql", {"sql": "SELECT count(*) FROM deltas"}).is_success
        assert door.request("PUT", "/api/v1/groups/h", {"n": 1}).status_code == 503
        disk.free = 1000
        assert call().is_success
        assert door.client.seal("g_g0", reward=1.0)["reason"] is None


def test_a_call_under_way_when_the_floor_is_reached_is_named_and_written_down(
    opened: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch)
    with opened(min_free_bytes=1000) as door:
        (rollout,) = door.register()
        generate = door.engine.generate

        async def slow(*arguments: Any, **named: Any) -> Any:
            disk.free = 500
            return await generate(*arguments, **named)

        door.engine.generate = slow
        assert chat(door, rollout, [U5]).is_success
        (failed,) = door.events("call_failed")
        assert (failed["reason"], failed["answered"]) == ("disk_full", True)
        assert 'gate_capture_failures_total{reason="disk_full"} 1.0' in door.request("GET", "/metrics").text
        assert chat(door, rollout, [U5]).status_code == 503


def test_calls_beyond_the_bound_in_flight_are_refused_before_their_bodies_are_read(opened: Opener) -> None:
    with opened(max_in_flight=2) as door:
        rollouts = door.register(n=4)
        go_on = asyncio.Event()
        generate = door.engine.generate

        async def slow(*arguments: Any, **named: Any) -> Any:
            await go_on.wait()
            return await generate(*arguments, **named)

        door.engine.generate = slow
        host, port = door.url.removeprefix("http://").split(":")
        head = (
            f"POST /ng-rollout/g_g1/v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
            f"x-api-key: {rollouts[1]['data_capability']}\r\nContent-Length: 100\r\n\r\n"
        )
        with socket.create_connection((host, int(port)), timeout=30) as unfinished:
            unfinished.sendall(head.encode())  # whoever sends slowly holds a place as well
            done: list[int] = []
            first = threading.Thread(target=lambda: done.append(chat(door, rollouts[0], [U5]).status_code))
            first.start()
            wait_for(door, lambda: door.service.slots.taken == 2)
            refused = chat(door, rollouts[2], [U5])
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "busy")
            assert int(refused.headers["retry-after"]) >= 1
            assert door.post("/v1/chat/completions", {"messages": [U5]}).status_code == 429
            assert door.request("GET", "/readyz").is_success
        wait_for(door, lambda: door.service.slots.taken == 1)
        door.on_loop(go_on.set)
        assert chat(door, rollouts[2], [U5]).is_success
        first.join()
        assert done == [200]
        assert chat(door, rollouts[3], [U5]).is_success
        assert door.post("/v1/chat/completions", {"messages": []}).status_code == 400
        assert door.service.slots.taken == 0
