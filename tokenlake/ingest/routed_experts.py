"""Which experts a mixture-of-experts model routed each token to: an extra of a delta, for trainers that replay it.

The extra is `routed_experts` with `start`, `dtype`, `shape` `[rows, layers, experts per token]`, `data` (base64 of the
rows, little-endian) and `sha256` of those bytes. Row `i` is the token at position `start + i` of the whole sequence.
A token is routed when it is fed and not when it is sampled, so a delta's last token has no row: it is the first of its
child's, and the deltas of a chain put together have a row for every token but the last.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

__all__ = ["NAME", "Routing", "read_routed_experts"]

NAME = "routed_experts"
"""Its key in `extras`."""
_DTYPES = ("uint8", "uint16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a model routes."""

    layers: int
    """All layers; one that routes nothing has zeros."""
    per_token: int
    """Experts that take one token in one layer."""
    experts: int
    """Experts of a layer; ids are below this."""

    @staticmethod
    def start(prev_len: int) -> int:
        """The position of the first row of a delta that has this many tokens before it."""
        return max(prev_len - 1, 0)

    def envelope(self, rows: NDArray[Any] | None, *, prev_len: int, cum_len: int) -> dict[str, Any]:
        """The extra of one delta; raises `ValueError` for rows that are missing, misshapen or out of range."""
        start = self.start(prev_len)
        wanted = (max(cum_len - 1 - start, 0), self.layers, self.per_token)
        if rows is None or rows.shape != wanted or str(rows.dtype) not in _DTYPES:
            raise ValueError("the routed experts are missing, or are not one row a token")
        if rows.size and int(rows.max()) >= self.experts:
            raise ValueError(f"a token was routed to an expert outside the {self.experts} that there are")
        data = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<")).tobytes()
        return {
            "start": start,
            "dtype": str(rows.dtype),
            "shape": list(wanted),
            "data": base64.b64encode(data).decode(),
            "sha256": hashlib.sha256(data).hexdigest(),
        }


def read_routed_experts(extra: Mapping[str, Any]) -> NDArray[Any]:
    """The rows of an extra; raises `ValueError` where its digest, shape or type is not what it says."""
    try:
        dtype, shape = extra["dtype"], tuple(cast("list[int]", extra["shape"]))
        data = base64.b64decode(str(extra["data"]), validate=True)
        if dtype not in _DTYPES or len(shape) != 3 or hashlib.sha256(data).hexdigest() != extra["sha256"]:
            raise ValueError("it contradicts its digest, or has another type or shape")
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"this is no extra of routed experts: {error}") from error
