"""The marker inside ids: which call served an item, where a dialect has ids that clients echo.

Chat carries the marker as `ng_call_id` of the message. The other dialects have no place for a field of ours, but ids
that an SDK's user sends back: the id of an item or block is its kind, the call, and a number where there are several.
"""

from __future__ import annotations

import re

__all__ = ["marked", "marker_of"]

_ID = re.compile(r"[a-z]+_(?P<call>[0-9a-f]{29})(?:_[0-9]+)?")


def marked(kind: str, call_id: str, index: int | None = None) -> str:
    """The id of an item that a call served."""
    return f"{kind}_{call_id}" if index is None else f"{kind}_{call_id}_{index}"


def marker_of(value: object) -> str | None:
    """The call that served the item of this id; None when the id is not one of ours."""
    found = _ID.fullmatch(value) if isinstance(value, str) else None
    return found and found["call"]
