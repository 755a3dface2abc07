"""What stands behind the gate: the embedded engine, capture workers, or an upstream, captured at the gate or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tokenlake.api.proxy import Proxy
from tokenlake.api.remote_worker import ask_state
from tokenlake.api.settings import Environment, Settings
from tokenlake.api.worker_pool import WorkerPool
from tokenlake.errors import ConfigError, Deadline, EngineFailed
from tokenlake.ingest.engine import Engine
from tokenlake.ingest.upstream import Hop, UpstreamClient, UpstreamEngine, UpstreamFacts, probe

__all__ = ["Backend", "Capture", "upstream_backend"]

Capture = Literal["worker", "gate", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """Who answers model calls, and where they are captured."""

    engine: Engine
    capture: Capture = "worker"
    upstream: str | None = None
    """Address of the server that plain calls go to; None: the engine answers them."""
    key: str | None = None
    """What the upstream takes as a bearer token."""
    hop: Hop = field(default_factory=Hop)
    """Counts what passes between the gate and the servers behind it."""

    def pool(self, lake_id: str, settings: Settings) -> WorkerPool | None:
        """The capture workers, where they are servers of their own."""
        if self.capture != "worker" or not isinstance(self.engine, UpstreamEngine):
            return None

        def connect(url: str) -> UpstreamClient:
            return UpstreamClient(url, key=self.key, deadline_s=settings.upstream_deadline_s, hop=self.hop)

        return WorkerPool(lake_id, self.engine.facts, connect)

    def proxy(self, settings: Settings) -> Proxy | None:
        """The plain way through to the upstream; raises `ConfigError` for pins that it would carry past."""
        _without_capture(self.capture, settings)
        if self.upstream is None:
            return None
        return Proxy(
            self.upstream,
            key=self.key,
            connect_s=settings.upstream_deadline_s,
            deadline_s=settings.call_deadline_s,
            hop=self.hop,
        )


async def upstream_backend(url: str, capture: Capture, settings: Settings, environment: Environment) -> Backend:
    """A backend over somebody else's server, asked what it can do; raises `ConfigError` when that is not enough."""
    _without_capture(capture, settings)
    hop, deadline_s = Hop(), settings.upstream_deadline_s
    client = UpstreamClient(url, key=environment.upstream_key, deadline_s=deadline_s, hop=hop)
    try:
        if capture == "worker":
            facts = await _worker_facts(client)
        elif capture == "gate":
            facts = await probe(client, logprob_mode=settings.upstream_logprobs)
        else:
            facts = await _reached(client)
    finally:
        await client.close()
    engine = UpstreamEngine(client.url, facts, key=environment.upstream_key, deadline_s=deadline_s, hop=hop)
    return Backend(engine=engine, capture=capture, upstream=client.url, key=environment.upstream_key, hop=hop)


def _without_capture(capture: Capture, settings: Settings) -> None:
    if capture == "off" and settings.pins:
        raise ConfigError(
            f"{', '.join(settings.pins)} cannot act with --capture off, which passes bytes on unchanged: "
            "leave them out, or say --capture gate"
        )


async def _worker_facts(client: UpstreamClient) -> UpstreamFacts:
    try:
        return (await ask_state(client)).facts
    except (EngineFailed, Deadline) as error:
        raise ConfigError(error.message, **error.detail) from error


async def _reached(client: UpstreamClient) -> UpstreamFacts:
    """Of a server that only passes bytes on nothing is asked but to be there."""
    try:
        await client.get("/v1/models")
    except (EngineFailed, Deadline) as error:
        if error.detail.get("reason") in ("upstream_unreachable", "upstream_deadline", "upstream_broke"):
            raise ConfigError(error.message, **error.detail) from error
    except ValueError:
        pass  # it answered: what it serves is its own business
    return UpstreamFacts(name="upstream")
