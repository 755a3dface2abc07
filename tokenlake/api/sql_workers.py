"""Queries of others, each in a process of its own: bounded in time, memory, rows and bytes, and gone with who asked.

A worker holds an index of its own over the same lake and outlives its queries. One that does not give up in time when
it is interrupted is killed, and the next query starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from tokenlake.api.settings import Settings, child_environment
from tokenlake.errors import Deadline, EngineFailed, QueryError, TooLarge

__all__ = ["SqlAnswer", "SqlWorkers"]

_GRACE_S = 2.0
"""Seconds for an interrupted query to end by itself."""

_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlAnswer:
    """What a query gave."""

    stream: bytes
    """An Arrow IPC stream."""
    more: bool
    """Whether the query had more rows than the limits let through."""


class SqlWorkers:
    """The worker processes of one service; used in one event loop."""

    def __init__(self, lake: Path, settings: Settings) -> None:
        self._lake = lake
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.sql_processes)
        self._idle: list[_Process] = []
        self._starting: set[asyncio.Task[_Process]] = set()
        self._ids = itertools.count()

    async def query(self, text: str, params: Sequence[Any]) -> SqlAnswer:
        """Run one query. Cancelling this cancels the query.

        Raises `QueryError` for what cannot run or does not only read, `TooLarge` when it takes too much memory,
        `Deadline` when it takes too long.
        """
        async with self._slots:
            process = self._idle.pop() if self._idle else await self._start()
            kept = False
            try:
                head, stream = await self._ask(process, text, params)
                kept = True
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                raise TooLarge(self._beyond("memory")) from error
            finally:
                if kept:
                    self._idle.append(process)
                else:
                    await process.kill()
        if "error" not in head:
            return SqlAnswer(stream=stream, more=head["more"])
        if head["kind"] == "query":
            raise QueryError(head["error"])
        if head["kind"] == "memory":
            raise TooLarge(self._beyond("memory"))
        raise Deadline(self._beyond("time"))

    async def close(self) -> None:
        """End every worker."""
        await asyncio.gather(*self._starting, return_exceptions=True)
        while self._idle:
            await self._idle.pop().kill()

    async def _start(self) -> _Process:
        """A new worker. One that nobody waits for any more is not given up: a large lake takes long to index."""
        starting = asyncio.create_task(_Process.start(self._lake, self._settings.sql_memory_bytes))
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(lambda done: self._idle.append(done.result()))
            raise
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EngineFailed("the process for queries did not start: the log of the service says why") from error

    async def _ask(self, process: _Process, text: str, params: Sequence[Any]) -> tuple[dict[str, Any], bytes]:
        settings, number = self._settings, next(self._ids)
        limits = {"max_rows": settings.sql_max_rows, "max_bytes": settings.sql_max_bytes}
        await process.send({"id": number, "sql": text, "params": list(params), **limits})
        answer = asyncio.ensure_future(process.receive())
        try:
            done, _ = await asyncio.wait([answer], timeout=settings.sql_timeout_s)
            if not done:
                await process.send({"cancel": number})
                done, _ = await asyncio.wait([answer], timeout=_GRACE_S)
            if not done:
                raise Deadline(self._beyond("time"))
            return answer.result()
        finally:
            answer.cancel()

    def _beyond(self, what: str) -> str:
        if what == "time":
            return f"the query ran longer than {self._settings.sql_timeout_s:g} s: ask for less, or raise sql_timeout_s"
        return (
            f"the query takes more than {self._settings.sql_memory_bytes} bytes of memory: ask for less, or raise "
            "sql_memory_bytes"
        )


class _Process:
    """One worker process."""

    def __init__(
        self, child: asyncio.subprocess.Process, requests: asyncio.StreamWriter, answers: asyncio.StreamReader
    ) -> None:
        self._child = child
        self._requests = requests
        self._answers = answers

    @classmethod
    async def start(cls, lake: Path, memory_bytes: int) -> Self:
        """Start one, and wait until its index is built."""
        command = (sys.executable, "-m", "tokenlake.store.query_worker", str(lake), str(memory_bytes))
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, limit=_LINE_BYTES, env=child_environment()
        )
        process = cls(child, cast("asyncio.StreamWriter", child.stdin), cast("asyncio.StreamReader", child.stdout))
        started = False
        try:
            await process.receive()
            started = True
        finally:
            if not started:
                await process.kill()
        return process

    async def send(self, message: dict[str, Any]) -> None:
        self._requests.write(json.dumps(message).encode() + b"\n")
        await self._requests.drain()

    async def receive(self) -> tuple[dict[str, Any], bytes]:
        """Head and stream of the next answer; raises `IncompleteReadError` when the process ends instead."""
        head = json.loads(await self._answers.readuntil(b"\n"))
        return head, await self._answers.readexactly(head.get("bytes", 0))

    async def kill(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        self._requests.close()
        await self._child.wait()
