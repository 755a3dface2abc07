"""Credentials: one control token for the trainer's side, and derived capabilities for each attempt.

A capability is an HMAC of lake, rollout, attempt and role under a key that lies outside the lake, so it needs no table,
survives a restart and can be handed out again. Comparisons take constant time; nothing here is ever logged.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Literal

from tokenlake.errors import ConfigError, Unauthorized

__all__ = ["Capabilities", "bearer", "load_key"]

Role = Literal["data", "control"]
_PREFIX: dict[Role, str] = {"data": "tld", "control": "tlc"}
_KEY_BYTES = 32


def load_key(text: str | None, path: Path) -> bytes:
    """The key that capabilities are derived from: `text` (64 hex digits) or the file, which is made when missing.

    The file is readable by its owner only. Raises `ConfigError` when either is malformed or the file cannot be used.
    """
    if text is not None:
        return _parse(text, "TOKENLAKE_CAPABILITY_KEY")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return _parse(path.read_text(encoding="ascii"), str(path))
        with os.fdopen(handle, "w", encoding="ascii") as file:
            made = secrets.token_bytes(_KEY_BYTES)
            file.write(made.hex())
            file.flush()
            os.fsync(file.fileno())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot use the key file {path}: set TOKENLAKE_CAPABILITY_KEY to 64 hex digits") from error
    return made


def _parse(text: str, where: str) -> bytes:
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(f"{where} does not hold 64 hex digits")
    return key


class Capabilities:
    """Mints and checks the capabilities of one lake."""

    def __init__(self, *, key: bytes, lake_id: str, token: str) -> None:
        self._key = key
        self._lake_id = lake_id
        self._token = token.encode()

    def mint(self, rollout_id: str, attempt: int, role: Role) -> str:
        """The capability of one attempt: `data` goes to the agent, `control` stays with its environment."""
        fields = ("tokenlake.capability.1", self._lake_id, rollout_id, str(attempt), role)
        message = b"".join(len(field.encode()).to_bytes(8, "little") + field.encode() for field in fields)
        digest = hmac.digest(self._key, message, hashlib.sha256)
        return f"{_PREFIX[role]}-{attempt}-{base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"

    def is_control(self, presented: str | None) -> bool:
        """Whether this is the control token."""
        return presented is not None and hmac.compare_digest(presented.encode("utf-8", "replace"), self._token)

    def data(self, presented: str | None, rollout_id: str) -> int:
        """The attempt that a data capability of this rollout may call; raises `Unauthorized`."""
        return self._attempt(presented, rollout_id, "data")

    def control(self, presented: str | None, rollout_id: str | None) -> int | None:
        """The attempt that who asks for something under `rollout_id` may command; None: the control token, for any.

        Without `rollout_id` it is about something else, for which the control token alone will do. Raises
        `Unauthorized`.
        """
        if self.is_control(presented):
            return None
        if rollout_id is None:
            raise Unauthorized("give the control token as `Authorization: Bearer <token>`")
        return self._attempt(presented, rollout_id, "control")

    def _attempt(self, presented: str | None, rollout_id: str, role: Role) -> int:
        parts = (presented or "").split("-", 2)
        if len(parts) == 3 and parts[1].isascii() and parts[1].isdigit() and len(parts[1]) < 8:
            attempt = int(parts[1])
            expected = self.mint(rollout_id, attempt, role)
            if hmac.compare_digest(expected.encode(), (presented or "").encode("utf-8", "replace")):
                return attempt
        raise Unauthorized(f"no valid {role} credential for rollout {rollout_id}", rollout_id=rollout_id)


def bearer(authorization: str | None, api_key: str | None = None) -> str | None:
    """The credential of a request: `Authorization: Bearer`, else `x-api-key`."""
    if authorization is not None:
        scheme, _, value = authorization.partition(" ")
        return value.strip() or None if scheme.lower() == "bearer" else None
    return api_key
