"""What `--middleware` may put between a worker's socket and its routes: a function that does nothing."""

from __future__ import annotations

from typing import Any


async def nothing(request: Any, call_next: Any) -> Any:
    return await call_next(request)
