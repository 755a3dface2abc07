"""Own routes that only read: groups, rows, SQL, audit; and what operators look at.

Lists are paged by a cursor: `after` is the last id of the page before, `next` the one to ask for, null at the end.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tokenlake import sql
from tokenlake.api.own_route import OwnRoute, service_of, unless_gone
from tokenlake.api.payload import payload, tag
from tokenlake.api.queries import ARROW_STREAM, as_json_rows, as_stream, from_stream
from tokenlake.api.receipts import group_state
from tokenlake.api.rollouts import Group
from tokenlake.api.routes_control import credential
from tokenlake.api.service import Service
from tokenlake.api.sql_workers import SqlAnswer
from tokenlake.api.wire import SqlBody, read_model
from tokenlake.errors import InvalidInput, NotFound
from tokenlake.ids import check_group_id
from tokenlake.store.query import fetch

__all__ = ["health", "router"]

_JSON = "application/json"

router = APIRouter(prefix="/api/v1", route_class=OwnRoute)
health = APIRouter()


def _check_parameters(request: Request, *known: str) -> None:
    """Raise `InvalidInput` for a parameter of the URL that has no meaning: without its filter an answer is another."""
    for name in request.query_params:
        if name not in known:
            raise InvalidInput(f"{name}: no such parameter; known are {', '.join(known)}", field=name)


def _limit(request: Request, most: int) -> int:
    text = request.query_params.get("limit")
    if text is None:
        return most
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0):
        raise InvalidInput("limit must be a whole number above 0", field="limit")
    return min(int(text), most)


def _wants_arrow(request: Request) -> bool:
    return ARROW_STREAM in request.headers.get("accept", "")


async def _known(service: Service, group_id: str) -> Group:
    group = await service.archive.recall(group_id)
    if group is None:
        raise NotFound(f"no group {group_id}", group_id=group_id)
    return group


async def _states(service: Service, page: Sequence[Group]) -> list[dict[str, Any]]:
    """Groups as they are told; what publishing came to is one query for all of them."""
    names = [group.group_id for group in page if group.state == "published"]
    found: dict[str, dict[str, Any]] = {}
    if names:
        table = await asyncio.to_thread(fetch, service.lake, sql.read("reads/published_groups"), [names], groups=names)
        found = {row["group_id"]: row for row in table.to_pylist()}
    return [group_state(group, found.get(group.group_id)) for group in page]


@router.get("/groups")
async def get_groups(request: Request) -> JSONResponse:
    """Groups in order of their ids."""
    credential(request)
    service = service_of(request)
    _check_parameters(request, "after", "limit")
    limit = _limit(request, service.settings.page_rows)
    after = request.query_params.get("after", "")
    text = sql.read("reads/group_ids")
    names = (await asyncio.to_thread(fetch, service.lake, text, [after, limit + 1])).column("group_id").to_pylist()
    page = await service.archive.look_up(names[:limit])
    states = await _states(service, list(page.values()))
    return JSONResponse({"groups": states, "next": names[limit - 1] if len(names) > limit else None})


@router.get("/groups/{group_id}")
async def get_group(request: Request, group_id: str) -> JSONResponse:
    """One group."""
    credential(request)
    service = service_of(request)
    group = await _known(service, check_group_id(group_id))
    return JSONResponse((await _states(service, [group]))[0])


@router.get("/rows")
async def get_rows(request: Request) -> Response:
    """Ready rows, whole groups only: a page holds at least one group and, beyond it, no more than `limit` rows."""
    credential(request)
    service = service_of(request)
    _check_parameters(request, "group_id", "after", "limit")
    limit = _limit(request, service.settings.page_rows)
    group_id, after = request.query_params.get("group_id"), request.query_params.get("after")
    if group_id is not None:
        await _known(service, check_group_id(group_id))
    table, following = await asyncio.to_thread(_page, service, group_id, after, limit)
    arrow = _wants_arrow(request)
    etag = tag("arrow" if arrow else "json", following or "", *table.column("row_digest").to_pylist())
    if arrow:
        headers = {} if following is None else {"x-next-after": following}
        return await payload(request, lambda: as_stream(table), ARROW_STREAM, headers, etag)
    return await payload(request, lambda: _dump(rows=as_json_rows(table), next=following), _JSON, {}, etag)


def _page(service: Service, group_id: str | None, after: str | None, limit: int) -> tuple[pa.Table, str | None]:
    """Runs in a thread: the rows of a page, and the cursor of the next one."""
    if group_id is not None:
        return _rows(service, [group_id]), None
    found = fetch(service.lake, sql.read("reads/ready_groups"), [None]).to_pydict()
    ready, sizes = cast("list[str]", found["group_id"]), cast("list[int]", found["n"])
    if after is not None:
        if after not in ready:
            raise NotFound(f"no published group {after} to go on after", after=after)
        start = ready.index(after) + 1
        ready, sizes = ready[start:], sizes[start:]
    chosen, rows = ready[:1], sum(sizes[:1])
    for name, n in zip(ready[1:], sizes[1:], strict=True):
        rows += n
        if rows > limit:
            break
        chosen.append(name)
    return _rows(service, chosen), chosen[-1] if len(chosen) < len(ready) else None


def _rows(service: Service, groups: Sequence[str]) -> pa.Table:
    return fetch(service.lake, sql.read("reads/ready_rows_of"), [groups], groups=groups)


@router.post("/sql")
async def post_sql(request: Request) -> Response:
    """A query that only reads this lake, bounded in time, memory, rows and bytes."""
    credential(request)
    service = service_of(request)
    body = await read_model(request, SqlBody, service.settings)
    answer = await unless_gone(request, service.sql_workers.query(body.sql, body.params))
    if _wants_arrow(request):
        return await payload(request, lambda: answer.stream, ARROW_STREAM, {"x-truncated": str(answer.more).lower()})
    return await payload(request, lambda: _as_json(answer), _JSON, {})


def _as_json(answer: SqlAnswer) -> bytes:
    table = from_stream(answer.stream)
    columns = [{"name": field.name, "type": str(field.type)} for field in table.schema]
    return _dump(columns=columns, rows=as_json_rows(table), truncated=answer.more)


def _dump(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


@router.get("/audit")
async def get_audit(request: Request) -> Response:
    """Everything verified again from the bytes: findings by kind."""
    credential(request)
    service = service_of(request)
    return await payload(request, lambda: _audit(service), _JSON, {})


def _audit(service: Service) -> bytes:
    """Runs in a thread."""
    findings = as_json_rows(fetch(service.lake, sql.read("reads/audit_findings"), []))
    return _dump(
        healthy=all(finding["severity"] != "fault" for finding in findings),
        kinds=Counter(finding["kind"] for finding in findings),
        findings=findings[: service.settings.page_rows],
        total=len(findings),
    )


@health.api_route("/healthz", methods=["GET", "HEAD"])
async def healthz() -> JSONResponse:
    """Whether the process answers."""
    return JSONResponse({"status": "ok"})


@health.api_route("/readyz", methods=["GET", "HEAD"])
async def readyz(request: Request) -> JSONResponse:
    """Whether model calls can be served."""
    faults = service_of(request).faults
    return JSONResponse(
        {"status": "ready"} if not faults else {"status": "not_ready", "faults": faults}, 503 if faults else 200
    )


@health.get("/metrics")
async def metrics(request: Request) -> PlainTextResponse:
    """Prometheus metrics."""
    credential(request)
    service = service_of(request)
    attempts = (rollout.current for group in service.control.groups.values() for rollout in group.rollouts.values())
    service.metrics.open_rollouts.set(sum(attempt.state == "open" and not attempt.released for attempt in attempts))
    lineage = service.lake.path / "lineage"
    service.metrics.lineage_bytes.set(sum(path.stat().st_size for path in lineage.rglob("*.arrow")))
    for direction, size in zip(("out", "in"), service.hop.take(), strict=True):
        service.metrics.http.labels("worker", direction).inc(size)
    return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
