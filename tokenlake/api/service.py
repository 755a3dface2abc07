"""The service: one owned lake, one engine, the gate between them, and what runs in the background."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from functools import partial
from typing import Any

from tokenlake import finalize, sql
from tokenlake.api.answers import Answers
from tokenlake.api.archive import Archive
from tokenlake.api.auth import Capabilities, load_key
from tokenlake.api.backend import Backend
from tokenlake.api.control import Control
from tokenlake.api.dialects import AnthropicDialect, ChatDialect, ResponsesDialect
from tokenlake.api.dialects.chat_reader import ChatReader
from tokenlake.api.dialects.content import TurnMaker
from tokenlake.api.gate import Gate
from tokenlake.api.housekeeper import Housekeeper
from tokenlake.api.ledger import Ledger
from tokenlake.api.lifecycle import Lifecycle
from tokenlake.api.limits import Limits, Slots
from tokenlake.api.metrics import Metrics
from tokenlake.api.publisher import Publisher
from tokenlake.api.receipts import entry_of, rollout_state
from tokenlake.api.recorder import Recorder
from tokenlake.api.registration import GroupLocks, Registrar
from tokenlake.api.rollouts import Attempt
from tokenlake.api.settings import Environment, Settings, read_environment
from tokenlake.api.sql_workers import SqlWorkers
from tokenlake.api.traces import NO_TRACES, Traces
from tokenlake.api.worker_gate import WorkerGate
from tokenlake.api.worker_pool import WorkerPool
from tokenlake.errors import ConfigError, Conflict, Deadline, EngineFailed, NotFound
from tokenlake.finalize.buffer import ReplayBuffer
from tokenlake.finalize.publish import set_policy
from tokenlake.ids import split_rollout_id
from tokenlake.ingest.capture import CaptureCore
from tokenlake.ingest.engine import Engine
from tokenlake.ingest.prefixes import Prefixes
from tokenlake.ingest.prompter import Prompter
from tokenlake.store.lake import OwnedLake
from tokenlake.store.query import fetch

__all__ = ["Service"]

_log = logging.getLogger(__name__)
_WRITER = "embedded"
_REMEMBERED = 65_536
"""Keys of deltas; every call is given a key of its own and staged once, so any number would do."""


class Service:
    """Everything behind the HTTP doors. `start` and `stop` belong to one event loop; the caller owns the lake.

    `began`: when its start began, on the monotonic clock, where that was before the lake was opened.
    """

    def __init__(
        self,
        lake: OwnedLake,
        backend: Engine | Backend,
        settings: Settings | None = None,
        environment: Environment | None = None,
        *,
        policy: dict[str, Any] | None = None,
        began: float | None = None,
        traces: Traces = NO_TRACES,
    ) -> None:
        self._began = time.monotonic() if began is None else began
        self.lake = lake
        backend = backend if isinstance(backend, Backend) else Backend(engine=backend)
        self.engine = engine = backend.engine
        self.settings = settings or Settings()
        self.capture = backend.capture
        self.hop = backend.hop
        self.proxy = backend.proxy(self.settings)
        environment = environment or read_environment()
        self.token = environment.token
        self.capabilities = Capabilities(
            key=load_key(environment.capability_key, environment.state_dir / f"{lake.lake_id}.key"),
            lake_id=lake.lake_id,
            token=environment.token,
        )
        self.metrics = Metrics()
        self.traces = traces
        self.control = Control(self.settings.closed_groups)
        events = lake.open_events()
        for event in events:
            self.control.apply(event)
        self._folded = len(events)
        self.control.policy = set_policy(lake, policy or {})
        self.buffer = ReplayBuffer(lake)
        writer = lake.delta_writer(_WRITER, remember=_REMEMBERED)
        self.ledger = Ledger(lake.lineage, writer, self.control, self.metrics)
        locks = GroupLocks()
        self.publisher = Publisher(lake, self.control, locks, self.metrics, self.settings, traces)
        self.archive = Archive(lake, self.control, locks)
        self.registrar = Registrar(self.control, self.ledger, locks)
        self.lifecycle = Lifecycle(
            self.control, self.ledger, self.settings, locks, stored=self._manifest, ended=self.publisher.ended
        )
        self.publisher.lifecycle = self.lifecycle
        fold = self.settings.reasoning == "fold"
        make = TurnMaker(strip=self.settings.strip, unfold=fold)
        self.chat = ChatDialect(ChatReader(make), fold=fold)
        self.responses = ResponsesDialect(make)
        self.anthropic = AnthropicDialect(make)
        self.limits = Limits(self.settings.rollout_requests_per_minute, self.settings.service_requests_per_minute)
        self.slots = Slots(self.settings.max_in_flight)
        lake.space.floor = self.settings.min_free_bytes
        self.prefixes = Prefixes(lake, self.settings.prefix_cache_bytes)
        self.recorder = Recorder(
            control=self.control,
            ledger=self.ledger,
            capture=CaptureCore(writer),
            prefixes=self.prefixes,
            metrics=self.metrics,
            traces=traces,
            space=lake.space,
        )
        self._upstream = backend.upstream
        self.pool = backend.pool(lake.lake_id, self.settings)
        make_gate = Gate if self.pool is None else partial(WorkerGate, pool=self.pool)
        self.gate = make_gate(
            control=self.control,
            engine=engine,
            prompter=Prompter(engine, self.prefixes, self.metrics.digest_failures.inc),
            recorder=self.recorder,
            answers=Answers(self._events, engine.name, self.settings.answer_cache),
            metrics=self.metrics,
            traces=traces,
            settings=self.settings,
        )
        self.sql_workers = SqlWorkers(lake.path, self.settings)
        self.housekeeper = Housekeeper(lake, self.control, self.metrics, self.settings)
        self._finalizers: finalize.FinalizerPool | None = None
        self._task: asyncio.Task[None] | None = None
        self._upkeep: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine and the background work, once."""
        if self._task is not None:
            return
        await self.engine.start()
        if self.pool is not None and self._upstream is not None:
            await self.pool.add(self._upstream)
            await self._readmit(self.pool)
        model = {
            "name": self.engine.name,
            "vocab_size": self.engine.vocab_size,
            "pad_id": self.engine.pad_id,
            "stop_ids": list(self.engine.stop_ids),
            "max_model_len": self.engine.max_model_len,
            "logprob_mode": self.engine.logprob_mode,
            **self.engine.digests(),
        }
        if self.capture != "off" and self.control.model != model:
            await self.ledger.append({"event_type": "model_registered", "detail": json.dumps(model, sort_keys=True)})
        if self.settings.finalizer_actors is not None:
            self._finalizers = self.publisher.judges = await asyncio.to_thread(
                finalize.FinalizerPool, self.lake.path, actors=self.settings.finalizer_actors
            )
        self._task = asyncio.create_task(self.publisher.run())
        self._upkeep = asyncio.create_task(self.housekeeper.run())
        seconds = time.monotonic() - self._began
        self.metrics.start.set(seconds)
        rollouts = sum(len(group.rollouts) for group in self.control.groups.values())
        _log.info("ready in %.2f s: %d open rollouts, %d events folded", seconds, rollouts, self._folded)

    async def stop(self) -> None:
        """Stop the background work, abort what generates, and let what is being committed finish."""
        for task in filter(None, (self._task, self._upkeep)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.sql_workers.close()
        await self.gate.stop()
        if self.proxy is not None:
            await self.proxy.close()
        await self.gate.drain()
        if self.pool is not None:
            await self.pool.close()
        await self.publisher.settle()
        if self._finalizers is not None:
            await asyncio.to_thread(self._finalizers.close)
        await self.housekeeper.settle()
        await asyncio.to_thread(self.lake.lineage.anchor)

    @property
    def faults(self) -> list[str]:
        """Why model calls cannot be served, or why nothing would come of them; empty when ready."""
        stopped = {
            "engine": not self.engine.running,
            "publisher": self._task is None or self._task.done(),
            "housekeeper": self._upkeep is None or (self._upkeep.done() and self.settings.compact_every_s is not None),
        }
        return [f"{name}_stopped" for name, is_so in stopped.items() if is_so]

    async def set_weight_version(self, version: int) -> dict[str, Any]:
        """Record the trainer's published version and hand it to the workers; never backwards.

        The embedded engine is told the label only: weights are loaded by whoever trains them, before this. Workers of
        their own are asked what they have loaded; a version that was announced is not one that is loaded.
        """
        known = self.control.weight_version
        if known is not None and version < known:
            raise Conflict(f"weight version {version} is older than {known}", current=known)
        if known != version:
            await self.ledger.append({"event_type": "weight_version_published", "weight_version": version})
        loaded = self.engine.weight_version
        if loaded is None or loaded < version:
            try:
                await self.engine.set_weights(None, version)
            except ValueError as error:
                raise EngineFailed(f"the engine did not take weight version {version}: {error}") from error
        return {"version": version, "workers": await self.workers()}

    async def register_worker(self, worker_id: str, url: str | None, loaded: int | None, meta: dict[str, Any]) -> None:
        """Register a capture worker, or renew what is known of it.

        Where workers capture, one with an address takes calls from now on, and is refused unless it captures.
        """
        if self.pool is not None and url is not None:
            try:
                loaded = (await self.pool.add(url, worker_id)).weight_version
            except ConfigError as error:
                raise Conflict(error.message, **error.detail) from error
        detail = {"worker_id": worker_id, "url": url, "meta": meta}
        await self.ledger.append(
            {
                "event_type": "worker_registered",
                "weight_version": loaded,
                "detail": json.dumps(detail, sort_keys=True),
            }
        )

    async def workers(self) -> list[dict[str, Any]]:
        """The workers that capture, asked now; else the embedded one and those that registered."""
        if self.pool is not None:
            return await self.pool.states()
        embedded = {
            "worker_id": "embedded",
            "model": self.engine.name,
            "healthy": self.engine.running,
            "loaded_weight_version": self.engine.weight_version,
        }
        return [embedded, *({"worker_id": name, **worker} for name, worker in self.control.workers.items())]

    async def _readmit(self, pool: WorkerPool) -> None:
        """Workers that registered before a restart take calls again, those that are still there."""
        for worker_id, worker in self.control.workers.items():
            if worker.get("url") is None:
                continue
            try:
                await pool.add(worker["url"], worker_id)
            except (ConfigError, Conflict, Deadline, EngineFailed) as error:
                _log.warning("worker %s is not taken in again: %s", worker_id, error)

    async def rollout(self, rollout_id: str) -> dict[str, Any]:
        """State of a rollout, with the views' verdict once it has ended; raises `NotFound`."""
        group, judged = await self.archive.recall(split_rollout_id(rollout_id)[0]), None
        rollout = group and group.rollouts.get(rollout_id)
        if group is None or rollout is None:
            raise NotFound(f"no rollout {rollout_id}", rollout_id=rollout_id)
        if rollout.current.ended:
            text = sql.read("reads/inspect_rollout")
            params = [rollout_id, group.group_id]
            table = await asyncio.to_thread(fetch, self.lake, text, params, groups=[group.group_id])
            judged = next(iter(table.select(["verdict", "reason"]).to_pylist()), None)
        return rollout_state(rollout, group, await self.lifecycle.manifest(rollout.current), judged)

    async def _manifest(self, attempt: Attempt) -> list[dict[str, Any]]:
        events = await asyncio.to_thread(self._events, attempt.rollout_id)
        return [
            entry_of(event)
            for event in events
            if event["event_type"] == "call_committed" and event["attempt"] == attempt.attempt
        ]

    def _events(self, rollout_id: str) -> list[dict[str, Any]]:
        """Lineage events of a rollout; for a thread."""
        text = sql.read("reads/rollout_events")
        return fetch(self.lake, text, [rollout_id], groups=[split_rollout_id(rollout_id)[0]]).to_pylist()
