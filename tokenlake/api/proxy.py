"""A transparent way through to the upstream: bytes in, bytes out, nothing captured.

Bodies pass unchanged in both directions, an answer as it comes, streams included. Headers pass too, except those that
belong to one connection (RFC 9110, 7.6.1), `Host`, the upstream's `Date` and `Server`, and the caller's credential,
which is ours: the upstream gets its own. A client that hangs up ends the call upstream; an upstream that breaks or
takes too long ends the answer without an end, so that no client takes it for whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import httpx
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenlake.errors import NotFound
from tokenlake.ingest.upstream.client import checked_url, http_client, named_failures
from tokenlake.ingest.upstream.hop import Hop

__all__ = ["Proxy"]

Headers = Iterable[tuple[bytes, bytes]]

_CONNECTION = frozenset(
    (
        b"connection",
        b"expect",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_NOT_SENT = _CONNECTION | {b"authorization", b"content-length", b"host", b"x-api-key"}
_NOT_ANSWERED = _CONNECTION | {b"date", b"server"}


class Proxy:
    """One upstream, for calls that nobody captures. Belongs to the service's event loop; `close` it there."""

    def __init__(self, url: str, *, key: str | None, connect_s: float, deadline_s: float, hop: Hop) -> None:
        self._url = checked_url(url)
        self._key = key
        self._deadline_s = deadline_s
        self._http = http_client(connect_s)
        self._hop = hop

    def forward(
        self, request: Request, raw_path: bytes, body: bytes, *, done: Callable[[], None] | None = None
    ) -> Response:
        """The upstream's answer to this request at `raw_path` (as it was sent, percent-encoded).

        `done` is called once, when nothing of the call is left. Raises `NotFound` for a path that climbs; sending the
        answer raises `Deadline` and `EngineFailed` with their names.
        """
        if any(segment in (b".", b"..") for segment in raw_path.lower().replace(b"%2e", b".").split(b"/")):
            raise NotFound("a path with dot segments is not passed on")
        query: bytes = request.scope["query_string"]
        target = self._url + raw_path.decode("ascii", "replace") + (f"?{query.decode('latin-1')}" if query else "")
        headers = _passed(request.scope["headers"], _NOT_SENT)
        if self._key is not None:
            headers.append((b"authorization", f"Bearer {self._key}".encode()))
        content = body if body or request.method not in ("GET", "HEAD") else None
        sent = httpx.Request(request.method, target, headers=headers, content=content)
        self._hop.sent += len(body)
        return _Forwarded(self._http, sent, self._deadline_s, done, self._hop)

    async def close(self) -> None:
        """Close every connection; idempotent."""
        await self._http.aclose()


class _Forwarded(Response):
    """One exchange, from the request upstream to the last byte downstream."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        sent: httpx.Request,
        deadline_s: float,
        done: Callable[[], None] | None,
        hop: Hop,
    ) -> None:
        super().__init__()
        self._http = http
        self._sent = sent
        self._deadline_s = deadline_s
        self._done = done
        self._hop = hop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        exchange = asyncio.create_task(self._exchange(send))
        hung_up = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({exchange, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            if exchange.done():
                exchange.result()
        finally:
            hung_up.cancel()
            exchange.cancel()
            await asyncio.wait({exchange, hung_up})
            if self._done is not None:
                self._done()

    async def _exchange(self, send: Send) -> None:
        async with named_failures(str(self._sent.url.copy_with(query=None)), self._deadline_s):
            answer = await self._http.send(self._sent, stream=True)
            try:
                headers = _passed(answer.headers.raw, _NOT_ANSWERED)
                await send({"type": "http.response.start", "status": answer.status_code, "headers": headers})
                async for chunk in answer.aiter_raw():
                    self._hop.received += len(chunk)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                await answer.aclose()


def _passed(headers: Headers, kept_back: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """Headers in order, without `kept_back` and what `Connection` names."""
    given = [(name.lower(), value) for name, value in headers]
    named = {part.strip().lower() for name, value in given if name == b"connection" for part in value.split(b",")}
    return [(name, value) for name, value in given if name not in kept_back and name not in named]


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
