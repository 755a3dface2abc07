"""Agents as people write them: the official `openai` SDK, unchanged, with another `base_url` and key.

An agent sees text only. What it needs of the trainer's side (sealing, failing, a second attempt) goes through the
control client, as an environment process would do it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from tokenlake.api.client import AsyncClient
from tokenlake.api.demo.plan import Kind
from tokenlake.api.demo.tasks import Task
from tokenlake.errors import MissingExtra
from tokenlake.ingest.tiny.tasks import (
    CALCULATOR_TOOL,
    FOLLOW_UPS,
    SIDE_TASK,
    SUMMARY_DONE,
    SYSTEM_PROMPT,
    calculator,
)

try:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient
    from openai.types.chat import ChatCompletion
except ImportError as error:
    raise MissingExtra("the demo needs the openai package: pip install 'tokenlake[demo]'") from error

__all__ = ["Agent", "Pause", "Player", "Slot", "Traffic", "assistant_message", "slot_of", "tool_results"]

_MAX_TOOL_TURNS = 3
_MAX_TOKENS = 96
_DEADLINE_S = 60.0


class Pause:
    """Lets a weight update wait until no call is in flight, and calls wait until it is done."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Condition()
        self._in_flight = 0

    async def enter(self) -> None:
        """Take part in a call, after any update that is going on."""
        await self._open.wait()
        self._in_flight += 1

    async def leave(self) -> None:
        """End a call."""
        self._in_flight -= 1
        async with self._idle:
            self._idle.notify_all()

    async def hold(self) -> None:
        """Stop new calls and wait for those in flight."""
        self._open.clear()
        async with self._idle:
            await self._idle.wait_for(lambda: self._in_flight == 0)

    def resume(self) -> None:
        """Let calls go on."""
        self._open.set()


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one attempt of a rollout talks to, as the gate answered at registration."""

    rollout_id: str
    attempt: int
    base_url: str
    data_capability: str


@dataclass(slots=True)
class Traffic:
    """Bytes of the agents' HTTP bodies."""

    requests: int = 0
    responses: int = 0


class Player:
    """One conversation: question, calculator calls, checks, and an answer that can be scored.

    `checks` is how often it is told to check its answer before it is asked to repeat it. With a `seed` every call has
    one of its own, so that what is sampled does not depend on who else is sampling.
    """

    def __init__(
        self, kind: Kind, task: Task, pause: Pause, traffic: Traffic, *, checks: int = 0, seed: int | None = None
    ) -> None:
        self._kind = kind
        self._task = task
        self._pause = pause
        self._traffic = traffic
        self._checks = checks
        self._seed = seed
        self.calls = 0
        """Calls that were asked."""
        self.messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": task.question},
        ]
        """The conversation so far."""

    async def solve(self, slot: Slot) -> tuple[str, str]:
        """The last answer and its response id."""
        opening = list(self.messages)
        async with self._sdk(slot) as sdk:
            completion = await self._answered(sdk)
            if self._kind == "fork":
                side = [*self.messages, *tool_results(completion)[0], {"role": "user", "content": SIDE_TASK}]
                await self._ask(sdk, side)
            result = await self._calculated(sdk, completion)
            for check in range(self._checks):
                self.messages.append({"role": "user", "content": FOLLOW_UPS[check % 2]})
                await self._calculated(sdk, await self._answered(sdk))
            if self._kind == "compaction":
                summary = SUMMARY_DONE.format(question=self._task.question, result=result or "nothing")
                self.messages = [
                    *opening,
                    {"role": "assistant", "content": "I have worked on this before."},
                    {"role": "user", "content": summary},
                ]
            else:
                self.messages.append({"role": "user", "content": FOLLOW_UPS[2]})
            completion = await self._answered(sdk)
        return completion.choices[0].message.content or "", completion.id

    async def _answered(self, sdk: AsyncOpenAI) -> ChatCompletion:
        """The answer to the conversation, which it then is part of."""
        completion = await self._ask(sdk, self.messages)
        self.messages.append(assistant_message(completion))
        return completion

    async def _calculated(self, sdk: AsyncOpenAI, completion: ChatCompletion) -> str:
        """Go on while the model calls the calculator; the last result."""
        result = ""
        for _ in range(_MAX_TOOL_TURNS):
            results, last = tool_results(completion)
            if not results:
                return result
            result = last
            self.messages += results
            completion = await self._answered(sdk)
        self.messages += tool_results(completion)[0]
        return result

    async def _ask(self, sdk: AsyncOpenAI, messages: list[dict[str, Any]]) -> ChatCompletion:
        seed = None if self._seed is None else self._seed + self.calls
        self.calls += 1
        await self._pause.enter()
        try:
            return await sdk.chat.completions.create(
                model="tiny",
                messages=cast("Any", messages),
                tools=cast("Any", [CALCULATOR_TOOL]),
                temperature=1.0,
                max_tokens=_MAX_TOKENS,
                seed=seed,
            )
        finally:
            await self._pause.leave()

    def _sdk(self, slot: Slot) -> AsyncOpenAI:
        async def sent(request: Any) -> None:
            self._traffic.requests += len(request.content)

        async def received(response: Any) -> None:
            self._traffic.responses += len(await response.aread())

        http = DefaultAsyncHttpxClient(event_hooks={"request": [sent], "response": [received]}, timeout=_DEADLINE_S)
        return AsyncOpenAI(base_url=slot.base_url, api_key=slot.data_capability, http_client=http)


class Agent(Player):
    """A player in its environment, which ends the rollout: with a reward, or by dying."""

    def __init__(self, kind: Kind, task: Task, control: AsyncClient, pause: Pause, traffic: Traffic) -> None:
        super().__init__(kind, task, pause, traffic)
        self._control = control

    async def run(self, slot: Slot) -> float | None:
        """Play the rollout to its end; returns the reward, or None where the environment died."""
        if self._kind == "retried":
            await self._dies(slot, retry=True)
            slot = slot_of(await self._control.register_attempt(slot.rollout_id, slot.attempt + 1))
        elif self._kind == "environment_dies":
            await self._dies(slot, retry=False)
            return None
        answer, response_id = await self.solve(slot)
        reward = self._task.score(answer)
        await self._control.seal(slot.rollout_id, reward=reward, attempt=slot.attempt, terminal_response_id=response_id)
        return reward

    async def _dies(self, slot: Slot, *, retry: bool) -> None:
        async with self._sdk(slot) as sdk:
            await self._ask(sdk, self.messages)
        await self._control.fail(slot.rollout_id, reason="environment_failed", attempt=slot.attempt, retry=retry)


def slot_of(registered: Mapping[str, Any]) -> Slot:
    """The slot of one entry that registering a group or an attempt answered."""
    return Slot(
        rollout_id=registered["rollout_id"],
        attempt=registered["attempt"],
        base_url=registered["base_url"],
        data_capability=registered["data_capability"],
    )


def assistant_message(completion: ChatCompletion) -> dict[str, Any]:
    """The message to echo, as SDK users do it."""
    return completion.choices[0].message.model_dump(exclude_none=True)


def tool_results(completion: ChatCompletion) -> tuple[list[dict[str, Any]], str]:
    """Tool messages for the calls of an answer, and the last result."""
    results: list[dict[str, Any]] = []
    last = ""
    for tool_call in completion.choices[0].message.tool_calls or []:
        last = _calculate(cast("Any", tool_call).function.arguments)
        results.append({"role": "tool", "tool_call_id": tool_call.id, "content": last})
    return results, last


def _calculate(arguments: str) -> str:
    try:
        parsed = json.loads(arguments)
    except json.JSONDecodeError:
        return "error: the arguments are not JSON"
    if not isinstance(parsed, dict) or not isinstance(cast("dict[str, Any]", parsed).get("expression"), str):
        return "error: give an expression"
    return calculator(cast("dict[str, Any]", parsed)["expression"])
