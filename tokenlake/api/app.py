"""The ASGI application: routes over one service, one error shape."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tokenlake.api import routes_claims, routes_control, routes_data, routes_model, routes_proxy
from tokenlake.api.console import pages
from tokenlake.api.doorway import Doorway
from tokenlake.api.errors_http import INTERNAL, error_response, plain_error
from tokenlake.api.openapi import serve_schema
from tokenlake.api.service import Service
from tokenlake.errors import TokenlakeError

__all__ = ["create_app"]


def create_app(service: Service) -> FastAPI:
    """The application of a service; starting and stopping it starts and stops the service."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    # The pages that FastAPI draws its schema with load scripts from elsewhere: the schema alone is served.
    app = FastAPI(title="Tokenlake", lifespan=lifespan, redirect_slashes=False, openapi_url=None)
    app.state.service = service
    app.add_middleware(Doorway, metrics=service.metrics, traces=service.traces)
    if service.capture == "off":
        app.include_router(routes_proxy.instead)
    app.router.routes.extend(routes_model.calls)
    app.include_router(routes_data.health)
    app.include_router(routes_control.router)
    app.include_router(routes_claims.router)
    app.include_router(routes_data.router)
    if service.proxy is None or service.settings.pins:
        # Bytes that pass unchanged would carry a temperature past its pin.
        app.include_router(routes_model.plain_calls)
    if service.proxy is not None:
        app.include_router(routes_proxy.beside)
    app.include_router(routes_model.router)
    app.include_router(pages.router)
    serve_schema(app)
    app.add_exception_handler(TokenlakeError, _ours)
    app.add_exception_handler(HTTPException, _routing)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)
    return app


async def _ours(request: Request, error: Any) -> Response:
    return error_response(request.url.path, error)


async def _routing(request: Request, error: Any) -> Response:
    headers = dict(error.headers or {})
    message = f"{error.detail}: {request.method} {request.url.path}"
    return plain_error(request.url.path, error.status_code, message, {}, headers=headers)


async def _validation(request: Request, error: Any) -> Response:
    fields = [".".join(map(str, item["loc"])) for item in error.errors()]
    return plain_error(request.url.path, 422, "the request is not valid", {"fields": fields})


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


async def _unexpected(request: Request, _error: Exception) -> Response:
    """A bug of ours: the traceback goes to the log, the client learns nothing of it."""
    return plain_error(request.url.path, 500, INTERNAL, {})
