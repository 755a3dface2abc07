"""The guard of the `nemo-gym` extra: imported first, so that what is missing is named together with its cure."""

from __future__ import annotations

from tokenlake.errors import MissingExtra

try:
    import nemo_gym.token_id_capture as _capture  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError as error:
    raise MissingExtra(
        f"NeMo-Gym's protocols need the package {error.name!r}: pip install 'tokenlake[nemo-gym]', or on a Python that "
        "it does not support: pip install --no-deps --ignore-requires-python nemo-gym==0.7.0, then pydantic and orjson",
        package=error.name,
    ) from error

__all__ = ["EXTRA"]

EXTRA = "nemo-gym"
"""The extra of this package's `pyproject.toml` that installs it."""
