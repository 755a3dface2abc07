"""The doors: gate, REST API, client and command line.

`Client` and `AsyncClient` are loaded when they are first asked for: they need the `serve` extra, and the commands that
only read a lake do not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenlake.api.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("tokenlake.api.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
