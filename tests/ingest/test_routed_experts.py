"""The extra of routed experts: a row a token, the engine's own numbers, and nothing that only looks like them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tokenlake.ingest.routed_experts import Routing, read_routed_experts
from tokenlake.store.digest import canonical_extras

ROUTING = Routing(layers=2, per_token=2, experts=4)


def rows(count: int, dtype: str = "uint8") -> Any:
    return (np.arange(count * 4) % 4).reshape(count, 2, 2).astype(dtype)


@pytest.mark.parametrize(("prev_len", "cum_len", "count"), [(0, 5, 4), (5, 9, 4), (0, 1, 0)])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_delta_has_the_rows_from_its_parents_last_token_on(
    prev_len: int, cum_len: int, count: int, dtype: str
) -> None:
    extra = ROUTING.envelope(rows(count, dtype), prev_len=prev_len, cum_len=cum_len)
    assert (extra["start"], extra["shape"], extra["dtype"]) == (max(prev_len - 1, 0), [count, 2, 2], dtype)
    assert np.array_equal(read_routed_experts(extra), rows(count, dtype))
    assert canonical_extras({"routed_experts": extra})


@pytest.mark.parametrize(
    "wrong",
    [None, rows(3), rows(5), rows(4)[:, :1], rows(4)[:, :, :1], rows(4, "int32"), rows(4) + np.uint8(4)],
    ids=["missing", "short", "long", "layers", "per-token", "type", "range"],
)
def test_what_is_not_one_row_a_token_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="routed"):
        ROUTING.envelope(wrong, prev_len=0, cum_len=5)


@pytest.mark.parametrize(
    "wrong", [{"data": "AAAA"}, {"data": "?"}, {"shape": [4, 2]}, {"dtype": "object"}, {"sha256": "0"}, {"shape": None}]
)
def test_an_extra_that_contradicts_itself_is_not_read(wrong: dict[str, Any]) -> None:
    extra = ROUTING.envelope(rows(4), prev_len=0, cum_len=5)
    with pytest.raises(ValueError, match=r".+"):
        read_routed_experts({**extra, **wrong})
