"""Where a loader's rows come from: a lake's folder, or a service's URL. Both answer the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from tokenlake import sql
from tokenlake.errors import EngineFailed, MissingExtra, NotFound, TokenlakeError
from tokenlake.store.reader import Lake
from tokenlake.store.rowreader import RowReader
from tokenlake.store.schema import ROW

__all__ = ["LakeSource", "ServiceSource", "Source"]

_STREAM = "application/vnd.apache.arrow.stream"
_PAGE = 5000
_Place = tuple[str, int, int]


class Source(Protocol):
    """Published rows, open where they are iterated over."""

    def groups(self, purpose: str | None) -> list[str]:
        """Published groups in the order of publication; a later answer only has more at its end."""
        ...

    def rows(self, groups: Sequence[str]) -> pa.Table:
        """All rows of these groups, a group's together, in the order of its rollouts; columns as in `ROW`."""
        ...

    def versions(self, groups: Sequence[str]) -> list[dict[str, Any]]:
        """Runs of sampled tokens with their known weight version, as the view `token_versions` has them."""
        ...

    def pad_id(self) -> int:
        """The registered model's pad id; 0 when there is none."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


class LakeSource:
    """A lake on this machine, read beside its owner: rows straight from the memory map of their files."""

    def __init__(self, path: Path) -> None:
        self._lake = Lake(path)
        self._reader = RowReader(path)
        self._places: dict[str, _Place] = {}

    def groups(self, purpose: str | None) -> list[str]:
        """As `Source` says."""
        self._lake.refresh()
        found = self._lake.sql(sql.read("reads/ready_groups"), [purpose]).fetchall()
        self._places.update((place[0], place) for place in found)
        return [place[0] for place in found]

    def rows(self, groups: Sequence[str]) -> pa.Table:
        """As `Source` says. Raises `NotFound` for a group that is not published, `DamagedLake` for missing rows."""
        return self._reader.read(self.places(groups))

    def places(self, groups: Sequence[str]) -> list[_Place]:
        """Where the rows of these groups are, as `RowReader` takes it: group, number of its file, N."""
        unknown = [name for name in groups if name not in self._places]
        if unknown:
            found = self._lake.sql(sql.read("reads/ready_segments"), [unknown]).fetchall()
            self._places.update((place[0], place) for place in found)
        for name in unknown:
            if name not in self._places:
                raise NotFound(f"group {name} is not published in {self._lake.path}", group_id=name)
        return [self._places[name] for name in groups]

    def versions(self, groups: Sequence[str]) -> list[dict[str, Any]]:
        """As `Source` says."""
        return self._lake.sql(sql.read("reads/versions_of"), [list(groups)]).to_arrow_table().to_pylist()

    def pad_id(self) -> int:
        """As `Source` says."""
        found = self._lake.sql(sql.read("reads/pad_id")).fetchall()
        return int(found[0][0] or 0) if found else 0

    def close(self) -> None:
        """As `Source` says."""
        self._lake.close()


class ServiceSource:
    """A service, asked over HTTP with the control token."""

    def __init__(self, url: str, token: str, *, deadline_s: float = 60.0) -> None:
        try:
            import httpx  # noqa: PLC0415  # a loader over a folder needs no HTTP
        except ImportError as error:
            raise MissingExtra("a loader over a URL needs httpx: pip install 'tokenlake[serve]'") from error
        headers = {"Authorization": f"Bearer {token}"}
        self._unreachable = httpx.TransportError
        self._http = httpx.Client(base_url=url, headers=headers, timeout=deadline_s)

    def groups(self, purpose: str | None) -> list[str]:
        """As `Source` says."""
        found: list[str] = []
        while True:
            page = self._sql("ready_page", [purpose, len(found), _PAGE])
            found += [row["group_id"] for row in page]
            if len(page) < _PAGE:
                return found

    def rows(self, groups: Sequence[str]) -> pa.Table:
        """As `Source` says, a request a group. Raises `NotFound` for a group that is not published."""
        tables: list[pa.Table] = []
        for name in groups:
            table, _ = self._table("GET", "/api/v1/rows", params={"group_id": name})
            if table.num_rows == 0:
                raise NotFound(f"group {name} is not published at {self._http.base_url}", group_id=name)
            tables.append(table.select(ROW.names).cast(ROW))
        return pa.concat_tables(tables)

    def versions(self, groups: Sequence[str]) -> list[dict[str, Any]]:
        """As `Source` says."""
        return [run for name in groups for run in self._sql("versions_of", [[name]])]

    def pad_id(self) -> int:
        """As `Source` says."""
        found = self._sql("pad_id", [])
        return int(next(iter(found[0].values())) or 0) if found else 0

    def close(self) -> None:
        """As `Source` says."""
        self._http.close()

    def _sql(self, read: str, params: list[Any]) -> list[dict[str, Any]]:
        table, truncated = self._table("POST", "/api/v1/sql", json={"sql": sql.read(f"reads/{read}"), "params": params})
        if truncated:
            raise TokenlakeError(f"{self._http.base_url} gave part of {read} only: raise its sql_max_rows")
        return table.to_pylist()

    def _table(self, method: str, path: str, **content: Any) -> tuple[pa.Table, bool]:
        """An answer's table, and whether the service says that there was more."""
        try:
            answer = self._http.request(method, path, headers={"Accept": _STREAM}, **content)
        except self._unreachable as error:
            raise EngineFailed(f"{self._http.base_url} cannot be reached: {error}") from error
        if not answer.is_success:
            kind = NotFound if answer.status_code == 404 else TokenlakeError
            raise kind(f"{self._http.base_url}{path} answered {answer.status_code}: {answer.text[:300]}")
        table = pa.ipc.open_stream(answer.content).read_all()
        return table, answer.headers.get("x-truncated") == "true"
