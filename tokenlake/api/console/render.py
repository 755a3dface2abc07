"""Templates to answers: everything escaped, nothing inline, nothing from anywhere else."""

from __future__ import annotations

import datetime as dt
import hashlib
import math
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from starlette.requests import Request
from starlette.responses import Response

from tokenlake.errors import NotFound

__all__ = ["page", "static_file"]

_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
_NOTHING = "\N{EN DASH}"
_STATIC = {"console.css": "text/css; charset=utf-8", "console.js": "text/javascript; charset=utf-8"}


def page(name: str, *, status: int = 200, **values: Any) -> Response:
    """One page."""
    text = _templates().get_template(f"{name}.html").render(**values)
    return Response(text, status, _HEADERS, "text/html; charset=utf-8")


def static_file(request: Request, name: str) -> Response:
    """A file of the package, by its name. Raises `NotFound`."""
    if name not in _STATIC:
        raise NotFound(f"no file {name}", name=name)
    content, tag = _static(name)
    headers = {"etag": tag, "cache-control": "no-cache", "x-content-type-options": "nosniff"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, headers=headers, media_type=_STATIC[name])


@cache
def _static(name: str) -> tuple[bytes, str]:
    content = resources.files("tokenlake.api.console").joinpath("static", name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


@cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tokenlake.api.console"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _number, "when": _when, "cell": _cell, "short": _short}
    return environment


def _number(value: float | None) -> str:
    """A number as people read it."""
    if value is None:
        return _NOTHING
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")
    return "not a number" if math.isnan(value) else f"{value:.3f}".rstrip("0").rstrip(".")


def _when(value: dt.datetime | None) -> str:
    return _NOTHING if value is None else value.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M:%S")


def _short(value: str | None) -> str:
    """The end of a long id, which is what tells ids apart."""
    if value is None:
        return _NOTHING
    return value if len(value) <= 14 else f"…{value[-12:]}"


def _cell(value: Any) -> str:
    """A value of a query's result."""
    if value is None:
        return "NULL"
    text = str(value)
    return text if len(text) <= 400 else text[:399] + "…"
