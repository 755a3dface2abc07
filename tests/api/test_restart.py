"""A restart knows every open rollout as it was, and closed ones when they are asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from tests.api.conftest import Door, Opener
from tests.api.test_chat import U5, U6, ask, echo
from tests.api.test_gate import chat
from tests.api.test_http import published
from tests.api.test_lifecycle import call_id
from tokenlake.api.control import Control
from tokenlake.errors import Conflict, NotFound
from tokenlake.ingest.resolve import AttemptLineage


def state(control: Control, groups: set[str]) -> Any:
    """All that a control holds of some groups, comparable."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return {name: plain(getattr(value, name)) for name in names if name not in ("landed", "before")}
        if isinstance(value, Mapping):
            return {str(key): plain(value[key]) for key in value}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        if isinstance(value, AttemptLineage):
            return {name: plain(getattr(value, name)) for name in AttemptLineage.__slots__}
        return value

    rest = (control.weight_version, control.policy, control.workers, control.model)
    return {name: plain(group) for name, group in control.groups.items() if name in groups}, plain(rest)


def busy(door: Door) -> None:
    """Open rollouts in every state, beside closed ones."""
    published(door, 2, "closed")
    door.client.set_weight_version(8)
    door.client.set_weight_version(9)
    door.request("PUT", "/api/v1/workers/w", {"loaded_weight_version": 7})
    door.request("PUT", "/api/v1/workers/w", {"loaded_weight_version": 9})
    rollouts = door.register("open", 4, idempotency_key="k", deadline_s=1000)
    agents = [door.agent(rollout) for rollout in rollouts]
    firsts = [ask(agent, [U5]) for agent in agents]
    ask(agents[0], [U5, echo(firsts[0]), U6])
    chat(door, rollouts[0], [U6], Idempotency_Key="a")
    door.client.freeze("open_g1", terminal_response_id=firsts[1].id)
    door.client.seal("open_g2", reward=0.5, terminal_response_id=firsts[2].id)
    door.client.fail("open_g3", reason="environment_failed", retry=True)
    door.client.register_attempt("open_g3", 1)


def test_what_a_start_folds_is_what_the_whole_log_says_of_open_groups(opened: Opener) -> None:
    with opened(tick_s=1000) as door:
        busy(door)
        running = state(door.service.control, {"open"})
    with opened(tick_s=1000) as door:
        whole = Control()
        for event in door.service.lake.lineage.events():
            whole.apply(event)
        assert set(door.service.control.groups) == {"open"}
        assert state(door.service.control, {"open"}) == state(whole, {"open"}) == running
        assert door.service.control.workers["w"]["loaded_weight_version"] == 9
        assert door.service.control.weight_version == 9


@pytest.mark.parametrize("restarted", [False, True])
def test_closed_groups_leave_memory_and_are_answered_from_the_lake(opened: Opener, restarted: bool) -> None:
    with opened(closed_groups=1) as door:
        rollouts = {name: published(door, 2, name) for name in ("a", "b", "c")}
        dropped = door.register("d", 1)
        door.client.abort("d")
        before = [door.client.group(name) for name in "abcd"]
        rollout = door.client.rollout("a_g0")
        if not restarted:
            asked_for_closed_groups(door, before, rollout, rollouts["a"][0], dropped[0])
    if restarted:
        with opened(closed_groups=1) as door:
            assert not door.service.control.groups
            asked_for_closed_groups(door, before, rollout, rollouts["a"][0], dropped[0])


def asked_for_closed_groups(
    door: Door, before: list[Any], rollout: dict[str, Any], slot: dict[str, Any], dropped: dict[str, Any]
) -> None:
    groups = door.service.control.groups
    assert [door.client.group(name) for name in "abcd"] == before
    assert len(groups) == 1
    assert door.client.rollout("a_g0") == rollout
    terminal = f"chatcmpl-{rollout['terminal_call_id']}"
    receipt = door.client.seal("a_g0", reward=1.0, terminal_response_id=terminal)
    assert receipt["manifest"] == rollout["manifest"]
    with pytest.raises(Conflict):
        door.client.seal("b_g0", reward=0.0)
    with pytest.raises(Conflict):
        door.client.freeze("b_g1")
    with pytest.raises(Conflict):
        door.client.register_group("c", 2)
    with pytest.raises(Conflict):
        door.client.register_attempt("a_g0", 1)
    with pytest.raises(Conflict):
        door.client.publish("d")
    assert door.client.publish("b")["valid"] == 1
    assert door.client.abort("d")["state"] == "dropped"
    for closed in (slot, dropped):
        assert chat(door, closed, [U5]).status_code == 409
    assert not door.engine.prompts or len(door.engine.prompts) == 6
    page = door.request("GET", "/api/v1/groups?limit=3").json()
    assert ([group["group_id"] for group in page["groups"]], page["next"]) == (["a", "b", "c"], "c")
    assert page["groups"] == before[:3]
    with pytest.raises(NotFound):
        door.client.group("z")
    with pytest.raises(NotFound):
        door.client.rollout("a_g7")
    assert len(groups) == 1


def test_a_restart_between_turns_goes_on_where_it_was(opened: Opener) -> None:
    """Ten restarts, one turn each: every prompt starts with the whole sequence before it."""
    history: list[dict[str, Any]] = [U5]
    whole: list[int] = []
    rollout: dict[str, Any] = {}
    url = ""
    for turn in range(10):
        with opened() as door:
            if not rollout:
                (rollout,) = door.register()
                url = rollout["base_url"].split("/ng-rollout")[0]
            door.engine.answers = [[20 + turn, 9]]
            moved = {**rollout, "base_url": rollout["base_url"].replace(url, door.url)}
            answer = ask(door.agent(moved), history)
            history += [echo(answer), U6]
            assert door.engine.prompts[0][: len(whole)] == whole
            whole = [*door.engine.prompts[0], 20 + turn, 9]
            if turn == 9:
                receipt = door.client.seal("g_g0", reward=1.0)
                assert receipt["terminal_call_id"] == call_id(answer)
                assert [entry["mode"] for entry in receipt["manifest"]] == ["text"] + ["token_in"] * 9
