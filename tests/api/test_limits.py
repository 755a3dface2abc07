"""Rates of requests, and the distribution that a run is pinned to."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from tests.api.conftest import Door, Opener
from tests.api.test_chat import U5
from tests.api.test_gate import chat
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


def sampled(door: Door, path: str, token: str) -> Any:
    door.post(path, {"messages": [U5], **ASKED}, token=token).raise_for_status()
    params = door.engine.params[-1]
    return params.temperature, params.top_p, params.top_k


@pytest.mark.parametrize(
    ("pins", "wanted"),
    [
        ({}, (0.3, 0.4, 5)),
        ({"pin_temperature": 1.0, "pin_top_p": 1.0, "pin_top_k": 0}, (1.0, 1.0, 0)),
        ({"pin_temperature": 0}, (0.0, 0.4, 5)),
    ],
)
def test_what_a_harness_asks_for_does_not_change_a_pinned_distribution(
    opened: Opener, pins: dict[str, Any], wanted: tuple[float, float, int]
) -> None:
    with opened(**pins) as door:
        (rollout,) = door.register()
        path = "/ng-rollout/g_g0/v1/chat/completions"
        assert sampled(door, path, rollout["data_capability"]) == wanted
        assert sampled(door, "/v1/chat/completions", door.client._http.headers["authorization"][7:]) == wanted
        (event,) = door.events("call_committed")
        assert (event["temperature"], event["top_p"], event["top_k"]) == wanted


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
