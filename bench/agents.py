"""Agents over real sockets, in a process of their own: conversations that go on from what they were answered.

This module imports little, since a fresh process does so before its clock starts.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import httpx

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
    limits = httpx.Limits(max_connections=in_flight)
    latencies: list[float] = []
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:

        async def agent(name: str, url: str, key: str) -> list[str]:
            messages: list[dict[str, Any]] = [{"role": "user", "content": f"{name} starts"}]
            calls: list[str] = []
            for turn in range(turns):
                async with gate:
                    began = time.perf_counter()
                    answer = await client.post(
                        f"{url}/chat/completions", json={"messages": messages}, headers={"x-api-key": key}
                    )
                    latencies.append(time.perf_counter() - began)
                answer.raise_for_status()
                body = answer.json()
                calls.append(body["id"].removeprefix("chatcmpl-"))
                messages += [body["choices"][0]["message"], {"role": "user", "content": f"turn {turn} of {name}"}]
            return calls

        began = time.perf_counter()
        calls = await asyncio.gather(*(agent(*each) for each in agents))
        seconds = time.perf_counter() - began
    return Played(calls=calls, seconds=seconds, latencies=latencies)
