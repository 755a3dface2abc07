"""What holds for all views: closed lists, one group like the whole lake, nothing decoded in vain, true docs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from tests.sql.records import RELATIONS, Record, complete_delta, complete_events, connect, raw
from tokenlake import sql
from tokenlake.errors import NotFound
from tokenlake.store import digest, functions, views
from tokenlake.store.policy import POLICIES
from tokenlake.store.schema import DELTA, LINEAGE, PLACEHOLDER_REASONS, ROW, SCHEMA_VERSION

NOTHING: dict[str, list[Record]] = {name: [] for name in RELATIONS}
NAN = float("nan")


def registered(group_id: str, n: int) -> list[Record]:
    events: list[Record] = [{"event_type": "group_registered", "group_id": group_id, "n": n, "weight_version": 3}]
    return events + [
        {"event_type": "rollout_registered", "group_id": group_id, "rollout_id": f"{group_id}_g{i}", "attempt": 0}
        for i in range(n)
    ]


def sealed(rollout_id: str, **more: Any) -> Record:
    return {"event_type": "rollout_sealed", "rollout_id": rollout_id, "attempt": 0, "reward": 1.0} | more


def committed(rollout_id: str, call_id: str) -> Record:
    return {"event_type": "call_committed", "rollout_id": rollout_id, "attempt": 0, "call_id": call_id}


def delta(rollout_id: str, call_id: str, ids: list[int], sampled: int, **more: Any) -> Record:
    mask = [0] * (len(ids) - sampled) + [1] * sampled
    return {"rollout_id": rollout_id, "call_id": call_id, "token_ids": ids, "token_mask": mask} | more


def mixed_lake(groups: int) -> dict[str, list[Record]]:
    """Groups with a good chain, a fork, damage, a failure, a false parent and a place that nobody ended."""
    lake: dict[str, list[Record]] = {name: [] for name in RELATIONS}
    for number in range(groups):
        g = f"g{number}"
        r = [f"{g}_g{i}" for i in range(6)]
        lake["deltas"] += [
            delta(r[0], "c0", [1, 2, 3], 1),
            delta(r[0], "c1", [4, 5], 1, parent_call_id="c0", weight_version=8),
            delta(r[1], "c0", [1, 2, 3], 1),
            delta(r[1], "x", [6], 1, parent_call_id="c0"),
            delta(r[1], "y", [7, 8], 2, parent_call_id="c0"),
            delta(r[1], "y2", [9], 1, parent_call_id="y"),
            delta(r[2], "c0", [1, 2, 3], 1, logprobs=[0.0, 0.0, NAN]),
            delta(r[3], "c0", [1, 2, 3], 1),
            delta(r[4], "c0", [1, 2, 3], 1, parent_call_id="d0", prev_len=2),
            delta(r[5], "d0", [1, 2], 1),
            delta(r[5], "c9", [1, 2], 1),
        ]
        lake["lineage"] += [
            *registered(g, 6),
            *(committed(each["rollout_id"], each["call_id"]) for each in lake["deltas"][-11:-1]),
            sealed(r[0]),
            sealed(r[1], terminal_call_id="y2"),
            sealed(r[2]),
            {"event_type": "rollout_failed", "rollout_id": r[3], "attempt": 0, "reason": "timeout"},
            sealed(r[4]),
        ]
        if number % 2:
            lake["lineage"].append({"event_type": "rollout_failed", "rollout_id": r[5], "reason": "never_sealed"})
    return lake


def rows_of(con: duckdb.DuckDBPyConnection, query: str) -> list[str]:
    return sorted(map(repr, con.execute(query).fetchall()))


@pytest.fixture(scope="module")
def whole() -> duckdb.DuckDBPyConnection:
    return connect(mixed_lake(4))


def test_reasons_in_sql_are_the_closed_list() -> None:
    words = re.findall(r"'([a-z_]+)'", sql.read("views/placeholder_reason"))
    assert tuple(words) == PLACEHOLDER_REASONS
    con = connect(NOTHING)
    assert con.execute("SELECT placeholder_reason(NULL, 'x'), placeholder_reason('why', 'x')").fetchall() == [
        (None, "x")
    ]


def test_every_reason_a_view_can_give_is_in_the_closed_list() -> None:
    given = set(re.findall(r"(?:THEN|ELSE) '([a-z_]+)'", sql.read("views/verified_calls")))
    given |= set(re.findall(r"'reason': '([a-z_]+)'", sql.read("views/call_checks")))
    for name in ("judged_rollouts", "rollout_trees"):
        given |= set(re.findall(r"THEN '([a-z_]+_[a-z_]+)'", sql.read(f"views/{name}"))) - {"only_leaf"}
    assert given <= set(PLACEHOLDER_REASONS)


def test_the_schema_version_that_views_know_is_the_one_written() -> None:
    assert f"schema_version = {SCHEMA_VERSION}," in sql.read("views/verified_calls")
    assert f"{SCHEMA_VERSION}::INTEGER AS schema_version" in sql.read("views/candidate_rows")


def test_policies_have_the_same_defaults_in_sql_and_in_python() -> None:
    cursor = connect(NOTHING).execute("SELECT * EXCLUDE (detail) FROM policies")
    names = [column[0] for column in cursor.description or ()]
    assert dict(zip(names, cursor.fetchall()[0], strict=True)) == {
        name: policy.default for name, policy in POLICIES.items() if policy.owner == "views"
    }


def test_a_row_has_the_columns_and_types_of_a_row() -> None:
    con = connect(NOTHING)
    wanted = ROW.empty_table()
    con.register("wanted", wanted)
    types = {row[0]: row[1] for row in con.execute("DESCRIBE wanted").fetchall()}
    ready = {row[0]: row[1] for row in con.execute("DESCRIBE ready_rows").fetchall()}
    publishable = {row[0]: row[1] for row in con.execute("DESCRIBE publishable_rows").fetchall()}
    assert ready == types
    assert publishable == {n: t for n, t in types.items() if n not in ("row_digest", "published_at")}


def test_a_check_is_never_null_and_every_call_has_one_verdict(whole: duckdb.DuckDBPyConnection) -> None:
    checks = whole.execute("SELECT count(*), count(ok), count(DISTINCT check_name) FROM call_checks").fetchall()
    calls = whole.execute("SELECT count(*), count(ok) FROM call_verdicts").fetchall()
    assert calls == [(40, 40)]
    assert checks == [(40 * 26, 40 * 26, 26)]


def test_a_verdict_is_the_first_failed_check_and_agrees_with_the_checks(whole: duckdb.DuckDBPyConnection) -> None:
    apart = """
        SELECT group_id, rollout_id, attempt, call_id
        FROM call_verdicts
        INNER JOIN call_checks USING (group_id, rollout_id, attempt, call_id)
        GROUP BY ALL
        HAVING
            any_value(call_verdicts.ok) <> (count(*) FILTER (NOT call_checks.ok AND severity = 'fault') = 0)
            OR NOT coalesce(
                list_contains(list(call_checks.reason), any_value(call_verdicts.reason)), any_value(call_verdicts.ok)
            )
    """
    assert whole.execute(apart).fetchall() == []


@pytest.mark.parametrize(
    "view",
    [
        "attempts",
        "call_verdicts",
        "candidate_rows",
        "chains",
        "group_versions",
        "groups",
        "linear_rows",
        "publishable_rows",
        "rollouts",
    ],
)
def test_one_group_alone_is_seen_like_that_group_in_the_whole_lake(whole: duckdb.DuckDBPyConnection, view: str) -> None:
    lake = mixed_lake(4)
    inside = lambda each: re.match("g2(_|$)", each.get("group_id") or each.get("rollout_id")) is not None  # noqa: E731
    alone = {name: [each for each in records if inside(each)] for name, records in lake.items()}
    lineage = {event["event_hash"]: event for event in complete_events(lake["lineage"], _complete(lake["deltas"]))}
    kept = [event for event in lineage.values() if inside(event)]
    one = connect(alone | {"lineage": kept})
    assert rows_of(one, f"SELECT * FROM {view}") == rows_of(whole, f"SELECT * FROM {view} WHERE group_id = 'g2'")


def _complete(deltas: list[Record]) -> list[Record]:
    return [complete_delta(each, deltas) for each in deltas]


def test_a_due_group_has_n_rows_in_the_order_of_its_rollouts(whole: duckdb.DuckDBPyConnection) -> None:
    found = whole.execute(
        "SELECT group_id, list(reason ORDER BY sample_id), list(sample_mask ORDER BY sample_id) "
        "FROM publishable_rows GROUP BY group_id ORDER BY group_id"
    ).fetchall()
    reasons = [None, None, "logprob_nan", "timeout", "parent_foreign", "never_sealed"]
    assert found == [(group, reasons, [1, 1, 0, 0, 0, 0]) for group in ("g1", "g3")]


def test_the_sums_of_a_row_are_those_of_its_arrays(whole: duckdb.DuckDBPyConnection) -> None:
    wrong = """
        SELECT sample_id FROM publishable_rows
        WHERE
            len(input_ids) <> len(token_mask) OR len(input_ids) <> len(logprobs)
            OR coalesce(list_sum(token_mask), 0) <> sampled_tokens OR len(call_ids) <> turns
            OR (sample_mask = 0 AND (input_ids <> prompt_ids_for_adv OR reward IS NOT NULL))
            OR input_ids[1:len(prompt_ids_for_adv)] <> prompt_ids_for_adv
    """
    assert whole.execute(wrong).fetchall() == []


def counting_lake(groups: int) -> tuple[duckdb.DuckDBPyConnection, list[int]]:
    """A lake whose `deltas` says how many records were decoded."""
    lake = mixed_lake(groups)
    con = duckdb.connect()
    con.execute("SET TimeZone = 'UTC'")
    functions.register(con)
    deltas = _complete(lake["deltas"])
    tables = {
        "staged": pa.Table.from_pylist(deltas, schema=DELTA),
        "lineage": pa.Table.from_pylist(complete_events(lake["lineage"], deltas), schema=LINEAGE),
        "rows": RELATIONS["rows"].empty_table(),
        "lake_findings": RELATIONS["lake_findings"].empty_table(),
    }
    for name, table in tables.items():
        con.register("given", table)
        con.execute(f"CREATE TABLE {name} AS SELECT * FROM given")
        con.unregister("given")
    decoded: list[int] = []

    def decode(ids: pa.ChunkedArray) -> pa.ChunkedArray:
        decoded.append(len(ids))
        return ids

    whole = duckdb.list_type(duckdb.sqltypes.INTEGER)
    con.create_function("decode", decode, [whole], whole, type="arrow", null_handling="special")
    con.execute(
        "CREATE VIEW deltas AS SELECT * REPLACE (decode(token_ids) AS token_ids), "
        "regexp_replace(rollout_id, '_g[0-9]+$', '') AS group_id FROM staged"
    )
    views.create_views(con)
    return con, decoded


@pytest.mark.slow
@pytest.mark.parametrize("view", ["linear_rows", "rollouts", "call_verdicts"])
def test_asking_for_one_rollout_decodes_only_its_records(view: str) -> None:
    con, decoded = counting_lake(200)
    assert con.execute(f"SELECT count(*) FROM {view} WHERE rollout_id = 'g77_g1'").fetchall()[0][0] > 0
    assert sum(decoded) == 4


@pytest.mark.slow
def test_asking_for_one_group_decodes_only_its_records() -> None:
    con, decoded = counting_lake(200)
    assert con.execute("SELECT count(*) FROM linear_rows WHERE group_id = 'g77'").fetchall()[0][0] > 0
    held = con.execute("SELECT count(*) FROM staged WHERE starts_with(rollout_id, 'g77_g')").fetchall()[0][0]
    assert sum(decoded) == held


@pytest.mark.slow
def test_where_a_group_stands_is_told_without_decoding() -> None:
    con, decoded = counting_lake(20)
    assert con.execute("SELECT state, count(*) FROM group_states GROUP BY ALL ORDER BY ALL").fetchall() == [
        ("due", 10),
        ("open", 10),
    ]
    con.execute("SELECT * FROM chains").fetchall()
    con.execute("SELECT * FROM ready_rows").fetchall()
    assert sum(decoded) == 0


def test_every_file_is_one_statement_with_a_header() -> None:
    for name in views.ordered_views():
        text = sql.read(name)
        assert re.match(
            r"-- what: .+\n(--   .+\n)*-- grain: .+\n-- reads: .+\nCREATE OR REPLACE (VIEW|MACRO) ", text
        ), name
        assert text.rstrip().endswith(";"), name
        assert text.count(";\n") == 1, name
        assert f" {name.rpartition('/')[2]}" in text, name
        assert not re.search(r"\bnow\(|current_|today\(|random\(", text), name


def test_headers_name_all_that_a_view_reads() -> None:
    names = {path.rpartition("/")[2] for path in views.ordered_views()} | set(RELATIONS)
    for path in views.ordered_views():
        text = sql.read(path)
        header = text[text.index("-- reads: ") :].partition("\n")[0]
        body = text.partition("CREATE OR REPLACE")[2].partition(" AS")[2]
        ctes = set(re.findall(r"(\w+) AS (?:MATERIALIZED )?\(\n", body))
        used = set(re.findall(r"(?:(?<!DISTINCT )FROM|JOIN) (\w+)", body)) | (set(re.findall(r"(\w+)\(", body)) & names)
        assert set(re.findall(r"\w+", header)[1:]) - {"nothing"} == used & names - ctes, path


def test_an_unknown_file_is_named() -> None:
    with pytest.raises(NotFound, match="views/nowhere"):
        sql.read("views/nowhere")
    with pytest.raises(NotFound, match="nowhere"):
        sql.names("nowhere")


RECORDS = [
    delta("g_g0", "c0", [1, 2, 3], 1),
    delta("g_g0", "c1", [], 0, parent_call_id=None, weight_version=None, finish_reason=None),
    delta("g_g0", "c2", [5], 1, extras='{"a":1}', logprobs=[None]),
    delta("g_g0", "c3", [5, 6], 1, logprobs=None) | {"token_ids": None, "token_mask": [0, None], "cum_len": 2},
    delta(
        "g_g0",
        "ü",
        [5, -6],
        1,
        logprobs=[NAN, 0.0],
        sampling=dict.fromkeys(("temperature", "top_p", "top_k", "logprob_mode")),
    ),
    delta("g_g0", "c5", [5, 6, 7], 2, token_ids=[None, 6, None]),
]


def test_digests_in_sql_are_those_of_the_format() -> None:
    deltas = _complete(RECORDS)
    con = connect(NOTHING | {"deltas": RECORDS})
    columns = ", ".join(functions._DELTA_ARGUMENTS)
    found = con.execute(f"SELECT call_id, tl_delta_digest({columns}), digest FROM deltas").fetchall()
    assert len(found) == len(RECORDS)
    assert all(computed == stored for _, computed, stored in found)
    chained = con.execute(
        "SELECT call_id, tl_chain_hash(NULL, token_ids), tl_chain_hash(digest, token_ids) FROM deltas"
    )
    for call_id, root, child in chained.fetchall():
        (one,) = (each for each in deltas if each["call_id"] == call_id)
        ids = raw("i", one["token_ids"])
        assert root == digest.chain_hash(None, ids)
        assert child == digest.chain_hash(one["digest"], ids)


def test_a_digest_of_what_cannot_be_bound_is_null() -> None:
    con = connect(NOTHING | {"deltas": RECORDS})
    columns = ", ".join(functions._DELTA_ARGUMENTS)
    query = f"SELECT tl_delta_digest({columns}) IS NULL FROM (SELECT * REPLACE ({{}}) FROM deltas)"
    for change in ("NULL AS call_id", "-1 AS schema_version", "NULL AS chain_hash", "NULL AS prev_len"):
        assert con.execute(query.format(change)).fetchall() == [(True,)] * len(RECORDS)
    half = con.execute(query.format("CASE call_id WHEN 'c0' THEN NULL ELSE mode END AS mode")).fetchall()
    assert sorted(half) == [(False,)] * 5 + [(True,)]


def test_slices_of_vectors_are_hashed_right() -> None:
    many = [delta("g_g0", f"c{i}", list(range(i % 7)), i % 3 if i % 7 > 2 else 0) for i in range(2500)]
    con = connect(NOTHING | {"deltas": many})
    columns = ", ".join(functions._DELTA_ARGUMENTS)
    same = f"SELECT count(*) FROM deltas WHERE digest = tl_delta_digest({columns})"
    assert con.execute(same).fetchall() == [(2500,)]
    assert con.execute(f"{same} AND len(token_ids) > 4").fetchall() == [(714,)]


def documented() -> dict[str, str]:
    text = (Path(__file__).parents[2] / "docs" / "views.md").read_text()
    return {part.partition("\n")[0]: part for part in text.split("\n### ")[1:]}


def test_every_view_is_documented_with_all_its_columns() -> None:
    con = connect(NOTHING)
    sections = documented()
    views_there = {row[0] for row in con.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()}
    assert set(sections) == views_there
    for name, section in sections.items():
        columns = [row[0] for row in con.execute(f"DESCRIBE {name}").fetchall()]
        listed = section.partition("- columns:")[2].partition("\n\n")[0].partition("```")[0]
        assert re.findall(r"`(\w+)`", listed) == columns, name


def test_examples_of_the_docs_run(whole: duckdb.DuckDBPyConnection) -> None:
    examples = [
        found for section in documented().values() for found in re.findall(r"```sql\n(.*?)\n```", section, re.DOTALL)
    ]
    assert len(examples) > 10
    for example in examples:
        whole.execute(example).fetchall()
