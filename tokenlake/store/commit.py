"""Group commit: concurrent callers share one flush, a lone caller waits for nobody.

The first caller to arrive leads: it flushes everything that waits, itself included. Callers that arrive meanwhile wait;
when the flush is over, one of them leads the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from tokenlake.errors import StorageFailed, TokenlakeError

__all__ = ["GroupCommit", "Ticket"]

T = TypeVar("T")
R = TypeVar("R")


class Ticket(Generic[T, R]):
    """One caller's item. A flush sets `result` or `error`."""

    __slots__ = ("abandoned", "error", "gate", "item", "leads", "result")

    def __init__(self, item: T) -> None:
        self.item = item
        self.result: R | None = None
        self.error: TokenlakeError | None = None
        self.gate: threading.Lock | None = None
        self.leads = False
        self.abandoned = False


class GroupCommit(Generic[T, R]):
    """`flush(tickets)` is called by one thread at a time."""

    def __init__(self, flush: Callable[[list[Ticket[T, R]]], None]) -> None:
        self._flush = flush
        self._lock = threading.Lock()
        self._waiting: list[Ticket[T, R]] = []
        self._led = False

    def submit(self, item: T) -> R:
        """Flush `item`, alone or in company, and return its result or raise its error."""
        ticket: Ticket[T, R] = Ticket(item)
        with self._lock:
            self._waiting.append(ticket)
            if self._led:
                ticket.gate = threading.Lock()
                ticket.gate.acquire()
            else:
                self._led = ticket.leads = True
        if ticket.gate is not None:
            self._wait(ticket, ticket.gate)
        if ticket.leads:
            self._lead()
        if ticket.error is not None:
            raise ticket.error
        if ticket.result is None:
            raise StorageFailed("the write was interrupted before it was acknowledged: try again")
        return ticket.result

    def _wait(self, ticket: Ticket[T, R], gate: threading.Lock) -> None:
        """Wait to be flushed or to lead; an interrupted caller passes the lead on."""
        passed = False
        try:
            passed = gate.acquire()
        finally:
            if not passed:
                with self._lock:
                    ticket.abandoned = True
                    leads = ticket.leads
                if leads:
                    self._lead()

    def _lead(self) -> None:
        with self._lock:
            batch, self._waiting = self._waiting, []
        try:
            self._flush(batch)
        finally:
            with self._lock:
                following = next((ticket for ticket in self._waiting if not ticket.abandoned), None)
                self._led = following is not None
                if following is not None:
                    following.leads = True
            if following is not None and following.gate is not None:
                following.gate.release()
            for ticket in batch:
                if ticket.gate is not None and not ticket.leads:
                    ticket.gate.release()
