"""A real service over a real socket and a real lake; only the tokens are scripted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from openai import OpenAI
from starlette.requests import Request

from tests.api.scripted_engine import ScriptedEngine
from tokenlake.api import serve
from tokenlake.api.client import Client
from tokenlake.api.serve import Running, embedded
from tokenlake.api.service import Service
from tokenlake.api.settings import Environment, Settings
from tokenlake.api.traces import NO_TRACES, Traces
from tokenlake.store.lake import OwnedLake

TOKEN = "control-token-of-the-tests"


@dataclass
class Door:
    """One running service, as its clients see it."""

    running: Running
    engine: ScriptedEngine
    client: Client
    http: httpx.Client
    agents: contextlib.ExitStack

    @property
    def url(self) -> str:
        return self.running.url

    @property
    def service(self) -> Service:
        return self.running.service

    def register(self, group_id: str = "g", n: int = 1, **more: Any) -> list[dict[str, Any]]:
        return self.client.register_group(group_id, n, **more)["rollouts"]

    def agent(self, rollout: dict[str, Any], **more: Any) -> OpenAI:
        key = rollout["data_capability"]
        return self.agents.enter_context(
            OpenAI(base_url=rollout["base_url"], api_key=key, **{"max_retries": 0, **more})
        )

    def post(self, path: str, body: Any = None, *, token: str | None = TOKEN, **headers: str) -> httpx.Response:
        return self.request("POST", path, body, token=token, **headers)

    def request(
        self, method: str, path: str, body: Any = None, *, token: str | None = TOKEN, **headers: str
    ) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if token is not None:
            named["Authorization"] = f"Bearer {token}"
        return self.http.request(method, path, json=body, headers=named)

    def on_loop(self, function: Callable[[], Any]) -> None:
        self.running.loop.call_soon_threadsafe(function)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        return [e for e in self.service.lake.lineage.events() if kind is None or e["event_type"] == kind]

    def ids(self, event: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Ids and mask of a committed call's delta."""
        rows = self.service.lake.sql(
            "SELECT token_ids, token_mask FROM deltas WHERE call_id = ?", [event["call_id"]]
        ).fetchall()
        assert len(rows) == 1
        return list(rows[0][0]), list(rows[0][1])


Opener = Callable[..., contextlib.AbstractContextManager[Door]]


def opener(root: Path) -> Opener:
    """Opens a service over the lake below `root`, as often as asked: a second time is a restart."""

    @contextlib.contextmanager
    def open_door(
        *,
        engine: Any = None,
        policy: dict[str, Any] | None = None,
        prepare: Callable[[Service], None] | None = None,
        traces: Traces = NO_TRACES,
        **settings: Any,
    ) -> Iterator[Door]:
        environment = Environment(
            token=TOKEN, token_given=True, capability_key=None, state_dir=root / "state" / "tokenlake"
        )
        engine = engine or ScriptedEngine()
        with OwnedLake.open(root / "lake") as lake:
            chosen = Settings(**{"tick_s": 0.05, **settings})
            service = Service(lake, engine, chosen, environment, policy=policy, traces=traces)
            if prepare is not None:
                prepare(service)
            with (
                embedded(service) as running,
                Client(running.url, TOKEN) as client,
                httpx.Client(base_url=running.url, timeout=30) as http,
                contextlib.ExitStack() as agents,
            ):
                yield Door(running, engine, client, http, agents)

    return open_door


@pytest.fixture
def opened(tmp_path: Path) -> Opener:
    """Opens a service over the lake of this test."""
    return opener(tmp_path)


@pytest.fixture
def door(opened: Opener) -> Iterator[Door]:
    with opened() as made:
        yield made


@pytest.fixture(params=[False, True], ids=["bare", "behind-function-middleware"])
def hung(request: pytest.FixtureRequest, opened: Opener, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param:
        plain = serve.create_app

        def wrapped(service: Service) -> FastAPI:
            app = plain(service)

            @app.middleware("http")
            async def nothing(request: Request, call_next: Any) -> Any:
                return await call_next(request)

            return app

        monkeypatch.setattr(serve, "create_app", wrapped)
    with opened() as door:
        yield door
