"""The client over connections that break, and its errors on their way through a process pool."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any, get_type_hints

import pytest

from tests.api.conftest import TOKEN, Door
from tests.api.test_chat import U5, ask
from tokenlake import errors
from tokenlake.api import results
from tokenlake.api.client import AsyncClient, Client
from tokenlake.errors import Conflict, Deadline, EngineFailed, InvalidInput, TokenlakeError


class Lossy:
    """Passes requests on to a service; the answers to the first `losses` of them are lost on the way back."""

    def __init__(self, door: Door, losses: int) -> None:
        host, port = door.url.removeprefix("http://").split(":")
        self._behind = (host, int(port))
        self._losses = losses
        self.passed = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                front, _ = self._listener.accept()
            except OSError:
                return
            with front, socket.create_connection(self._behind) as back:
                threading.Thread(target=self._forward, args=(front, back), daemon=True).start()
                while answer := back.recv(65536):
                    self.passed += 1
                    if self.passed <= self._losses:
                        front.shutdown(socket.SHUT_RDWR)
                        break
                    front.sendall(answer)

    @staticmethod
    def _forward(front: socket.socket, back: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while request := front.recv(65536):
                back.sendall(request)
            back.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def lossy(door: Door) -> Iterator[Lossy]:
    proxy = Lossy(door, 1)
    yield proxy
    proxy.close()


def test_a_registration_whose_answer_was_lost_is_asked_for_again(door: Door, lossy: Lossy) -> None:
    with Client(lossy.url, TOKEN) as client:
        (slot,) = client.register_group("g", 1)["rollouts"]
    assert lossy.passed >= 2
    assert len(door.events("group_registered")) == 1
    ask(door.agent({**slot, "base_url": f"{door.url}/ng-rollout/g_g0/v1"}), [U5])
    with pytest.raises(Conflict):
        door.client.register_group("g", 1)


def test_a_seal_whose_answer_was_lost_is_one_seal(door: Door, lossy: Lossy) -> None:
    ask(door.agent(door.register()[0]), [U5])

    async def seal() -> Any:
        async with AsyncClient(lossy.url, TOKEN) as client:
            return await client.seal("g_g0", reward=1.0)

    receipt = asyncio.run(seal())
    assert lossy.passed >= 2
    assert receipt["reason"] is None
    assert len(door.events("rollout_sealed")) == 1


def test_a_dead_service_is_an_error_and_a_silent_one_a_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with Client(url, TOKEN, deadline_s=0.2) as client, pytest.raises(Deadline):
            client.group("g")
    with Client(url, TOKEN, retry_s=0.2) as client, pytest.raises(EngineFailed):
        client.group("g")


def test_a_reward_that_is_no_number_is_refused_before_it_is_sent() -> None:
    with Client("http://127.0.0.1:1", TOKEN, retry_s=0.0) as client, pytest.raises(InvalidInput, match="reward"):
        client.seal("g_g0", reward=float("nan"))


def test_lists_and_audits_come_as_the_service_has_them(door: Door) -> None:
    door.register("a")
    door.register("b")
    page = door.client.groups(limit=1)
    assert ([group["group_id"] for group in page["groups"]], page["next"]) == (["a"], "a")
    assert [group["group_id"] for group in door.client.groups(after="a")["groups"]] == ["b"]
    assert door.client.audit()["healthy"]
    assert [worker["worker_id"] for worker in door.client.workers()] == ["embedded"]


def test_every_answer_has_the_keys_of_its_type(door: Door) -> None:
    (slot,) = door.register()
    found: dict[str, Any] = {"Slot": slot, "WeightVersion": door.client.set_weight_version(9)}
    ask(door.agent(slot), [U5])
    found["Boundary"] = door.client.freeze("g_g0")
    found["Receipt"] = door.client.seal("g_g0", reward=1.0)
    found["Entry"] = found["Receipt"]["manifest"][0]
    found["Published"] = door.client.publish("g")
    found["RolloutState"] = door.client.rollout("g_g0")
    found["GroupState"] = door.client.group("g")
    found["GroupPage"] = door.client.groups()
    found["RegisteredGroup"] = door.client.register_group("h", 1)
    found["Ended"] = door.client.fail("h_g0", reason="timeout")
    found["AuditReport"] = door.client.audit()
    found["SqlResult"] = door.client.sql("SELECT 1 AS one")
    assert sorted(found) == sorted(results.__all__)
    for name, answer in found.items():
        assert set(answer) == set(get_type_hints(getattr(results, name))), name


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "MissingExtra"])
def test_errors_survive_the_way_through_a_process_pool(name: str) -> None:
    error: TokenlakeError = getattr(errors, name)("what, where and what to do", retry_after_s=1.5, call_id="c")
    rebuild, arguments = error.__reduce__()[:2]
    again = rebuild(*arguments)
    assert (type(again), again.message, again.detail) == (type(error), error.message, error.detail)
