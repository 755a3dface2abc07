"""One loaded engine a module's tests share; each test starts and stops it in its own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tokenlake.ingest.tiny import TinyEngine, tasks

Run = Callable[[Callable[[TinyEngine], Awaitable[Any]]], Any]


@pytest.fixture(scope="session")
def idle_engine() -> TinyEngine:
    """The shipped model, never started: for rendering and parsing."""
    return TinyEngine()


@pytest.fixture
def fresh() -> TinyEngine:
    """A new engine of the shipped model."""
    return TinyEngine(seed=7)


@pytest.fixture
def run(fresh: TinyEngine) -> Run:
    """Run a coroutine function over the started engine, and stop the engine after it."""

    def serve(body: Callable[[TinyEngine], Awaitable[Any]]) -> Any:
        async def whole() -> Any:
            await fresh.start()
            try:
                return await body(fresh)
            finally:
                await fresh.stop()

        return asyncio.run(asyncio.wait_for(whole(), timeout=120))

    return serve


@pytest.fixture
def prompts(idle_engine: TinyEngine) -> list[list[int]]:
    """Six prompts of different lengths, as the demo's agents send them."""
    problems = ["4 - 1", "23 - 60", "98 + 93 - 77", "6 + 0 - 1", "58 + 26", "1043 + 14"]
    texts = [f"State the final answer to the following arithmetic problem: {problem} =" for problem in problems]
    return [
        idle_engine.render(
            [{"role": "system", "content": system}, {"role": "user", "content": text}],
            [tasks.CALCULATOR_TOOL],
            add_generation_prompt=True,
        )
        for text, system in zip(texts, tasks.SYSTEM_PROMPTS * 2, strict=False)
    ]
