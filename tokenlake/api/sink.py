"""Text of one streamed answer on its way from the engine to the client, and whether any of it has gone out.

Once a byte of the answer was sent, a call that fails has been answered; before, it has not. Both sides live on the
same loop and never disagree: a failure shuts the sink before it is written down, and a shut sink gives nothing.
"""

from __future__ import annotations

import asyncio

from tokenlake.api.dialects.dialect import Head
from tokenlake.ingest.engine import AssistantTurn, TurnDelta

__all__ = ["Sink"]


class Sink:
    """Belongs to the event loop that made it."""

    def __init__(self) -> None:
        self.head: Head | None = None
        """Set before the first delta."""
        self.answered = False
        """Whether text was handed out to be sent."""
        self._shut = False
        self._waiting: list[TurnDelta] = []
        self._told: dict[str, str] = {}
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def ready(self) -> asyncio.Future[None]:
        """Done when there is text to take."""
        return self._ready

    def push(self, delta: TurnDelta) -> None:
        """Text that is certain."""
        self._told[delta.kind] = self._told.get(delta.kind, "") + delta.text
        self._waiting.append(delta)
        if not self._shut and not self._ready.done():
            self._ready.set_result(None)

    def take(self) -> list[TurnDelta]:
        """What is to be sent now; from then on the call has been answered."""
        if self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()
        taken, self._waiting = ([] if self._shut else self._waiting), []
        self.answered = self.answered or bool(taken)
        return taken

    def shut(self) -> None:
        """Nothing more goes out: the call has failed."""
        self._shut = True

    def holds(self, turn: AssistantTurn) -> bool:
        """Whether what was told is how the turn begins."""
        said = {"content": turn.content or "", "reasoning": turn.reasoning or ""}
        return all(said[kind].startswith(text) for kind, text in self._told.items())
