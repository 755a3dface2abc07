"""The pages of the console: what is live, one group, one rollout, search, a SQL box; behind a login."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from typing import Any
from urllib.parse import parse_qs

import pyarrow as pa
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tokenlake import sql
from tokenlake.api.call_tree import call_tree
from tokenlake.api.console.charts import by_number, in_bins
from tokenlake.api.console.render import page, static_file
from tokenlake.api.console.session import end_session, is_open, same_site, start_session
from tokenlake.api.console.strip import token_strip
from tokenlake.api.own_route import OwnRoute, service_of, unless_gone
from tokenlake.api.queries import as_json_rows, from_stream
from tokenlake.api.service import Service
from tokenlake.errors import InvalidInput, NotFound, TokenlakeError
from tokenlake.ids import check_group_id, split_rollout_id
from tokenlake.store.query import fetch

__all__ = ["router"]

router = APIRouter(route_class=OwnRoute, include_in_schema=False)
_GROUPS = 48
_FOUND = 100
_TOKENS = 2000
_SHOWN = 1000
_LOGIN_BYTES = 4096
_EXAMPLE = "SELECT rollout_id, reason, detail FROM rollouts WHERE verdict = 'placeholder'"
_PAGES = {"group_id": "groups", "rollout_id": "rollouts"}
"""Columns of a result whose values have a page."""

Record = dict[str, Any]
Page = Callable[[Request, Service], Coroutine[Any, Any, Response]]


def _guarded(path: str) -> Callable[[Page], Page]:
    """A page that asks for the login first, and for what was asked for after it."""

    def add(handler: Page) -> Page:
        async def guarded(request: Request) -> Response:
            service = service_of(request)
            if not is_open(request, service):
                return page("login", status=401, wrong=False)
            try:
                return await handler(request, service)
            except (NotFound, InvalidInput) as error:
                return page("nothing", status=404, message=error.message)

        router.add_api_route(path, guarded, methods=["GET"])
        return handler

    return add


async def _records(service: Service, name: str, params: Sequence[Any], group_id: str | None = None) -> list[Record]:
    """The records of one SQL file, over the whole lake or one group of it."""
    groups = None if group_id is None else [group_id]
    table = await asyncio.to_thread(fetch, service.lake, sql.read(name), params, groups=groups)
    return await asyncio.to_thread(table.to_pylist)


@_guarded("/")
async def overview(_request: Request, service: Service) -> Response:
    """What is going on."""
    totals, groups, causes = await asyncio.gather(
        _records(service, "console/totals", []),
        _records(service, "console/groups", [_GROUPS]),
        _records(service, "console/causes", []),
    )
    published = [group["group_id"] for group in groups if group["state"] == "published"]
    rows = await _records(service, "console/rows", [published]) if published else []
    valid = [row for row in rows if row["sample_mask"] == 1]
    newest = totals[0]["weight_version"]
    known = [row["weight_version_min"] for row in valid if row["weight_version_min"] is not None]
    newest = max(known, default=0) if newest is None else newest
    return page(
        "overview",
        service=service,
        totals=totals[0],
        groups=[group | _summary(group, rows) for group in groups],
        roots=[cause for cause in causes if cause["kind"] == "root"],
        failures=[cause for cause in causes if cause["kind"] == "failure"],
        placeholders=Counter(row["reason"] for row in rows if row["sample_mask"] == 0).most_common(),
        rewards=in_bins([row["reward"] for row in valid]),
        staleness=by_number([newest - version for version in known]),
        lengths=in_bins([float(row["tokens"]) for row in valid]),
        turns=by_number([row["turns"] for row in valid]),
        rows=len(rows),
    )


def _summary(group: Record, rows: list[Record]) -> Record:
    mine = [row for row in rows if row["group_id"] == group["group_id"]]
    rewards = [row["reward"] for row in mine if row["sample_mask"] == 1]
    meta: dict[str, Any] = json.loads(group["meta"] or "{}")
    return {
        "valid": len(rewards) if mine else None,
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "signal": len(set(rewards)) > 1,
        "about": ", ".join(f"{name} {value}" for name, value in meta.items()),
    }


@_guarded("/console/groups/{group_id}")
async def group_page(request: Request, service: Service) -> Response:
    """One group and its rollouts."""
    group_id = check_group_id(request.path_params["group_id"])
    groups, rollouts = await asyncio.gather(
        _records(service, "console/group", [group_id], group_id),
        _records(service, "console/group_rollouts", [group_id], group_id),
    )
    if not groups:
        raise NotFound(f"There is no group {group_id} in this lake.")
    return page("group", service=service, group=groups[0], rollouts=rollouts)


@_guarded("/console/rollouts/{rollout_id}")
async def rollout_page(request: Request, service: Service) -> Response:
    """One rollout: its verdict, its calls and its tokens."""
    rollout_id = request.path_params["rollout_id"]
    group_id, _ = split_rollout_id(rollout_id)
    start = _position(request.query_params.get("from", "0"))
    rollouts, calls, faults, tokens = await asyncio.gather(
        _records(service, "reads/inspect_rollout", [rollout_id, group_id], group_id),
        _records(service, "reads/inspect_calls", [rollout_id], group_id),
        _records(service, "console/failed_checks", [rollout_id], group_id),
        _records(service, "console/tokens", [group_id, rollout_id, start, start + _TOKENS], group_id),
    )
    if not rollouts:
        raise NotFound(f"There is no rollout {rollout_id} in this lake.")
    attempts = sorted({call["attempt"] for call in calls}, reverse=True)
    chain = [call for call in calls if call["position"] is not None]
    strip = await asyncio.to_thread(lambda: list(token_strip(tokens, _decoder(service))))
    return page(
        "rollout",
        service=service,
        rollout=rollouts[0],
        attempts=[(number, list(call_tree([c for c in calls if c["attempt"] == number]))) for number in attempts],
        longest=max((call["cum_len"] or 0 for call in calls), default=0),
        faults=faults,
        strip=strip,
        start=start,
        shown=sum(len(call.tokens) for call in strip),
        total=max((call["cum_len"] or 0 for call in chain), default=0),
        step=_TOKENS,
    )


def _position(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def _decoder(service: Service) -> Callable[[int], str]:
    """Text of one id, where the engine here can tell."""

    @cache
    def decode(token_id: int) -> str:
        try:
            return service.engine.decode([token_id])
        except (TokenlakeError, ValueError, IndexError, OverflowError):
            return f"[{token_id}]"

    return decode


@_guarded("/console/search")
async def search(request: Request, service: Service) -> Response:
    """Groups, rollouts and calls by id or by what was said."""
    text = request.query_params.get("q", "").strip()
    found = await _records(service, "console/search", [text, _FOUND]) if text else []
    if len({(each["group_id"], each["rollout_id"]) for each in found}) == 1:
        kind, name = (
            ("rollouts", found[0]["rollout_id"]) if found[0]["rollout_id"] else ("groups", found[0]["group_id"])
        )
        return RedirectResponse(f"/console/{kind}/{name}", 303)
    return page("search", service=service, text=text, found=found, most=_FOUND)


@_guarded("/console/sql")
async def sql_page(request: Request, service: Service) -> Response:
    """A query in a box, and its result."""
    text = request.query_params.get("q", "").strip()
    if not text:
        return page("sql", service=service, text="", example=_EXAMPLE)
    try:
        answer = await unless_gone(request, service.sql_workers.query(text, []))
    except TokenlakeError as error:
        return page("sql", status=400, service=service, text=text, error=error.message)
    found = from_stream(answer.stream)
    table = found.slice(0, _SHOWN)
    rows = await asyncio.to_thread(as_json_rows, table)
    return page(
        "sql",
        service=service,
        text=text,
        columns=[(field.name, _is_number(field.type)) for field in table.schema],
        rows=[list(row.values()) for row in rows],
        more=answer.more or found.num_rows > _SHOWN,
        pages=_PAGES,
    )


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)


@router.get("/console/login")
async def login_page(request: Request) -> Response:
    """The login, or the console for who has done it."""
    if is_open(request, service_of(request)):
        return RedirectResponse("/", 303)
    return page("login", wrong=False)


@router.post("/console/login")
async def login(request: Request) -> Response:
    """Take the control token and give a session."""
    service = service_of(request)
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > _LOGIN_BYTES:
            break
    token = parse_qs(body[:_LOGIN_BYTES].decode("utf-8", "replace")).get("token", [""])[0].strip()
    if not same_site(request) or not service.capabilities.is_control(token):
        return page("login", status=403, wrong=True)
    response = RedirectResponse("/", 303)
    start_session(request, response, service)
    return response


@router.post("/console/logout")
async def logout(request: Request) -> Response:
    """End the session."""
    if not same_site(request):
        return page("login", status=403, wrong=False)
    response = RedirectResponse("/console/login", 303)
    end_session(response)
    return response


@router.get("/console/static/{name}")
async def static(request: Request, name: str) -> Response:
    """Style and script."""
    return static_file(request, name)
