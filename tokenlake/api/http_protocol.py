"""HTTP as it comes in from a socket: parsed in C, and refused where it does not end."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["BoundedProtocol"]

_MOST = 65_536
"""Bytes of a request's head. The parser itself would keep whatever comes."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. What is no body and not complete after so many bytes is answered 400, and nothing else is."""

    _unfinished = 0
    """Bytes since the end of the last head, body or part of a body."""

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        self._unfinished += len(data)
        super().data_received(data)
        if self._unfinished > _MOST and not self.transport.is_closing():
            self.send_400_response("Invalid HTTP request received.")

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._unfinished = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of a body is there."""
        self._unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._unfinished = 0
        super().on_message_complete()
