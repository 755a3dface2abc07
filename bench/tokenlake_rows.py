"""W3 for Tokenlake: every rollout of a lake verified and linearized by the SQL views.

Each round opens the lake anew and connects anew: reading lineage, finding the deltas on disk, recomputing every digest
and handing out Arrow arrays are all inside the clock, and nothing is left over from the round before.
"""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa

import tokenlake
from bench.measure import Timing

__all__ = ["QUERY", "linear_rows"]

QUERY = "SELECT rollout_id, input_ids, token_mask, logprobs FROM linear_rows WHERE reason IS NULL"
"""A row without a reason passed every check, so the checks cannot be skipped."""


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
