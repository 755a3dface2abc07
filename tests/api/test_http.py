"""The wire: one error shape on every route, credentials, bounds, reading, settings."""

from __future__ import annotations

import json
import stat
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.api.conftest import TOKEN, Door, Opener
from tests.api.test_chat import U5, U6, ask, echo
from tests.api.test_lifecycle import wait_for
from tokenlake.api import errors_http
from tokenlake.api.auth import Capabilities, load_key
from tokenlake.api.settings import Settings, read_environment
from tokenlake.errors import (
    ConfigError,
    Conflict,
    Deadline,
    InvalidInput,
    NotFound,
    QueryError,
    TokenlakeError,
    Unauthorized,
)

ROUTES = [
    ("PUT", "/api/v1/groups/g", {"n": 1}),
    ("GET", "/api/v1/groups", None),
    ("GET", "/api/v1/groups/g", None),
    ("POST", "/api/v1/groups/g/publish", None),
    ("POST", "/api/v1/groups/g/abort", None),
    ("PUT", "/api/v1/rollouts/g_g0/attempts/1", None),
    ("GET", "/api/v1/rollouts/g_g0", None),
    ("POST", "/api/v1/rollouts/g_g0/freeze", {}),
    ("POST", "/api/v1/rollouts/g_g0/seal", {"reward": 1}),
    ("POST", "/api/v1/rollouts/g_g0/fail", {"reason": "x"}),
    ("GET", "/api/v1/rows", None),
    ("POST", "/api/v1/claims", {"consumer": "t0"}),
    ("POST", "/api/v1/claims/c/consume", {"checkpoint": "step-1"}),
    ("POST", "/api/v1/claims/c/release", {}),
    ("POST", "/api/v1/consumers/t0/rewind", {"checkpoint": "step-1"}),
    ("PUT", "/api/v1/workers/w", {}),
    ("GET", "/api/v1/workers", None),
    ("PUT", "/api/v1/weight_version", {"version": 1}),
    ("POST", "/api/v1/sql", {"sql": "SELECT 1"}),
    ("GET", "/api/v1/audit", None),
    ("GET", "/metrics", None),
]


def shape(answer: Any, status: int, kind: str) -> None:
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"type", "message", "detail"}


def test_every_route_has_one_error_shape(door: Door) -> None:
    for method, path, body in ROUTES:
        shape(door.request(method, path, body, token=None), 401, "unauthorized")
        shape(door.request(method, path, body, token="wrong"), 401, "unauthorized")
        shape(door.request("PATCH", path), 405, "method_not_allowed")
        if body is not None:
            for content in (b"{", b"[]", b"\xff", b"{" * 5000, b'{"n": NaN}'):
                answer = door.http.request(method, path, content=content, headers={"Authorization": f"Bearer {TOKEN}"})
                shape(answer, 400, "invalid_input")
            shape(door.request(method, path, {**body, "unknown": 1}), 400, "invalid_input")
    shape(door.request("GET", "/api/v1/nothing"), 404, "not_found")
    shape(door.request("GET", "/nothing"), 404, "not_found")
    shape(door.request("GET", "/api/v1/groups/nothing"), 404, "not_found")
    shape(door.request("GET", "/api/v1/groups/no%20id"), 400, "invalid_input")


def test_health_needs_no_token(door: Door) -> None:
    assert door.request("GET", "/healthz", token=None).json() == {"status": "ok"}
    assert door.request("GET", "/readyz", token=None).json() == {"status": "ready"}
    for path in ("/healthz", "/readyz"):
        asked = door.request("HEAD", path, token=None)
        assert (asked.status_code, asked.content) == (200, b"")


def test_an_oversized_body_is_refused_before_it_is_read(opened: Opener) -> None:
    with opened(max_body_bytes=1000) as door:
        (rollout,) = door.register()
        shape(door.request("PUT", "/api/v1/groups/h", {"n": 1, "meta": {"x": "y" * 1000}}), 413, "too_large")
        chunks = (b"x" * 500 for _ in range(3))
        answer = door.http.put("/api/v1/groups/h", content=chunks, headers={"Authorization": f"Bearer {TOKEN}"})
        shape(answer, 413, "too_large")
        path = f"/ng-rollout/{rollout['rollout_id']}/v1/chat/completions"
        big = door.post(path, {"messages": [{"role": "user", "content": "x" * 1000}]}, token=rollout["data_capability"])
        assert (big.status_code, big.json()["error"]["code"]) == (413, "too_large")


def test_malformed_model_calls_answer_in_the_dialects_shape(door: Door) -> None:
    (rollout,) = door.register()
    path = f"/ng-rollout/{rollout['rollout_id']}/v1/chat/completions"
    for content in (b"{", b"[]", b"{}", b'{"messages": NaN}', b"\xff"):
        answer = door.http.post(path, content=content, headers={"x-api-key": rollout["data_capability"]})
        assert answer.status_code == 400
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert set(door.request("GET", "/v1/nothing").json()["error"]) == {"message", "type", "param", "code"}
    assert not door.events("call_failed")


def test_every_error_class_has_a_status() -> None:
    statuses = {errors_http.status_of(cls("x"))[0] for cls in errors_http.STATUSES}
    assert statuses <= {400, 401, 403, 404, 409, 413, 422, 429, 503, 504}
    assert errors_http.status_of(QueryError("x")) == (400, "invalid_input")
    assert errors_http.status_of(TokenlakeError("x")) == (500, "internal")


def published(door: Door, n: int = 2, group_id: str = "g") -> list[Any]:
    """A group of which rollout 0 is valid and the others failed, published."""
    rollouts = door.register(group_id, n)
    agent = door.agent(rollouts[0])
    first = ask(agent, [U5])
    last = ask(agent, [U5, echo(first), U6])
    door.client.seal(f"{group_id}_g0", reward=1.0, terminal_response_id=last.id)
    for index in range(1, n):
        door.client.fail(f"{group_id}_g{index}", reason="environment_failed")
    wait_for(door, lambda: door.service.control.groups[group_id].state == "published")
    return rollouts


def test_a_group_publishes_itself_when_all_its_rollouts_have_ended(door: Door) -> None:
    published(door)
    group = door.client.group("g")
    assert (group["state"], group["n"], group["valid"]) == ("published", 2, 1)
    assert (group["group_min_wv"], group["group_max_wv"]) == (7, 7)
    rows = door.request("GET", "/api/v1/rows?group_id=g").json()["rows"]
    assert [row["sample_id"] for row in rows] == ["g_g0", "g_g1"]
    assert rows[0]["input_ids"] == [1, 101, 5, 9, 8, 102, 3, 9, 8, 101, 6, 9, 8, 102, 3, 9]
    assert rows[0]["token_mask"] == [0] * 6 + [1, 1] + [0] * 6 + [1, 1]
    assert (rows[1]["sample_mask"], rows[1]["reason"], rows[1]["reward"]) == (0, "environment_failed", None)
    table, following = door.client.rows(group_id="g")
    assert (table.num_rows, following) == (2, None)
    assert table.column("logprobs").to_pylist()[0] == rows[0]["logprobs"]
    again = door.client.seal("g_g0", reward=1.0, terminal_response_id=f"chatcmpl-{rows[0]['terminal_call_id']}")
    assert [entry["call_id"] for entry in again["manifest"]] == rows[0]["call_ids"]
    state = door.client.rollout("g_g1")
    assert (state["verdict"], state["reason"]) == ("placeholder", "environment_failed")
    with pytest.raises(Conflict):
        door.client.register_attempt("g_g0", 1)
    audit = door.request("GET", "/api/v1/audit").json()
    assert (audit["healthy"], audit["total"]) == (True, 0)
    text = door.request("GET", "/metrics").text
    for line in (
        'finalize_rows_total{reason="environment_failed",valid="false"} 1.0',
        'gate_calls_total{dialect="chat",mode="token_in"} 1.0',
        'gate_roots_total{cause="no_history"} 1.0',
        "gate_token_in_rate 0.5",
        "finalize_delivered_fraction 0.5",
    ):
        assert line in text


METRICS = (
    "gate_calls_total",
    "gate_roots_total",
    "gate_token_in_rate",
    "gate_capture_failures_total",
    "gate_call_overhead_seconds",
    "gate_open_rollouts",
    "gate_lineage_bytes",
    "stage_seconds",
    "stage_bytes_total",
    "finalize_rows_total",
    "finalize_seconds",
    "finalize_delivered_fraction",
    "group_wv_spread",
    "digest_failures_total",
    "rollouts_expired_total",
)


def test_all_metrics_are_there(door: Door) -> None:
    text = door.request("GET", "/metrics").text
    for name in METRICS:
        assert f"# TYPE {name} " in text


def test_rows_come_in_pages_of_whole_groups(door: Door) -> None:
    for name in ("a", "b", "c"):
        published(door, 2, name)
    seen: list[str] = []
    after: str | None = None
    while True:
        table, after = door.client.rows(after=after, limit=3)
        seen += table.column("sample_id").to_pylist()
        assert table.num_rows == 2
        if after is None:
            break
    assert seen == ["a_g0", "a_g1", "b_g0", "b_g1", "c_g0", "c_g1"]
    assert len(door.request("GET", "/api/v1/rows?limit=4").json()["rows"]) == 4
    page = door.request("GET", "/api/v1/groups?limit=2").json()
    assert ([group["group_id"] for group in page["groups"]], page["next"]) == (["a", "b"], "b")
    assert [(group["valid"], group["group_min_wv"]) for group in page["groups"]] == [(1, 7), (1, 7)]
    rest = door.request("GET", "/api/v1/groups?limit=2&after=b").json()
    assert ([group["group_id"] for group in rest["groups"]], rest["next"]) == (["c"], None)
    with pytest.raises(NotFound):
        door.client.rows(after="z")
    for limit in ("0", "-1", "x", "1.5"):
        shape(door.request("GET", f"/api/v1/rows?limit={limit}"), 400, "invalid_input")


def test_a_deadline_publishes_placeholders_for_whoever_did_not_end(door: Door) -> None:
    rollouts = door.register(n=2, deadline_s=2)
    ask(door.agent(rollouts[0]), [U5])
    door.client.seal("g_g0", reward=1.0)
    wait_for(door, lambda: door.service.control.groups["g"].state == "published")
    rows = door.request("GET", "/api/v1/rows?group_id=g").json()["rows"]
    assert [row["reason"] for row in rows] == [None, "never_sealed"]
    assert "rollouts_expired_total 1.0" in door.request("GET", "/metrics").text


def test_rollouts_that_nobody_ends_expire(opened: Opener) -> None:
    with opened(rollout_ttl_s=0.05) as door:
        door.register()
        wait_for(door, lambda: door.service.control.groups["g"].state == "published")
        assert door.client.rollout("g_g0")["reason"] == "never_sealed"


def test_publish_now_takes_the_deadline_as_passed(door: Door) -> None:
    rollouts = door.register(n=2)
    ask(door.agent(rollouts[0]), [U5])
    door.client.seal("g_g0", reward=0.0)
    done = door.client.publish("g")
    assert (done["n"], done["valid"], done["reasons"]) == (2, 1, {"never_sealed": 1})
    assert door.client.publish("g") == done
    with pytest.raises(Conflict):
        door.client.seal("g_g1", reward=1.0)


def test_sql_is_read_only_and_bounded(opened: Opener) -> None:
    with opened(sql_max_rows=10, sql_timeout_s=0.5) as door:
        published(door)
        found = door.client.sql("SELECT sample_id, reward FROM ready_rows WHERE group_id = ? ORDER BY 1", ["g"])
        assert found["rows"] == [{"sample_id": "g_g0", "reward": 1.0}, {"sample_id": "g_g1", "reward": None}]
        assert [column["name"] for column in found["columns"]] == ["sample_id", "reward"]
        more = door.client.sql("SELECT * FROM range(11)")
        assert (len(more["rows"]), more["truncated"]) == (10, True)
        for text in (
            "DROP VIEW groups",
            "SELECT 1; SELECT 2",
            "CREATE TABLE t (a INT)",
            "SELEKT",
            "",
            "SELECT no FROM no",
        ):
            with pytest.raises(InvalidInput):
                door.client.sql(text)
        with pytest.raises(Deadline):
            door.client.sql("SELECT count(*) FROM range(100000000) a, range(100000000) b")
        arrow = door.post("/api/v1/sql", {"sql": "SELECT 1 AS one"}, Accept="application/vnd.apache.arrow.stream")
        assert pa.ipc.open_stream(arrow.content).read_all().to_pylist() == [{"one": 1}]


def test_workers_register_and_say_what_they_loaded(door: Door) -> None:
    body = {"url": "http://w:1", "loaded_weight_version": 7}
    assert door.request("PUT", "/api/v1/workers/w", body).json()["loaded_weight_version"] == 7
    workers = door.request("GET", "/api/v1/workers").json()["workers"]
    assert [worker["worker_id"] for worker in workers] == ["embedded", "w"]


def test_a_route_that_takes_too_long_is_504(opened: Opener) -> None:
    with opened(control_deadline_s=0.5, seal_wait_s=30) as door:
        (rollout,) = door.register()
        door.engine.hold = True
        thread = threading.Thread(target=lambda: ask(door.agent(rollout), [U5]))
        thread.start()
        wait_for(door, lambda: bool(door.engine._waiting))
        with pytest.raises(Deadline):
            door.client.seal("g_g0", reward=1.0)
        door.on_loop(door.engine.release)
        thread.join()
        assert door.client.seal("g_g0", reward=1.0)["reason"] is None


def test_unknown_settings_and_wrong_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown settings: surprise"):
        Settings.parse({"surprise": 1})
    for name, value in (
        ("max_body_bytes", 0),
        ("max_body_bytes", 1.5),
        ("max_body_bytes", True),
        ("call_deadline_s", "soon"),
        ("reasoning", "both"),
        ("strip_patterns", ["("]),
        ("strip_patterns", "x"),
        ("strip_patterns", [1]),
    ):
        with pytest.raises(ConfigError, match=name):
            Settings.parse({name: value})
    assert Settings.parse({"strip_patterns": ["a+"]}).strip[0].pattern == "a+"


def test_every_route_and_metric_is_documented() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    for _, path, _ in ROUTES:
        template = path.replace("/g_g0", "/{rollout_id}").replace("/groups/g", "/groups/{group_id}")
        template = template.replace("attempts/1", "attempts/{k}").replace("workers/w", "workers/{worker_id}")
        template = template.replace("claims/c/", "claims/{id}/").replace("consumers/t0", "consumers/{name}")
        assert template in documented
    for name in METRICS:
        assert name in documented


def test_the_environment_is_read_in_one_place(tmp_path: Path) -> None:
    found = read_environment({"TOKENLAKE_TOKEN": "t", "XDG_STATE_HOME": str(tmp_path)})
    assert (found.token, found.token_given, found.state_dir) == ("t", True, tmp_path / "tokenlake")
    assert read_environment({}).token != read_environment({}).token


def test_the_key_of_capabilities_lies_outside_the_lake_and_is_the_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "lake.key"
    key = load_key(None, path)
    assert load_key(None, path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_key("ab" * 32, path) == bytes.fromhex("ab" * 32)
    for text in ("", "xy" * 32, "ab" * 31):
        with pytest.raises(ConfigError):
            load_key(text, path)


def test_capabilities_of_other_lakes_rollouts_attempts_and_roles_do_not_open() -> None:
    def made(lake_id: str = "l", key: bytes = b"k" * 32) -> Capabilities:
        return Capabilities(key=key, lake_id=lake_id, token="t")

    mine = made()
    data = mine.mint("g_g0", 3, "data")
    assert mine.data(data, "g_g0") == 3
    for other in (made("m"), made(key=b"j" * 32)):
        with pytest.raises(Unauthorized):
            other.data(data, "g_g0")
    tampered = data.replace("-3-", "-4-")
    for presented in (tampered, data[:-1], data + "x", mine.mint("g_g0", 3, "control"), None, "", "tld-3-", "é" * 9):
        with pytest.raises(Unauthorized):
            mine.data(presented, "g_g0")
    with pytest.raises(Unauthorized):
        mine.data(data, "g_g1")


def test_secrets_never_reach_the_lake(door: Door, tmp_path: Path) -> None:
    rollouts = published(door)
    secrets = [TOKEN] + [rollout[f"{role}_capability"] for rollout in rollouts for role in ("data", "control")]
    for path in (tmp_path / "lake").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [secret for secret in secrets if secret.encode() in content]
    assert json.loads((tmp_path / "lake" / "lake.json").read_text())
