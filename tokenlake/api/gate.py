"""The gate: one model call in order, from an agent's messages to a committed, durable record, then the answer.

    admit -> resolve the parent -> exact prefix -> render and splice -> generate -> stage -> commit -> answer

The answer is released only after the commit, so a child can never exist before its parent is durable; of a streamed
one, text may flow before, but nothing that an agent can act upon. A client that goes away before generation ends aborts
it; staging and committing are never cut short. Whatever cannot be captured is written down as a failure before the
agent sees the end of it, and a wrong prefix is never served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from tokenlake.api.answers import Answers, served_finish
from tokenlake.api.control import Control
from tokenlake.api.dialects.dialect import Answer, Head, ModelRequest
from tokenlake.api.errors_http import INTERNAL
from tokenlake.api.flight import Flight
from tokenlake.api.metrics import Metrics
from tokenlake.api.recorder import Recorder
from tokenlake.api.rollouts import Attempt
from tokenlake.api.settings import Settings
from tokenlake.api.sink import Sink
from tokenlake.api.threads import Threads
from tokenlake.api.traces import Traces
from tokenlake.errors import (
    Conflict,
    ContextOverflow,
    Deadline,
    EngineFailed,
    InvalidInput,
    NotFound,
    TokenlakeError,
)
from tokenlake.ids import mint_call_id
from tokenlake.ingest.calls import Node
from tokenlake.ingest.engine import AssistantTurn, Engine, Generation
from tokenlake.ingest.fingerprint import History, trace
from tokenlake.ingest.first_call import until_first_call
from tokenlake.ingest.messages import Conversation, to_messages
from tokenlake.ingest.prompter import Prompt, Prompter
from tokenlake.ingest.resolve import Cause, Resolution

__all__ = ["Gate", "overflow_answer"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
_THREADS = 32
"""A prompt may be rendered by a server elsewhere, which is waited for."""
_ABORTED = "the generation was aborted: send the call again"


class Gate:
    """Model calls of all rollouts of one service."""

    def __init__(
        self,
        *,
        control: Control,
        engine: Engine,
        prompter: Prompter,
        recorder: Recorder,
        answers: Answers,
        metrics: Metrics,
        traces: Traces,
        settings: Settings,
    ) -> None:
        self._control = control
        self._engine = engine
        self._prompter = prompter
        self._recorder = recorder
        self._answers = answers
        self._metrics = metrics
        self._traces = traces
        self._settings = settings
        self._flights: dict[Flight, asyncio.Task[Answer]] = {}
        self._threads = Threads(_THREADS, "tokenlake-prompt")

    def admit(self, rollout_id: str, attempt: int) -> Attempt:
        """The attempt, if it takes calls; raises `NotFound` or `Conflict` before anything is sampled.

        The caller holds a capability of it, and every open group is known here: one that is not was closed.
        """
        rollout = self._control.rollout(rollout_id)
        if rollout is None:
            raise Conflict(f"rollout {rollout_id} is closed: it takes no more calls", state="closed")
        found = rollout.attempts.get(attempt)
        if found is None:
            raise NotFound(f"no rollout {rollout_id} with attempt {attempt}", rollout_id=rollout_id)
        if found is not rollout.current:
            raise Conflict(f"attempt {attempt} of {rollout_id} is superseded by {rollout.current.attempt}")
        if found.state != "open" or found.closing or found.released:
            state = "closed" if found.state == "open" else found.state
            raise Conflict(f"rollout {rollout_id} is {state}: it takes no more calls", state=state)
        return found

    async def call(self, flight: Flight, *, sdk_retry: bool) -> Answer:
        """Answer an admitted call; joins or repeats the same call where the request says it is one.

        Asked in a task that is its own and that nobody cancels: staging and committing are never cut short.
        """
        known = await self._repeated(flight, sdk_retry=sdk_retry)
        if known is not None:
            return known
        if self.admit(flight.attempt.rollout_id, flight.attempt.attempt) is not flight.attempt:
            raise Conflict(f"rollout {flight.attempt.rollout_id} was closed")
        self._recorder.check_space()
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a call runs in a task")
        flight.attempt.inflight |= {flight.call_id}
        self._flights[flight] = task
        task.add_done_callback(lambda _: self._landed(flight))
        return await self._run(flight)

    async def plain(self, request: ModelRequest, sink: Sink | None) -> Answer:
        """A call outside every rollout: nothing of it is kept."""
        request = self._pinned(request)
        prompt = await self._prompt(request.conversation, None, None)
        head = self._head(mint_call_id(), len(prompt.ids))
        try:
            generation = await self._sample(request, prompt, head, sink)
        except TimeoutError as error:
            raise self._too_late() from error
        except ValueError as error:
            raise InvalidInput(str(error)) from error
        if generation.finish_reason == "abort":
            raise EngineFailed(_ABORTED)
        return (await self._read(request, head, generation))[1]

    async def count(self, conversation: Conversation, attempt: Attempt | None) -> int:
        """Tokens of the prompt that a call with this conversation would have now; nothing of it is kept."""
        found = None if attempt is None else attempt.lineage.resolve(trace(conversation))
        parent = found and found.parent
        prompt = await self._prompt(conversation, parent, found and found.cause)
        return len(prompt.ids)

    async def client_gone(self, flight: Flight) -> None:
        """The client of a call hung up: what still generates is aborted, what is being committed is completed."""
        flight = flight.joined or flight
        flight.waiters -= 1
        if not flight.gone:
            return
        if flight.phase == "generating":
            await self._abort(flight.call_id)
        elif flight.phase == "done":
            await self._recorder.delivered(flight.attempt, flight.call_id, delivered=False)

    async def stop(self) -> None:
        """Abort what generates; calls end as aborted."""
        await self._engine.stop()

    async def drain(self) -> None:
        """Wait until nothing is in flight; used at shutdown, after `stop`."""
        while self._flights:
            await asyncio.wait(list(self._flights.values()))

    def _landed(self, flight: Flight) -> None:
        flight.attempt.land(flight.call_id)
        task = self._flights.pop(flight)
        if not task.cancelled():
            # Whoever still waits gets the error; with nobody waiting it has been recorded, and is not news.
            task.exception()

    async def _repeated(self, flight: Flight, *, sdk_retry: bool) -> Answer | None:
        attempt, key = flight.attempt, flight.idempotency_digest
        if key is not None:
            while (running := self._running(attempt, lambda other: other.idempotency_digest == key)) is not None:
                _same_body(running[0].request_digest, flight.request_digest)
                if not running[0].abandoned:
                    return await self._join(flight, *running)
                await asyncio.wait({running[1]})
            call_id = attempt.keys.get(key)
            if call_id is not None:
                _same_body(attempt.calls[call_id].request_digest, flight.request_digest)
                return await self._again(attempt, call_id)
        elif sdk_retry:
            running = self._running(
                attempt, lambda other: other.request_digest == flight.request_digest and not other.abandoned
            )
            if running is not None:
                return await self._join(flight, *running)
            parents = {call.node.parent_call_id for call in attempt.calls.values()}
            for call_id in reversed(attempt.calls):
                if attempt.calls[call_id].request_digest == flight.request_digest and call_id not in parents:
                    return await self._again(attempt, call_id)
        return None

    def _running(self, attempt: Attempt, same: Callable[[Flight], bool]) -> tuple[Flight, asyncio.Task[Answer]] | None:
        """The call of an attempt that is under way and the same."""
        return next((each for each in self._flights.items() if each[0].attempt is attempt and same(each[0])), None)

    @staticmethod
    async def _join(flight: Flight, other: Flight, task: asyncio.Task[Answer]) -> Answer:
        flight.joined = other
        other.waiters += 1
        return await asyncio.shield(task)

    async def _again(self, attempt: Attempt, call_id: str) -> Answer:
        await self._recorder.delivered(attempt, call_id, delivered=True)
        return await self._answers.get(attempt.rollout_id, call_id)

    async def _run(self, flight: Flight) -> Answer:
        """The boundary of a captured call: what nobody foresaw is an event and a line in the log, never an answer."""
        try:
            with self._traces.span("call"):
                return await self._answered(flight)
        except TokenlakeError:
            raise
        except Exception as error:
            _log.exception("call %s of %s failed unexpectedly", flight.call_id, flight.attempt.rollout_id)
            if flight.call_id in flight.attempt.calls:
                await self._recorder.delivered(flight.attempt, flight.call_id, delivered=False)
                raise TokenlakeError(INTERNAL) from error
            raise await self._recorder.unanswered(flight, "internal", TokenlakeError(INTERNAL)) from error

    async def _answered(self, flight: Flight) -> Answer:
        flight.request = self._pinned(flight.request)
        history = trace(flight.request.conversation)
        answer = await self._captured(flight, history, flight.attempt.lineage.resolve(history))
        flight.phase = "done"
        if flight.gone:
            await self._recorder.delivered(flight.attempt, flight.call_id, delivered=False)
        self._answers.put(answer)
        self._metrics.overhead.observe(time.monotonic() - flight.started - flight.engine_s)
        return answer

    async def _captured(self, flight: Flight, history: History, found: Resolution) -> Answer:
        """From the parent to the committed answer."""
        try:
            prompt = await self._prompt(flight.request.conversation, found.parent, found.cause)
        except InvalidInput as error:
            raise await self._recorder.unanswered(flight, "refused", error) from error
        except TokenlakeError as error:
            raise await self._recorder.unanswered(flight, _reason(error), error) from error
        head = self._head(flight.call_id, len(prompt.ids))
        try:
            generation = await self._generate(
                flight, lambda: self._sample(flight.request, prompt, head, flight.sink), lambda made: made.finish_reason
            )
        except ContextOverflow:
            answer = overflow_answer(head)
            flight.phase = "committing"
            await self._recorder.overflow(flight, history, prompt, answer)
        else:
            try:
                generation, answer = await self._read(flight.request, head, generation)
            except TokenlakeError as error:
                raise await self._recorder.unanswered(flight, _reason(error), error) from error
            await self._ended(flight, answer)
            await self._recorder.capture(flight, history, prompt, generation, answer, self._engine.logprob_mode)
        return answer

    async def _ended(self, flight: Flight, answer: Answer) -> None:
        """Generation is over; what was streamed of it must be how it begins."""
        flight.phase = "committing"
        if flight.sink is not None and not flight.sink.holds(answer.turn):
            broken = EngineFailed("the engine streamed another text than it ended with")
            raise await self._recorder.unanswered(flight, "stream_contradicted", broken)

    async def _generate(
        self, flight: Flight, run: Callable[[], Awaitable[T]], finish_reason: Callable[[T], str | None]
    ) -> T:
        """What the engine makes of a call; whatever else becomes of it is recorded and raised."""
        if flight.gone:
            raise await self._recorder.unanswered(flight, "client_disconnected", EngineFailed("the client went away"))
        flight.phase = "generating"
        began = time.monotonic()
        try:
            with self._traces.span("engine"):
                made = await run()
        except TimeoutError as error:
            await self._abort(flight.call_id)
            raise await self._recorder.unanswered(flight, "deadline", self._too_late()) from error
        except ValueError as error:
            raise await self._recorder.unanswered(flight, "refused", InvalidInput(str(error))) from error
        except ContextOverflow:
            raise
        except TokenlakeError as error:
            raise await self._recorder.unanswered(flight, _reason(error), error) from error
        finally:
            flight.engine_s = time.monotonic() - began
        if finish_reason(made) == "abort":
            reason = "client_disconnected" if flight.gone else "engine_aborted"
            raise await self._recorder.unanswered(flight, reason, EngineFailed(_ABORTED))
        return made

    async def _abort(self, call_id: str) -> None:
        await self._engine.abort(call_id)

    async def _prompt(self, conversation: Conversation, parent: Node | None, cause: Cause | None) -> Prompt:
        messages = to_messages(conversation.turns)
        return await self._threads.run(self._prompter.build, messages, conversation.tools, parent, cause)

    async def _sample(self, request: ModelRequest, prompt: Prompt, head: Head, sink: Sink | None) -> Generation:
        if sink is not None:
            sink.head = head
        on_delta = None if sink is None else sink.push
        async with asyncio.timeout(self._settings.call_deadline_s):
            return await self._engine.generate(prompt.ids, request.params, request_id=head.call_id, on_delta=on_delta)

    def _too_late(self) -> Deadline:
        return Deadline(f"no answer within {self._settings.call_deadline_s:g} s")

    def _head(self, call_id: str, prompt_tokens: int) -> Head:
        now = int(time.time())
        return Head(call_id=call_id, model=self._engine.name, created=now, prompt_tokens=prompt_tokens)

    def _pinned(self, request: ModelRequest) -> ModelRequest:
        """The request as it is sampled: nothing that a harness asks for changes a pinned distribution."""
        return replace(request, params=self._settings.pinned(request.params))

    async def _read(self, request: ModelRequest, head: Head, generation: Generation) -> tuple[Generation, Answer]:
        """What of a generation counts, and the answer that it is."""
        if request.most_calls == 1:
            generation = await self._threads.run(until_first_call, self._engine, generation)
        turn = self._engine.parse(generation.token_ids, generation.text, calls=request.most_calls != 0)
        return generation, Answer(
            head=head,
            turn=turn,
            finish_reason=served_finish(turn, generation.finish_reason),
            stop_sequence=generation.stop_sequence,
            completion_tokens=len(generation.token_ids),
        )


def overflow_answer(head: Head) -> Answer:
    """The dialect's answer to a full context: an empty turn that stopped for length."""
    empty = AssistantTurn(content=None, reasoning=None, tool_calls=[])
    return Answer(head=head, turn=empty, finish_reason="length", completion_tokens=0)


def _reason(error: TokenlakeError) -> str:
    """What the failure is recorded as: the engine's own name for it, where it has one."""
    return error.detail.get("reason", "engine_failed")


def _same_body(known: bytes | None, asked: bytes) -> None:
    if known != asked:
        raise Conflict("this Idempotency-Key was used with another body: use a new key")
