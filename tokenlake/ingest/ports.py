"""Ports that a service or a worker is told to listen at."""

from __future__ import annotations

from tokenlake.errors import ConfigError

__all__ = ["check_port"]

_LAST = 65_535


def check_port(port: int) -> int:
    """Return the port, 0 for any that is free; raises `ConfigError` for a number that is none."""
    if not 0 <= port <= _LAST:
        raise ConfigError(f"port {port} is not from 0 to {_LAST}")
    return port
