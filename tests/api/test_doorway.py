"""Bytes of HTTP bodies, counted hop by hop."""

from __future__ import annotations

import json

from tests.api.conftest import TOKEN, Door, Opener
from tests.api.stub_upstream import stub_upstream
from tests.api.test_chat import U5
from tests.api.test_lifecycle import wait_for
from tests.api.test_upstream import served

BODY = json.dumps({"model": "m", "messages": [U5]}).encode()


def counted(door: Door, peer: str) -> tuple[int, int]:
    """In and out, as `/metrics` says."""
    lines = door.request("GET", "/metrics").text.splitlines()
    sizes = dict(line.rsplit(" ", 1) for line in lines if line.startswith("http_bytes_total{"))
    names = (f'http_bytes_total{{direction="{direction}",peer="{peer}"}}' for direction in ("in", "out"))
    into, out = (int(float(sizes.get(name, 0))) for name in names)
    return into, out


def post(door: Door, path: str, key: str) -> int:
    answer = door.http.post(path, content=BODY, headers={"Authorization": f"Bearer {key}"})
    assert answer.is_success
    return len(answer.content)


def test_each_peer_has_the_bytes_of_its_bodies(door: Door) -> None:
    (rollout,) = door.register()
    known = counted(door, "trainer")
    assert min(known) > 0
    size = post(door, "/ng-rollout/g_g0/v1/chat/completions", rollout["data_capability"])
    wait_for(door, lambda: counted(door, "agent")[1] > 0)
    assert counted(door, "agent") == (len(BODY), size)
    assert counted(door, "plain") == (0, 0)
    size = post(door, "/v1/chat/completions", TOKEN)
    assert counted(door, "plain") == (len(BODY), size)
    assert counted(door, "trainer") == known
    assert counted(door, "worker") == (0, 0)


def test_the_servers_behind_the_gate_are_a_hop_of_their_own(opened: Opener) -> None:
    with stub_upstream() as stub, served(opened, stub) as door:
        counted(door, "worker")
        before = counted(door, "worker")
        size = post(door, "/v1/chat/completions", TOKEN)
        into, out = counted(door, "worker")
        assert (into - before[0], out - before[1]) == (size, len(BODY))
        (rollout,) = door.register()
        post(door, "/ng-rollout/g_g0/v1/chat/completions", rollout["data_capability"])
        assert all(now > then for now, then in zip(counted(door, "worker"), (into, out), strict=True))
