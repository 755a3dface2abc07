"""Statements over some groups that DuckDB plans once: to plan what judging asks takes it longer than to run it.

DuckDB keeps the plan of a prepared statement as long as the statement reads no table (it cannot know what has become of
one), and plans it anew each time otherwise. So what is judged is given as Arrow and read by functions: a database of
its own, with the same views over relations that are `unnest` of a function. A statement that is planned anew all the
same says the same, later.
"""

from __future__ import annotations

from functools import partial

import duckdb
import pyarrow as pa

from tokenlake import sql
from tokenlake.store import functions, views
from tokenlake.store.fetch import Fetcher
from tokenlake.store.schema import LINEAGE, PLACE
from tokenlake.store.sqlfunction import add_function
from tokenlake.store.sqltypes import sql_type

__all__ = ["Planned"]

_STATEMENTS = ("due_rows",)
_NOT_JUDGED = {
    *("schema_version", "byte_length", "batch_row", "fingerprint", "context_digest", "request_digest"),
    *("idempotency_digest", "prev_hash", "event_hash", "consumer", "claim_id", "checkpoint", "served_text"),
}
"""Columns of an event that no verdict depends on; what is given is narrow, since every operator pays for its width."""

_EVENTS = pa.schema([each for each in LINEAGE if each.name not in _NOT_JUDGED])
_PLACES = pa.schema(
    [
        *PLACE,
        *(LINEAGE.field(name) for name in ("rollout_id", "attempt", "call_id", "group_id")),
        pa.field("shadowed", pa.bool_()),
    ]
)
_GIVEN = {"events": _EVENTS, "places": _PLACES}


class Planned:
    """A database over what it is given. Used by one thread at a time."""

    def __init__(self, fetcher: Fetcher) -> None:
        """`fetcher` reads the deltas. Whoever makes it closes `con`."""
        # Of a vector or two, a second thread has nothing to do but to wait for.
        self.con = duckdb.connect(":memory:", config={"threads": 1})
        self._given: dict[str, pa.Array] = {}
        self._prepared: set[str] = set()
        fetcher.register(self.con)
        functions.register(self.con)
        for name, schema in _GIVEN.items():
            self.give(name, schema.empty_table())
            kind = sql_type(self._given[name].type)
            add_function(self.con, f"tl_given_{name}", partial(self._given.__getitem__, name), {}, kind, fixed=False)
        # A view that is made later would have every statement planned anew.
        needed = views.needed_views(" ".join(sql.read(f"planned/{name}") for name in _STATEMENTS))
        for name in ("planned/lineage", "planned/tl_places", "tables/deltas", *needed):
            self.con.execute(sql.read(name))

    def give(self, name: str, table: pa.Table) -> None:
        """Let `events` or `places` hold what a table does; of its columns it takes those it needs."""
        schema = _GIVEN[name]
        columns = [
            pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
            for column in table.select(schema.names).cast(schema).columns
        ]
        records = pa.StructArray.from_arrays(columns, fields=list(schema))
        self._given[name] = pa.ListArray.from_arrays(pa.array([0, len(records)], pa.int32()), records)

    def ask(self, name: str) -> pa.Table:
        """The result of one of the statements."""
        if name not in self._prepared:
            self.con.execute(sql.read(f"planned/{name}"))
            self._prepared.add(name)
        return self.con.sql(sql.read(f"planned/ask_{name}")).to_arrow_table()
