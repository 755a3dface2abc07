"""Reads through the service's thread pool while groups are published, compacted and deleted (B29)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import httpx
import pyarrow as pa

from tests.api.conftest import TOKEN, Door
from tests.api.test_http import published
from tokenlake.api.queries import ARROW_STREAM
from tokenlake.store.retention import retire_named

READERS, ROUNDS = 3, 2


def test_every_answer_is_of_what_was_asked_while_groups_come_and_go(door: Door) -> None:
    names = [f"r{i}" for i in range(READERS)]
    for name in names:
        published(door, 2, name)
    exact = {name: door.request("GET", f"/api/v1/rows?group_id={name}").json()["rows"] for name in names}

    def read(name: str) -> None:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=door.url, headers=headers, timeout=60) as http:
            for _ in range(ROUNDS):
                assert http.get("/api/v1/rows", params={"group_id": name}).json()["rows"] == exact[name]
                arrow = http.get("/api/v1/rows", params={"group_id": name}, headers={"Accept": ARROW_STREAM})
                table = pa.ipc.open_stream(arrow.content).read_all()
                assert table.column("sample_id").to_pylist() == [f"{name}_g0", f"{name}_g1"]
                assert http.get(f"/api/v1/groups/{name}").json()["group_id"] == name
                assert http.get(f"/api/v1/rollouts/{name}_g1").json()["rollout_id"] == f"{name}_g1"

    def query() -> None:
        asked = "SELECT ? AS mine, count(*) AS rows FROM ready_rows WHERE group_id = ?"
        for i in range(ROUNDS):
            name = names[i % READERS]
            answer = door.post("/api/v1/sql", {"sql": asked, "params": [name, name]})
            assert answer.json()["rows"] == [{"mine": name, "rows": 2}]

    with ThreadPoolExecutor(READERS + 1) as pool:
        reading = [pool.submit(read, name) for name in names] + [pool.submit(query)]
        for i in range(2):
            published(door, 1, f"new{i}")
            retire_named(door.service.lake, groups=[f"new{i}"])
        for each in reading:
            each.result()
    assert door.request("GET", "/api/v1/audit").json()["healthy"]
