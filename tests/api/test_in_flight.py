"""B44: whatever ends a rollout while its calls are in flight, its row has them all or is none, and stays as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.api.conftest import Door, Opener
from tests.api.test_chat import U5, U6, ask, echo
from tests.api.test_gate import chat
from tests.api.test_late import held
from tests.api.test_lifecycle import wait_for
from tokenlake.errors import Conflict

ROWS = "SELECT * FROM ready_rows ORDER BY sample_id"
REASONS = "SELECT sample_id, reason FROM ready_rows ORDER BY sample_id"


def published(door: Door) -> bool:
    return door.service.control.groups["g"].state != "open"


ENDS: dict[str, tuple[Callable[[Door], Any], str]] = {
    "seal": (lambda door: door.client.seal("g_g0", reward=1.0), "incomplete"),
    "fail": (lambda door: door.client.fail("g_g0", reason="timeout"), "timeout"),
    "publish": (lambda door: door.client.publish("g"), "never_sealed"),
    "attempt": (lambda door: door.client.register_attempt("g_g0", 1) and door.client.publish("g"), "never_sealed"),
}


@pytest.mark.parametrize("end", ENDS)
def test_calls_that_outlive_their_rollout_are_late_and_change_no_row(opened: Opener, end: str) -> None:
    with opened(seal_wait_s=0.1) as door:
        first, second = door.register(n=2)
        before = ask(door.agent(first), [U5])
        ask(door.agent(second), [U5])
        door.client.seal("g_g1", reward=0.5)
        said: list[int] = []
        threads = [held(door, first, [U5, echo(before), U6, *[U5] * call], said) for call in range(2)]
        how, reason = ENDS[end]
        how(door)
        wait_for(door, lambda: published(door))
        rows = door.service.lake.sql(ROWS).fetchall()
        assert door.service.lake.sql(REASONS).fetchall() == [("g_g0", reason), ("g_g1", None)]
        door.on_loop(door.engine.release)
        for thread in threads:
            thread.join()
        assert said == [409, 409]
        assert len(door.events("call_committed")) == 2
        assert [event["answered"] for event in door.events("call_failed")] == [False, False]
        assert door.service.lake.sql(ROWS).fetchall() == rows
        assert door.request("GET", "/api/v1/audit").json()["healthy"]


def test_one_call_of_two_that_lands_in_time_is_not_enough(opened: Opener) -> None:
    with opened(seal_wait_s=0.1) as door:
        (rollout,) = door.register()
        said: list[int] = []
        landed = held(door, rollout, [U5], said)
        (waiter,) = door.engine._waiting.values()
        late = held(door, rollout, [U5, U6], said)
        door.on_loop(lambda: waiter.set_result(True))
        landed.join()
        assert door.client.seal("g_g0", reward=1.0)["reason"] == "incomplete"
        door.on_loop(door.engine.release)
        late.join()
        assert said == [200, 409]
        wait_for(door, lambda: published(door))
        assert door.service.lake.sql(REASONS).fetchall() == [("g_g0", "incomplete")]


def test_two_seals_at_once_wait_for_the_same_call_and_get_the_same_receipt(door: Door) -> None:
    (rollout,) = door.register()
    before = ask(door.agent(rollout), [U5])
    said: list[int] = []
    threads = [held(door, rollout, [U5, echo(before), U6], said)]
    receipts: list[Any] = []
    for _ in range(2):
        threads.append(threading.Thread(target=lambda: receipts.append(door.client.seal("g_g0", reward=1.0))))
        threads[-1].start()
    wait_for(door, lambda: door.service.control.groups["g"].rollouts["g_g0"].current.closing)
    door.on_loop(door.engine.release)
    for thread in threads:
        thread.join()
    assert said == [200]
    assert receipts[0] == receipts[1]
    assert len(receipts[0]["manifest"]) == 2


def test_a_call_of_an_older_attempt_and_one_that_was_refused_hold_up_nobody(door: Door) -> None:
    (old,) = door.register()
    said: list[int] = []
    zombie = held(door, old, [U5], said)
    new = door.client.register_attempt("g_g0", 1)
    door.engine.hold = False
    assert chat(door, new, [{"role": "nobody", "content": "x"}]).status_code == 400
    ask(door.agent(new), [U5])
    receipt = door.client.seal("g_g0", reward=1.0, attempt=1)
    assert (receipt["reason"], len(receipt["manifest"])) == (None, 1)
    wait_for(door, lambda: published(door))
    rows = door.service.lake.sql(ROWS).fetchall()
    door.on_loop(door.engine.release)
    zombie.join()
    assert said == [409]
    assert door.service.lake.sql(ROWS).fetchall() == rows
    assert door.service.lake.sql("SELECT attempt, turns, reason FROM ready_rows").fetchall() == [(1, 1, None)]


def test_a_freeze_is_refused_while_a_call_is_in_flight_and_holds_afterwards(door: Door) -> None:
    (rollout,) = door.register()
    before = ask(door.agent(rollout), [U5])
    said: list[int] = []
    thread = held(door, rollout, [U5, echo(before), U6], said)
    with pytest.raises(Conflict):
        door.client.freeze("g_g0")
    door.on_loop(door.engine.release)
    thread.join()
    assert door.client.freeze("g_g0")["calls"] == 2
    assert chat(door, rollout, [U5]).status_code == 409
    assert len(door.client.seal("g_g0", reward=1.0)["manifest"]) == 2
