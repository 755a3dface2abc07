"""What comes after the end, or in the way of it: late calls, stop ids that are headers, small caches, failing sinks."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.conftest import Door, Opener
from tests.api.scripted_engine import ScriptedEngine, text
from tests.api.speakers import Speaker, Told
from tests.api.test_chat import U5, U6, ask, echo
from tests.api.test_claims import names
from tests.api.test_dialects import ASK, speaking
from tests.api.test_faults import fill_disk
from tests.api.test_gate import chat
from tests.api.test_lifecycle import call_id, wait_for
from tokenlake.api.cli import main
from tokenlake.errors import Conflict
from tokenlake.ingest.engine import Generation

ROWS = "SELECT * FROM ready_rows ORDER BY ALL"


class HeaderStops(ScriptedEngine):
    """Its turns that call a tool end on the id that opens the tool's turn; the template writes that id once."""

    stop_ids = (9, 103)

    def __init__(self) -> None:
        super().__init__()
        self.edit = self._ended

    def _ended(self, generation: Generation) -> Generation:
        written = text(*[token for token in generation.token_ids if token not in self.stop_ids])
        return replace(generation, finish_reason="stop", text=written)

    def render_text(self, messages: Any, tools: Any, *, add_generation_prompt: bool) -> str:
        written = super().render_text(messages, tools, add_generation_prompt=add_generation_prompt)
        return written.replace(text(9, 8, 103), text(103))


@speaking
def test_a_stop_id_that_is_also_a_header_is_there_once(opened: Opener, speaker: type[Speaker]) -> None:
    with opened(engine=HeaderStops()) as door:
        (rollout,) = door.register()
        agent = speaker(door, rollout)
        sampled = [*map(ord, "<f|{}>"), 103]
        door.engine.answers = [sampled]
        first = agent.say([ASK])
        agent.say([ASK, first, Told("tool", text(60), first.calls[0].id)])
        assert door.engine.prompts[1] == [1, 101, 5, 9, 8, 102, *sampled, 60, 9, 8, 102]
        _, second = door.events("call_committed")
        assert door.ids(second) == ([60, 9, 8, 102, 3, 9], [0, 0, 0, 0, 1, 1])


def held(door: Door, rollout: dict[str, Any], messages: list[Any], said: list[int]) -> threading.Thread:
    """A call that the engine holds; its status comes into `said` when it is let go."""
    door.engine.hold = True
    others = len(door.engine._waiting)
    thread = threading.Thread(target=lambda: said.append(chat(door, rollout, messages).status_code))
    thread.start()
    wait_for(door, lambda: len(door.engine._waiting) > others)
    return thread


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed-meanwhile", "published-by-deadline"])
def test_a_call_that_lands_after_publication_changes_nothing(opened: Opener, sealed: bool) -> None:
    with opened(seal_wait_s=0.1) as door:
        first, second = door.register(n=2)
        before = ask(door.agent(first), [U5])
        ask(door.agent(second), [U5])
        door.client.seal("g_g1", reward=1.0)
        said: list[int] = []
        zombie = held(door, first, [U5, echo(before), U6], said)
        if sealed:
            assert door.client.seal("g_g0", reward=1.0)["reason"] == "incomplete"
        door.client.publish("g")
        rows = door.service.lake.sql(ROWS).fetchall()
        assert len(rows) == 2
        door.on_loop(door.engine.release)
        zombie.join()
        assert said == [409]
        assert chat(door, first, [U5, echo(before), U6]).status_code == 409
        assert len(door.events("call_committed")) == 2
        assert {(e["reason"], e["answered"]) for e in door.events("call_failed")} == {("late", False)}
        with pytest.raises(Conflict):
            door.client.seal("g_g0", reward=0.5)
        assert door.service.lake.sql(ROWS).fetchall() == rows
        assert door.request("GET", "/api/v1/audit").json()["healthy"]
    with opened() as door:
        assert door.service.lake.sql(ROWS).fetchall() == rows
        reasons = "SELECT rollout_id, reason FROM ready_rows ORDER BY ALL"
        assert door.service.lake.sql(reasons).fetchall() == [
            ("g_g0", "incomplete" if sealed else "never_sealed"),
            ("g_g1", None),
        ]


def test_a_call_that_never_lands_does_not_hold_the_group(opened: Opener) -> None:
    with opened(seal_wait_s=0.1) as door:
        first, second = door.register(n=2)
        ask(door.agent(second), [U5])
        zombie = held(door, first, [U5], [])
        door.client.seal("g_g1", reward=1.0)
        assert door.client.seal("g_g0", reward=1.0)["reason"] in ("incomplete", "no_calls")
        wait_for(door, lambda: door.service.control.groups["g"].state == "published")
        found = door.service.lake.sql("SELECT rollout_id, sample_mask FROM ready_rows ORDER BY ALL").fetchall()
        assert found == [("g_g0", 0), ("g_g1", 1)]
        door.on_loop(door.engine.release)
        zombie.join()


def test_three_rollouts_in_turns_over_a_cache_of_two_are_exact(opened: Opener) -> None:
    with opened(prefix_cache_bytes=80) as door:
        rollouts = door.register(n=3)
        histories: list[list[Any]] = [[U5] for _ in rollouts]
        exact: list[list[int]] = []
        for turn in range(2):
            for index, rollout in enumerate(rollouts):
                door.engine.answers = [[20 + index, 30 + turn, 9]]
                histories[index] += [echo(ask(door.agent(rollout), histories[index])), U6]
                exact.append([1, 101, 5, 9, 8, 102, *([20 + index, 30, 9, 8, 101, 6, 9, 8, 102] if turn else [])])
        assert door.engine.prompts == exact
        assert [event["mode"] for event in door.events("call_committed")] == ["text"] * 3 + ["token_in"] * 3
        assert door.service.prefixes.evictions > 0


def test_a_trainer_that_crashed_gets_what_it_did_not_consume_once(opened: Opener) -> None:
    groups = [f"g{index}" for index in range(5)]
    with opened() as door:
        for name in groups:
            for rollout in door.register(name, n=1):
                ask(door.agent(rollout), [U5])
                door.client.seal(rollout["rollout_id"], reward=1.0)
            door.client.publish(name)
        claim = door.client.claim("t0", groups=3)
        door.client.consume(claim["claim_id"], checkpoint="step-1")
        consumed = names(claim)
        assert len(door.client.claim("t0")["groups"]) == 1, "claimed, and never consumed"
    with opened() as door:
        left = names(door.client.claim("t0", groups=5))
        assert (len(consumed), len(left)) == (3, 1)
        assert not set(consumed) & set(left)
        door.client.rewind("t0", checkpoint="step-1")
        assert sorted(consumed + names(door.client.claim("t0", groups=5))) == groups
        assert door.client.claim("t0", groups=5)["claim_id"] is None


@pytest.mark.parametrize("action", ["continue", "abort"])
def test_a_sink_that_fails_on_the_second_call(opened: Opener, action: str) -> None:
    with opened(policy={"on_capture_failure": action}) as door:
        (rollout,) = door.register()
        before = ask(door.agent(rollout), [U5])
        fill_disk(door.service.recorder._capture._writer._segments)  # type: ignore[attr-defined]
        answer = chat(door, rollout, [U5, echo(before), U6])
        assert (answer.status_code, text(3) in answer.text.encode().decode("unicode_escape")) == (
            (200, True) if action == "continue" else (503, False)
        )
        if action == "continue":
            assert door.client.seal("g_g0", reward=1.0)["reason"] == "capture_failed"
        wait_for(door, lambda: door.service.control.groups["g"].state == "published")
        (row,) = door.service.lake.sql("SELECT sample_mask, reason, reward FROM ready_rows").fetchall()
        assert row == (0, "capture_failed", None)
        assert [event["call_id"] for event in door.events("call_committed")] == [call_id(before)]


@pytest.mark.parametrize("lake", ["", "nothing", "*/lake"])
def test_an_audit_of_what_is_no_lake_does_not_say_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lake: str
) -> None:
    assert main(["audit", "--lake", str(tmp_path / lake)]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert not said.out
