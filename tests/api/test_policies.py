"""The policies that the gate acts on, seen from SQL and the published rows."""

from __future__ import annotations

import pytest

from tests.api.conftest import Door, Opener
from tests.api.scripted_engine import text
from tests.api.test_chat import U5, U6, ask, echo
from tests.api.test_lifecycle import wait_for
from tokenlake.errors import Conflict

SYSTEM = {"role": "system", "content": text(4)}
ROWS = "SELECT sample_mask, reason FROM ready_rows"


def published_rows(door: Door) -> list[tuple[int, str | None]]:
    wait_for(door, lambda: door.service.control.groups["g"].state == "published")
    return door.service.lake.sql(ROWS).fetchall()


@pytest.mark.parametrize(
    ("action", "row"), [("root", (1, None)), ("poison", (0, "unresolved_parent")), ({"no_match": "root"}, (1, None))]
)
def test_a_call_whose_parent_is_unknown_is_a_root_or_spoils_the_row(
    opened: Opener, action: object, row: object
) -> None:
    with opened(policy={"on_unresolved": action}) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        first = ask(agent, [U5])
        edited = echo(first) | {"content": "something else"}
        last = ask(agent, [U5, edited, U6])
        door.client.seal("g_g0", reward=1.0, terminal_response_id=last.id)
        assert published_rows(door) == [row]
        assert door.service.lake.sql("SELECT cause, roots FROM roots_by_cause ORDER BY ALL").fetchall() == [
            ("no_history", 1),
            ("no_match", 1),
        ]


def test_a_required_boundary_is_the_only_way_to_a_valid_row(opened: Opener) -> None:
    with opened(policy={"boundary": "required"}) as door:
        (rollout,) = door.register()
        last = ask(door.agent(rollout), [U5])
        with pytest.raises(Conflict):
            door.client.seal("g_g0", reward=1.0, terminal_response_id=last.id)
        assert door.service.lake.sql("SELECT state FROM rollouts").fetchall() == [("open",)]
        frozen = door.client.freeze("g_g0", terminal_response_id=last.id)
        with pytest.raises(Conflict):
            door.client.seal("g_g0", reward=1.0, boundary_id="another")
        door.client.seal("g_g0", reward=1.0, boundary_id=frozen["boundary_id"])
        assert published_rows(door) == [(1, None)]


def test_a_boundary_that_is_named_must_be_right_where_it_is_compatible_and_counts_for_nothing_where_it_is_off(
    opened: Opener,
) -> None:
    with opened(policy={"boundary": "compat"}) as door:
        door.register()
        with pytest.raises(Conflict):
            door.client.seal("g_g0", reward=1.0, boundary_id="another")
        door.client.seal("g_g0", reward=1.0)
        assert published_rows(door) == [(0, "no_calls")]
    with opened(policy={"boundary": "off"}) as door:
        (rollout,) = door.register("off")
        ask(door.agent(rollout), [U5])
        door.client.seal("off_g0", reward=1.0, boundary_id="another")
        wait_for(door, lambda: door.service.control.groups["off"].state == "published")
        rows = door.service.lake.sql("SELECT rollout_id, sample_mask FROM ready_rows ORDER BY ALL").fetchall()
        assert rows == [("g_g0", 0), ("off_g0", 1)]


@pytest.mark.parametrize(
    ("cause", "poison"),
    [
        ("preamble_changed", ["preamble_changed"]),
        ("history_edited", ["history_edited"]),
        ("no_match", ["no_match"]),
        ("history_edited", ["preamble_changed", "no_match", "ambiguous", "splice_failed", "prefix_unavailable"]),
    ],
)
def test_each_cause_spoils_the_row_or_not_as_it_was_told(opened: Opener, cause: str, poison: list[str]) -> None:
    with opened(policy={"on_unresolved": dict.fromkeys(poison, "poison")}) as door:
        (rollout,) = door.register()
        agent = door.agent(rollout)
        first = echo(ask(agent, [SYSTEM, U5]))
        asked = {
            "preamble_changed": [{"role": "system", "content": text(7)}, U5, first, U6],
            "history_edited": [SYSTEM, U6, first, U6],
            "no_match": [SYSTEM, U5, first | {"content": "something else"}, U6],
        }
        last = ask(agent, asked[cause])
        door.client.seal("g_g0", reward=1.0, terminal_response_id=last.id)
        assert published_rows(door) == [(0, "unresolved_parent") if cause in poison else (1, None)]
        causes = door.service.lake.sql("SELECT cause FROM roots_by_cause ORDER BY ALL").fetchall()
        assert causes == sorted([(cause,), ("no_history",)])


def test_a_groups_deadline_comes_from_the_policy_where_it_names_none(opened: Opener) -> None:
    with opened(policy={"group_deadline_s": 0.2}) as door:
        door.register()
        assert published_rows(door) == [(0, "never_sealed")]
