"""Cases from the field, brought in by `tokenlake import` and read back as rows."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest

from tests.cases.conftest import CaseLake, call, fail, group, seal

G = "g7_g0"


def test_a_retried_call_whose_answer_was_lost_is_a_dead_branch(case: CaseLake) -> None:
    """B05 (i)."""
    row = case.row(
        group("g7"),
        call(G, "c1", [1, 2], [4, 5, 9]),
        call(G, "c1b", [1, 2], [6, 9]),
        call(G, "c2", [1, 2, 6, 9, 7], [10, 9]),
        seal(G),
    )
    assert row["input_ids"] == [1, 2, 6, 9, 7, 10, 9]
    assert row["token_mask"] == [0, 0, 1, 1, 0, 1, 1]
    assert (row["sample_mask"], row["reason"], row["call_ids"]) == (1, None, ["c1b", "c2"])
    assert row["dropped_sampled_tokens"] == 3
    assert case.sql("SELECT count(*) FROM calls") == [(3,)]


def test_the_same_record_twice_is_one_call(case: CaseLake) -> None:
    """B05 (ii)."""
    records = [group("g7"), call(G, "x", [1, 2], [4, 9]), call(G, "x", [1, 2], [4, 9]), seal(G)]
    row = case.row(*records)
    assert row["input_ids"] == [1, 2, 4, 9]
    status, out, _ = case.try_import(*records)
    assert status == 0
    assert "imported 0 groups, 0 calls, 0 seals, 0 fails; 4 records were there already" in out
    assert case.rows() == [row]


def test_a_call_id_with_other_content_refuses_the_file(case: CaseLake) -> None:
    """B05 (iii)."""
    status, _, err = case.try_import(group("g7"), call(G, "x", [1, 2], [4, 9]), call(G, "x", [1, 2], [6, 9]))
    assert status == 2
    assert "line 3" in err
    assert "exists with other content" in err
    assert case.sql("SELECT count(*) FROM lineage WHERE event_type <> 'lake_opened'") == [(0,)]


def test_identical_twins_have_one_parent_and_are_trained_once(case: CaseLake) -> None:
    """B05 (iv)."""
    row = case.row(
        group("g7"),
        call(G, "t1", [1, 2], [4, 9]),
        call(G, "t2", [1, 2], [4, 9]),
        call(G, "c2", [1, 2, 4, 9, 7], [8]),
        seal(G),
    )
    assert row["call_ids"] == ["t1", "c2"]
    assert row["input_ids"] == [1, 2, 4, 9, 7, 8]
    assert row["token_mask"] == [0, 0, 1, 1, 0, 1]
    assert case.sql("SELECT parent_call_id FROM calls WHERE call_id = 'c2'") == [("t1",)]


SIDE = [
    group("g7"),
    call(G, "c0", [1, 2], [3], response_id="r6"),
    call(G, "c1", [1, 2, 3, 4], [5], response_id="r7"),
    call(G, "c9", [50], [51], response_id="r8"),
]


def test_the_terminal_is_what_the_evidence_names(case: CaseLake) -> None:
    """B08: never the newest call."""
    expected = {
        (("terminal_response_id", "r7"),): (None, ["c0", "c1"]),
        (("terminal_call_id", "c1"),): (None, ["c0", "c1"]),
        (("terminal_call_id", "c1"), ("terminal_response_id", "r7")): (None, ["c0", "c1"]),
        (("terminal_call_id", "c1"), ("terminal_response_id", "r8")): ("terminal_ambiguous", []),
        (("terminal_call_id", "nowhere"),): ("terminal_unknown", []),
        (("terminal_response_id", "nowhere"),): ("terminal_unknown", []),
        (): ("terminal_ambiguous", []),
    }
    calls = [record | {"rollout_id": f"g7_g{i}"} for i in range(len(expected)) for record in SIDE[1:]]
    case.take(
        group("g7", len(expected)), *calls, *(seal(f"g7_g{i}", **dict(names)) for i, names in enumerate(expected))
    )
    case.finalize()
    rows = dict(zip(expected, case.rows(), strict=True))
    assert {names: (row["reason"], row["call_ids"]) for names, row in rows.items()} == expected
    assert all(row["sample_mask"] == int(row["reason"] is None) for row in rows.values())


def test_without_evidence_the_only_leaf_is_the_terminal(case: CaseLake) -> None:
    """B08."""
    assert case.row(*SIDE[:3], seal(G))["call_ids"] == ["c0", "c1"]


NAN = float("nan")
INF = float("inf")


def test_bad_logprobs_make_a_placeholder_with_their_own_reason(case: CaseLake) -> None:
    """B16, B34."""
    given: list[tuple[list[float | None] | None, str | None]] = [
        ([-0.1, -0.2], None),
        ([-0.1, 0.0], None),
        (None, "logprobs_missing"),
        ([-0.1, None], "logprob_null"),
        ([-0.1, NAN], "logprob_nan"),
        ([-0.1, -INF], "logprob_infinite"),
        ([-0.1, INF], "logprob_infinite"),
        ([-0.1], "length_mismatch"),
        ([-0.1, -0.2, -0.3], "length_mismatch"),
        ([-0.1, 0.25], "logprob_positive"),
        ([-0.1, -9999.0], "logprob_sentinel"),
    ]
    case.take(
        group("g7", len(given)),
        *(call(f"g7_g{i}", "c0", [1, 2], [3, 9], generation_logprobs=each) for i, (each, _) in enumerate(given)),
        *(seal(f"g7_g{i}") for i in range(len(given))),
    )
    case.finalize()
    rows = case.rows()
    assert [row["reason"] for row in rows] == [reason for _, reason in given]
    for row in rows:
        assert row["sample_mask"] == int(row["reason"] is None)
        if row["reason"] is not None:
            assert (row["input_ids"], row["token_mask"], row["logprobs"]) == ([1, 2], [0, 0], [0.0, 0.0])
            assert row["reward"] is None
    assert case.sql("SELECT count(*), count(ok) FROM call_verdicts") == [(len(given), len(given))]


def test_float32_logprobs_come_back_bit_for_bit(case: CaseLake) -> None:
    """B22."""
    value = -12.3456
    row = case.row(group("g7"), call(G, "c0", [1], [2, 3], generation_logprobs=[value, -1e-38]), seal(G))
    assert struct.pack("<3f", *row["logprobs"]) == struct.pack("<3f", 0.0, value, -1e-38)


def test_versions_of_the_chain_make_the_versions_of_the_row(case: CaseLake) -> None:
    """B18: the minimum over starts, the maximum over ends; unknown is not zero."""
    case.take(
        group("g7", 3),
        call("g7_g0", "c0", [1], [2], weight_version=7),
        call("g7_g0", "c1", [1, 2, 3], [4], weight_version=7, weight_version_end=8),
        seal("g7_g0"),
        call("g7_g1", "c0", [1], [2], weight_version=9),
        seal("g7_g1"),
        call("g7_g2", "c0", [1], [2], weight_version=None),
        seal("g7_g2"),
    )
    case.finalize()
    rows = case.rows()
    assert [(r["weight_version_min"], r["weight_version_max"]) for r in rows] == [(7, 8), (9, 9), (None, None)]
    assert {r["sample_mask"] for r in rows} == {1}


def test_mixed_versions_can_be_rejected_and_siblings_stay(case: CaseLake) -> None:
    case.take(
        group("g7", 2),
        call("g7_g0", "c0", [1], [2], weight_version=7),
        call("g7_g0", "c1", [1, 2, 3], [4], weight_version=8),
        seal("g7_g0"),
        call("g7_g1", "c0", [1], [2], weight_version=8),
        seal("g7_g1"),
    )
    case.finalize("--policy", "mixed_weight_version=reject")
    assert [r["reason"] for r in case.rows()] == ["mixed_weight_version", None]


def test_a_group_with_too_few_valid_rows_is_dropped_with_its_reason_and_never_short(case: CaseLake) -> None:
    case.take(
        group("g7", 2),
        call("g7_g0", "c0", [1], [2]),
        seal("g7_g0"),
        fail("g7_g1"),
        group("g8", 1),
        call("g8_g0", "c0", [1], [2]),
        seal("g8_g0"),
    )
    out = case.finalize("--policy", "min_valid_fraction_per_group=0.75")
    assert "g7: dropped (min_valid_fraction_per_group)" in out
    assert [row["sample_id"] for row in case.rows()] == ["g8_g0"]
    assert case.sql("SELECT reason FROM lineage WHERE event_type = 'group_dropped'") == [
        ("min_valid_fraction_per_group",)
    ]
    assert "published 0 groups" in case.finalize()


def test_a_claimed_parent_is_checked_and_not_trusted(case: CaseLake) -> None:
    """B37."""
    whole, other = [1, 2, 3, 9, 5], [1, 2, 4, 9, 5]
    given: list[tuple[list[int], dict[str, Any], str | None]] = [
        (whole, {"parent_call_id": "c0", "prev_len": 4}, None),
        (whole, {"parent_call_id": "c0"}, None),
        (other, {"parent_call_id": "c0", "prev_len": 4}, "chain_hash_mismatch"),
        (whole, {"parent_call_id": "c0", "prev_len": 5}, "parent_length_mismatch"),
        (whole, {"parent_call_id": "c0", "prev_len": 3}, "parent_length_mismatch"),
        (whole, {"parent_call_id": "d0", "prev_len": 4}, "parent_foreign"),
        (whole, {"parent_call_id": "zz", "prev_len": 4}, "parent_missing"),
        (whole, {"parent_call_id": "c1", "prev_len": 4}, "parent_cycle"),
        (whole, {"digest": "00" * 32}, "digest_mismatch"),
    ]
    claims = range(len(given))
    case.take(
        group("g7", len(given) + 1),
        *(call(f"g7_g{i}", "c0", [1, 2, 3], [9]) for i in claims),
        call(f"g7_g{len(given)}", "d0", [1, 2, 3], [9]),
        *(call(f"g7_g{i}", "c1", prompt, [6], **claim) for i, (prompt, claim, _) in enumerate(given)),
        *(seal(f"g7_g{i}", terminal_call_id="c1") for i in claims),
        seal(f"g7_g{len(given)}"),
    )
    case.finalize()
    rows = case.rows()
    assert [row["reason"] for row in rows] == [reason for _, _, reason in given] + [None]
    assert all(row["sample_mask"] == int(row["reason"] is None) for row in rows)
    status, findings = case.audit()
    assert status == 1
    assert {each["rollout_id"] for each in findings} == {row["sample_id"] for row in rows if row["reason"] is not None}


def test_the_first_difference_from_a_false_parent_is_told(case: CaseLake) -> None:
    """B37: a position, where the ids are known."""
    case.take(
        group("g7"), call(G, "c0", [1, 2, 3], [9]), call(G, "c1", [1, 2, 4, 9, 5], [6], parent_call_id="c0", prev_len=4)
    )
    assert case.sql("SELECT detail ->> '$.first_difference' FROM lineage WHERE call_id = 'c1'") == [("2",)]


def test_a_cycle_of_two_is_named(case: CaseLake) -> None:
    case.take(
        group("g7"),
        call(G, "a", [1, 2], [3], parent_call_id="b", prev_len=1),
        call(G, "b", [1, 2], [3], parent_call_id="a", prev_len=1),
        seal(G, terminal_call_id="a"),
    )
    case.finalize()
    (row,) = case.rows()
    assert row["sample_mask"] == 0
    assert row["reason"] in ("parent_cycle", "parent_missing")


def test_three_turns_are_one_linear_row(case: CaseLake) -> None:
    """B38."""
    row = case.row(
        group("g7"),
        call(G, "c0", [1, 2], [3]),
        call(G, "c1", [1, 2, 3, 4], [5]),
        call(G, "c2", [1, 2, 3, 4, 5, 6], [7]),
        seal(G),
    )
    assert row["input_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert row["token_mask"] == [0, 0, 1, 0, 1, 0, 1]
    assert len(row["logprobs"]) == 7
    assert (row["turns"], row["sampled_tokens"], row["prompt_ids_for_adv"]) == (3, 3, [1, 2])


def test_a_rollout_stores_each_token_once(case: CaseLake) -> None:
    """B38: ten turns of 60 + 40 are 1,000 ids, not 5,500; also as suffixes."""
    records: list[dict[str, Any]] = [group("g7", 2)]
    whole: list[int] = []
    for turn in range(10):
        suffix, answer = [turn] * 60, [100 + turn] * 40
        prompt = whole + suffix
        whole = prompt + answer
        records.append(call("g7_g0", f"c{turn}", prompt, answer))
        if turn == 0:
            records.append(call("g7_g1", "c0", prompt, answer))
        else:
            record = call("g7_g1", f"c{turn}", [], answer, parent_call_id=f"c{turn - 1}")
            del record["prompt_token_ids"]
            records.append(record | {"prompt_suffix_token_ids": suffix})
    case.take(*records, seal("g7_g0"), seal("g7_g1"))
    case.finalize()
    assert case.sql("SELECT rollout_id, sum(len(token_ids)) FROM deltas GROUP BY ALL ORDER BY ALL") == [
        ("g7_g0", 1000),
        ("g7_g1", 1000),
    ]
    assert [row["input_ids"] for row in case.rows()] == [whole, whole]


def test_failure_is_not_reward_zero_and_there_are_always_n_rows(case: CaseLake) -> None:
    """B43."""
    case.take(
        group("g7", 4),
        *(call(f"g7_g{i}", "c0", [1, 2], [3]) for i in range(4)),
        call("g7_g3", "c1", [1, 2, 3, 4], [5]),
        seal("g7_g0", 1.0),
        seal("g7_g1", 1.0),
        seal("g7_g2", 0.0),
        fail("g7_g3", "environment_failed"),
    )
    case.finalize()
    rows = case.rows("g7")
    assert [r["sample_id"] for r in rows] == ["g7_g0", "g7_g1", "g7_g2", "g7_g3"]
    assert [r["reward"] for r in rows] == [1.0, 1.0, 0.0, None]
    assert [r["reason"] for r in rows] == [None, None, None, "environment_failed"]
    assert rows[3]["input_ids"] == rows[0]["prompt_ids_for_adv"] == [1, 2]


def test_what_never_reports_is_a_placeholder_at_the_deadline_and_not_before(case: CaseLake) -> None:
    """B43."""
    case.take(group("g7", 2), call("g7_g0", "c0", [1, 2], [3]), seal("g7_g0"))
    case.finalize()
    assert case.rows("g7") == []
    case.finalize("--policy", "group_deadline_s=0")
    assert [r["reason"] for r in case.rows("g7")] == [None, "never_sealed"]


def test_a_group_of_which_nothing_is_left_still_has_n_rows(case: CaseLake) -> None:
    case.take(group("g7", 3))
    case.finalize("--policy", "group_deadline_s=0")
    rows = case.rows("g7")
    assert [r["reason"] for r in rows] == ["never_sealed"] * 3
    assert [r["input_ids"] for r in rows] == [[0]] * 3


def test_a_reward_that_is_no_number_is_kept_and_makes_a_placeholder(case: CaseLake) -> None:
    rewards = ["NaN", "Infinity", "-Infinity"]
    case.take(
        group("g7", len(rewards)),
        *(call(f"g7_g{i}", "c0", [1], [2]) for i in range(len(rewards))),
        *(json.dumps(seal(f"g7_g{i}", float(reward))) for i, reward in enumerate(rewards)),
    )
    case.finalize()
    assert [(row["reason"], row["reward"]) for row in case.rows()] == [("non_finite_reward", None)] * 3


def test_a_missing_reward_is_never_zero(case: CaseLake) -> None:
    assert case.row(group("g7"), call(G, "c0", [1], [2]), seal(G, None))["reason"] == "reward_missing"


def test_a_chain_without_a_sampled_token_is_not_trained(case: CaseLake) -> None:
    row = case.row(group("g7"), call(G, "c0", [1, 2], []), seal(G))
    assert (row["reason"], row["input_ids"]) == ("no_sampled_tokens", [1, 2])


def test_the_highest_attempt_counts_and_the_older_one_is_superseded(case: CaseLake) -> None:
    """B46."""
    row = case.row(
        group("g7"),
        call(G, "c0", [1, 2], [3]),
        call(G, "c1", [1, 2, 3, 4], [5]),
        call(G, "d0", [1, 2], [8, 9], attempt=1),
        seal(G, 1.0, attempt=1),
        call(G, "c2", [1, 2, 3, 4, 5, 6], [7]),
    )
    assert (row["input_ids"], row["call_ids"], row["attempt"]) == ([1, 2, 8, 9], ["d0"], 1)
    assert row["dropped_sampled_tokens"] == 0
    assert case.sql("SELECT call_id FROM calls WHERE superseded ORDER BY call_id") == [("c0",), ("c1",), ("c2",)]


def test_a_late_call_changes_no_published_row(case: CaseLake) -> None:
    """B44."""
    row = case.row(group("g7"), call(G, "c0", [1, 2], [3]), seal(G))
    case.take(call(G, "late", [1, 2, 3, 4], [5]))
    case.finalize("--policy", "group_deadline_s=0")
    assert case.rows() == [row]
    status, _, err = case.try_import(call(G, "d0", [1, 2], [8], attempt=1))
    assert status == 2
    assert "published" in err


MALFORMED: list[tuple[dict[str, Any] | str, str]] = [
    ("{", "not valid JSON"),
    ("[]", "must be a JSON object"),
    ('{"type":"call"}', "rollout_id is missing"),
    ('{"type":"dance"}', "type must be one of"),
    (call(G, "c1", [1], [2]) | {"surprise": 1}, "unknown key 'surprise'"),
    (call(G, "c1", [1], [2]) | {"prompt_token_ids": ["1"]}, "prompt_token_ids"),
    (call(G, "c1", [1], [2]) | {"generation_token_ids": [True]}, "generation_token_ids"),
    (call(G, "c1", [1], [-2]), "generation_token_ids"),
    (call(G, "c1", [1], [2**31]), "generation_token_ids"),
    (call(G, "c1", [1], [2]) | {"generation_logprobs": ["x"]}, "generation_logprobs"),
    (call(G, "c1", [1], [2]) | {"weight_version": "7"}, "weight_version"),
    (call(G, "../c1", [1], [2]), "call_id"),
    (call("g7_g1", "c1", [1], [2]), "outside its group"),
    (call("g8_g0", "c1", [1], [2]), "group g8 is unknown"),
    (call("g7", "c1", [1], [2]), "rollout_id"),
    (group("g7", 2), "exists with other content"),
    (group("g9", 0), "n must be"),
    (seal(G) | {"reward": True}, "reward"),
    (seal(G) | {"reward": "1"}, "reward"),
    ('{"type":"group","group_id":"g8","n":1,"n":2}', "given twice"),
]


def test_a_malformed_line_refuses_the_whole_file(case: CaseLake, subtests: pytest.Subtests) -> None:
    case.take(group("g7"), call(G, "c0", [1], [2]))
    written = "SELECT event_hash FROM lineage WHERE event_type <> 'lake_opened' ORDER BY event_seq"
    kept = case.sql(written)
    for bad, why in MALFORMED:
        with subtests.test(why):
            status, _, err = case.try_import(call(G, "fine", [1, 2, 3], [4]), bad)
            assert status == 2
            assert "line 2" in err
            assert why in err
            assert err.count("\n") == 1
    assert case.sql(written) == kept
