"""Opening a lake of many calls read-only, in a fresh process each time, and one group's rows from it.

The lake is as a service leaves it: groups published, small batches compacted, closed. A call is 32 tokens here: what
opening costs depends on how many there are. SQLite has the same published rows under an index; pyarrow scans the lake's
own row files.
"""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import tokenlake
from bench import tokenlake_stage
from bench.measure import Sample, typical
from bench.plan import Plan
from bench.table import Contender, Figure, Row
from bench.workload import rollouts
from tokenlake.finalize.publish import publish_due
from tokenlake.store.lake import OwnedLake

__all__ = ["rows"]

_SIZE, _CALLS, _DELTA = 8, 16, 32
_AT_ONCE = 64
"""Groups that are staged and published together."""
_ASKED = 20
_ROWS = "SELECT group_id, sample_id, input_ids, token_mask, logprobs FROM ready_rows"
_TABLE = "CREATE TABLE rows (group_id TEXT, sample_id TEXT, input_ids BLOB, token_mask BLOB, logprobs BLOB)"
_INDEX = "CREATE INDEX groups ON rows (group_id)"
_INSERT = "INSERT INTO rows VALUES (?, ?, ?, ?, ?)"


def rows(plan: Plan) -> list[Row]:
    """The rows of opening."""
    lake, database = plan.scratch / "lake", plan.scratch / "rows.db"
    groups = _fill(lake, plan.size.open_calls, plan.seed)
    _copy(lake, database)
    calls = len(groups) * _SIZE * _CALLS
    asked = random.Random(plan.seed).sample(groups, min(_ASKED, len(groups)))
    runs = {"lake": ("tokenlake", lake), "sqlite": ("SQLite", database), "pyarrow": ("pyarrow", lake)}
    digests = {kind: _opened(kind, path, asked)["rows"] for kind, (_, path) in runs.items()}
    if len(set(digests.values())) != 1:
        raise AssertionError(f"the same groups give other rows: {digests}")
    ours, floor, peer = (
        Contender(name=name, run=lambda kind=kind, path=path: _sample(_opened(kind, path, asked)))
        for kind, (name, path) in runs.items()
    )
    return [
        Row(
            work="open",
            what=what,
            unit=unit,
            ours=Figure(ours, measure),
            floor=Figure(floor, measure),
            peers=[Figure(peer, measure)],
        )
        for what, unit, measure in (
            (f"open read-only, {calls:,} calls", "s", "open"),
            ("peak memory of that process", "MiB", "mib"),
            ("one group's rows from it", "ms", "group"),
        )
    ]


def _fill(path: Path, calls: int, seed: int) -> list[str]:
    """At least so many calls in published groups; returns the groups."""
    count = -(-calls // (_SIZE * _CALLS))
    groups: list[str] = []
    with OwnedLake.open(path) as lake:
        for first in range(0, count, _AT_ONCE):
            here = min(_AT_ONCE, count - first)
            work = rollouts(here * _SIZE, calls=_CALLS, delta=_DELTA, seed=seed, group_size=_SIZE, first=first * _SIZE)
            events, _ = tokenlake_stage.finished(lake.delta_writer("w0"), work)
            lake.lineage.append_many(events)
            groups += dict.fromkeys(rollout.group_id for rollout in work)
            publish_due(lake, groups=groups[first:])
        lake.compact()
    return groups


def _copy(path: Path, database: Path) -> None:
    with tokenlake.open(path) as lake:
        table = lake.sql(_ROWS).to_arrow_table()
    with sqlite3.connect(database) as made:
        made.execute(_TABLE)
        for batch in table.to_batches(max_chunksize=1024):
            names, arrays = batch.columns[:2], batch.columns[2:]
            made.executemany(
                _INSERT,
                (
                    (*(name[at].as_py() for name in names), *(each[at].values.to_numpy().tobytes() for each in arrays))
                    for at in range(batch.num_rows)
                ),
            )
        made.execute(_INDEX)
    made.close()


def _opened(kind: str, path: Path, asked: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.opener", kind, str(path), *asked]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def _sample(found: dict[str, Any]) -> dict[str, Sample]:
    return {
        "open": Sample(value=found["open"]),
        "mib": Sample(value=found["mib"]),
        "group": typical(found["groups"]),
    }
