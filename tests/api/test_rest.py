"""The REST API as its clients meet it: schema, cursors, tags, compression, and health beside large rows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from tests.api.conftest import TOKEN, Door, Opener
from tests.api.test_http import published
from tests.cases.conftest import CaseLake, call, group, seal
from tokenlake.api.openapi import BODIES
from tokenlake.api.queries import ARROW_STREAM

DOCS = Path(__file__).parents[2] / "docs" / "http.md"


def test_the_schema_has_every_own_route_of_the_docs_with_a_valid_example(door: Door) -> None:
    schema = door.request("GET", "/api/v1/openapi.json", token=None).json()
    served = {f"{method.upper()} {path}" for path, methods in schema["paths"].items() for method in methods}
    documented = {
        f"{method} {path}".replace("attempts/{k}", "attempts/{number}").replace("claims/{id}", "claims/{claim_id}")
        for method, path in re.findall(r"`(GET|PUT|POST) (/api/v1/[^`?\s]+)", DOCS.read_text())
    }
    assert documented - {"GET /api/v1/openapi.json"} == served
    for name, (model, example) in BODIES.items():
        method, path = name.split(" ")
        body = schema["paths"][f"/api/v1{path}"][method]["requestBody"]["content"]["application/json"]
        assert body["example"] == example
        assert model.model_validate(example)
    references = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(schema)))
    assert references <= set(schema["components"]["schemas"])


def test_the_curl_lines_of_the_docs_work(door: Door) -> None:
    (block,) = re.findall(r"```bash\n(export URL=.*?)```", DOCS.read_text(), re.DOTALL)
    lines = block.replace("http://127.0.0.1:8000", door.url).replace("curl -s", "curl -fsS").splitlines()
    script = "set -e\n" + "\n".join(f"{line}\necho" for line in lines)
    secret = {**os.environ, "TOKENLAKE_TOKEN": TOKEN}
    done = subprocess.run(["bash", "-c", script], env=secret, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line]
    assert len(answers) == 7
    assert answers[0]["rollouts"][1]["rollout_id"] == "g7_g1"
    assert answers[2]["state"] == "failed"
    assert [row["reason"] for row in answers[4]["rows"]] == ["never_sealed", "environment_failed"]
    assert answers[5]["rows"] == [{"group_id": "g7", "state": "published"}]
    assert answers[6]["healthy"]


def test_no_page_loads_scripts_from_elsewhere(door: Door) -> None:
    assert [door.request("GET", path).status_code for path in ("/docs", "/redoc", "/openapi.json")] == [404] * 3


def test_a_cursor_gives_every_group_once_while_others_are_published(door: Door) -> None:
    for name in ("b", "d"):
        published(door, 1, name)
    first = door.request("GET", "/api/v1/rows?limit=1").json()
    for name in ("a", "c", "e"):
        published(door, 1, name)
    seen, after = [row["group_id"] for row in first["rows"]], first["next"]
    while after is not None:
        page = door.request("GET", f"/api/v1/rows?limit=1&after={after}").json()
        seen += [row["group_id"] for row in page["rows"]]
        after = page["next"]
    assert sorted(seen) == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("path", ["rows?group=g", "rows?group_id=g&Limit=1", "groups?group_id=g"])
def test_a_parameter_that_does_not_exist_is_refused_by_name(door: Door, path: str) -> None:
    door.register("g")
    answer = door.request("GET", f"/api/v1/{path}")
    assert (answer.status_code, "no such parameter" in answer.json()["error"]["message"]) == (400, True)


def test_rows_have_a_tag_that_changes_with_what_is_answered(door: Door) -> None:
    published(door, 2)
    path = "/api/v1/rows?group_id=g"
    first = door.request("GET", path, accept_encoding="identity")
    assert "content-encoding" not in first.headers
    again = door.request("GET", path, accept_encoding="identity", if_none_match=first.headers["etag"])
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    tags = {first.headers["etag"]}
    tags.add(door.request("GET", path, accept_encoding="gzip").headers["etag"])
    tags.add(door.request("GET", path, accept=ARROW_STREAM, accept_encoding="identity").headers["etag"])
    published(door, 1, "h")
    tags.add(door.request("GET", "/api/v1/rows", accept_encoding="identity").headers["etag"])
    assert len(tags) == 4
    assert door.request("GET", path, accept_encoding="identity").headers["etag"] == first.headers["etag"]


def test_large_bodies_are_compressed_for_who_takes_that(door: Door) -> None:
    published(door, 2)
    for accept in ("application/json", ARROW_STREAM):
        plain = door.request("GET", "/api/v1/rows", accept=accept, accept_encoding="identity")
        packed = door.request("GET", "/api/v1/rows", accept=accept, accept_encoding="gzip")
        assert packed.headers["content-encoding"] == "gzip"
        assert int(packed.headers["content-length"]) < len(plain.content)
        assert packed.content == plain.content
    for refused in ("gzip;q=0", "br, gzip; q=0.000", "xgzip", "identity"):
        assert "content-encoding" not in door.request("GET", "/api/v1/rows", accept_encoding=refused).headers
    for taken in ("br, gzip;q=0.05", "GZIP", "gzip;q=1.0, identity;q=0"):
        assert "content-encoding" in door.request("GET", "/api/v1/rows", accept_encoding=taken).headers
    assert "content-encoding" not in door.request("GET", "/healthz", accept_encoding="gzip").headers


@pytest.mark.parametrize("accept", ["application/json", ARROW_STREAM])
def test_health_answers_while_large_rows_are_fetched(
    opened: Opener, tmp_path: Path, capsys: pytest.CaptureFixture[str], accept: str
) -> None:
    case = CaseLake(tmp_path / "lake", capsys)
    prompt = list(range(200_000))
    case.take(group("g", 2), *(line for i in range(2) for line in (call(f"g_g{i}", "c", prompt, [7]), seal(f"g_g{i}"))))
    case.finalize()
    with opened() as door:
        answers: list[httpx.Response] = []

        def fetch() -> None:
            answers.append(door.request("GET", "/api/v1/rows?group_id=g", accept=accept))

        fetching = threading.Thread(target=fetch)
        fetching.start()
        beats = 0
        while fetching.is_alive():
            assert door.http.get("/healthz").status_code == 200
            beats += 1
        fetching.join()
        assert beats > 1
        (answer,) = answers
        if accept == ARROW_STREAM:
            ids = pa.ipc.open_stream(answer.content).read_all().column("input_ids").to_pylist()
        else:
            ids = [row["input_ids"] for row in answer.json()["rows"]]
        assert ids == [[*prompt, 7]] * 2


def test_reads_see_whole_groups_in_one_order_while_others_are_published_dropped_and_retired(opened: Opener) -> None:
    names = [f"g{number}" for number in range(3)]
    with opened(compact_every_s=None, retain_closed_s=1e-6) as door, ThreadPoolExecutor(3) as pool:
        done = threading.Event()

        def writing() -> None:
            try:
                for name in names:
                    door.register(f"dropped-{name}", n=1)
                    door.client.abort(f"dropped-{name}")
                    published(door, 2, name)
                    door.service.housekeeper._once(door.service.housekeeper._rule())
            finally:
                done.set()

        def paging() -> list[list[str]]:
            """The groups of each whole pass, in the order of their rows."""
            passes: list[list[str]] = []
            last = False
            while not last:
                last = done.is_set()
                after, rows = "", []
                while after is not None:
                    page = door.request("GET", "/api/v1/rows?limit=2" + (f"&after={after}" if after else "")).json()
                    rows += [row["group_id"] for row in page["rows"]]
                    after = page["next"]
                assert rows == [name for name in dict.fromkeys(rows) for _ in range(2)]
                passes.append(rows[::2])
            return passes

        def asking() -> list[list[str]]:
            passes: list[list[str]] = []
            last = False
            while not last:
                last = done.is_set()
                said = door.client.sql("SELECT group_id, count(*) AS rows FROM ready_rows GROUP BY ALL ORDER BY ALL")
                assert {row["rows"] for row in said["rows"]} <= {2}
                passes.append([row["group_id"] for row in said["rows"]])
            return passes

        readers = [pool.submit(paging), pool.submit(asking)]
        pool.submit(writing).result()
        for passes in (reader.result() for reader in readers):
            assert len(passes) > 1
            assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(passes))
            assert passes[-1] == names
        assert {event["group_id"] for event in door.events("retired")} >= set(names)
        assert door.client.audit()["healthy"]


def test_rows_of_one_group_cost_that_group(door: Door) -> None:
    for name in ("g", "h", "i"):
        published(door, group_id=name)
    fetcher = door.service.lake._index.fetcher

    def cost(query: str) -> int:
        before = fetcher.decoded
        assert door.request("GET", f"/api/v1/rows?{query}").json()["rows"]
        return fetcher.decoded - before

    one = cost("group_id=h")
    assert cost("limit=1&after=g") == one > 0
    assert cost("limit=6") == 3 * one


def test_every_answer_is_of_what_was_asked_by_many_at_once(door: Door) -> None:
    """B29, through the service's thread pool."""
    names = [f"r{i}" for i in range(3)]
    for name in names:
        published(door, 2, name)

    def ask(i: int) -> tuple[str, ...]:
        name = names[i % 3]
        rows = door.request("GET", f"/api/v1/rows?group_id={name}").json()["rows"]
        asked = {"sql": "SELECT ? AS mine, any_value(group_id) FROM groups WHERE group_id = ?", "params": [name, name]}
        (said,) = door.post("/api/v1/sql", asked).json()["rows"]
        return (*said.values(), *(row["sample_id"] for row in rows))

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, range(6)))
    assert found == [(name, name, f"{name}_g0", f"{name}_g1") for name in names] * 2
