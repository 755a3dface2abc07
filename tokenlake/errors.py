"""The one error tree of Tokenlake.

Every error a caller may meet descends from `TokenlakeError`; there is a class for each thing a caller does
differently, and no more. All of them survive pickling, because they cross Ray and process pools.

    TokenlakeError
    +-- ConfigError          a setting, policy or argument of the operator is wrong: fix it and start again
    +-- InvalidInput         what a client or a file sent is malformed: fix the request
    |   +-- ImportRefused    a line of an import file is malformed or conflicts: nothing of the file was kept
    |   +-- QueryError       a SQL query that cannot run, or that tries to write
    +-- NotFound             no such group, rollout, call, segment or lake
    +-- Conflict             the thing exists with other content, or is in a state that forbids this
    +-- Unauthorized         no or wrong credential
    +-- Forbidden            a valid credential that does not reach this far
    +-- TooLarge             beyond a configured limit of size
    +-- Busy                 asked too often, or no room now: wait `detail["retry_after_s"]` seconds and ask again
    +-- Deadline             a bounded wait ran out
    +-- LakeLocked           another process owns the lake (or this writer's directory)
    +-- FormatError          written by a newer Tokenlake, or not a lake at all
    +-- DamagedLake          acknowledged bytes are missing or changed, and going on would hide it
    +-- StorageFailed        the disk refused a write or a sync: nothing was acknowledged
    +-- CaptureFailed        a call could not be captured; carries the reason that is counted
    +-- ContextOverflow      the prompt leaves no room for an answer
    +-- EngineFailed         the model engine or the upstream failed
    +-- MissingExtra         an optional dependency is not installed

A message says what is wrong, where, and what to do. It never holds a secret, a token id or a log-probability.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "Busy",
    "CaptureFailed",
    "ConfigError",
    "Conflict",
    "ContextOverflow",
    "DamagedLake",
    "Deadline",
    "EngineFailed",
    "Forbidden",
    "FormatError",
    "ImportRefused",
    "InvalidInput",
    "LakeLocked",
    "MissingExtra",
    "NotFound",
    "QueryError",
    "StorageFailed",
    "TokenlakeError",
    "TooLarge",
    "Unauthorized",
]


class TokenlakeError(Exception):
    """Base of every error Tokenlake raises on purpose.

    `message` is one line for a human; `detail` is a small JSON-able mapping for machines.
    """

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.detail: dict[str, Any] = detail

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.detail))


def _rebuild(cls: type[TokenlakeError], message: str, detail: dict[str, Any]) -> TokenlakeError:
    return cls(message, **detail)


class ConfigError(TokenlakeError):
    """A setting, policy or start argument is wrong."""


class InvalidInput(TokenlakeError):
    """Malformed input of a client or file."""


class ImportRefused(InvalidInput):
    """An import file was refused whole; `detail["line"]` is the 1-based line number."""


class QueryError(InvalidInput):
    """A SQL query failed to parse, bind or run, or is not read-only."""


class NotFound(TokenlakeError):
    """The named thing does not exist."""


class Conflict(TokenlakeError):
    """The named thing exists with other content, or its state forbids this."""


class Unauthorized(TokenlakeError):
    """No credential, or a wrong one."""


class Forbidden(TokenlakeError):
    """A valid credential without the right for this."""


class TooLarge(TokenlakeError):
    """Beyond a configured size limit."""


class Busy(TokenlakeError):
    """Asked too often, or no room for this now; `detail["retry_after_s"]` says how long to wait."""


class Deadline(TokenlakeError):
    """A bounded wait ran out."""


class LakeLocked(TokenlakeError):
    """Another process owns the lake; `detail["pid"]` names it where known."""


class FormatError(TokenlakeError):
    """The lake or a record is of a format this version does not read."""


class DamagedLake(TokenlakeError):
    """Acknowledged bytes are missing or changed."""


class StorageFailed(TokenlakeError):
    """A write or sync failed; nothing was acknowledged."""


class CaptureFailed(TokenlakeError):
    """A call could not be captured; `detail["reason"]` is the counted reason."""


class ContextOverflow(TokenlakeError):
    """The prompt leaves no room for an answer in the model's context."""


class EngineFailed(TokenlakeError):
    """The engine or the upstream failed, or did not answer in time."""


class MissingExtra(TokenlakeError, ImportError):
    """An optional dependency is missing; the message says which extra installs it."""
