"""The gate in front of capture workers: they render, sample and stage; the gate decides the parent, checks, commits."""

from __future__ import annotations

import asyncio
from typing import Any

from tokenlake.api.answers import served_finish
from tokenlake.api.dialects.dialect import Answer
from tokenlake.api.flight import Flight
from tokenlake.api.gate import Gate, overflow_answer
from tokenlake.api.remote_worker import RemoteWorker, Said
from tokenlake.api.worker_pool import WorkerPool
from tokenlake.errors import ContextOverflow, EngineFailed, InvalidInput
from tokenlake.ingest.capture_ask import CaptureAsk
from tokenlake.ingest.fingerprint import History
from tokenlake.ingest.prompter import Origin
from tokenlake.ingest.resolve import Resolution

__all__ = ["WorkerGate"]


class WorkerGate(Gate):
    """Sends every captured call to the worker of its rollout. No token passes through."""

    def __init__(self, *, pool: WorkerPool, **more: Any) -> None:
        super().__init__(**more)
        self._pool = pool
        self._calls: dict[str, asyncio.Task[Said]] = {}

    async def _captured(self, flight: Flight, history: History, found: Resolution) -> Answer:
        if flight.request.most_calls is not None and flight.request.conversation.tools:
            refused = InvalidInput(
                "tool calls cannot be forbidden or limited with capture workers", field="tool_choice"
            )
            raise await self._recorder.unanswered(flight, "refused", refused)
        ask = CaptureAsk(
            rollout_id=flight.attempt.rollout_id,
            attempt=flight.attempt.attempt,
            call_id=flight.call_id,
            parent=found.parent,
            cause=found.cause,
        )
        try:
            said = await self._generate(
                flight, lambda: self._said(flight, ask), lambda said: None if said is not None else "abort"
            )
        except ContextOverflow as full:
            cause = full.detail.get("cause")
            origin = Origin(None if cause else ask.parent, cause)
            answer = overflow_answer(self._head(flight.call_id, full.detail.get("prompt_len") or 0))
            flight.phase = "committing"
            await self._recorder.overflow(flight, history, origin, answer)
            return answer
        if said is None:
            raise EngineFailed("the call was aborted")
        turn = self._engine.parse([], said.text) if said.turn is None else said.turn
        answer = Answer(
            head=self._head(flight.call_id, said.prompt_tokens),
            turn=turn,
            finish_reason=served_finish(turn, said.finish_reason),
            stop_sequence=said.stop_sequence,
            completion_tokens=said.completion_tokens,
        )
        await self._ended(flight, answer)
        await self._recorder.commit(flight, history, said.origin, answer, said.coords)
        return answer

    async def _said(self, flight: Flight, ask: CaptureAsk) -> Said | None:
        """What the rollout's worker answers, or another one where it is gone; None when the call was aborted here."""
        while True:
            worker = self._pool.of(ask.rollout_id)
            try:
                return await self._said_by(worker, flight, ask)
            except EngineFailed as error:
                # Who was never connected to has sampled nothing.
                if error.detail.get("reason") != "upstream_unreachable" or not self._pool.pass_over(worker):
                    raise

    async def _said_by(self, worker: RemoteWorker, flight: Flight, ask: CaptureAsk) -> Said | None:
        sink = flight.sink

        def opened(prompt_tokens: int) -> None:
            if sink is not None:
                sink.head = self._head(flight.call_id, prompt_tokens)

        calling = worker.call(flight.request, ask, opened, None if sink is None else sink.push)
        task = self._calls[flight.call_id] = asyncio.ensure_future(calling)
        try:
            return await asyncio.wait_for(task, self._settings.call_deadline_s)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            return None
        finally:
            del self._calls[flight.call_id]

    async def _abort(self, call_id: str) -> None:
        task = self._calls.get(call_id)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        """As the gate's; closing a call's connection aborts it at its worker."""
        for task in list(self._calls.values()):
            task.cancel()
        await super().stop()
