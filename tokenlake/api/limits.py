"""How often agents may ask, and how much at a time.

There is a rate for each rollout and one for the whole service, and a bound on calls in flight, which bounds memory.

A rate of R a minute lets R requests through at once and one more every 60/R seconds. What is refused costs neither a
body nor a token; what the trainer's side asks is not counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

from tokenlake.errors import Busy

__all__ = ["Limits", "Slots"]

T = TypeVar("T")

_MINUTE_S = 60.0
_SWEPT = 4096
_WHOLE = ""


_AGAIN_S = 1.0


class Limits:
    """Rates of requests under rollouts' prefixes; None is no limit. The event loop owns it."""

    def __init__(self, per_rollout: int | None, whole: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_rollout = per_rollout
        self._whole = whole
        self._clock = clock
        self._spent: dict[str, float] = {}
        """When a rollout will have its whole allowance again."""

    def count(self, rollout_id: str) -> None:
        """Count one request of a rollout; raises `Busy` when it is one too many."""
        now = self._clock()
        wanted = [(key, rate) for key, rate in ((rollout_id, self._per_rollout), (_WHOLE, self._whole)) if rate]
        for key, rate in wanted:
            wait = self._spent.get(key, now) - now - (_MINUTE_S - _MINUTE_S / rate)
            if wait > 0:
                who = f"rollout {key}" if key else "this service"
                raise Busy(f"{who} takes {rate} requests a minute: wait {math.ceil(wait)} s", retry_after_s=wait)
        for key, rate in wanted:
            self._spent[key] = max(now, self._spent.get(key, now)) + _MINUTE_S / rate
        if len(self._spent) > _SWEPT:
            self._spent = {key: until for key, until in self._spent.items() if until > now}


class Slots:
    """Model calls in flight, from before their body is read until they are over. The event loop owns it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken = 0

    @contextmanager
    def one(self) -> Generator[None]:
        """Hold one; raises `Busy` when all are taken."""
        if self.taken >= self._most:
            raise Busy(f"{self._most} calls are in flight: ask again in a moment", retry_after_s=_AGAIN_S)
        self.taken += 1
        try:
            yield
        finally:
            self.taken -= 1

    @staticmethod
    async def during(held: AbstractContextManager[Any], call: Coroutine[Any, Any, T]) -> T:
        """A call that lets go of what it holds when it is over, whoever still waits for it."""
        with held:
            return await call
