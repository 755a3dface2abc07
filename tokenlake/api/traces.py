"""Spans of what a service does, for whoever collects them; without a collector they are nothing and cost nothing.

A span carries the ids of `tokenlake.api.trail` and never a text, a token id or a log-probability.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from tokenlake.api.trail import Noted

__all__ = ["NO_TRACES", "Headers", "RequestSpan", "Traces"]

Headers = Iterable[tuple[bytes, bytes]]


class RequestSpan(Protocol):
    """The span of a request, named when its route is known."""

    def end(self, name: str, notes: Mapping[str, Noted]) -> None:
        """Say what it was."""
        ...


class Traces(Protocol):
    """Makes spans; each is a child of the one that is open in its context."""

    def request(self, headers: Headers) -> AbstractContextManager[RequestSpan]:
        """The span of a request, a child of the `traceparent` in its headers."""
        ...

    def span(self, name: str, **more: Noted) -> AbstractContextManager[object]:
        """A step of what is being handled."""
        ...


class _NoSpan:
    def end(self, name: str, notes: Mapping[str, Noted]) -> None:
        pass


class _NoTraces:
    _request: AbstractContextManager[RequestSpan] = nullcontext(_NoSpan())
    _span: AbstractContextManager[object] = nullcontext()

    def request(self, headers: Headers) -> AbstractContextManager[RequestSpan]:  # noqa: ARG002
        return self._request

    def span(self, name: str, **more: Noted) -> AbstractContextManager[object]:  # noqa: ARG002
        return self._span


NO_TRACES: Traces = _NoTraces()
