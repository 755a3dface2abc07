"""Who may see the console: whoever once gave the control token, for some hours.

The cookie holds no token: it is an HMAC under it, so it proves that the token was known and dies with it. It opens
pages that only read, and no route of the REST API.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from tokenlake.api.service import Service

__all__ = ["COOKIE", "end_session", "is_open", "same_site", "start_session"]

COOKIE = "tokenlake_console"
_SECONDS = 12 * 3600


def start_session(request: Request, response: Response, service: Service) -> None:
    """Set the cookie."""
    expires = str(int(time.time()) + _SECONDS)
    response.set_cookie(
        COOKIE,
        f"{expires}.{_proof(service, expires)}",
        max_age=_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


def end_session(response: Response) -> None:
    """Take the cookie back."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict")


def is_open(request: Request, service: Service) -> bool:
    """Whether the request comes with a cookie of ours that has not expired."""
    expires, _, proof = request.cookies.get(COOKIE, "").partition(".")
    if not (expires.isascii() and expires.isdigit() and len(expires) < 13 and int(expires) > time.time()):
        return False
    return hmac.compare_digest(_proof(service, expires).encode(), proof.encode("utf-8", "replace"))


def same_site(request: Request) -> bool:
    """Whether a form was sent from a page of this service: browsers say where a POST comes from."""
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        return False
    return request.headers.get("sec-fetch-site", "none") in ("same-origin", "none")


def _proof(service: Service, expires: str) -> str:
    message = f"tokenlake.console.1\n{service.lake.lake_id}\n{expires}".encode()
    digest = hmac.digest(service.token.encode(), message, hashlib.sha256)
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
