"""Opens what holds published rows, in a fresh process: a lake, a SQLite file, or the lake's row files through pyarrow.

`python -m bench.opener lake|sqlite|pyarrow PATH GROUP...` prints one JSON line: seconds to open, seconds of each
group's rows by its id, the peak of its resident memory in MiB, and a digest of those rows. Imports are before the
clock, and only what is opened is imported, since that is in the memory too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

__all__ = ["Row"]

Row = tuple[str, Any, Any, Any]
"""A sample's id, and its ids, mask and log-probabilities as arrays or their bytes."""
_COLUMNS = ("sample_id", "input_ids", "token_mask", "logprobs")
_LAKE = "SELECT sample_id, input_ids, token_mask, logprobs FROM ready_rows WHERE group_id = ?1 ORDER BY sample_id"
_SQLITE = "SELECT sample_id, input_ids, token_mask, logprobs FROM rows WHERE group_id = ? ORDER BY sample_id"
_TYPES = (np.int32, np.uint8, np.float32)


def _lake(path: Path) -> Callable[[], Callable[[str], Iterable[Row]]]:
    import tokenlake  # noqa: PLC0415 - see above

    def opened() -> Callable[[str], Iterable[Row]]:
        lake = tokenlake.open(path)
        return lambda group: _rows(lake.sql(_LAKE, [group]).to_arrow_table())

    return opened


def _sqlite(path: Path) -> Callable[[], Callable[[str], Iterable[Row]]]:
    def opened() -> Callable[[str], Iterable[Row]]:
        database = sqlite3.connect(path)
        return lambda group: database.execute(_SQLITE, (group,)).fetchall()

    return opened


def _pyarrow(path: Path) -> Callable[[], Callable[[str], Iterable[Row]]]:
    import pyarrow.dataset as ds  # noqa: PLC0415 - see above

    def opened() -> Callable[[str], Iterable[Row]]:
        rows = ds.dataset(sorted(map(str, (path / "rows").glob("*.arrow"))), format="ipc")
        return lambda group: _rows(
            rows.to_table(columns=list(_COLUMNS), filter=ds.field("group_id") == group).sort_by("sample_id")
        )

    return opened


def _rows(table: Any) -> list[Row]:
    table = table.combine_chunks()
    names, *arrays = (table.column(name).chunk(0) for name in _COLUMNS)
    values = [_values(column, kind) for column, kind in zip(arrays, _TYPES, strict=True)]
    return [(name, *(lists[at] for lists in values)) for at, name in enumerate(names.to_pylist())]  # pyright: ignore[reportReturnType] - three arrays


def _values(column: Any, kind: type) -> list[Any]:
    """Each list as an array, over its buffer: Arrow's own `to_numpy` imports pandas, which nobody here needs."""
    flat = cast("Any", np.frombuffer(column.values.buffers()[1], kind))[column.values.offset :]
    ends = column.offsets.to_pylist()
    return [flat[start:end] for start, end in itertools.pairwise(ends)]


def _digest(found: Sequence[Iterable[Row]]) -> str:
    hashed = hashlib.sha256()
    for row in (row for group in found for row in group):
        hashed.update(row[0].encode())
        for value, kind in zip(row[1:], _TYPES, strict=True):
            hashed.update(value if isinstance(value, bytes) else np.asarray(value, kind).tobytes())
    return hashed.hexdigest()


def main(arguments: Sequence[str]) -> None:
    """Open, ask for every group, print."""
    kind, path, *groups = arguments
    opening = {"lake": _lake, "sqlite": _sqlite, "pyarrow": _pyarrow}[kind](Path(path))
    before = time.perf_counter()
    rows_of = opening()
    opened = time.perf_counter() - before
    latencies: list[float] = []
    found: list[Iterable[Row]] = []
    for group in groups:
        before = time.perf_counter()
        found.append(rows_of(group))
        latencies.append(time.perf_counter() - before)
    # Not getrusage's peak: that is inherited from the process that started this one.
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    mib = 0.0 if peak is None else int(peak[1]) / 1024
    print(json.dumps({"open": opened, "groups": latencies, "mib": mib, "rows": _digest(found)}))


if __name__ == "__main__":
    main(sys.argv[1:])
