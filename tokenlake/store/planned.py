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
_FIELDS = {field.name: field for field in (*PLACE, *LINEAGE)}


class Planned:
    """A database over what it is given. Used by one thread at a time."""

    def __init__(self, fetcher: Fetcher, events: pa.Table, places: pa.Table) -> None:
        """`fetcher` reads the deltas; the rest is what `give` takes. Whoever makes it closes `con`."""
        # Of a vector or two, a second thread has nothing to do but to wait for.
        self.con = duckdb.connect(":memory:", config={"threads": 1})
        self._given: dict[str, pa.Array] = {}
        self._prepared: set[str] = set()
        fetcher.register(self.con)
        functions.register(self.con)
        self.give(events, places)
        for name, given in self._given.items():
            kind = sql_type(given.type)
            add_function(self.con, f"tl_given_{name}", partial(self._given.__getitem__, name), {}, kind, fixed=False)
        # A view that is made later would have every statement planned anew.
        needed = views.needed_views(" ".join(sql.read(f"planned/{name}") for name in _STATEMENTS))
        for name in ("planned/lineage", "planned/tl_places", "tables/deltas", *needed):
            self.con.execute(sql.read(name))

    def give(self, events: pa.Table, places: pa.Table) -> None:
        """Judge these events and places from now on; they have the columns of the first that were given."""
        self._given.update(events=_one_list(events), places=_one_list(places))

    def ask(self, name: str) -> pa.Table:
        """The result of one of the statements."""
        if name not in self._prepared:
            self.con.execute(sql.read(f"planned/{name}"))
            self._prepared.add(name)
        return self.con.sql(sql.read(f"planned/ask_{name}")).to_arrow_table()


def _one_list(table: pa.Table) -> pa.Array:
    """A list of all rows as STRUCTs."""
    schema = pa.schema([_FIELDS[name] for name in table.column_names])
    columns = [
        pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
        for column in table.cast(schema).columns
    ]
    records = pa.StructArray.from_arrays(columns, fields=list(schema))
    return pa.ListArray.from_arrays(pa.array([0, len(records)], pa.int32()), records)
