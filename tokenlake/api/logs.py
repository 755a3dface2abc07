"""Log lines of a service: for people, or one JSON object a line with the ids of what was being handled.

A line never holds a credential, a header, a body, a text of an agent, a token id or a log-probability: nobody hands
them to a logger, and what is handed over beside the message goes through `tokenlake.api.trail`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

from tokenlake.api.settings import LogFormat
from tokenlake.api.trail import noted

__all__ = ["JsonLines", "TextLines", "logging_to"]


class TextLines(logging.Formatter):
    """`time LEVEL logger message name=value ...`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is logging's
        """The line without a traceback."""
        notes = "".join(f" {name}={value}" for name, value in noted().items() if value is not None)
        return super().formatMessage(record) + notes


class JsonLines(logging.Formatter):
    """`at`, `level`, `logger`, `message`, the ids and figures that were noted, and `traceback` of an error."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        line = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **noted(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps({name: value for name, value in line.items() if value is not None}, ensure_ascii=False)


@contextmanager
def logging_to(stream: TextIO, kind: LogFormat) -> Generator[None]:
    """Our own log lines from `info` on, those of libraries from `warning` on, until the block ends."""
    root, ours = logging.getLogger(), logging.getLogger("tokenlake")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    before = ours.level
    root.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield
    finally:
        ours.setLevel(before)
        root.removeHandler(handler)
