"""Large answers: built, tagged and compressed in a thread, so that the loop goes on with everything else."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import Response

__all__ = ["payload", "tag"]

_WORTH_BYTES = 1024
_LEVEL = 1
"""Rows are large and the wire is near: the fastest level takes half of the bytes for a tenth of the time."""

_GZIP = re.compile(r"(?:^|,)\s*gzip\s*(?:$|,|;\s*q=(?:1|0?\.0*[1-9]))", re.IGNORECASE)
"""That a client takes gzip; `gzip;q=0` says that it does not."""


async def payload(
    request: Request, build: Callable[[], bytes], media_type: str, headers: dict[str, str], etag: str | None = None
) -> Response:
    """The answer that `build` makes; 304 for who has it, gzip for who takes it."""
    packed = _GZIP.search(request.headers.get("accept-encoding", "")) is not None
    headers = {**headers, "vary": "accept, accept-encoding"}
    if etag is not None:
        etag = f'"{etag}{"-gzip" if packed else ""}"'
        headers |= {"etag": etag, "cache-control": "private, no-cache"}
        known = request.headers.get("if-none-match", "")
        if etag in [each.strip().removeprefix("W/") for each in known.split(",")]:
            return Response(status_code=304, headers=headers)

    def make() -> tuple[bytes, bool]:
        body = build()
        worth = packed and len(body) >= _WORTH_BYTES
        return (gzip.compress(body, _LEVEL, mtime=0) if worth else body), worth

    body, compressed = await asyncio.to_thread(make)
    if compressed:
        headers["content-encoding"] = "gzip"
    return Response(body, headers=headers, media_type=media_type)


def tag(*parts: bytes | str) -> str:
    """What stands for content that these identify."""
    hashed = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.hexdigest()[:32]
