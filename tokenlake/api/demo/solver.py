"""Agents that are asked for a number and nothing else, through the gate, with the official `openai` SDK.

What is rewarded is what the system prompt asks for: the right number, alone, when the user asks for it once more. The
shipped model thinks now and then, calls the calculator, copies a digit wrong here and there and mostly says
`Answer: 42`, so there is something to learn in a few steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tokenlake.api.client import AsyncClient
from tokenlake.api.demo.agents import assistant_message, tool_results
from tokenlake.errors import MissingExtra
from tokenlake.ingest.tiny.tasks import CALCULATOR_TOOL, FOLLOW_UPS, SYSTEM_PROMPT

try:
    import reasoning_gym
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletion
except ImportError as error:
    raise MissingExtra("the training demo needs its extra: pip install 'tokenlake[demo]'") from error

__all__ = ["Conversation", "Problem", "make_problems", "play"]

_MAX_TURNS = 3
_MAX_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Problem:
    """One question and its one right answer."""

    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """One rollout as its agent saw it: text."""

    messages: Sequence[Mapping[str, Any]]


def make_problems(count: int, seed: int) -> list[Problem]:
    """`count` sums of two numbers of three or four digits, the same for the same seed."""
    entries = reasoning_gym.create_dataset(
        "chain_sum", size=count, seed=seed, min_terms=2, max_terms=2, min_digits=3, max_digits=4
    )
    return [Problem(entry["question"], str(entry["answer"])) for entry in entries]


async def play(
    client: AsyncClient, group_id: str, rollouts: int, problem: Problem, said: dict[str, Conversation]
) -> None:
    """All rollouts of a group at once, and its publication. `said` gets what was said in each before it is sealed."""
    registered = await client.register_group(group_id, rollouts, meta={"task": "chain_sum"})
    slots: Sequence[Mapping[str, Any]] = cast("Any", registered["rollouts"])
    await asyncio.gather(*(_solve(client, slot, problem, said) for slot in slots))
    await client.publish(group_id)


async def _solve(client: AsyncClient, slot: Mapping[str, Any], problem: Problem, said: dict[str, Conversation]) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem.question},
    ]
    async with AsyncOpenAI(base_url=slot["base_url"], api_key=slot["data_capability"]) as sdk:
        for _ in range(_MAX_TURNS):
            results, _ = tool_results(await _ask(sdk, messages))
            messages += results
            if not results:
                break
        messages.append({"role": "user", "content": FOLLOW_UPS[2]})
        completion = await _ask(sdk, messages)
    reward = float((completion.choices[0].message.content or "").strip() == problem.answer)
    said[slot["rollout_id"]] = Conversation(messages)
    await client.seal(slot["rollout_id"], reward=reward, terminal_response_id=completion.id)


async def _ask(sdk: AsyncOpenAI, messages: list[dict[str, Any]]) -> ChatCompletion:
    """The answer to a conversation, which it then is part of."""
    completion = await sdk.chat.completions.create(
        model="tiny",
        messages=cast("Any", messages),
        tools=cast("Any", [CALCULATOR_TOOL]),
        temperature=1.0,
        max_tokens=_MAX_TOKENS,
    )
    messages.append(assistant_message(completion))
    return completion
