"""A streamed answer as an ASGI response: what the sink holds goes out, and the rest when the call is committed.

The client hears something every `keep_alive_s`, so that nothing between it and the service gives up, and the service
hears at once when the client goes away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenlake.api.dialects.dialect import Answer, Encoder
from tokenlake.api.errors_http import INTERNAL, agent_message, status_of
from tokenlake.api.sink import Sink
from tokenlake.errors import TokenlakeError

__all__ = ["EventStream"]


class EventStream(Response):
    """One streamed answer. `call` and `hung_up` are running tasks; `gone` tells the gate that nobody listens."""

    media_type = "text/event-stream"

    def __init__(
        self,
        encoder: Encoder,
        sink: Sink,
        call: asyncio.Task[Answer],
        hung_up: asyncio.Task[None],
        gone: Callable[[], Awaitable[None]],
        keep_alive_s: float,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._encoder = encoder
        self._sink = sink
        self._call = call
        self._hung_up = hung_up
        self._gone = gone
        self._keep_alive_s = keep_alive_s
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - of ASGI
        """Send events until the answer has ended or the client is gone."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if await self._flow(send):
                await send({"type": "http.response.body", "body": self._last(), "more_body": False})
                self._raise_what_is_a_bug()
                return
        except OSError:
            # The connection broke while something was being sent.
            pass
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._gone()))
            raise
        finally:
            self._hung_up.cancel()
        await self._gone()
        await asyncio.wait({self._call})
        if not self._call.cancelled():
            # Nobody is there to be told: what came of it is recorded.
            self._call.exception()

    async def _flow(self, send: Send) -> bool:
        """Text as it comes, until the call is done; False when the client went away first."""
        while not self._call.done():
            waited = {self._call, self._hung_up, self._sink.ready}
            await asyncio.wait(waited, timeout=self._keep_alive_s, return_when=asyncio.FIRST_COMPLETED)
            if self._hung_up.done():
                return False
            if not self._call.done():
                text = self._text() or self._encoder.keep_alive
                await send({"type": "http.response.body", "body": text, "more_body": True})
        return True

    def _text(self) -> bytes:
        deltas = self._sink.take()
        if not deltas or self._sink.head is None:
            return b""
        begun, self._started = self._started, True
        start = b"" if begun else self._encoder.start(self._sink.head)
        return start + b"".join(map(self._encoder.delta, deltas))

    def _last(self) -> bytes:
        error = self._call.exception()
        if error is not None:
            known = isinstance(error, TokenlakeError)
            status, kind = status_of(error) if known else (500, "internal")
            return self._encoder.error(status, kind, agent_message(error) if known else INTERNAL)
        answer = self._call.result()
        return (b"" if self._started else self._encoder.start(answer.head)) + self._encoder.end(answer)

    def _raise_what_is_a_bug(self) -> None:
        """The client was told; the log of the service gets the traceback."""
        error = self._call.exception()
        if error is not None and not isinstance(error, TokenlakeError):
            raise error
