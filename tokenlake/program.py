"""Which Tokenlake this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["program_version"]


def program_version() -> str:
    """The installed version; `unknown` where the package runs from a folder that nobody installed."""
    try:
        return version("tokenlake")
    except PackageNotFoundError:
        return "unknown"
