"""The index's DDL against the schemas: a column is declared once."""

import duckdb
import pyarrow as pa

from tokenlake.store.lake import OwnedLake
from tokenlake.store.schema import DELTA, LINEAGE, PLACE, ROW
from tokenlake.store.sqltypes import sql_type


def columns(lake: OwnedLake, name: str) -> dict[str, str]:
    return dict(lake.sql(f"SELECT column_name, column_type FROM (DESCRIBE {name})").fetchall())


def declared(schema: pa.Schema) -> dict[str, str]:
    con = duckdb.connect()
    found = {f.name: str(sql_type(f.type)) for f in schema}
    con.close()
    return found


def test_lineage_has_the_columns_of_its_schema(lake: OwnedLake) -> None:
    assert columns(lake, "lineage") == declared(LINEAGE)


def test_deltas_have_the_columns_of_their_schema_and_the_group_to_filter_by(lake: OwnedLake) -> None:
    assert columns(lake, "deltas") == declared(DELTA) | {"group_id": "VARCHAR"}


def test_rows_have_the_columns_of_their_schema_and_the_number_of_their_file(lake: OwnedLake) -> None:
    assert columns(lake, "rows") == declared(ROW) | {"segment": "INTEGER"}


def test_a_place_has_the_columns_of_its_schema(lake: OwnedLake) -> None:
    assert declared(PLACE).items() <= columns(lake, "tl_places").items()


def test_findings_have_three_columns(lake: OwnedLake) -> None:
    assert columns(lake, "lake_findings") == {"kind": "VARCHAR", "place": "VARCHAR", "detail": "VARCHAR"}
