"""`tokenlake worker --engine tiny`: the embedded engine as a process of its own, behind a real gate."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Door, Opener
from tests.api.test_lifecycle import wait_for
from tests.api.test_upstream import backend
from tokenlake.ingest.capture_ask import CALL_PATH, CAPTURE_PATH, WEIGHTS_PATH

pytest.importorskip("torch")
pytestmark = pytest.mark.slow
ASKED: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "tokenlake.api.cli", "worker", "--engine", "tiny", "--with-parent"]
    process = subprocess.Popen(
        [*command, "--lake", str(tmp_path / "lake"), "--worker-id", "w0", "--port", str(port)],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    url = f"http://127.0.0.1:{port}"
    until_up(process, url)
    yield url, process
    assert process.stdin is not None
    process.stdin.close()
    process.wait(60)


def until_up(process: subprocess.Popen[bytes], url: str) -> None:
    with httpx.Client() as client:
        while process.poll() is None:
            with contextlib.suppress(httpx.TransportError):
                assert client.get(url + CAPTURE_PATH).json()["captures"]
                return
    raise AssertionError("the worker ended")


def test_a_worker_over_the_embedded_engine_is_a_worker(
    opened: Opener, worker: tuple[str, subprocess.Popen[bytes]]
) -> None:
    url, process = worker
    with opened(engine=backend(url, "worker")) as door:
        whole, flowing = door.register(n=2)
        assert httpx.put(url + WEIGHTS_PATH, json={"version": 4}).json()["weights"] == "4"
        assert httpx.put(url + WEIGHTS_PATH, json={"version": 3}).status_code == 409
        assert httpx.put(url + WEIGHTS_PATH, json={"version": "5"}).status_code == 400
        assert httpx.post(url + CALL_PATH, json={"messages": ASKED, "logprobs": True}).status_code == 400
        assert played(door, whole, stream=False) == played(door, flowing, stream=True)
        for rollout in (whole, flowing):
            door.client.seal(rollout["rollout_id"], reward=1.0)
        events = door.events("call_committed")
        assert [(e["mode"], e["writer"], e["weight_version"]) for e in events] == [
            ("text", "w0", 4),
            ("token_in", "w0", 4),
        ] * 2
        wait_for(door, lambda: door.service.control.groups["g"].state == "published")
        one, two = door.request("GET", "/api/v1/rows?group_id=g").json()["rows"]
        assert one["sample_mask"] == two["sample_mask"] == 1
        assert [one[name] for name in ("input_ids", "token_mask", "logprobs")] == [
            two[name] for name in ("input_ids", "token_mask", "logprobs")
        ]
        assert door.request("GET", "/api/v1/audit").json()["healthy"]
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) is not None, "it ends with the process that started it"


def played(door: Door, rollout: dict[str, Any], *, stream: bool) -> list[str]:
    agent, said = door.agent(rollout).chat.completions, list[str]()
    messages = [*ASKED]
    for _ in range(2):
        asked: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 12, "temperature": 0}
        if stream:
            chunks = agent.create(**asked, stream=True)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        else:
            text = agent.create(**asked).choices[0].message.content or ""
        said.append(text)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And again?"}]
    return said
