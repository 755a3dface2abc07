"""What an engine hands over as the raw elements that are stored: ids as int32, log-probabilities as float32.

An int32 buffer (`array('i')`, a numpy int32 array) is taken as it is, without a copy. A list is packed by `struct`, in
half the time that `array` takes.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Sequence
from typing import cast

from tokenlake.ingest.coords import failure

__all__ = ["TOKEN_PREFIX", "Ids", "check_signs", "float32", "int32", "token_id"]

Ids = Sequence[int] | Sequence[int | str] | memoryview
"""Token ids: an int32 buffer, or a sequence of integers or `token_id:N` texts."""

TOKEN_PREFIX = "token_id:"
"""How servers write an id as text."""

_MAX_ID = 2**31 - 1
_MAX_DIGITS = 4_000
"""Python refuses to read much longer numbers with an error of its own."""


def token_id(value: object) -> int | None:
    """A token id: a number, or the number in a `token_id:N` text; None for what is neither."""
    if isinstance(value, str) and value.startswith(TOKEN_PREFIX):
        digits = value.removeprefix(TOKEN_PREFIX)
        value = int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ID else None


def int32(values: Ids | None, missing: str) -> memoryview:
    """The bytes of token ids; `CaptureFailed` when they are absent (`missing`), not integers or too large.

    Their signs are not looked at: `check_signs` is for what is stored of them.
    """
    if values is None:
        raise failure(missing)
    try:
        view = memoryview(cast("array[int]", values))
    except TypeError:
        view = None
    if view is None or view.format != "i" or view.ndim != 1 or not view.c_contiguous:
        return memoryview(_converted(cast("Sequence[int | str]", values)))
    return view.cast("B") if view.nbytes else memoryview(b"")


def check_signs(raw: bytes) -> None:
    """`CaptureFailed` when one of these int32 is negative; the whole array at memory speed."""
    if not raw[3::4].isascii():
        raise failure("token_id_invalid")


def float32(values: Sequence[float | None], *, strict: bool) -> tuple[bytes, tuple[int, ...]]:
    """The bytes of log-probabilities, zero where they are None, and the positions of those.

    What is no number is `CaptureFailed`; with `strict` so is what is None or not finite as a float32.
    """
    try:
        raw = struct.pack(f"<{len(values)}f", *values)
    except (struct.error, OverflowError):
        return _exceptional(values, strict=strict)
    if strict and not math.isfinite(sum(cast("Sequence[float]", values))):  # that of finite float32 is finite
        raise failure("logprob_not_finite")
    return raw, ()


def _exceptional(values: Sequence[float | None], *, strict: bool) -> tuple[bytes, tuple[int, ...]]:
    """Values that are None, beyond float32 (they become infinite) or no numbers."""
    nulls = tuple(position for position, value in enumerate(values) if value is None)
    try:
        numbers = array("f", [0.0 if value is None else value for value in values])
    except TypeError as error:
        raise failure("logprobs_missing") from error
    if strict:
        raise failure("logprobs_missing" if nulls else "logprob_not_finite")
    return numbers.tobytes(), nulls


def _converted(values: Sequence[int | str]) -> bytes:
    try:
        return struct.pack(f"<{len(values)}i", *values)
    except struct.error:
        return struct.pack(f"<{len(values)}i", *map(_id, values))


def _id(value: object) -> int:
    """An id that `struct` cannot pack as it is."""
    found = token_id(value)
    if found is None:
        raise failure("token_id_invalid")
    return found
