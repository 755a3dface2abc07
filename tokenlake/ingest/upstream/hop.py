"""Bytes of HTTP bodies between a service and the servers behind it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Hop"]


@dataclass(slots=True)
class Hop:
    """What has passed since it was last asked; belongs to one event loop."""

    sent: int = 0
    received: int = 0

    def take(self) -> tuple[int, int]:
        """Bytes sent and received since the last time."""
        passed = (self.sent, self.received)
        self.sent = self.received = 0
        return passed
