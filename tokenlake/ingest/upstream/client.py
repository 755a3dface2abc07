"""JSON over HTTP to an upstream, every call with a deadline and every failure with a name.

The names are `upstream_unreachable`, `upstream_deadline`, `upstream_broke` (the connection ended early),
`upstream_unauthorized`, `upstream_no_route`, `upstream_busy`, `upstream_error` and `upstream_malformed`; they stand in
the error's `detail["reason"]`. What the upstream refuses as the request's fault is `UpstreamRefused`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from tokenlake.errors import ConfigError, Deadline, EngineFailed
from tokenlake.ingest.upstream.hop import Hop

__all__ = ["UpstreamClient", "UpstreamRefused", "checked_url", "http_client", "named_failures"]

_IDLE_S = 2.0
"""Connections idle for longer are not used again: vLLM closes its own after five seconds."""
_MAX_MESSAGE = 300
_NAMES = {
    401: ("upstream_unauthorized", "refuses our credential: set TOKENLAKE_UPSTREAM_KEY to its API key"),
    403: ("upstream_unauthorized", "refuses our credential: set TOKENLAKE_UPSTREAM_KEY to its API key"),
    404: ("upstream_no_route", "does not serve this"),
    405: ("upstream_no_route", "does not serve this"),
    429: ("upstream_busy", "is busy: send the call again later"),
    501: ("upstream_no_route", "does not serve this"),
}


class UpstreamRefused(ValueError):
    """The upstream says that the request is wrong (400, 413, 422)."""

    def __init__(self, kind: str, field: str | None, message: str, body: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.kind = kind
        self.body = body
        """The whole answer, where it was a JSON object."""
        self.field = field
        """The parameter it names."""


def checked_url(url: str) -> str:
    """The upstream's address without a slash or `/v1` at its end; raises `ConfigError`."""
    try:
        parts = urlsplit(url)
        fine = parts.scheme in ("http", "https") and parts.hostname and (parts.port or True)
    except ValueError:
        raise ConfigError("the upstream's address is not a URL: give http://host:port") from None
    if not fine or parts.query or parts.fragment:
        raise ConfigError("the upstream's address must be http://host:port or https://host:port")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("the upstream's address holds a credential: give it in TOKENLAKE_UPSTREAM_KEY")
    return url.rstrip("/").removesuffix("/v1")


def http_client(connect_s: float) -> httpx.AsyncClient:
    """A client whose calls are bounded by their callers; connecting alone is bounded here.

    The process's environment (proxies, netrc) is not read, and redirects are not followed.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=_IDLE_S)
    return httpx.AsyncClient(timeout=httpx.Timeout(None, connect=connect_s), limits=limits, trust_env=False)


@contextlib.asynccontextmanager
async def named_failures(where: str, seconds: float | None) -> AsyncGenerator[None]:
    """Bound an exchange with `where`, and name what ends it before its answer is there."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as late:
        said = f"no answer from the upstream {where} within {seconds:g} s"
        raise Deadline(said, reason="upstream_deadline") from late
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        said = f"cannot connect to the upstream {where}: start it, or correct its address"
        raise EngineFailed(said, reason="upstream_unreachable") from error
    except httpx.HTTPError as error:
        said = f"the upstream {where} ended the connection early ({type(error).__name__})"
        raise EngineFailed(said, reason="upstream_broke") from error


class UpstreamClient:
    """One upstream; belongs to the event loop that it is first used on."""

    def __init__(self, url: str, *, key: str | None = None, deadline_s: float = 30.0, hop: Hop | None = None) -> None:
        self.url = checked_url(url)
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._deadline_s = deadline_s
        self._http = http_client(deadline_s)
        self._hop = hop or Hop()

    async def get(self, path: str) -> dict[str, Any]:
        """The JSON object at `path`."""
        async with named_failures(self.url + path, self._deadline_s):
            return self._read(path, await self._http.get(self.url + path, headers=self._headers))

    async def post(self, path: str, body: Mapping[str, Any], *, bounded: bool = True) -> dict[str, Any]:
        """The answer to a JSON body. Cancelling closes the connection, which aborts what the upstream generates.

        `bounded=False` leaves the deadline to the caller.

        Raises:
            UpstreamRefused: the request is wrong.
            Deadline: no whole answer in time.
            EngineFailed: anything else, with its name.
        """
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        self._hop.sent += len(content)
        async with named_failures(self.url + path, self._deadline_s if bounded else None):
            return self._read(path, await self._http.post(self.url + path, content=content, headers=headers))

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The server-sent JSON objects that answer a body, until `[DONE]`; its deadline is the caller's.

        Raises as `post` does, also in the middle; close it to abort.
        """
        content = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
        headers = {**self._headers, "Content-Type": "application/json"}
        self._hop.sent += len(content)
        async with (
            named_failures(self.url + path, None),
            self._http.stream("POST", self.url + path, content=content, headers=headers) as answer,
        ):
            if not answer.is_success:
                await answer.aread()
                self._read(path, answer)
            async for line in answer.aiter_lines():
                self._hop.received += len(line.encode()) + 1
                field, _, data = line.partition(":")
                if field == "data" and data.strip() == "[DONE]":
                    return
                if field == "data":
                    yield self._event(path, data)
        where = f"the upstream {self.url}{path}"
        raise EngineFailed(f"{where} ended its stream without an end", reason="upstream_broke")

    async def close(self) -> None:
        """Close every connection; idempotent."""
        await self._http.aclose()

    def _event(self, path: str, data: str) -> dict[str, Any]:
        where = f"the upstream {self.url}{path}"
        try:
            event: Any = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise EngineFailed(f"{where} streamed something that is no JSON object", reason="upstream_malformed")
        if "error" in event:
            raise EngineFailed(f"{where} failed in the middle of its stream", reason="upstream_error")
        return cast("dict[str, Any]", event)

    def _read(self, path: str, answer: httpx.Response) -> dict[str, Any]:
        where = f"the upstream {self.url}{path}"
        self._hop.received += answer.num_bytes_downloaded
        try:
            body: Any = json.loads(answer.content)
        except (ValueError, RecursionError):
            body = None
        if answer.status_code in (400, 413, 422):
            raise _refused(body)
        if answer.status_code in _NAMES:
            reason, says = _NAMES[answer.status_code]
            raise EngineFailed(f"{where} {says}", reason=reason, status=answer.status_code)
        if not answer.is_success:
            said = f"{where} answered {answer.status_code}"
            raise EngineFailed(said, reason="upstream_error", status=answer.status_code)
        if not isinstance(body, dict):
            raise EngineFailed(f"{where} did not answer a JSON object", reason="upstream_malformed")
        return cast("dict[str, Any]", body)


def _refused(body: Any) -> UpstreamRefused:
    """From OpenAI's error shape, which vLLM has, nested or (older) flat."""
    whole = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
    fields = whole
    inner = fields.get("error")
    if isinstance(inner, dict):
        fields = cast("dict[str, Any]", inner)
    field = fields.get("param")
    message = str(fields.get("message") or "no reason given")[:_MAX_MESSAGE]
    return UpstreamRefused(str(fields.get("type") or "error"), None if field is None else str(field), message, whole)
