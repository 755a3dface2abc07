"""The guard of the `torch` extra: imported first, so that what is missing is named together with its cure."""

from __future__ import annotations

from tokenlake.errors import MissingExtra

try:
    import jinja2 as _jinja2  # noqa: F401  # pyright: ignore[reportUnusedImport]
    import safetensors as _safetensors  # noqa: F401  # pyright: ignore[reportUnusedImport]
    import tokenizers as _tokenizers  # noqa: F401  # pyright: ignore[reportUnusedImport]
    import torch as _torch  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise MissingExtra(
        f"the tiny engine needs the package {error.name!r}: pip install 'tokenlake[torch]'", package=error.name
    ) from error

__all__ = ["EXTRA"]

EXTRA = "torch"
"""The extra of this package's `pyproject.toml` that installs them."""
