"""What every dialect is, and the forms it reads into and writes from.

An answer holds no token id and no log-probability, and no key that could hold one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tokenlake.ingest.engine import AssistantTurn, SamplingParams, TurnDelta
from tokenlake.ingest.messages import Conversation, Turn

__all__ = ["Answer", "Dialect", "Encoder", "Head", "ModelRequest", "rest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """One model call as the gate needs it, whatever dialect it came in."""

    conversation: Conversation
    params: SamplingParams
    stream: bool = False
    most_calls: Literal[0, 1] | None = None
    """Tool calls that the answer may hold; None: as many as the model writes."""
    echo: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What of the request the dialect's answer repeats or is shaped by; of no meaning to anybody else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What is known of an answer before its first token."""

    call_id: str
    model: str
    created: int
    """Seconds since the epoch."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was sampled, as every dialect serves it."""

    head: Head
    turn: AssistantTurn
    finish_reason: str
    """`stop`, `length` or `tool_calls`."""
    stop_sequence: str | None = None
    """The stop text of the request that ended it; None when something else did, or when the engine does not tell."""
    completion_tokens: int

    @property
    def call_id(self) -> str:
        """The call that it answers."""
        return self.head.call_id


class Encoder(Protocol):
    """Writes one streamed answer as server-sent events; used for one answer, from one task."""

    keep_alive: bytes
    """Says nothing, and may come at any time, also before everything else."""

    def start(self, head: Head) -> bytes:
        """The events before any text; the first call, once."""
        ...

    def delta(self, delta: TurnDelta) -> bytes:
        """Text that is certain."""
        ...

    def end(self, answer: Answer) -> bytes:
        """What of the committed answer was not shown yet, and the event that ends it."""
        ...

    def error(self, status: int, kind: str, message: str) -> bytes:
        """The event that ends a stream that cannot be completed."""
        ...


class Dialect(Protocol):
    """Reads and writes one API. Without state: one instance serves every call."""

    @property
    def name(self) -> str:
        """What lineage and metrics call it."""
        ...

    def request(self, body: Mapping[str, Any]) -> ModelRequest:
        """Parse a request body; raises `InvalidInput` naming the field that is malformed or not supported."""
        ...

    def response_id(self, call_id: str) -> str:
        """The response id of a call."""
        ...

    def text(self, answer: Answer) -> str:
        """The served text that a verifier would score."""
        ...

    def turn(self, answer: Answer) -> Turn:
        """The served answer as it will be read when it is echoed."""
        ...

    def body(self, request: ModelRequest, answer: Answer) -> dict[str, Any]:
        """The response body."""
        ...

    def encoder(self, request: ModelRequest) -> Encoder:
        """A writer for one streamed answer."""
        ...

    def error(self, status: int, kind: str, message: str, field: str | None) -> dict[str, Any]:
        """An error body."""
        ...


def rest(shown: Mapping[str, str], turn: AssistantTurn) -> Iterator[TurnDelta]:
    """What of an answer's text has not been streamed: `shown` is, by kind, what has."""
    for kind, whole in (("reasoning", turn.reasoning), ("content", turn.content)):
        text = (whole or "")[len(shown.get(kind, "")) :]
        if text:
            yield TurnDelta(kind=kind, text=text)  # pyright: ignore[reportArgumentType]
