"""The replay buffer: whole groups, once for each consumer, in a pinned order, whoever dies."""

from __future__ import annotations

import math
import threading
from itertools import pairwise
from typing import Any

import pytest

from tests.finalize.conftest import Field, group
from tokenlake.errors import Conflict, InvalidInput, NotFound
from tokenlake.finalize.buffer import Claim, ReplayBuffer
from tokenlake.finalize.publish import set_policy

SECOND = 1_000_000


def names(claim: Claim) -> list[str]:
    return [each.group_id for each in claim.groups]


@pytest.fixture
def buffer(field: Field) -> ReplayBuffer:
    train = [record for number in range(6) for record in group(f"g{number}", [1.0, None], weight_version=number)]
    field.publish(*train, *group("e0", [1.0], purpose="eval"))
    return ReplayBuffer(field.lake)


def test_each_consumer_gets_every_group_once_in_the_order_of_publication(buffer: ReplayBuffer) -> None:
    first, second = buffer.claim("a", groups=2), buffer.claim("a", groups=3)
    other = buffer.claim("b", groups=100)
    last, nothing = buffer.claim("a", groups=2), buffer.claim("a")
    assert names(first) + names(second) + names(last) == names(other) == [f"g{number}" for number in range(6)]
    assert (nothing.state, nothing.claim_id, nothing.groups) == ("empty", None, ())
    assert (first.groups[1].n, first.groups[1].group_min_wv, first.groups[1].group_max_wv) == (2, 1, 1)


def test_members_of_a_consumer_share_its_groups(buffer: ReplayBuffer) -> None:
    taken: list[str] = []

    def member() -> None:
        while names(claim := buffer.claim("a")):
            taken.extend(names(claim))

    members = [threading.Thread(target=member) for _ in range(4)]
    for each in members:
        each.start()
    for each in members:
        each.join()
    assert sorted(taken) == [f"g{number}" for number in range(6)]


def test_a_claim_that_dies_comes_back_after_its_lease_and_not_before(buffer: ReplayBuffer) -> None:
    dead = buffer.claim("a", groups=2, lease_s=10, now=0)
    assert names(buffer.claim("a", groups=1, now=10 * SECOND - 1)) == ["g2"]
    assert names(buffer.claim("a", groups=3, now=10 * SECOND)) == ["g0", "g1", "g3"]
    with pytest.raises(Conflict, match="released"):
        buffer.consume(dead.claim_id or "", "step-1")


def test_a_late_member_may_consume_what_nobody_took_back(buffer: ReplayBuffer) -> None:
    late = buffer.claim("a", lease_s=1, now=0)
    assert buffer.consume(late.claim_id or "", "step-1").state == "consumed"
    assert names(buffer.claim("a", now=100 * SECOND)) == ["g1"]


def test_consume_is_for_ever_and_idempotent(buffer: ReplayBuffer, field: Field) -> None:
    claim = buffer.claim("a", groups=2)
    done = buffer.consume(claim.claim_id or "", "step-1")
    before = field.rows("SELECT count(*) FROM lineage")
    assert buffer.consume(claim.claim_id or "", "step-1") == done
    assert field.rows("SELECT count(*) FROM lineage") == before
    for refused in (
        lambda: buffer.consume(claim.claim_id or "", "step-2"),
        lambda: buffer.release(claim.claim_id or ""),
    ):
        with pytest.raises(Conflict):
            refused()
    assert names(buffer.claim("a", groups=9)) == ["g2", "g3", "g4", "g5"]


def test_release_gives_back_in_the_old_order_and_is_idempotent(buffer: ReplayBuffer) -> None:
    claim = buffer.claim("a", groups=2)
    buffer.claim("a")
    assert buffer.release(claim.claim_id or "").state == "released"
    again = buffer.claim("a", groups=3)
    assert names(again) == ["g0", "g1", "g3"]
    assert buffer.release(claim.claim_id or "").state == "released"
    assert buffer.consume(again.claim_id or "", "step-1").state == "consumed"


def test_a_restart_changes_nothing(buffer: ReplayBuffer, field: Field) -> None:
    open_claim, done = buffer.claim("a", groups=2), buffer.claim("a")
    buffer.consume(done.claim_id or "", "step-1")
    field.restart()
    field.lake.rebuild()
    buffer = ReplayBuffer(field.lake)
    assert names(buffer.claim("a")) == ["g3"]
    assert names(buffer.consume(open_claim.claim_id or "", "step-2")) == ["g0", "g1"]
    assert buffer.consume(done.claim_id or "", "step-1").state == "consumed"


def test_rewinding_gives_back_what_came_after_a_checkpoint(buffer: ReplayBuffer, field: Field) -> None:
    claims = [buffer.claim("a") for _ in range(4)]
    for claim, checkpoint in zip(claims[:3], ("s1", "s1", "s2"), strict=True):
        buffer.consume(claim.claim_id or "", checkpoint)
    assert buffer.rewind("a", "s1") == ["g3", "g2"]
    assert buffer.rewind("a", "s1") == []
    with pytest.raises(Conflict, match="released"):
        buffer.consume(claims[3].claim_id or "", "s3")
    with pytest.raises(NotFound, match="s2"):
        buffer.rewind("a", "s2")
    again = buffer.claim("a", groups=2)
    assert names(again) == ["g2", "g3"]
    buffer.consume(again.claim_id or "", "s2")
    assert buffer.rewind("a", None) == ["g0", "g1", "g2", "g3"]
    assert names(buffer.claim("a", groups=9)) == [f"g{number}" for number in range(6)]
    assert field.rows("SELECT consumer, claimed, consumed, evicted, waiting, checkpoint FROM consumers") == [
        ("a", 6, 0, 0, 0, None)
    ]


def test_groups_that_are_too_old_are_evicted_and_future_ones_wait(buffer: ReplayBuffer, field: Field) -> None:
    assert names(buffer.claim("a", groups=9, current_version=4, max_staleness=2)) == ["g2", "g3", "g4"]
    assert field.rows("SELECT group_id, reason FROM claims WHERE state = 'evicted' ORDER BY ALL") == [
        ("g0", "stale"),
        ("g1", "stale"),
    ]
    assert names(buffer.claim("a", groups=9, current_version=5, max_staleness=9)) == ["g5"]
    assert names(buffer.claim("b", current_version=0)) == ["g0"]
    assert buffer.rewind("a", None)[:2] == ["g0", "g1"]
    assert names(buffer.claim("a", groups=2, current_version=1, max_staleness=1)) == ["g0", "g1"]


def test_an_unknown_version_is_not_fresh(field: Field) -> None:
    field.publish(*group("g", [1.0], weight_version=None))
    buffer = ReplayBuffer(field.lake)
    assert names(buffer.claim("a", current_version=7, max_staleness=1000)) == []
    assert field.rows("SELECT state, reason FROM claims") == [("evicted", "unknown_version")]
    assert names(buffer.claim("b", current_version=7)) == ["g"]


def test_the_oldest_version_of_a_group_counts(field: Field) -> None:
    records = group("g", [1.0, 0.0], weight_version=7)
    records[1]["weight_version"] = 5
    field.publish(*records)
    buffer = ReplayBuffer(field.lake)
    assert names(buffer.claim("a", current_version=7, max_staleness=1)) == []
    assert names(buffer.claim("b", current_version=7, max_staleness=2)) == ["g"]


AGES: dict[str, tuple[tuple[int | None, int | None], tuple[float, float], str]] = {
    "old": ((5, 7), (1.0, 0.0), "stale"),
    "just": ((6, 9), (1.0, 0.0), "fresh"),
    "newer": ((8, 9), (1.0, 0.0), "future"),
    "first-unknown": ((None, 7), (1.0, 0.0), "unknown_version"),
    "second-unknown": ((7, None), (1.0, 0.0), "unknown_version"),
    "old-not-valid": ((5, 7), (math.nan, 0.0), "fresh"),
    "unknown-not-valid": ((None, 7), (math.nan, 0.0), "fresh"),
    "newer-not-valid": ((9, 7), (math.nan, 0.0), "fresh"),
    "none-valid": ((5, 5), (math.nan, math.nan), "unknown_version"),
}
"""Versions and rewards of a group's two rollouts; how old it is at version 7 where 1 behind is allowed."""


def test_how_old_a_group_is_is_judged_over_its_valid_rows_and_changes_no_row(field: Field) -> None:
    set_policy(field.lake, {"max_staleness": 1})
    for name, (versions, rewards, _) in AGES.items():
        records = group(name, rewards)
        records[1]["weight_version"], records[3]["weight_version"] = versions
        field.add(*records)
    field.publish()
    before = field.rows("SELECT * FROM ready_rows ORDER BY sample_id")
    claim = ReplayBuffer(field.lake).claim("a", groups=99, current_version=7)
    assert set(names(claim)) == {name for name, (*_, age) in AGES.items() if age == "fresh"}
    said = {name: (state, reason) for name, state, reason in field.rows("SELECT group_id, state, reason FROM claims")}
    states = {
        "fresh": ("claimed", None),
        "stale": ("evicted", "stale"),
        "unknown_version": ("evicted", "unknown_version"),
    }
    assert said == {name: states[age] for name, (*_, age) in AGES.items() if age != "future"}
    assert field.rows("SELECT * FROM ready_rows ORDER BY sample_id") == before


def test_the_policy_and_the_published_version_count_where_a_claim_is_silent(buffer: ReplayBuffer, field: Field) -> None:
    set_policy(field.lake, {"max_staleness": "1"})
    with pytest.raises(InvalidInput, match="current_version"):
        buffer.claim("a")
    field.lake.lineage.append("weight_version_published", weight_version=5)
    assert names(buffer.claim("a", groups=9)) == ["g4", "g5"]


def test_the_same_key_gets_the_same_claim(buffer: ReplayBuffer) -> None:
    first = buffer.claim("a", groups=2, idempotency_key="k")
    assert buffer.claim("a", groups=2, idempotency_key="k") == first
    assert names(buffer.claim("b", idempotency_key="k")) == ["g0"]
    assert names(buffer.claim("a", idempotency_key="l")) == ["g2"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": 0},
        *({"lease_s": seconds} for seconds in (0, math.nan, math.inf)),
        *({"current_version": version} for version in (-1, 1 << 63)),
    ],
)
def test_a_claim_of_nothing_is_refused(buffer: ReplayBuffer, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        buffer.claim("a", **wrong)
    with pytest.raises(InvalidInput, match="consumer"):
        buffer.claim("no name")
    with pytest.raises(NotFound):
        buffer.release("nothing")
    with pytest.raises(InvalidInput, match="checkpoint"):
        buffer.consume("c", "")


def test_every_change_is_one_chained_event_a_group(buffer: ReplayBuffer, field: Field) -> None:
    claim = buffer.claim("a", groups=2)
    buffer.consume(claim.claim_id or "", "s1")
    events = [event for event in field.lake.lineage.events() if event["event_type"].startswith("rows_")]
    assert [(e["event_type"], e["group_id"], e["claim_id"]) for e in events] == [
        (kind, name, claim.claim_id) for kind in ("rows_claimed", "rows_consumed") for name in ("g0", "g1")
    ]
    assert all(after["prev_hash"] == before["event_hash"] for before, after in pairwise(events))
