"""One model call and the client that waits for it: the answer, whole or streamed, or a hang-up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tokenlake.api.dialects.dialect import Answer, Dialect, ModelRequest
from tokenlake.api.dialects.sse import compact
from tokenlake.api.event_stream import EventStream
from tokenlake.api.sink import Sink

__all__ = ["Exchange"]

_CLIENT_GONE = 499


class Exchange:
    """Answers one request in its dialect; belongs to the task that handles it."""

    def __init__(self, request: Request, dialect: Dialect, asked: ModelRequest, keep_alive_s: float) -> None:
        self._request = request
        self._dialect = dialect
        self._asked = asked
        self._keep_alive_s = keep_alive_s
        self.sink: Sink | None = Sink() if asked.stream else None
        """Where the text of a streamed answer goes while it is generated."""

    async def respond(
        self, running: Coroutine[Any, Any, Answer], gone: Callable[[], Awaitable[None]] | None = None
    ) -> Response:
        """Run a call and answer it. `gone` is told when the client hung up; without it the call is cancelled.

        A streamed answer begins when there is something of it to send, or something to keep alive: what fails before
        that has the status of any other failure.
        """
        call = asyncio.create_task(running)
        hung_up = asyncio.create_task(self._hung_up())

        async def cancel() -> None:
            call.cancel()

        leave = gone or cancel
        streaming = False
        try:
            waited: list[asyncio.Future[Any]] = [call, hung_up]
            seconds = None
            if self.sink is not None:
                waited.append(self.sink.ready)
                seconds = self._keep_alive_s
            await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if hung_up.done():
                await leave()
                await asyncio.wait({call})
                if not call.cancelled():
                    # Nobody is there to be told: what came of it is recorded.
                    call.exception()
                return Response(status_code=_CLIENT_GONE)
            streaming = self.sink is not None and not (call.done() and call.exception())
            if self.sink is not None and streaming:
                encoder = self._dialect.encoder(self._asked)
                return EventStream(encoder, self.sink, call, hung_up, leave, self._keep_alive_s)
            body = self._dialect.body(self._asked, call.result())
            return Response(compact(body), media_type="application/json")
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(leave()))
            raise
        finally:
            if not streaming:
                hung_up.cancel()

    async def _hung_up(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
