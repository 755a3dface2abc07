"""NeMo-Gym's digests of staged calls, from whole arrays.

SHA-256 of a domain and framed fields: integers are 64-bit big-endian, texts and arrays have their count before them, an
optional field a byte 0 or 1. Token ids are widened to 64 bits and floats turned to big-endian by numpy, so a digest
costs what its bytes cost and not what its tokens do.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from tokenlake.errors import InvalidInput

__all__ = [
    "EXTRAS_VERSION",
    "STAGING_VERSION",
    "Floats",
    "Ids",
    "chain_hash",
    "cumulative_hash",
    "entry_digest",
    "extras_digest",
    "float_field",
    "staging_digest",
    "text_field",
    "token_field",
]

Ids: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
Floats: TypeAlias = Sequence[float] | npt.NDArray[np.floating[Any]]

STAGING_VERSION = 2
"""Of the layout of `staging_digest`."""
EXTRAS_VERSION = 1
"""Of the layout of `extras_digest`."""


def token_field(ids: Ids) -> bytes:
    """The count of token ids, then each of them. Raises `InvalidInput` for one that is negative."""
    values = np.asarray(ids, dtype=np.int64)
    if values.size and values.min() < 0:
        raise InvalidInput("a token id is negative")
    return _uint(values.size) + values.astype(">u8").tobytes()


def float_field(values: Floats) -> bytes:
    """The count of floats, then the bits of each as float32. Raises `InvalidInput` for one that is not finite."""
    with np.errstate(over="ignore"):
        array = np.asarray(values, dtype=np.float64).astype(">f4")
    if not np.isfinite(array).all():
        raise InvalidInput("a number is not finite as a float32")
    return _uint(array.size) + array.tobytes()


def text_field(text: str) -> bytes:
    """The count of a text's UTF-8 bytes, then these."""
    return _bytes(text.encode())


def chain_hash(parent: str | None, ids: Ids) -> str:
    """What binds a call's own tokens to those of its ancestors; `parent` is the parent's, None for a root."""
    return _sha256(b"nemo-gym-staging-chain-v1", _optional_digest(parent), token_field(ids))


def cumulative_hash(ids: Ids) -> str:
    """The digest of a whole sequence from its root on."""
    return _sha256(b"nemo-gym-staging-prefix-v2", token_field(ids))


def entry_digest(ids: Ids) -> str:
    """The digest of the whole sequence that a token entry carries; of the domain alone for no ids."""
    return _sha256(b"nemo-gym-tokens", b"\1" + token_field(ids) if len(ids) else b"")


def extras_digest(extras: Mapping[str, Any] | None) -> str:
    """The digest of a call's extras, by type and independent of the order of keys. Raises `InvalidInput`."""
    return _sha256(
        b"nemo-gym-staging-extras-v1", bytes([EXTRAS_VERSION]), _extra(None if extras is None else {**extras})
    )


def staging_digest(
    *,
    schema_version: int,
    rollout_id: str,
    model_call_id: str,
    parent_call_id: str | None,
    mode: str,
    prev_len: int,
    cum_len: int,
    weight_version: int,
    token_ids: Ids,
    token_mask: Floats,
    logprobs: Floats,
    extras_digest: str,
    chain_hash: str | None,
    cumulative_hash: str | None,
) -> str:
    """The digest of one staged call, over everything but its extras, which are bound by their own."""
    parent = b"\0" if parent_call_id is None else b"\1" + text_field(parent_call_id)
    return _sha256(
        b"nemo-gym-staging-call-v2",
        bytes([schema_version, STAGING_VERSION, EXTRAS_VERSION]),
        text_field(rollout_id) + text_field(model_call_id) + parent + text_field(mode),
        struct.pack(">4Q", prev_len, cum_len - prev_len, cum_len, weight_version),
        _bytes(token_field(token_ids)) + _bytes(float_field(token_mask)) + _bytes(float_field(logprobs)),
        bytes.fromhex(extras_digest) + _optional_digest(chain_hash) + _optional_digest(cumulative_hash),
    )


def _sha256(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _uint(value: int) -> bytes:
    return struct.pack(">Q", value)


def _bytes(raw: bytes) -> bytes:
    return _uint(len(raw)) + raw


def _optional_digest(digest: str | None) -> bytes:
    return b"\0" if digest is None else b"\1" + bytes.fromhex(digest)


def _extra(value: Any) -> bytes:
    if value is None:
        return b"N"
    if isinstance(value, bool):
        return b"B\1" if value else b"B\0"
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return b"I" + struct.pack(">q", value)
    if isinstance(value, float) and math.isfinite(value):
        return b"F" + struct.pack(">d", value)
    if isinstance(value, str):
        return b"S" + text_field(value)
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return b"L" + _uint(len(items)) + b"".join(map(_extra, items))
    if isinstance(value, dict) and all(isinstance(key, str) for key in cast("dict[Any, Any]", value)):
        items = cast("dict[str, Any]", value)
        keys = sorted(items, key=str.encode)
        return b"D" + _uint(len(keys)) + b"".join(text_field(key) + _extra(items[key]) for key in keys)
    raise InvalidInput("extras hold what has no encoding: JSON values only, numbers finite and of 64 bits")
