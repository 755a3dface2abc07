"""From sealed rollouts to rows a trainer uses: policies, publishing, loading.

`RowLoader` needs torch and is imported when it is asked for, so that publishing needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenlake.finalize.loader import RowLoader

__all__ = ["RowLoader"]


def __getattr__(name: str) -> Any:
    if name == "RowLoader":
        module = importlib.import_module("tokenlake.finalize.loader")
        return module.RowLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
