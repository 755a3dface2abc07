"""Each policy about rows and groups: what the views say before publishing, and what is published then."""

from __future__ import annotations

from typing import Any

from tests.finalize.conftest import Field, Record, call, group
from tokenlake.finalize.publish import publish_due, set_policy

STATES = "SELECT rollout_id, verdict, reason FROM rollouts ORDER BY rollout_id"
ROWS = "SELECT rollout_id, sample_mask, reason FROM ready_rows ORDER BY rollout_id"


def two_versions(*, end: int | None = None) -> list[Record]:
    """A group of two: one whose second call came from newer weights (or ended in them), and one of version 7 alone."""
    first = call("g_g0", "c0", [1], [2])
    second = call("g_g0", "c1", [1, 2, 3], [4], weight_version=8 if end is None else 7, weight_version_end=end or 8)
    seal: Record = {"type": "seal", "rollout_id": "g_g0", "reward": 1.0}
    return [*group("g", [None, 0.5])[:1], first, second, seal, *group("g", [None, 0.5])[2:]]


def test_a_row_of_mixed_versions_is_allowed_or_rejected_and_its_siblings_stay(field: Field) -> None:
    field.add(*two_versions())
    assert field.rows(STATES) == [("g_g0", "valid", None), ("g_g1", "valid", None)]
    set_policy(field.lake, {"mixed_weight_version": "reject"})
    assert field.rows(STATES) == [("g_g0", "placeholder", "mixed_weight_version"), ("g_g1", "valid", None)]
    publish_due(field.lake)
    set_policy(field.lake, {"mixed_weight_version": "allow"})
    assert field.rows(ROWS) == [("g_g0", 0, "mixed_weight_version"), ("g_g1", 1, None)]
    assert field.rows("SELECT DISTINCT group_min_wv, group_max_wv FROM ready_rows") == [(7, 7)]


def test_a_call_that_ends_in_newer_weights_is_mixed(field: Field) -> None:
    set_policy(field.lake, {"mixed_weight_version": "reject"})
    field.publish(*two_versions(end=9))
    assert field.rows(ROWS) == [("g_g0", 0, "mixed_weight_version"), ("g_g1", 1, None)]


def dropped(field: Field, records: list[Record], reason: str, valid: int) -> None:
    """Publishing drops the group `g` for this reason: said before, recorded, never silently short."""
    field.add(*records)
    said = field.rows("SELECT verdict, drop_reason, valid FROM groups")
    assert said == [("drop", reason, valid)]
    assert field.rows("SELECT * FROM publishable_rows") == []
    (done,) = publish_due(field.lake)
    assert (done.dropped, done.valid) == (reason, valid)
    assert field.rows("SELECT * FROM ready_rows") == []
    assert field.rows("SELECT state, drop_reason FROM groups") == [("dropped", reason)]
    assert field.rows("SELECT reason FROM lineage WHERE event_type = 'group_dropped'") == [(reason,)]
    assert publish_due(field.lake) == []


def test_a_group_of_mixed_versions_is_dropped_where_the_policy_says_so(field: Field) -> None:
    records = group("g", [1.0, 0.5, None])
    records[1]["weight_version"] = 6
    set_policy(field.lake, {"mixed_weight_version_per_group": "reject", "mixed_weight_version": "reject"})
    dropped(field, records, "mixed_weight_version_per_group", 2)


def test_a_group_of_unknown_version_is_mixed(field: Field) -> None:
    set_policy(field.lake, {"mixed_weight_version_per_group": "reject"})
    dropped(field, group("g", [1.0, 0.5], weight_version=None), "mixed_weight_version_per_group", 2)


def test_only_valid_rows_make_a_group_mixed(field: Field) -> None:
    set_policy(field.lake, {"mixed_weight_version_per_group": "reject", "mixed_weight_version": "reject"})
    field.publish(*two_versions())
    assert field.rows(ROWS) == [("g_g0", 0, "mixed_weight_version"), ("g_g1", 1, None)]


def test_a_group_with_too_few_valid_rows_is_dropped(field: Field) -> None:
    set_policy(field.lake, {"min_valid_fraction_per_group": 0.5})
    dropped(field, group("g", [1.0, None, None]), "min_valid_fraction_per_group", 1)


def test_a_group_with_just_enough_valid_rows_is_published_whole(field: Field) -> None:
    set_policy(field.lake, {"min_valid_fraction_per_group": 0.5})
    field.publish(*group("g", [1.0, None]))
    assert field.rows(ROWS) == [("g_g0", 1, None), ("g_g1", 0, "environment_failed")]


def test_a_group_that_just_meets_the_fraction_is_published(field: Field) -> None:
    """As a product, 0.28 * 25 is more than 7."""
    set_policy(field.lake, {"min_valid_fraction_per_group": 0.28})
    (done,) = field.publish(*group("g", [1.0] * 7 + [None] * 18))
    assert (done.dropped, done.valid, done.rows) == (None, 7, 25)


def test_segments_of_a_rollout_are_judged_each_by_its_own_versions_and_a_group_by_all(field: Field) -> None:
    def branched(name: str) -> list[Record]:
        """A terminal chain of version 7, one beside it of version 8, and one that began under 7 and ended under 8."""
        return [
            {"type": "group", "group_id": name, "n": 2},
            call(f"{name}_g0", "a", [1], [2]),
            call(f"{name}_g0", "b", [3], [4], weight_version=8),
            call(f"{name}_g0", "c", [5], [6]),
            call(f"{name}_g0", "d", [5, 6, 7], [8], weight_version=8),
            {"type": "seal", "rollout_id": f"{name}_g0", "reward": 1.0, "terminal_call_id": "a"},
            {"type": "fail", "rollout_id": f"{name}_g1", "reason": "timeout"},
        ]

    set_policy(field.lake, {"rows": "segments", "mixed_weight_version": "reject", "min_valid_fraction_per_group": 0.5})
    (done,) = field.publish(*branched("g"))
    assert (done.valid, done.rows, done.dropped) == (1, 3, None)
    told = "SELECT segment_index, input_ids, weight_version_min, weight_version_max, group_min_wv, group_max_wv"
    assert field.rows(f"{told} FROM ready_rows WHERE sample_mask = 1 ORDER BY 1") == [
        (0, [1, 2], 7, 7, 7, 8),
        (1, [3, 4], 8, 8, 7, 8),
    ]
    set_policy(field.lake, {"min_delivered_fraction": 0.5})
    assert [each.valid for each in field.publish(*branched("h"))] == [1]
    set_policy(field.lake, {"min_delivered_fraction": 0.6, "min_valid_fraction_per_group": 0})
    assert [dict(each.reasons) for each in field.publish(*branched("i"))] == [{"timeout": 1, "undelivered": 1}]
    set_policy(field.lake, {"mixed_weight_version_per_group": "reject", "min_delivered_fraction": 0})
    assert [each.dropped for each in field.publish(*branched("j"))] == ["mixed_weight_version_per_group"]


def test_nothing_is_due_before_the_deadline_that_the_policy_sets_and_everything_after(field: Field) -> None:
    records = [record for record in group("g", [1.0, 0.5]) if record.get("rollout_id") != "g_g1"]
    assert field.publish(*records) == []
    ((registered,),) = field.rows("SELECT epoch_us(registered_at) FROM groups")
    set_policy(field.lake, {"group_deadline_s": 60})
    assert publish_due(field.lake, now=registered + 60_000_000 - 1) == []
    assert field.rows(STATES) == [("g_g0", "valid", None), ("g_g1", "open", None)]
    assert len(publish_due(field.lake, now=registered + 60_000_000)) == 1
    assert field.rows(STATES) == field.rows(
        "SELECT rollout_id, if(sample_mask = 1, 'valid', 'placeholder'), reason FROM ready_rows ORDER BY 1"
    )
    assert field.rows(ROWS) == [("g_g0", 1, None), ("g_g1", 0, "never_sealed")]


def test_a_row_that_holds_too_little_of_what_was_sampled_is_undelivered(field: Field) -> None:
    records: list[Any] = [
        *group("g", [None])[:1],
        call("g_g0", "c0", [1], [2, 3, 4]),
        call("g_g0", "c1", [9], [5]),
        {"type": "seal", "rollout_id": "g_g0", "reward": 1.0, "terminal_call_id": "c1"},
    ]
    set_policy(field.lake, {"min_delivered_fraction": 0.5})
    field.publish(*records)
    assert field.rows(ROWS) == [("g_g0", 0, "undelivered")]
    assert field.rows("SELECT dropped_sampled_tokens FROM ready_rows") == [(4,)]


def test_a_row_that_just_holds_the_fraction_is_delivered(field: Field) -> None:
    set_policy(field.lake, {"min_delivered_fraction": 0.28})
    field.publish(
        *group("g", [None])[:1],
        call("g_g0", "c0", [1], [2] * 18),
        call("g_g0", "c1", [9], [5] * 7),
        {"type": "seal", "rollout_id": "g_g0", "reward": 1.0, "terminal_call_id": "c1"},
    )
    assert field.rows(STATES) == [("g_g0", "valid", None)]
    assert field.rows(ROWS) == [("g_g0", 1, None)]
