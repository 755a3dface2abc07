"""Events that a loss of power left in part: whole in form, with some of their bytes never written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from tokenlake.store.digest import event_hash
from tokenlake.store.footer import has_footer
from tokenlake.store.maps import Mapped
from tokenlake.store.records import event_rows
from tokenlake.store.schema import SCHEMA_VERSION
from tokenlake.store.walk import Walk, has_hole

__all__ = ["is_torn", "sound", "without_torn"]

T = TypeVar("T")
_HASHES = ("prev_hash", "event_hash")


def sound(events: Sequence[dict[str, Any]]) -> bool:
    """Whether each event has the hash of its content; what a newer version wrote is not for us to judge."""
    return all(
        event["schema_version"] > SCHEMA_VERSION
        or event["event_hash"] == event_hash(event["prev_hash"], {k: v for k, v in event.items() if k not in _HASHES})
        for event in events
    )


def is_torn(mapped: Mapped, start: int, end: int) -> bool:
    """Whether a loss of power left the message between two positions of a log in part; never where it is sealed."""
    if mapped.schema is None or has_footer(mapped.view) or not has_hole(mapped.view, start, end):
        return False
    events = event_rows(mapped.view, start, end, mapped.schema)
    return events is None or not sound(events)


def without_torn(mapped: Mapped, found: Walk[T]) -> Walk[T]:
    """What was found in a log, without its last message where that tore: recovery leaves it out as well."""
    if found.found and not found.ended:
        start, meta, body, _ = found.found[-1]
        if is_torn(mapped, start, start + meta + body):
            found.found.pop()
            found.scanned = start
    return found
