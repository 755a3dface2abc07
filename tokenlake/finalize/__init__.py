"""From sealed rollouts to rows a trainer uses: policies, publishing, loading.

`RowLoader` needs torch, `FinalizerPool` and `read_rows` need Ray: each is imported when it is asked for, so that
publishing needs neither.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenlake.finalize.loader import RowLoader
    from tokenlake.finalize.ray_pool import FinalizerPool
    from tokenlake.finalize.ray_rows import read_rows

__all__ = ["FinalizerPool", "RowLoader", "read_rows"]


def __getattr__(name: str) -> Any:
    places = {"FinalizerPool": "ray_pool", "RowLoader": "loader", "read_rows": "ray_rows"}
    if name in places:
        return getattr(importlib.import_module(f"tokenlake.finalize.{places[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
