"""Agents over real sockets, in a process of their own: conversations that go on from what they were answered.

This module imports little, since a fresh process does so before its clock starts.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

__all__ = ["Agent", "Played", "play"]

Agent = tuple[str, str, str]
"""Rollout id, URL and capability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of it."""

    calls: list[list[str]]
    """Ids of the answers of each agent, in order."""
    seconds: float
    latencies: list[float]
    """Seconds of each call as the agent saw them, without the wait for its turn."""


def play(agents: list[Agent], turns: int, in_flight: int) -> Played:
    """Some turns of every agent, at most `in_flight` calls at a time."""
    return asyncio.run(_play(agents, turns, in_flight))


async def _play(agents: list[Agent], turns: int, in_flight: int) -> Played:
    gate = asyncio.Semaphore(in_flight)
    latencies: list[float] = []

    async def agent(name: str, url: str, key: str) -> list[str]:
        door = await _Door.open(f"{url}/chat/completions", key)
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"{name} starts"}]
        calls: list[str] = []
        for turn in range(turns):
            async with gate:
                began = time.perf_counter()
                answer = await door.post({"messages": messages})
                latencies.append(time.perf_counter() - began)
            calls.append(answer["id"].removeprefix("chatcmpl-"))
            messages += [answer["choices"][0]["message"], {"role": "user", "content": f"turn {turn} of {name}"}]
        door.close()
        return calls

    began = time.perf_counter()
    calls = await asyncio.gather(*(agent(*each) for each in agents))
    seconds = time.perf_counter() - began
    return Played(calls=calls, seconds=seconds, latencies=latencies)


class _Door:
    """One connection, kept: it takes a tenth of what a client with a pool takes, and the service shares the cores."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: str) -> None:
        self._reader, self._writer, self._head = reader, writer, head

    @classmethod
    async def open(cls, url: str, key: str) -> Self:
        parts = urlsplit(url)
        head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nX-Api-Key: {key}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        )
        return cls(*await asyncio.open_connection(parts.hostname, parts.port), head)

    async def post(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer; raises where it is none."""
        sent = json.dumps(body).encode()
        self._writer.write(f"{self._head}{len(sent)}\r\n\r\n".encode() + sent)
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines if line)
        answer = await self._reader.readexactly(int(fields["content-length"]))
        if status.split()[1] != "200":
            raise RuntimeError(f"{status}: {answer.decode()}")
        return json.loads(answer)

    def close(self) -> None:
        self._writer.close()
