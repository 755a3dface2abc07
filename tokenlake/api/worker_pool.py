"""The capture workers of one service. A rollout stays with one of them, so that its prefixes are in memory there.

A worker is taken in only after it has said that it captures, into this lake, and serves the same model as the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from tokenlake.api.remote_worker import RemoteWorker, WorkerState, ask_state
from tokenlake.errors import ConfigError, Conflict, Deadline, EngineFailed
from tokenlake.ingest.upstream.client import UpstreamClient
from tokenlake.ingest.upstream.facts import UpstreamFacts

__all__ = ["WorkerPool"]

_AWAY_S = 30.0
"""Seconds for which a worker that could not be reached is passed over."""


class WorkerPool:
    """Belongs to the service's event loop. `connect` makes a client of an address."""

    def __init__(self, lake_id: str, facts: UpstreamFacts, connect: Callable[[str], UpstreamClient]) -> None:
        self._lake_id = lake_id
        self._facts = facts
        self._connect = connect
        self._workers: dict[str, RemoteWorker] = {}
        self._away: dict[str, float] = {}
        """Workers that could not be reached, and until when they are passed over."""
        self._left: list[UpstreamClient] = []

    async def add(self, url: str, worker_id: str | None = None) -> WorkerState:
        """Take in the worker at an address, or renew what is known of it; `worker_id` is who it has to be.

        Raises `ConfigError`, `EngineFailed` or `Deadline` where none answers that captures, and `Conflict` for another
        worker, another lake or another model.
        """
        client = self._connect(url)
        async with AsyncExitStack() as refused:
            refused.push_async_callback(client.close)
            state = await ask_state(client)
            self._check(state, url, worker_id)
            refused.pop_all()
        older = self._workers.get(state.worker_id)
        if older is not None:
            # Calls that still run there end on the older connections.
            self._left.append(older.client)
        self._workers[state.worker_id] = RemoteWorker(client, state)
        self._away.pop(state.worker_id, None)
        return state

    def of(self, rollout_id: str) -> RemoteWorker:
        """The worker of a rollout: by rendezvous hashing, so that one more or less moves few. Raises `EngineFailed`."""
        if not self._workers:
            raise EngineFailed("no capture worker is registered", reason="no_worker")
        names = self._reached() or self._workers
        return self._workers[max(names, key=lambda name: _weight(name, rollout_id))]

    def pass_over(self, worker: RemoteWorker) -> bool:
        """Leave out a worker that could not be reached, for a while; whether another one is left to ask."""
        self._away[worker.state.worker_id] = time.monotonic() + _AWAY_S
        return bool(self._reached())

    def _reached(self) -> list[str]:
        now = time.monotonic()
        return [name for name in self._workers if self._away.get(name, now) <= now]

    async def states(self) -> list[dict[str, Any]]:
        """Every worker, asked now: whether it captures, and which weights it has loaded."""
        return await asyncio.gather(*(self._state(name, worker) for name, worker in sorted(self._workers.items())))

    async def close(self) -> None:
        """Close every connection; idempotent."""
        for client in (*self._left, *(worker.client for worker in self._workers.values())):
            await client.close()

    async def _state(self, name: str, worker: RemoteWorker) -> dict[str, Any]:
        loaded: int | None = None
        healthy = True
        try:
            state = await ask_state(worker.client)
            self._check(state, worker.client.url, name)
            loaded = state.weight_version
        except (ConfigError, Conflict, Deadline, EngineFailed):
            healthy = False
        return {
            "worker_id": name,
            "url": worker.client.url,
            "model": self._facts.name,
            "healthy": healthy,
            "loaded_weight_version": loaded,
        }

    def _check(self, state: WorkerState, url: str, worker_id: str | None) -> None:
        if worker_id is not None and state.worker_id != worker_id:
            raise Conflict(f"the worker at {url} is {state.worker_id}, not {worker_id}", worker_id=state.worker_id)
        if state.lake_id != self._lake_id:
            raise Conflict(f"the worker at {url} captures into another lake: start it with this one's --lake")
        if state.facts != self._facts:
            raise Conflict(f"the worker at {url} serves another model, or renders or samples it otherwise")


def _weight(worker_id: str, rollout_id: str) -> bytes:
    return hashlib.sha256(f"{worker_id}\n{rollout_id}".encode()).digest()
