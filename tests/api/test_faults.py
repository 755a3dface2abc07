"""Faults at the gate's door, each with its outcome: disks, workers, engines and clients that fail at every step."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import Door, Opener
from tests.api.scripted_engine import text
from tests.api.speakers import SPEAKERS, Speaker
from tests.api.test_chat import U5, U6, ask, echo
from tests.api.test_dialects import ASK
from tests.api.test_gate import chat, hang_up
from tests.api.test_lifecycle import call_id, wait_for
from tokenlake.errors import Conflict, EngineFailed, StorageFailed, TooLarge
from tokenlake.ingest.coords import Coords
from tokenlake.store.delta import Delta
from tokenlake.store.segment import SegmentWriter


def fill_disk(segments: SegmentWriter) -> None:
    """The next write into this segment meets a full disk; a later segment has room again."""
    assert segments._fd >= 0
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, segments._fd)
    os.close(full)


def delta_segments(door: Door) -> SegmentWriter:
    return door.service.recorder._capture._writer._segments  # type: ignore[attr-defined]


def current(door: Door, name: str = "g_g0") -> Any:
    return door.service.control.groups["g"].rollouts[name].current


def test_a_full_disk_under_a_delta_answers_poisons_and_the_next_rollout_is_sound(opened: Opener) -> None:
    with opened() as door:
        first, second = door.register(n=2)
        agent = door.agent(first)
        before = ask(agent, [U5])
        fill_disk(delta_segments(door))
        after = ask(agent, [U5, echo(before), U6])
        assert after.choices[0].message.content == text(3)
        (failed,) = door.events("call_failed")
        assert (failed["reason"], failed["answered"]) == ("stage_failed", True)
        ask(door.agent(second), [U5])
        assert door.client.seal("g_g1", reward=1.0)["reason"] is None
    with opened() as door:
        receipt = door.client.seal("g_g0", reward=1.0)
        assert (receipt["poisoned"], receipt["reason"]) == (True, "capture_failed")
        assert [entry["call_id"] for entry in receipt["manifest"]] == [call_id(before)]


def test_a_full_disk_under_lineage_answers_and_poisons_also_after_a_restart(opened: Opener) -> None:
    with opened() as door:
        (rollout,) = door.register()
        fill_disk(door.service.lake.lineage._segments)
        assert ask(door.agent(rollout), [U5]).choices[0].message.content == text(3)
        assert not door.events("call_committed")
    with opened() as door:
        assert door.events("call_failed")[0]["reason"] == "commit_failed"
        receipt = door.client.seal("g_g0", reward=1.0)
        assert (receipt["poisoned"], receipt["reason"]) == (True, "capture_failed")


class Full:
    """A lineage log that takes nothing while it is full."""

    def __init__(self, door: Door) -> None:
        self.ledger, self.log, self.full = door.service.ledger, door.service.ledger._lineage, True
        self.ledger._lineage = self

    def append_each(self, batches: Any) -> Any:
        if self.full:
            raise StorageFailed("the disk is full")
        return self.log.append_each(batches)


def test_what_lineage_can_say_nothing_of_is_not_answered_and_spoils_nothing(opened: Opener) -> None:
    with opened() as door:
        (rollout,) = door.register()
        disk = Full(door)
        refused = chat(door, rollout, [U5])
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_failed")
        assert text(3) not in refused.text
        with pytest.raises(Exception, match="disk is full"):
            door.client.seal("g_g0", reward=1.0)
        disk.full = False
        assert chat(door, rollout, [U5], x_stainless_retry_count="1").is_success
        assert len(door.engine.prompts) == 2
    with opened() as door:
        receipt = door.client.seal("g_g0", reward=1.0)
        assert (receipt["poisoned"], receipt["reason"], len(receipt["manifest"])) == (False, None, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"call_id": "another"},
        {"rollout_id": "g_g1"},
        {"attempt": 1},
        {"parent_call_id": None},
        {"prev_len": 1},
        {"delta_len": 1},
        {"cum_len": 3},
        {"sampled_tokens": 9},
        {"chain_hash": None},
    ],
)
def test_coordinates_that_contradict_what_was_asked_are_not_committed(door: Door, wrong: dict[str, Any]) -> None:
    first, _ = door.register(n=2)
    agent = door.agent(first)
    before = ask(agent, [U5])
    build = door.service.recorder._capture.build

    def contradicting(*given: Any, **more: Any) -> tuple[Coords, Delta | None]:
        coords, delta = build(*given, **more)
        return replace(coords, **wrong), delta

    door.service.recorder._capture.build = contradicting
    assert ask(agent, [U5, echo(before), U6]).choices[0].message.content == text(3)
    assert len(door.events("call_committed")) == 1
    (failed,) = door.events("call_failed")
    assert (failed["reason"], failed["answered"], failed["rollout_id"]) == ("coords_contradict", True, "g_g0")
    assert door.client.seal("g_g0", reward=1.0)["poisoned"]
    assert not door.client.seal("g_g1", reward=1.0)["poisoned"]


def test_a_delta_that_a_dead_service_staged_and_never_committed_is_in_no_row(opened: Opener) -> None:
    with opened() as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        before = ask(agent, [U5])
        disk = Full(door)  # as if it had died between stage and commit: the delta is there, no event, no answer
        assert chat(door, rollout, [U5, echo(before), U6]).status_code == 503
        disk.full = False
        url = door.url
    with opened() as door:
        moved = {**rollout, "base_url": rollout["base_url"].replace(url, door.url)}
        last = ask(door.agent(moved), [U5, echo(before), U6])
        receipt = door.client.seal("g_g0", reward=1.0)
        assert [entry["call_id"] for entry in receipt["manifest"]] == [call_id(before), call_id(last)]
        assert receipt["reason"] is None
        audit = door.request("GET", "/api/v1/audit").json()
        assert (audit["healthy"], audit["kinds"]) == (True, {"uncommitted_record": 1})


def test_an_engine_that_dies_poisons_nothing(door: Door) -> None:
    (rollout,) = door.register()
    agent = door.agent(rollout)
    before = ask(agent, [U5])
    generate = door.engine.generate

    async def dead(*_: Any, **__: Any) -> Any:
        raise EngineFailed("the engine is gone")

    door.engine.generate = dead
    with pytest.raises(openai.InternalServerError):
        ask(agent, [U5, echo(before), U6])
    (failed,) = door.events("call_failed")
    assert (failed["reason"], failed["answered"]) == ("engine_failed", False)
    door.engine.generate = generate
    last = ask(agent, [U5, echo(before), U6])
    receipt = door.client.seal("g_g0", reward=1.0)
    assert (receipt["terminal_call_id"], receipt["reason"]) == (call_id(last), None)


@contextlib.contextmanager
def held_back(door: Door, kind: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Events of one kind wait at the disk: whether one has come, and what lets it go on."""
    reached, go_on = threading.Event(), threading.Event()
    log = door.service.ledger._lineage

    class Slow:
        def append_each(self, batches: Any) -> Any:
            if any(events[0]["event_type"] == kind for events in batches):
                reached.set()
                assert go_on.wait(30)
            return log.append_each(batches)

    door.service.ledger._lineage = Slow()
    yield reached, go_on
    door.service.ledger._lineage = log


def hang_up_during_commit(door: Door, rollout: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """The client goes away after the delta was staged and before a byte of its answer."""
    with held_back(door, "call_committed") as (reached, go_on):
        connection = hang_up(door, rollout, messages)
        assert reached.wait(30)
        connection.close()
        wait_for(door, lambda: next(iter(door.service.gate._flights)).gone)
        go_on.set()
        wait_for(door, lambda: bool(current(door, rollout["rollout_id"]).undelivered))


def test_a_retry_that_meets_its_own_call_being_aborted_is_sampled_anew(door: Door) -> None:
    (rollout,) = door.register()
    key = "Idempotency-Key: k"
    door.engine.hold = True
    with held_back(door, "call_failed") as (reached, go_on), ThreadPoolExecutor() as pool:
        connection = hang_up(door, rollout, [U5], key)
        wait_for(door, lambda: bool(door.engine._waiting))
        connection.close()
        assert reached.wait(30)
        door.engine.hold = False
        again = pool.submit(chat, door, rollout, [U5], Idempotency_Key="k")
        wait_for(door, lambda: door.service.slots.taken == 2)
        go_on.set()
        assert again.result().status_code == 200
    assert [event["reason"] for event in door.events("call_failed")] == ["client_disconnected"]
    assert len(door.events("call_committed")) == 1
    assert door.client.seal("g_g0", reward=1.0)["reason"] is None


def test_an_undelivered_answer_stays_undelivered_after_a_restart(opened: Opener) -> None:
    with opened() as door:
        (rollout,) = door.register()
        before = ask(door.agent(rollout), [U5])
        hang_up_during_commit(door, rollout, [U5, echo(before), U6])
        assert len(door.events("call_committed")) == 2
    with opened() as door:
        assert len(current(door).undelivered) == 1
        assert not current(door).failures
        receipt = door.client.seal("g_g0", reward=1.0)
        assert (receipt["terminal_call_id"], receipt["poisoned"]) == (call_id(before), False)
        assert len(receipt["manifest"]) == 2


def test_an_answer_that_a_retry_got_after_all_counts_also_after_a_restart(opened: Opener) -> None:
    with opened() as door:
        (rollout,) = door.register()
        before = ask(door.agent(rollout), [U5])
        hang_up_during_commit(door, rollout, [U5, echo(before), U6])
        retried = chat(door, rollout, [U5, echo(before), U6], x_stainless_retry_count="1").json()
        assert len(door.engine.prompts) == 2
    with opened() as door:
        assert not current(door).undelivered
        receipt = door.client.seal("g_g0", reward=1.0)
        assert receipt["terminal_call_id"] == retried["id"].removeprefix("chatcmpl-")


def test_many_calls_of_many_rollouts_in_flight_at_once_each_get_their_own_answer(door: Door) -> None:
    """Two calls of every rollout are in flight together; then each of both is continued exactly."""
    rollouts = door.register(n=24)
    answers: dict[tuple[str, int], dict[str, Any]] = {}

    def one(rollout: dict[str, Any], turn: int) -> None:
        asked = [{"role": "user", "content": f"{rollout['rollout_id']} {turn}"}]
        first = chat(door, rollout, asked).json()["choices"][0]["message"]
        second: httpx.Response = chat(door, rollout, [*asked, first, U6])
        answers[rollout["rollout_id"], turn] = second.json()

    threads = [threading.Thread(target=one, args=(rollout, turn)) for rollout in rollouts for turn in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = {event["call_id"]: event for event in door.events("call_committed")}
    assert len(events) == 96
    for (name, _), answer in answers.items():
        event = events[answer["id"].removeprefix("chatcmpl-")]
        parent = events[event["parent_call_id"]]
        assert (event["rollout_id"], parent["rollout_id"]) == (name, name)
        assert event["prev_len"] == parent["cum_len"]
    assert not door.events("call_failed")


def odd(*_: Any, **__: Any) -> Any:
    raise KeyError("nobody foresaw this")


async def odd_engine(*_: Any, **__: Any) -> Any:
    raise KeyError("nobody foresaw this")


def refused_by_template(*_: Any, **__: Any) -> Any:
    raise ValueError("roles must alternate")


def too_big(*_: Any, **__: Any) -> Any:
    raise TooLarge("the engine takes no such prompt")


UNFORESEEN: dict[str, tuple[str, Any]] = {
    "generate": ("engine.generate", odd_engine),
    "render": ("engine.render_text", odd),
    "parse": ("engine.parse", odd),
    "stage": ("service.recorder._capture.build", odd),
}


@contextlib.contextmanager
def replaced(door: Door, path: str, by: Any) -> Iterator[None]:
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, door)
    real = getattr(owner, name)
    setattr(owner, name, by)
    yield
    setattr(owner, name, real)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("speaker", SPEAKERS)
@pytest.mark.parametrize("where", UNFORESEEN)
def test_what_nobody_foresaw_is_an_event_and_a_line_in_the_log(
    door: Door, caplog: pytest.LogCaptureFixture, speaker: type[Speaker], where: str, stream: bool
) -> None:
    """Text that a stream has sent before makes it an answered failure; nothing else does."""
    (rollout,) = door.register()
    agent = speaker(door, rollout)
    before = agent.say([ASK])
    with replaced(door, *UNFORESEEN[where]):
        answer = agent.raw([ASK, before, ASK], stream=stream)
    sent = stream and "\\u0003" in answer.text  # the scripted answer
    assert answer.status_code == 500 or stream
    assert "something went wrong here" in answer.text
    assert "foresaw" not in answer.text
    (failed,) = door.events("call_failed")
    assert (failed["reason"], failed["answered"]) == ("internal", sent)
    assert not current(door).inflight
    assert [record.exc_info is not None for record in caplog.records if "foresaw" in str(record.exc_info)] == [True]
    last = agent.say([ASK, before, ASK])
    receipt = door.client.seal("g_g0", reward=1.0, terminal_call_id=last.call_id)
    assert (receipt["poisoned"], receipt["reason"]) == ((True, "capture_failed") if sent else (False, None))


def test_an_error_after_the_commit_leaves_an_undelivered_answer(door: Door) -> None:
    (rollout,) = door.register()
    before = ask(door.agent(rollout), [U5])
    with replaced(door, "service.gate._answers.put", odd):
        assert chat(door, rollout, [U5, echo(before), U6]).status_code == 500
    assert len(current(door).undelivered) == 1
    assert not current(door).failures
    receipt = door.client.seal("g_g0", reward=1.0)
    assert (receipt["terminal_call_id"], receipt["poisoned"]) == (call_id(before), False)


@pytest.mark.parametrize(
    ("where", "by", "status", "reason"),
    [("engine.render", refused_by_template, 400, "refused"), ("engine.render", too_big, 413, "engine_failed")],
)
def test_what_is_refused_before_inference_is_a_named_event(
    door: Door, where: str, by: Any, status: int, reason: str
) -> None:
    (rollout,) = door.register()
    with replaced(door, where, by):
        assert chat(door, rollout, [U5]).status_code == status
    (failed,) = door.events("call_failed")
    assert (failed["reason"], failed["answered"]) == (reason, False)
    ask(door.agent(rollout), [U5])
    assert door.client.seal("g_g0", reward=1.0)["reason"] is None


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("same", [True, False], ids=["same-record", "another-record"])
def test_a_call_is_committed_once_however_often_its_worker_says_so(door: Door, at_once: bool, same: bool) -> None:
    door.register()
    ledger = door.service.ledger
    event: dict[str, Any] = {
        "group_id": "g",
        "rollout_id": "g_g0",
        "attempt": 0,
        "call_id": "c0",
        "mode": "text",
        "prev_len": 0,
        "delta_len": 1,
        "cum_len": 1,
        "sampled_tokens": 1,
        "chain_hash": bytes(32),
        "digest": bytes(32),
    }
    again = event if same else {**event, "digest": bytes(31) + b"1"}

    async def twice() -> list[Any]:
        if at_once:
            return await asyncio.gather(ledger.commit(event), ledger.commit(again), return_exceptions=True)
        return await asyncio.gather(ledger.commit(event)) + await asyncio.gather(
            ledger.commit(again), return_exceptions=True
        )

    said = asyncio.run_coroutine_threadsafe(twice(), door.running.loop).result()
    assert [type(each) for each in said] == [dict, dict if same and not at_once else Conflict]
    assert [e["digest"] for e in door.events("call_committed")] == [bytes(32)]
    assert "duplicate_commit" not in door.request("GET", "/api/v1/audit").json()["kinds"]


def test_a_commit_that_comes_again_with_another_record_spoils_the_rollout_and_not_the_lake(door: Door) -> None:
    (rollout,) = door.register()
    before = ask(door.agent(rollout), [U5])
    capture = door.service.recorder.capture

    async def twice(flight: Any, history: Any, prompt: Any, generation: Any, *rest: Any) -> None:
        await capture(flight, history, prompt, generation, *rest)
        await capture(flight, history, prompt, replace(generation, token_ids=[4, 9]), *rest)

    with replaced(door, "service.recorder.capture", twice):
        chat(door, rollout, [U5, echo(before), U6])
    (failed,) = door.events("call_failed")
    assert (failed["reason"], failed["answered"]) == ("call_id_conflict", True)
    receipt = door.client.seal("g_g0", reward=1.0)
    assert (receipt["poisoned"], receipt["reason"], len(receipt["manifest"])) == (True, "call_id_conflict", 2)
    assert door.request("GET", "/api/v1/audit").json()["healthy"]
