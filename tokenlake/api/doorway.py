"""Where every request comes in and every answer goes out: bytes counted by peer, a line in the log, a span.

The line says the route and not the path, so that nothing of an agent's own making is in it; queries, headers and bodies
are never looked at. What watches the service (health, metrics) is counted and only said at `debug`.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenlake.api.metrics import Metrics
from tokenlake.api.traces import Traces
from tokenlake.api.trail import note, trail

__all__ = ["Doorway"]

_log = logging.getLogger("tokenlake.access")
_PEERS = (("/ng-rollout/", "agent"), ("/api/", "trainer"), ("/v1/", "plain"))
_UNANSWERED = 500
"""What the server answers where an error passed through here."""


class Doorway:
    """ASGI middleware around the routes of one service."""

    def __init__(self, app: ASGIApp, metrics: Metrics, traces: Traces) -> None:
        self._app = app
        self._metrics = metrics
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One exchange."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        peer = next((peer for start, peer in _PEERS if scope["path"].startswith(start)), "other")
        passing = _Passing(self._metrics, peer, receive, send)
        with trail() as notes, self._traces.request(scope["headers"]) as span:
            try:
                await self._app(scope, passing.receive, passing.send)
            finally:
                what = f"{scope['method']} {_route(scope)}"
                seconds = round(time.monotonic() - passing.began, 6)
                note(status=passing.status or _UNANSWERED, seconds=seconds, **passing.bytes)
                span.end(what, notes)
                _log.log(logging.DEBUG if peer == "other" else logging.INFO, "%s", what)


class _Passing:
    """One exchange, as it passes."""

    def __init__(self, metrics: Metrics, peer: str, receive: Receive, send: Send) -> None:
        self._in, self._out = (metrics.http.labels(peer, direction) for direction in ("in", "out"))
        self._receive = receive
        self._send = send
        self.bytes = {"bytes_in": 0, "bytes_out": 0}
        self.status = 0
        self.began = time.monotonic()

    async def receive(self) -> Message:
        """The next message of the client."""
        message = await self._receive()
        size = len(message.get("body", b""))
        self.bytes["bytes_in"] += size
        self._in.inc(size)
        return message

    async def send(self, message: Message) -> None:
        """A message to the client."""
        self.status = self.status or message.get("status", 0)
        size = len(message.get("body", b""))
        self.bytes["bytes_out"] += size
        self._out.inc(size)
        await self._send(message)


def _route(scope: Scope) -> str:
    """The template of the route that answered."""
    route: Any = scope.get("route")
    return getattr(route, "path", "(no route)")
