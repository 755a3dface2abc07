"""One admitted call on its way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

from tokenlake.api.dialects.dialect import Dialect, ModelRequest
from tokenlake.api.rollouts import Attempt
from tokenlake.api.sink import Sink
from tokenlake.ids import mint_call_id, split_rollout_id

__all__ = ["Flight"]


@dataclass(slots=True, eq=False)
class Flight:
    """One call, until its answer is given or refused."""

    attempt: Attempt
    request: ModelRequest
    dialect: Dialect
    request_digest: bytes
    idempotency_digest: bytes | None
    sink: Sink | None = None
    """Where text goes while it is generated, of a streamed call."""
    call_id: str = field(default_factory=mint_call_id)
    started: float = field(default_factory=time.monotonic)
    engine_s: float = 0.0
    """Seconds spent in the engine."""
    phase: Literal["preparing", "generating", "committing", "done"] = "preparing"
    waiters: int = 1
    """Clients that wait for its answer: the one that sent it, and those that joined."""
    joined: Flight | None = None
    """The same call, already in flight, that answers this one."""

    @property
    def gone(self) -> bool:
        """Whether nobody waits any more."""
        return self.waiters <= 0

    @property
    def abandoned(self) -> bool:
        """Whether nothing will come of it: nobody waited, so it is being aborted, or will not be begun."""
        return self.gone and self.phase in ("preparing", "generating")

    def cut_off(self) -> bool:
        """End what is being streamed; whether any of it was sent before."""
        if self.sink is None:
            return False
        self.sink.shut()
        return self.sink.answered

    @property
    def names(self) -> dict[str, Any]:
        """The columns that say which call an event is about."""
        return {
            "group_id": split_rollout_id(self.attempt.rollout_id)[0],
            "rollout_id": self.attempt.rollout_id,
            "attempt": self.attempt.attempt,
            "call_id": self.call_id,
        }
