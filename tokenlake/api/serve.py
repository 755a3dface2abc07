"""Running the service: as a command, and inside another process for tests, notebooks and the demo."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import socket
import sys
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI

from tokenlake.api.app import create_app
from tokenlake.api.backend import Backend, upstream_backend
from tokenlake.api.commands import pairs
from tokenlake.api.http_protocol import BoundedProtocol
from tokenlake.api.logs import logging_to
from tokenlake.api.service import Service
from tokenlake.api.settings import Environment, Settings, read_environment
from tokenlake.api.traces import NO_TRACES, Traces
from tokenlake.errors import ConfigError
from tokenlake.ingest.ports import check_port
from tokenlake.ingest.tiny import TinyEngine
from tokenlake.store.lake import OwnedLake

__all__ = ["Running", "embedded", "few_collections", "in_thread", "run"]

_START_S = 60.0
_KEEP_ALIVE_S = 75
"""Seconds; longer than clients keep idle connections, so that the service never closes one under a request."""
_YOUNG = 20_000
"""New objects that the collector waits for; 64 calls in flight hold about as many."""


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """A service that listens."""

    url: str
    """`http://host:port`, without a slash at the end."""
    token: str
    service: Service
    loop: asyncio.AbstractEventLoop
    """The loop that owns the service's state."""


def _listen(host: str, port: int) -> socket.socket:
    check_port(port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol is named because asyncio turns Nagle's algorithm off only where it is: without that, 40 ms a call.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # who reads the address connects at once, and waits until the service is up
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _config(app: FastAPI) -> uvicorn.Config:
    # Header names of agents are not logged, and neither are bodies: a capability never reaches a log.
    return uvicorn.Config(
        app,
        http=BoundedProtocol,
        log_config=None,  # its lines go where ours go, in the same form
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=10,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )


@contextlib.contextmanager
def embedded(service: Service, *, host: str = "127.0.0.1", port: int = 0) -> Generator[Running]:
    """Serve in a thread with a loop of its own until the block ends; port 0 takes a free one."""
    with in_thread(create_app(service), host=host, port=port) as (url, loop):
        yield Running(url, service.token, service, loop)


@contextlib.contextmanager
def in_thread(
    app: FastAPI, *, host: str = "127.0.0.1", port: int = 0
) -> Generator[tuple[str, asyncio.AbstractEventLoop]]:
    """As `embedded`, for any application: its address and its loop."""
    listener = _listen(host, port)
    server = uvicorn.Server(_config(app))
    loops: list[asyncio.AbstractEventLoop] = []

    async def main() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve(sockets=[listener])

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="tokenlake-service", daemon=True)
    thread.start()
    try:
        _wait_until_started(server, thread)
        yield _url(listener), loops[0]
    finally:
        server.should_exit = True
        thread.join(_START_S)
        listener.close()


@contextlib.contextmanager
def few_collections() -> Generator[None]:
    """Let the garbage collector leave alone what is there by now, and look for what is new only seldom.

    Calls leave hardly a cycle, but what those in flight hold for a moment makes the collector go through everything
    again and again, and once in some hundred calls through the whole process, for 0.15 s while all of them wait. For
    a process that does nothing else: it is set back at the end of the block.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _wait_until_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    tick = threading.Event()
    for _ in range(int(_START_S / 0.01)):
        if server.started:
            return
        if not thread.is_alive():
            break
        tick.wait(0.01)
    raise ConfigError("the service did not start: its log says why")


def _settings(given: Mapping[str, str]) -> Settings:
    """Settings from `NAME=VALUE` texts: JSON where it is JSON, else the text itself."""
    values: dict[str, Any] = {}
    for name, text in given.items():
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return Settings.parse(values)


@contextlib.contextmanager
def _traces(settings: Settings) -> Generator[Traces]:
    """Traces to where the settings say; what was traced is sent before it ends."""
    if settings.otlp_endpoint is None:
        yield NO_TRACES
        return
    from tokenlake.api import otel  # noqa: PLC0415 - an extra that is loaded where it is asked for

    traces = otel.exporting(settings.otlp_endpoint)
    try:
        yield traces
    finally:
        traces.close()


def _backend(arguments: argparse.Namespace, settings: Settings, environment: Environment) -> Backend:
    if arguments.upstream is not None:
        return asyncio.run(upstream_backend(arguments.upstream, arguments.capture or "gate", settings, environment))
    if arguments.capture not in (None, "worker"):
        raise ConfigError(f"--capture {arguments.capture} needs --upstream URL: the embedded engine is a worker")
    return Backend(engine=TinyEngine())


def run(arguments: argparse.Namespace) -> int:
    """`tokenlake serve`."""
    began = time.monotonic()
    environment = read_environment()
    settings = _settings(pairs(arguments.set))
    with contextlib.ExitStack() as held:
        held.enter_context(logging_to(sys.stderr, settings.log_format))
        traces = held.enter_context(_traces(settings))
        backend = _backend(arguments, settings, environment)
        listener = held.enter_context(_listen(arguments.host, arguments.port))
        lake = held.enter_context(OwnedLake.open(arguments.lake))
        policy = pairs(arguments.policy)
        service = Service(lake, backend, settings, environment, policy=policy, began=began, traces=traces)
        sys.stdout.write(f"serving {arguments.lake} at {_url(listener)}\n")
        if not environment.token_given:
            sys.stdout.write(f"control token: {environment.token}\n")
        sys.stdout.flush()
        held.enter_context(few_collections())
        asyncio.run(_serve(service, listener))
    return 0


async def _serve(service: Service, listener: socket.socket) -> None:
    await service.start()  # here a refusal is the command's, not a traceback of the server's
    await uvicorn.Server(_config(create_app(service))).serve(sockets=[listener])
