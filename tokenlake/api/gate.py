"""The gate: one model call in order, from an agent's messages to a committed, durable record, then the answer.

    admit -> resolve the parent -> exact prefix -> render and splice -> generate -> stage -> commit -> answer

The answer is released only after the commit, so a child can never exist before its parent is durable. A client that
goes away before generation ends aborts it; staging and committing are never cut short. Whatever cannot be captured is
written down as a failure before the agent sees anything of it, and a wrong prefix is never served.
"""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tokenlake.api.answers import Answers, answer_detail, served_finish
from tokenlake.api.chat import Answer, ChatDialect, ModelRequest
from tokenlake.api.control import Control
from tokenlake.api.ledger import Ledger
from tokenlake.api.metrics import Metrics
from tokenlake.api.prefixes import Prefixes
from tokenlake.api.rollouts import Attempt
from tokenlake.api.settings import Settings
from tokenlake.errors import (
    CaptureFailed,
    Conflict,
    ContextOverflow,
    DamagedLake,
    Deadline,
    EngineFailed,
    InvalidInput,
    NotFound,
    StorageFailed,
)
from tokenlake.ids import mint_call_id, split_rollout_id
from tokenlake.ingest.capture import Coords, ParentLink, Sampling, Ticket
from tokenlake.ingest.engine import AssistantTurn, Engine, Generation, SamplingParams
from tokenlake.ingest.fingerprint import History, trace
from tokenlake.ingest.messages import to_messages
from tokenlake.ingest.resolve import UNRESOLVED, Cause, Node, since
from tokenlake.ingest.splice import SpliceFailed, splice

__all__ = ["Capture", "Flight", "Gate"]

Phase = Literal["preparing", "generating", "committing", "done"]


class Capture(Protocol):
    """What the gate needs of the capture core."""

    def begin(
        self, *, rollout_id: str, attempt: int, call_id: str, parent: ParentLink | None = None, sampling: Sampling = ...
    ) -> Ticket: ...

    def complete(self, ticket: Ticket, **generation: Any) -> Coords: ...


@dataclass(slots=True, eq=False)
class Flight:
    """One admitted call, until its answer is given or refused."""

    attempt: Attempt
    request: ModelRequest
    dialect: ChatDialect
    request_digest: bytes
    idempotency_digest: bytes | None
    call_id: str = field(default_factory=mint_call_id)
    started: float = field(default_factory=time.monotonic)
    engine_s: float = 0.0
    phase: Phase = "preparing"
    waiters: int = 1
    """Clients that wait for its answer: the one that sent it, and those that joined."""
    joined: Flight | None = None
    """The same call, already in flight, that answers this one."""

    @property
    def gone(self) -> bool:
        """Whether nobody waits any more."""
        return self.waiters <= 0


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What the engine is given."""

    ids: list[int]
    parent: Node | None
    prefix: bytes
    cause: Cause | None


class Gate:
    """Model calls of all rollouts of one service."""

    def __init__(
        self,
        *,
        control: Control,
        ledger: Ledger,
        engine: Engine,
        capture: Capture,
        prefixes: Prefixes,
        answers: Answers,
        metrics: Metrics,
        settings: Settings,
    ) -> None:
        self._control = control
        self._ledger = ledger
        self._engine = engine
        self._capture = capture
        self._prefixes = prefixes
        self._answers = answers
        self._metrics = metrics
        self._settings = settings
        self._flights: dict[Flight, asyncio.Task[Answer]] = {}

    def admit(self, rollout_id: str, attempt: int) -> Attempt:
        """The attempt, if it takes calls; raises `NotFound` or `Conflict` before anything is sampled."""
        rollout = self._control.rollout(rollout_id)
        found = rollout and rollout.attempts.get(attempt)
        if rollout is None or found is None:
            raise NotFound(f"no rollout {rollout_id} with attempt {attempt}", rollout_id=rollout_id)
        if found is not rollout.current:
            raise Conflict(f"attempt {attempt} of {rollout_id} is superseded by {rollout.current.attempt}")
        if found.state != "open" or found.closing or found.released:
            state = "closed" if found.state == "open" else found.state
            raise Conflict(f"rollout {rollout_id} is {state}: it takes no more calls", state=state)
        return found

    async def call(self, flight: Flight, *, sdk_retry: bool) -> Answer:
        """Answer an admitted call; joins or repeats the same call where the request says it is one."""
        known = await self._repeated(flight, sdk_retry=sdk_retry)
        if known is not None:
            return known
        if self.admit(flight.attempt.rollout_id, flight.attempt.attempt) is not flight.attempt:
            raise Conflict(f"rollout {flight.attempt.rollout_id} was closed")
        flight.attempt.inflight.add(flight.call_id)
        task = asyncio.create_task(self._run(flight))
        self._flights[flight] = task
        task.add_done_callback(lambda _: self._landed(flight))
        return await asyncio.shield(task)

    async def plain(self, request: ModelRequest) -> Answer:
        """A call outside every rollout: nothing of it is kept."""
        prompt = await asyncio.to_thread(self._prompt, request, None, None)
        call_id = mint_call_id()
        seconds = self._settings.call_deadline_s
        try:
            generation = await asyncio.wait_for(
                self._engine.generate(prompt.ids, request.params, request_id=call_id), seconds
            )
        except TimeoutError as error:
            raise Deadline(f"no answer within {seconds:g} s") from error
        except ValueError as error:
            raise InvalidInput(str(error)) from error
        if generation.finish_reason == "abort":
            raise EngineFailed("the generation was aborted: send the call again")
        turn = self._engine.parse(generation.token_ids, generation.text)
        return self._answer(call_id, turn, generation.finish_reason, len(prompt.ids), len(generation.token_ids))

    async def client_gone(self, flight: Flight) -> None:
        """The client of a call hung up: what still generates is aborted, what is being committed is completed."""
        flight = flight.joined or flight
        flight.waiters -= 1
        if not flight.gone:
            return
        if flight.phase == "generating":
            await self._engine.abort(flight.call_id)
        elif flight.phase == "done" and flight.call_id in flight.attempt.calls:
            flight.attempt.undelivered.add(flight.call_id)

    async def drain(self) -> None:
        """Wait until nothing is in flight; used at shutdown, after the engine was told to stop."""
        while self._flights:
            await asyncio.wait(list(self._flights.values()))

    def _landed(self, flight: Flight) -> None:
        flight.attempt.inflight.discard(flight.call_id)
        flight.attempt.landed.set()
        task = self._flights.pop(flight)
        if not task.cancelled():
            # Whoever still waits gets the error; with nobody waiting it has been recorded, and is not news.
            task.exception()

    async def _repeated(self, flight: Flight, *, sdk_retry: bool) -> Answer | None:
        attempt, key = flight.attempt, flight.idempotency_digest
        if key is not None:
            for other, task in self._flights.items():
                if other.attempt is attempt and other.idempotency_digest == key:
                    _same_body(other.request_digest, flight.request_digest)
                    return await self._join(flight, other, task)
            call_id = self._control.keys.get((attempt.rollout_id, attempt.attempt, key))
            if call_id is not None:
                _same_body(attempt.calls[call_id].request_digest, flight.request_digest)
                return await self._again(attempt, call_id)
        elif sdk_retry:
            for other, task in self._flights.items():
                if other.attempt is attempt and other.request_digest == flight.request_digest and not other.gone:
                    return await self._join(flight, other, task)
            parents = {call.node.parent.call_id for call in attempt.calls.values() if call.node.parent is not None}
            for call_id, call in reversed(attempt.calls.items()):
                if call.request_digest == flight.request_digest and call_id not in parents:
                    return await self._again(attempt, call_id)
        return None

    @staticmethod
    async def _join(flight: Flight, other: Flight, task: asyncio.Task[Answer]) -> Answer:
        flight.joined = other
        other.waiters += 1
        return await asyncio.shield(task)

    async def _again(self, attempt: Attempt, call_id: str) -> Answer:
        attempt.undelivered.discard(call_id)
        return await self._answers.get(attempt.rollout_id, call_id)

    async def _run(self, flight: Flight) -> Answer:
        history = trace(flight.request.conversation)
        found = flight.attempt.lineage.resolve(history)
        prompt = await asyncio.to_thread(self._prompt, flight.request, found.parent, found.cause)
        try:
            generation = await self._generate(flight, prompt.ids)
        except ContextOverflow:
            return await self._overflow(flight, history, prompt)
        turn = self._engine.parse(generation.token_ids, generation.text)
        answer = self._answer(flight.call_id, turn, generation.finish_reason, len(prompt.ids), len(generation.token_ids))
        flight.phase = "committing"
        await self._captured(flight, history, prompt, generation, answer)
        flight.phase = "done"
        if flight.gone and flight.call_id in flight.attempt.calls:
            flight.attempt.undelivered.add(flight.call_id)
        self._answers.put(answer)
        self._metrics.overhead.observe(time.monotonic() - flight.started - flight.engine_s)
        return answer

    def _prompt(self, request: ModelRequest, parent: Node | None, cause: Cause | None) -> _Prompt:
        """Runs in a thread: reads the parent's ids and renders."""
        messages = to_messages(request.conversation.turns)
        tools = request.conversation.tools or None
        if parent is not None:
            try:
                prefix = self._prefixes.get(parent)
                ids = array("i", prefix).tolist()
                spliced = splice(self._engine, ids, messages, parent.turns, tools)
                return _Prompt(spliced.prompt_ids, parent, prefix, None)
            except SpliceFailed:
                cause = "splice_failed"
            except (DamagedLake, StorageFailed, NotFound):
                self._metrics.digest_failures.inc()
                cause = "prefix_unavailable"
        try:
            return _Prompt(self._engine.render(messages, tools, add_generation_prompt=True), None, b"", cause)
        except ValueError as error:
            raise InvalidInput(f"the chat template cannot express this conversation: {error}", field="messages") from error

    async def _generate(self, flight: Flight, ids: list[int]) -> Generation:
        if flight.gone:
            raise await self._unanswered(flight, "client_disconnected", EngineFailed("the client went away"))
        flight.phase = "generating"
        began = time.monotonic()
        try:
            generation = await asyncio.wait_for(
                self._engine.generate(ids, flight.request.params, request_id=flight.call_id),
                self._settings.call_deadline_s,
            )
        except TimeoutError as error:
            await self._engine.abort(flight.call_id)
            seconds = self._settings.call_deadline_s
            raise await self._unanswered(flight, "deadline", Deadline(f"no answer within {seconds:g} s")) from error
        except ValueError as error:
            raise await self._unanswered(flight, "refused", InvalidInput(str(error))) from error
        except EngineFailed as error:
            raise await self._unanswered(flight, "engine_failed", error) from error
        finally:
            flight.engine_s = time.monotonic() - began
        if generation.finish_reason == "abort":
            reason = "client_disconnected" if flight.gone else "engine_aborted"
            raise await self._unanswered(flight, reason, EngineFailed("the generation was aborted: send the call again"))
        return generation

    def _answer(self, call_id: str, turn: AssistantTurn, finish: str, prompt: int, completion: int) -> Answer:
        return Answer(
            call_id=call_id,
            model=self._engine.name,
            created=int(time.time()),
            turn=turn,
            finish_reason=served_finish(turn, finish),
            prompt_tokens=prompt,
            completion_tokens=completion,
        )

    async def _captured(
        self, flight: Flight, history: History, prompt: _Prompt, generation: Generation, answer: Answer
    ) -> None:
        coords = await asyncio.to_thread(self._stage, flight, prompt, generation)
        reason = coords.reason if coords.disposition == "capture_failed" else _contradiction(coords, flight, prompt)
        if reason is None and not self._takes_commits(flight.attempt):
            error = Conflict(f"rollout {flight.attempt.rollout_id} ended while this call ran")
            raise await self._unanswered(flight, "late", error)
        if reason is None:
            event = self._event(flight, history, prompt, answer) | coords.columns()
            try:
                await self._ledger.append({**event, "event_type": "call_committed", "reason": prompt.cause})
            except StorageFailed:
                reason = "commit_failed"
            else:
                self._committed(flight, prompt, generation, coords)
                return
        self._metrics.capture_failures.labels(reason).inc()
        if self._control.policy.get("on_capture_failure") == "abort":
            error = CaptureFailed("this call could not be captured and was discarded", reason=reason)
            await self._unanswered(flight, reason, error)
            await self._ledger.append(self._ended(flight.attempt, "capture_failed"))
            raise error
        await self._failed(flight, reason, answered=True)

    def _stage(self, flight: Flight, prompt: _Prompt, generation: Generation) -> Coords:
        """Runs in a thread: the only heavy hop."""
        params: SamplingParams = flight.request.params
        parent = prompt.parent
        ticket = self._capture.begin(
            rollout_id=flight.attempt.rollout_id,
            attempt=flight.attempt.attempt,
            call_id=flight.call_id,
            parent=None
            if parent is None
            else ParentLink(
                call_id=parent.call_id,
                root_call_id=parent.root_call_id,
                depth=parent.depth,
                cum_len=parent.cum_len,
                chain_hash=parent.chain_hash,
                token_ids=prompt.prefix,
            ),
            sampling=(params.temperature, params.top_p, params.top_k, self._engine.logprob_mode),
        )
        with self._metrics.stage.time():
            return self._capture.complete(
                ticket,
                prompt_token_ids=prompt.ids,
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
                finish_reason=generation.finish_reason,
                weight_version=generation.weight_version,
                weight_version_end=generation.weight_version_end,
                weight_version_spans=generation.weight_version_spans,
            )

    def _committed(self, flight: Flight, prompt: _Prompt, generation: Generation, coords: Coords) -> None:
        node = flight.attempt.calls[flight.call_id].node
        self._prefixes.put(node, array("i", [*prompt.ids, *map(int, generation.token_ids)]).tobytes())
        self._metrics.committed(coords.mode, flight.dialect.name, prompt.cause)
        self._metrics.stage_bytes.inc(0 if coords.place is None else coords.place.byte_length)
        self._metrics.evictions.set(self._prefixes.evictions)

    async def _overflow(self, flight: Flight, history: History, prompt: _Prompt) -> Answer:
        """The dialect's answer to a full context: an empty turn that stopped for length."""
        turn = AssistantTurn(content=None, reasoning=None, tool_calls=[])
        answer = self._answer(flight.call_id, turn, "length", len(prompt.ids), 0)
        flight.phase = "committing"
        event = self._event(flight, history, prompt, answer)
        parent = prompt.parent
        event |= {"parent_call_id": parent and parent.call_id, "finish_reason": "length"}
        await self._ledger.append({**event, "event_type": "call_overflowed"})
        flight.phase = "done"
        return answer

    def _event(self, flight: Flight, history: History, prompt: _Prompt, answer: Answer) -> dict[str, Any]:
        after = history.then(flight.dialect.turn(answer))
        reasoning = [(turn, digest.hex()) for turn, digest in since(after, prompt.parent)]
        detail = {
            "preamble": after.preamble.hex(),
            "turns": after.turns,
            "reasoning": reasoning or None,
            "seed": history.fingerprint.hex() if prompt.cause == "seeded" else None,
            "poison": "unresolved_parent" if self._poisons(prompt.cause) else None,
            "answer": answer_detail(answer.turn),
        }
        return {
            **self._names(flight),
            "response_id": flight.dialect.response_id(flight.call_id),
            "dialect": flight.dialect.name,
            "fingerprint": after.fingerprint,
            "context_digest": after.context,
            "request_digest": flight.request_digest,
            "idempotency_digest": flight.idempotency_digest,
            "served_text": flight.dialect.message(answer)["content"] or "",
            "detail": json.dumps({key: value for key, value in detail.items() if value is not None}),
        }

    async def _failed(self, flight: Flight, reason: str, *, answered: bool) -> None:
        """Write a failure down; when even that fails it poisons from memory until it can be written."""
        event = {**self._names(flight), "event_type": "call_failed", "reason": reason, "answered": answered}
        try:
            await self._ledger.append(event)
        except StorageFailed:
            self._control.apply({**event, "at": flight.attempt.touched_at})
            flight.attempt.unsaved.append(event)

    async def _unanswered(self, flight: Flight, reason: str, error: Exception) -> Exception:
        """Record a call that the agent gets no answer of, and hand back what to raise."""
        await self._failed(flight, reason, answered=False)
        return error

    def _names(self, flight: Flight) -> dict[str, Any]:
        attempt = flight.attempt
        return {
            "group_id": split_rollout_id(attempt.rollout_id)[0],
            "rollout_id": attempt.rollout_id,
            "attempt": attempt.attempt,
            "call_id": flight.call_id,
        }

    @staticmethod
    def _ended(attempt: Attempt, reason: str) -> dict[str, Any]:
        return {
            "event_type": "rollout_failed",
            "group_id": split_rollout_id(attempt.rollout_id)[0],
            "rollout_id": attempt.rollout_id,
            "attempt": attempt.attempt,
            "reason": reason,
        }

    def _takes_commits(self, attempt: Attempt) -> bool:
        rollout = self._control.rollout(attempt.rollout_id)
        return rollout is not None and rollout.current is attempt and attempt.end is None and not attempt.released

    def _poisons(self, cause: Cause | None) -> bool:
        policy: Any = self._control.policy.get("on_unresolved", "root")
        if isinstance(policy, dict):
            policy = policy.get(cause, "root")  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        return cause in UNRESOLVED and policy == "poison"


def _same_body(known: bytes | None, asked: bytes) -> None:
    if known != asked:
        raise Conflict("this Idempotency-Key was used with another body: use a new key")


def _contradiction(coords: Coords, flight: Flight, prompt: _Prompt) -> str | None:
    """Whether the coordinates are of the call that was asked for."""
    asked = (flight.call_id, prompt.parent and prompt.parent.call_id, 0 if prompt.parent is None else prompt.parent.cum_len)
    given = (coords.call_id, coords.parent_call_id, coords.prev_len)
    return None if asked == given and coords.chain_hash is not None else "coords_contradict"
