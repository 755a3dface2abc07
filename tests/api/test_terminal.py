"""The terminal of a rollout: every witness, every two of them, and what is no leaf, in receipt, lineage and row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import pytest

from tests.api.conftest import Door, Opener
from tests.api.scripted_engine import text
from tests.api.test_chat import U5, U6, ask, echo
from tests.api.test_faults import hang_up_during_commit
from tests.api.test_gate import chat
from tests.api.test_lifecycle import call_id
from tokenlake.errors import Conflict

TITLE = {"role": "user", "content": "title?"}
U7 = {"role": "user", "content": text(7)}


@dataclass
class World:
    """The calls of one rollout by a letter, as their clients know them."""

    door: Door
    rollout: dict[str, Any]
    said: dict[str, Any] = field(default_factory=dict[str, Any])

    def ask(self, name: str, sampled: int, messages: list[Any]) -> Any:
        self.door.engine.answers = [[sampled, 9]]
        self.said[name] = ask(self.door.agent(self.rollout), messages)
        return self.said[name]

    def id(self, name: str | None) -> str | None:
        return None if name is None else call_id(self.said[name])


def chain(world: World) -> list[Any]:
    """a, and b after it."""
    first = world.ask("a", 20, [U5])
    messages = [U5, echo(first), U6]
    world.ask("b", 21, messages)
    return messages


def two(world: World) -> None:
    """a, b, and a title t on its own."""
    chain(world)
    world.ask("t", 30, [TITLE])


def alike(world: World) -> None:
    """As `two`, but t says what b says, in another conversation."""
    chain(world)
    world.ask("t", 21, [TITLE])


def retried(world: World) -> None:
    """b was not used: the retry c was, and d follows it."""
    messages = chain(world)
    second = world.ask("c", 22, messages)
    world.ask("d", 23, [*messages, echo(second), U7])


def twins(world: World) -> None:
    """b and its twin c, nobody continued."""
    world.ask("c", 21, chain(world))


def siblings(world: World) -> None:
    """b and c are two answers to the same prompt, nobody continued."""
    world.ask("c", 22, chain(world))


def undelivered(world: World) -> None:
    """Nobody waited for the answer to what follows a."""
    first = world.ask("a", 20, [U5])
    world.door.engine.answers = [[21, 9]]
    hang_up_during_commit(world.door, world.rollout, [U5, echo(first), U6])


def overflowed(world: World) -> None:
    """What follows b does not fit: o is its empty answer."""
    messages = chain(world)
    most, world.door.engine.max_model_len = world.door.engine.max_model_len, 1
    world.said["o"] = ask(world.door.agent(world.rollout), [*messages, echo(world.said["b"]), U7])
    world.door.engine.max_model_len = most


@dataclass(frozen=True)
class Case:
    build: Callable[[World], Any]
    evidence: dict[str, str]
    """`declared`, `response_id`, `content` and `frozen`, each naming a call of the world or `?`, which is none."""
    terminal: str | None
    selection: str | None
    reason: str | None = None
    truncated: bool = False
    lineage: str | None = None
    """The call that lineage names, where that is another one than the terminal."""


def agreeing_and_contradicting() -> list[Case]:
    """Each two witnesses of `two`, once of one mind and once not; a frozen terminal that is contradicted is below."""
    kinds = ["frozen", "declared", "response_id", "content"]
    cases: list[Case] = []
    for one, other in combinations(kinds, 2):
        selection = "declared" if one == "frozen" else one
        cases.append(Case(two, {one: "b", other: "b"}, "b", selection))
        if one != "frozen" or other == "content":
            cases.append(Case(two, {one: "b", other: "t"}, None, None, "terminal_ambiguous"))
    return cases


CASES = [
    Case(two, {"frozen": "b"}, "b", "declared"),
    Case(two, {"declared": "b"}, "b", "declared"),
    Case(two, {"declared": "a"}, "a", "declared"),
    Case(two, {"response_id": "b"}, "b", "response_id"),
    Case(two, {"content": "b"}, "b", "content"),
    Case(two, {}, None, None, "terminal_ambiguous"),
    Case(two, {"declared": "?"}, None, None, "terminal_unknown"),
    Case(two, {"response_id": "?"}, None, None, "terminal_unknown"),
    Case(two, {"content": "?"}, None, None, "terminal_ambiguous"),
    Case(two, {"declared": "b", "response_id": "?"}, None, None, "terminal_unknown"),
    Case(two, {"declared": "?", "response_id": "b"}, None, None, "terminal_unknown"),
    Case(two, {"declared": "b", "content": "?"}, "b", "declared"),
    Case(two, {"declared": "b", "response_id": "b", "content": "b"}, "b", "declared"),
    Case(two, {"declared": "b", "response_id": "b", "content": "t"}, None, None, "terminal_ambiguous"),
    Case(two, {"declared": "b", "response_id": "t", "content": "b"}, None, None, "terminal_ambiguous"),
    *agreeing_and_contradicting(),
    Case(chain, {}, "b", "only_leaf"),
    Case(chain, {"content": "?"}, "b", "only_leaf"),
    Case(alike, {"content": "b"}, None, None, "terminal_ambiguous"),
    Case(alike, {"content": "b", "response_id": "t"}, "t", "response_id"),
    Case(retried, {}, "d", "only_leaf"),
    Case(retried, {"content": "b"}, "b", "content"),
    Case(retried, {"response_id": "b"}, "b", "response_id"),
    Case(retried, {"response_id": "d", "content": "b"}, None, None, "terminal_ambiguous"),
    Case(twins, {}, "b", "only_leaf"),
    Case(twins, {"response_id": "c"}, "c", "response_id"),
    Case(twins, {"content": "c"}, "b", "content"),
    Case(siblings, {}, None, None, "terminal_ambiguous"),
    Case(siblings, {"response_id": "c"}, "c", "response_id"),
    Case(siblings, {"content": "c"}, "c", "content"),
    Case(undelivered, {}, "a", "only_leaf"),
    Case(undelivered, {"content": "a"}, "a", "content"),
    Case(overflowed, {}, "b", "only_leaf", truncated=True, lineage="o"),
    Case(overflowed, {"declared": "o"}, "b", "declared", truncated=True, lineage="o"),
    Case(overflowed, {"response_id": "o"}, "b", "response_id", truncated=True, lineage="o"),
    Case(overflowed, {"response_id": "b"}, "b", "response_id"),
    Case(overflowed, {"frozen": "o"}, "b", "declared", truncated=True, lineage="o"),
    Case(overflowed, {"frozen": "o", "response_id": "b"}, "b", "declared", truncated=True, lineage="o"),
    Case(overflowed, {"response_id": "o", "content": "b"}, "b", "response_id", truncated=True, lineage="o"),
    Case(overflowed, {"response_id": "o", "declared": "a"}, None, None, "terminal_ambiguous"),
]


def freeze(world: World, evidence: dict[str, str]) -> None:
    if "frozen" in evidence:
        world.door.client.freeze(world.rollout["rollout_id"], terminal_response_id=world.said[evidence["frozen"]].id)


def arguments(world: World, evidence: dict[str, str]) -> dict[str, str]:
    """What `seal` is told."""
    known = {name: said.choices[0].message.content or "" for name, said in world.said.items()}
    told = {
        "terminal_call_id": {name: call_id(said) for name, said in world.said.items()},
        "terminal_response_id": {name: said.id for name, said in world.said.items()},
        "scored_text": known,
    }
    kinds = zip(("declared", "response_id", "content"), told, strict=True)
    return {key: told[key].get(evidence[kind], "nobody said this") for kind, key in kinds if kind in evidence}


def test_every_witness_and_every_two_of_them(opened: Opener) -> None:
    """One rollout a case, in one group: receipt, event and published row say the same of each."""
    with opened() as door:
        rollouts = door.register(n=len(CASES))
        worlds: list[World] = []
        for case, rollout in zip(CASES, rollouts, strict=True):
            world = World(door, rollout)
            worlds.append(world)
            case.build(world)
            freeze(world, case.evidence)
            receipt = door.client.seal(rollout["rollout_id"], reward=1.0, **arguments(world, case.evidence))
            said = (receipt["terminal_call_id"], receipt["terminal_selection"], receipt["reason"])
            assert said == (world.id(case.terminal), case.selection, case.reason), case
            assert not receipt["poisoned"]
        door.client.publish("g")
        sealed = {event["rollout_id"]: event for event in door.events("rollout_sealed")}
        names = "rollout_id, terminal_call_id, reason, sample_mask, truncated, call_ids[-1]"
        rows = {row[0]: row[1:] for row in door.service.lake.sql(f"SELECT {names} FROM ready_rows").fetchall()}
        for case, world in zip(CASES, worlds, strict=True):
            name, terminal = world.rollout["rollout_id"], world.id(case.terminal)
            event = sealed[name]
            told = (event.get("terminal_call_id"), event.get("terminal_selection"), event.get("reason"))
            assert told == (world.id(case.lineage or case.terminal), case.selection, case.reason), case
            valid = case.reason is None
            assert rows[name] == (terminal, case.reason, int(valid), case.truncated, terminal), case
        assert door.request("GET", "/api/v1/audit").json()["healthy"]


@pytest.mark.parametrize("kind", ["declared", "response_id"])
def test_a_frozen_terminal_is_not_changed_by_a_seal(door: Door, kind: str) -> None:
    (rollout,) = door.register()
    world = World(door, rollout)
    two(world)
    freeze(world, {"frozen": "b"})
    with pytest.raises(Conflict):
        door.client.seal("g_g0", reward=1.0, **arguments(world, {kind: "t"}))
    assert door.client.seal("g_g0", reward=1.0)["terminal_call_id"] == world.id("b")


def test_what_another_rollout_or_attempt_said_is_no_evidence(door: Door) -> None:
    first, second, third = (World(door, rollout) for rollout in door.register(n=3))
    for world in (first, second, third):
        two(world)
    foreign = {"terminal_response_id": first.said["b"].id}
    assert door.client.seal("g_g1", reward=1.0, **foreign)["reason"] == "terminal_unknown"
    door.client.fail("g_g2", reason="environment_failed", retry=True)
    later = World(door, door.client.register_attempt("g_g2", 1))
    chain(later)
    old = third.said["b"]
    receipt = door.client.seal("g_g2", reward=1.0, attempt=1, terminal_response_id=old.id)
    assert (receipt["terminal_call_id"], receipt["reason"]) == (None, "terminal_unknown")
    with pytest.raises(Conflict):
        door.client.freeze("g_g0", terminal_response_id=second.said["b"].id)
    assert door.client.seal("g_g0", reward=1.0, terminal_response_id=first.said["b"].id)["reason"] is None


def test_a_witness_may_name_an_answer_that_nobody_waited_for(door: Door) -> None:
    """Evidence beats delivery: the scored answer came from somewhere."""
    (rollout,) = door.register()
    world = World(door, rollout)
    undelivered(world)
    (_, late) = door.events("call_committed")
    receipt = door.client.seal("g_g0", reward=1.0, terminal_response_id=late["response_id"])
    assert (receipt["terminal_call_id"], receipt["reason"]) == (late["call_id"], None)
    assert chat(door, rollout, [U5]).status_code == 409
