"""Answers that are lost on their way, and the SDKs' own retries: one call, sampled once, whoever asks again."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.api.conftest import Door
from tests.api.speakers import Speaker
from tests.api.test_dialects import ASK, MORE, THINKING, results, speaking
from tests.api.test_lifecycle import wait_for


class Lossy:
    """A way to the service on which answers are lost: `losses` has, for each connection, how much of one arrives."""

    def __init__(self, url: str, losses: list[float]) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._to = (host, int(port))
        self._losses = losses
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                thread = threading.Thread(target=self._carry, args=(client,))
                self._threads.append(thread)
                thread.start()

    def _carry(self, client: socket.socket) -> None:
        """One request and its answer; the service closes its connection after it, and so does this."""
        with client, socket.create_connection(self._to) as service:
            service.sendall(_whole(client).replace(b"onnection: keep-alive", b"onnection: close", 1))
            answer = b"".join(iter(lambda: service.recv(65536), b""))
            share = self._losses.pop(0) if self._losses else 1.0
            client.sendall(answer[: int(share * len(answer))])


def _whole(client: socket.socket) -> bytes:
    request = b""
    while b"\r\n\r\n" not in request:
        request += client.recv(65536)
    head, _, body = request.partition(b"\r\n\r\n")
    length = int(
        next(line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))
    )
    while len(body) < length:
        more = client.recv(65536)
        request, body = request + more, body + more
    return request


@contextlib.contextmanager
def lossy(door: Door, rollout: dict[str, Any], *losses: float) -> Iterator[dict[str, Any]]:
    way = Lossy(door.url, list(losses))
    try:
        yield {**rollout, "base_url": rollout["base_url"].replace(door.url, way.url)}
    finally:
        way.close()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDKs ask again without waiting."""
    for sdk in (openai, anthropic):
        monkeypatch.setattr(sdk._base_client.BaseClient, "_calculate_retry_timeout", lambda *_, **__: 0.0)


@speaking
@pytest.mark.parametrize(
    ("stream", "losses"),
    [(False, [0.0]), (False, [0.5]), (False, [0.0, 0.9]), (True, [0.0]), (True, [0.0, 0.0])],
    ids=["whole-lost", "whole-cut", "whole-twice", "stream-lost", "stream-lost-twice"],
)
def test_a_lost_answer_is_asked_for_again_and_is_the_same(
    door: Door, speaker: type[Speaker], stream: bool, losses: list[float]
) -> None:
    """Of a stream whose beginning arrived an SDK asks for nothing again: its user does."""
    (rollout,) = door.register()
    door.engine.answers = [THINKING]
    with lossy(door, rollout, *losses) as way:
        agent = speaker(door, way, max_retries=2)
        said = agent.say([ASK], stream=stream)
        door.agents.close()
    (event,) = door.events("call_committed")
    assert said.call_id == event["call_id"]
    assert len(door.engine.prompts) == 1
    last = speaker(door, rollout).say([ASK, said, *results(said)])
    assert [event["mode"] for event in door.events("call_committed")] == ["text", "token_in"]
    receipt = door.client.seal("g_g0", reward=1.0)
    assert (receipt["terminal_call_id"], receipt["reason"]) == (last.call_id, None)


@speaking
def test_a_stream_that_broke_is_asked_for_again_with_its_key(door: Door, speaker: type[Speaker]) -> None:
    (rollout,) = door.register()
    door.engine.answers = [THINKING]
    keyed = {"extra_headers": {"Idempotency-Key": "k"}}
    with lossy(door, rollout, 0.8) as way:
        with pytest.raises(Exception, match=r"peer closed|Connection error"):  # each SDK names it otherwise
            speaker(door, way, max_retries=2).say([ASK], stream=True, **keyed)
        door.agents.close()
    wait_for(door, lambda: len(door.events("call_committed")) == 1)
    said = speaker(door, rollout).say([ASK], stream=True, **keyed)
    (event,) = door.events("call_committed")
    assert said.call_id == event["call_id"]
    assert len(door.engine.prompts) == 1
    speaker(door, rollout).say([ASK, said, *results(said), MORE])
    assert door.client.seal("g_g0", reward=1.0)["reason"] is None
