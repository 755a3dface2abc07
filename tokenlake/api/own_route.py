"""What every own route has in common: a deadline, and the service it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from tokenlake.api.service import Service
from tokenlake.errors import Deadline

__all__ = ["OwnRoute", "service_of"]


def service_of(request: Request) -> Service:
    """The service that this application serves."""
    return request.app.state.service


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
