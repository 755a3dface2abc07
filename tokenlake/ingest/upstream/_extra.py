"""The guard of the `serve` extra: imported first, so that what is missing is named together with its cure."""

from __future__ import annotations

from tokenlake.errors import MissingExtra

try:
    import httpx as _httpx  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise MissingExtra(
        f"an upstream needs the package {error.name!r}: pip install 'tokenlake[serve]'", package=error.name
    ) from error

__all__ = ["EXTRA"]

EXTRA = "serve"
"""The extra of this package's `pyproject.toml` that installs it."""
