"""W3 for Tokenlake: every rollout of a lake verified and linearized by the SQL views.

`linear_rows` opens the lake anew and connects anew each round: reading lineage, finding the deltas on disk, recomputing
every digest and handing out Arrow arrays are all inside the clock, and nothing is left over from the round before.
`open_rows` asks a lake that is open already, as a trainer does all day; the deltas are read and verified each time all
the same. `deltas_by_hand` reads the same records through the lake, and verifies and joins them without a view.
"""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa

import tokenlake
from bench.by_hand import numpy_table
from bench.measure import Timing
from tokenlake.store.reader import Lake

__all__ = ["QUERY", "deltas_by_hand", "linear_rows", "open_rows"]

QUERY = "SELECT rollout_id, input_ids, token_mask, logprobs FROM linear_rows WHERE reason IS NULL"
"""A row without a reason passed every check, so the checks cannot be skipped."""


_DELTAS = """
    SELECT rollout_id, call_id, parent_call_id, prev_len, cum_len, weight_version, mode, extras_digest, chain_hash,
        digest, token_ids, token_mask, logprobs
    FROM deltas
    ORDER BY rollout_id, depth
"""


def linear_rows(path: Path) -> tuple[Timing, pa.Table]:
    """The timing of one round, and its rows."""
    start = time.monotonic()
    lake = tokenlake.open(path)
    connection = lake.connect()
    table = connection.sql(QUERY).to_arrow_table()
    end = time.monotonic()
    connection.close()
    lake.close()
    return (start, end, []), table


def open_rows(lake: Lake) -> Timing:
    """The timing of one query of a lake that is open."""
    start = time.monotonic()
    lake.sql(QUERY).to_arrow_table()
    return start, time.monotonic(), []


def deltas_by_hand(lake: Lake) -> Timing:
    """The timing of one verification of the same records in numpy."""
    start = time.monotonic()
    rows = numpy_table(lake.sql(_DELTAS).to_arrow_table())
    end = time.monotonic()
    if not rows:
        raise AssertionError("the lake holds no rollout")
    return start, end, []
