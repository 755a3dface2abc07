"""Identities: what a group, rollout and call id may look like, validated once at the border.

An id is never used as a path. A rollout id is derived from its group (`{group_id}_g{i}`), so each end can check
the other without asking.
"""

from __future__ import annotations

import re
import secrets

from tokenlake.clock import now_us
from tokenlake.errors import InvalidInput

__all__ = ["check_call_id", "check_group_id", "check_rollout_id", "mint_call_id", "rollout_id", "split_rollout_id"]

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
_ROLLOUT = re.compile(r"(?P<group>[A-Za-z0-9][A-Za-z0-9._:-]{0,199})_g(?P<index>0|[1-9][0-9]{0,6})")
_RULE = "1 to 200 characters of A-Z a-z 0-9 . _ : - and a letter or digit first"


def _check(value: object, what: str) -> str:
    if not isinstance(value, str) or _ID.fullmatch(value) is None:
        raise InvalidInput(f"{what} is not a valid id: use {_RULE}", field=what)
    return value


def check_group_id(value: object) -> str:
    """Return the group id, or raise `InvalidInput`."""
    return _check(value, "group_id")


def check_call_id(value: object, what: str = "call_id") -> str:
    """Return the call id, or raise `InvalidInput`."""
    return _check(value, what)


def rollout_id(group_id: str, index: int) -> str:
    """The id of rollout `index` (0-based) of a group."""
    return f"{group_id}_g{index}"


def split_rollout_id(value: str) -> tuple[str, int]:
    """(group id, index) of a rollout id, or raise `InvalidInput`."""
    match = _ROLLOUT.fullmatch(value)
    if match is None:
        raise InvalidInput(
            "rollout_id is not valid: it is {group_id}_g{i}, i from 0, and a group id is " + _RULE, field="rollout_id"
        )
    return match["group"], int(match["index"])


def check_rollout_id(value: object) -> str:
    """Return the rollout id, or raise `InvalidInput`."""
    if not isinstance(value, str):
        raise InvalidInput("rollout_id must be a string", field="rollout_id")
    split_rollout_id(value)
    return value


def mint_call_id() -> str:
    """A new call id: 13 hex digits of microseconds since the epoch, then 64 random bits. Sorts in time."""
    return f"{now_us():013x}{secrets.token_hex(8)}"
