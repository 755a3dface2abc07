"""Work in threads of the event loop: what comes back, in which order, and what ends with whom."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from tokenlake.api.threads import Threads
from tokenlake.api.trail import note, noted, trail


def begun(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_what_is_asked_comes_back_and_what_it_raises_is_raised() -> None:
    async def run() -> None:
        threads = Threads(2, "told")

        def refuse(why: str) -> None:
            raise ValueError(why)

        assert await threads.run(divmod, 7, 2) == (3, 1)
        with pytest.raises(ValueError, match="no"):
            await threads.run(refuse, why="no")
        assert await threads.run(threading.current_thread) is not threading.current_thread()
        assert len(begun("told")) == 1

    asyncio.run(run())


def test_what_a_request_noted_is_seen_where_it_asks_and_nowhere_else() -> None:
    async def run() -> None:
        threads = Threads(1, "context")
        with trail():
            note(call_id="c0")
            assert await threads.run(noted) == {"call_id": "c0"}
        assert await threads.run(noted) == {}

    asyncio.run(run())


def test_a_thread_is_begun_when_all_are_busy_and_no_more_than_were_allowed() -> None:
    async def run() -> None:
        threads = Threads(2, "busy")
        go = threading.Event()
        waiting = [asyncio.ensure_future(threads.run(go.wait)) for _ in range(3)]
        await asyncio.sleep(0)
        assert len(begun("busy")) == 2
        go.set()
        assert await asyncio.gather(*waiting) == [True, True, True]
        assert await threads.run(int) == 0
        assert len(begun("busy")) == 2

    asyncio.run(run())


def test_one_thread_does_things_in_their_order_also_for_who_no_longer_waits() -> None:
    async def run() -> None:
        threads = Threads(1, "order")
        go = threading.Event()
        done: list[int] = []
        first = asyncio.ensure_future(threads.run(go.wait))
        gone = asyncio.ensure_future(threads.run(done.append, 1))
        last = asyncio.ensure_future(threads.run(done.append, 2))
        await asyncio.sleep(0)
        gone.cancel()
        go.set()
        await asyncio.gather(first, last)
        assert done == [1, 2]
        assert gone.cancelled()

    asyncio.run(run())


def test_a_loop_that_is_closed_takes_nothing_with_it() -> None:
    threads = Threads(1, "closed")
    go = threading.Event()
    done: list[int] = []

    async def leave() -> None:
        asyncio.ensure_future(threads.run(go.wait))  # noqa: RUF006 - nobody waits
        await asyncio.sleep(0)

    asyncio.run(leave())
    go.set()

    async def another() -> None:
        await threads.run(done.append, 1)

    asyncio.run(another())
    assert done == [1]


def test_threads_end_with_who_had_them() -> None:
    async def run() -> None:
        threads = Threads(2, "ended")
        go = threading.Event()
        waiting = [asyncio.ensure_future(threads.run(go.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*waiting)
        of_it = begun("ended")
        assert len(of_it) == 2
        del threads, waiting
        gc.collect()
        for thread in of_it:
            thread.join(10)
            assert not thread.is_alive()

    asyncio.run(run())
