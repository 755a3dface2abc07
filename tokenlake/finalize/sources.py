"""Where a loader's rows come from: a lake's folder, a service's URL, or a store that they were exported to.

All answer the same questions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from pyarrow import fs

from tokenlake import sql
from tokenlake.errors import EngineFailed, MissingExtra, NotFound, TokenlakeError, Unauthorized
from tokenlake.store.exported import Catalog, ExportedFiles
from tokenlake.store.objects import Objects
from tokenlake.store.query import fetch
from tokenlake.store.reader import Lake, RowLake
from tokenlake.store.rowreader import MappedFiles, Place, RowFiles, RowReader
from tokenlake.store.schema import ROW

__all__ = ["LakeSource", "PlacedSource", "ServiceSource", "Source", "StoreSource", "placed_source"]

_STREAM = "application/vnd.apache.arrow.stream"
_PAGE = 5000
_REFUSALS: dict[int, type[TokenlakeError]] = {401: Unauthorized, 404: NotFound}
"""What an answer that is none means, by its status."""


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


class PlacedSource(Source, Protocol):
    """A source that says where its rows are, so that other processes can read them."""

    @property
    def files(self) -> RowFiles:
        """The files that hold them."""
        ...

    def places(self, groups: Sequence[str]) -> list[Place]:
        """Where the rows of these groups are. Raises `NotFound` for a group that is not published."""
        ...


class LakeSource:
    """A lake on this machine, read beside its owner: rows straight from the memory map of their files."""

    def __init__(self, path: Path) -> None:
        self._lake = RowLake(path)
        self._whole: Lake | None = None
        """Opened where versions are asked for, which are what deltas say."""
        self.files = MappedFiles(path.absolute())
        self._reader = RowReader(self.files)
        self._places: dict[str, Place] = {}

    def groups(self, purpose: str | None) -> list[str]:
        """As `Source` says."""
        for lake in self._open():
            lake.refresh()
        found = self._lake.sql(sql.read("reads/ready_groups"), [purpose]).fetchall()
        self._places.update((place[0], place) for place in found)
        return [place[0] for place in found]

    def rows(self, groups: Sequence[str]) -> pa.Table:
        """As `Source` says. Raises `NotFound` for a group that is not published, `DamagedLake` for missing rows."""
        return self._reader.read(self.places(groups))

    def places(self, groups: Sequence[str]) -> list[Place]:
        """As `PlacedSource` says."""
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
        if self._whole is None:
            self._whole = Lake(self._lake.path)
        return fetch(self._whole, sql.read("reads/versions_of"), [list(groups)], groups=groups).to_pylist()

    def pad_id(self) -> int:
        """As `Source` says."""
        found = self._lake.sql(sql.read("reads/pad_id")).fetchall()
        return int(found[0][0] or 0) if found else 0

    def close(self) -> None:
        """As `Source` says."""
        for lake in self._open():
            lake.close()

    def _open(self) -> list[Lake]:
        return [self._lake, *([] if self._whole is None else [self._whole])]


class StoreSource:
    """Exported rows, fetched a file at a time and checked, digest by digest."""

    def __init__(self, store: Objects) -> None:
        self._catalog = Catalog(store)
        self.files = ExportedFiles(store, self._catalog.files)
        self._reader = RowReader(self.files)

    def groups(self, purpose: str | None) -> list[str]:
        """As `Source` says. Raises `NotFound` where nothing was exported yet."""
        self._catalog.refresh()
        if self._catalog.lake_id is None:
            raise NotFound(
                f"{self._catalog.store.name} holds no exported rows (yet): `tokenlake export` puts them there"
            )
        return [each.group_id for each in self._catalog.groups if purpose in (None, each.purpose)]

    def rows(self, groups: Sequence[str]) -> pa.Table:
        """As `Source` says. Raises `NotFound` for a group that is not there, `DamagedLake` for rows that changed."""
        return self._reader.read(self.places(groups))

    def places(self, groups: Sequence[str]) -> list[Place]:
        """As `PlacedSource` says."""
        return [group.place for group in self._catalog.find(groups)]

    def versions(self, groups: Sequence[str]) -> list[dict[str, Any]]:
        """As `Source` says, as of the export."""
        return self._catalog.versions(groups)

    def pad_id(self) -> int:
        """As `Source` says, as of the last export."""
        self._catalog.refresh()
        return self._catalog.pad_id

    def close(self) -> None:
        """As `Source` says."""


def placed_source(source: str | os.PathLike[str], filesystem: fs.FileSystem | None = None) -> PlacedSource:
    """A lake for a folder, a store for a URI or a path of `filesystem`."""
    if filesystem is not None or "://" in os.fspath(source):
        return StoreSource(Objects(source, filesystem))
    return LakeSource(Path(source))


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
            kind = _REFUSALS.get(answer.status_code, TokenlakeError)
            raise kind(f"{self._http.base_url}{path} answered {answer.status_code}: {answer.text[:300]}")
        table = pa.ipc.open_stream(answer.content).read_all()
        return table, answer.headers.get("x-truncated") == "true"
