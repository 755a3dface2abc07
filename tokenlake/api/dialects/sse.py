"""JSON bodies and server-sent events as bytes.

JSON is escaped to ASCII, so that half a surrogate pair that a model wrote in tool arguments gets through.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["COMMENT", "compact", "event"]

COMMENT = b": keep-alive\n\n"
"""A line that every reader of events skips."""


def compact(body: Mapping[str, Any]) -> bytes:
    """A JSON body without spaces."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """One event; `name` only where the dialect names its events."""
    head = b"" if name is None else b"event: %s\n" % name.encode()
    return head + b"data: " + compact(data) + b"\n\n"
