"""What is being handled: the ids of a request, noted where they are proven, read where something is said of it.

They belong to a context: tasks and threads that a request starts see what it notes, other requests do not. Only ids,
words and numbers are noted; never a credential, a text, a token id or a log-probability.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["Noted", "note", "noted", "trail"]

Noted = str | int | float | None

_NOTES: ContextVar[dict[str, Noted] | None] = ContextVar("tokenlake_trail", default=None)


@contextmanager
def trail() -> Generator[Mapping[str, Noted]]:
    """Begin with nothing noted; what is noted until the end, here or in what was started here."""
    notes: dict[str, Noted] = {}
    token = _NOTES.set(notes)
    try:
        yield notes
    finally:
        _NOTES.reset(token)


def note(**names: Noted) -> None:
    """Note ids of what is being handled; nothing outside of a trail."""
    notes = _NOTES.get()
    if notes is not None:
        notes |= names


def noted() -> Mapping[str, Noted]:
    """What was noted so far."""
    return _NOTES.get() or {}
