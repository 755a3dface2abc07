"""What every own route has in common: a deadline, and the service it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tokenlake.api.service import Service
from tokenlake.errors import Deadline

__all__ = ["OwnRoute", "service_of", "unless_gone"]


T = TypeVar("T")


def service_of(request: Request) -> Service:
    """The service that this application serves."""
    return request.app.state.service


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. The request's body was read before this."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class OwnRoute(APIRoute):
    """A route that answers within `control_deadline_s`, if only with 504."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, bounded in time."""
        handler = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            seconds = service_of(request).settings.control_deadline_s
            try:
                async with asyncio.timeout(seconds):
                    return await handler(request)
            except TimeoutError as error:
                raise Deadline(f"no answer within {seconds:g} s: ask again") from error

        return bounded
