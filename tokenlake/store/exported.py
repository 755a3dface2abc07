"""Ready rows that were exported: a catalog of groups, and the row files of the lake as they are.

    STORE/rows/<number>-<sha256>.arrow              a lake's row file, byte for byte
    STORE/versions/<sha256>.arrow                   runs of sampled tokens with their weight version
    STORE/catalog/<first>-<end>-<sha256>.json       the groups from `first` on, in the order of publication, and the
                                                    files that they need; one that reaches further replaces it

Nothing is there for a reader until the catalog names it, and an entry of the catalog is written after what it names.
Names hold the SHA-256 of the content, so every byte that is used was checked, from the catalog down; the digest that a
row carries is computed again beside that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc

from tokenlake.errors import DamagedLake, FormatError, NotFound
from tokenlake.store.functions import row_digests
from tokenlake.store.objects import Objects, sha256_of
from tokenlake.store.records import conform
from tokenlake.store.rowreader import Place
from tokenlake.store.schema import FORMAT_VERSION, ROW

__all__ = ["Catalog", "Entry", "ExportedFile", "ExportedFiles", "ExportedGroup", "check_digests", "versions_name"]

_FOLDER = "catalog"
_NAME = re.compile(r"(?P<first>\d{12})-(?P<end>\d{12})-(?P<sha256>[0-9a-f]{64})\.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedGroup:
    """A published group."""

    group_id: str
    n: int
    purpose: str
    number: int
    """Of the file that holds its rows."""
    versions: str
    """SHA-256 of the file that holds its weight versions."""

    @property
    def place(self) -> Place:
        """Where its rows are."""
        return (self.group_id, self.number, self.n)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile:
    """A file of rows."""

    number: int
    sha256: str

    @property
    def name(self) -> str:
        """Of its object."""
        return f"rows/{self.number:06d}-{self.sha256}.arrow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A stretch of the catalog."""

    lake_id: str
    first: int
    """How many groups were published before the first of these."""
    pad_id: int
    """Of the model that was registered at the time of the export; 0 when there was none."""
    groups: tuple[ExportedGroup, ...]
    files: tuple[ExportedFile, ...]

    def put(self, store: Objects) -> None:
        """Write it: from then on readers see what it names."""
        data = json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=1).encode()
        store.put(f"{_FOLDER}/{self.first:012d}-{self.first + len(self.groups):012d}-{sha256_of(data)}.json", data)

    @classmethod
    def get(cls, store: Objects, name: str, sha256: str) -> Self:
        """Read it. Raises `FormatError` for a newer format, `DamagedLake` where it is not what was written."""
        found: dict[str, Any] = json.loads(store.get(f"{_FOLDER}/{name}", sha256).to_pybytes())
        version = found.pop("format_version")
        if version > FORMAT_VERSION:
            raise FormatError(
                f"{store.name}/{_FOLDER}/{name} has format {version}, this Tokenlake reads up to {FORMAT_VERSION}: "
                "upgrade Tokenlake",
                format_version=version,
            )
        groups = tuple(ExportedGroup(**each) for each in found.pop("groups"))
        return cls(groups=groups, files=tuple(ExportedFile(**each) for each in found.pop("files")), **found)


class Catalog:
    """What was exported to a store, as far as the last `refresh`. Used by one thread."""

    def __init__(self, store: Objects) -> None:
        self.store = store
        self.lake_id: str | None = None
        """None: nothing was exported yet."""
        self.pad_id = 0
        self.groups: list[ExportedGroup] = []
        """In the order of publication."""
        self.files: dict[int, ExportedFile] = {}
        self._by_name: dict[str, ExportedGroup] = {}

    def refresh(self) -> None:
        """See what was exported since. Raises `DamagedLake` where an entry is missing, changed, or of another lake."""
        found = [match for name in self.store.names(_FOLDER) if (match := _NAME.fullmatch(name))]
        further = [(int(match["end"]), int(match["first"]), match) for match in found]
        while further := [each for each in further if each[0] > len(self.groups)]:
            fitting = [each for each in further if each[1] <= len(self.groups)]
            if not fitting:
                raise DamagedLake(
                    f"{self.store.name}/{_FOLDER} lacks an entry: a group after {len(self.groups)} others"
                )
            match = max(fitting, key=itemgetter(0))[2]
            self.take(Entry.get(self.store, match[0], match["sha256"]))

    def take(self, entry: Entry) -> None:
        """Add what an entry has beyond what is known. Raises `DamagedLake` where it contradicts that."""
        known = self.groups[entry.first :]
        same = all(a.place == b.place for a, b in zip(known, entry.groups, strict=False))
        if self.lake_id not in (None, entry.lake_id) or not same:
            raise DamagedLake(f"{self.store.name}/{_FOLDER} has entries that contradict each other: export elsewhere")
        self.lake_id, self.pad_id = entry.lake_id, entry.pad_id
        self.groups += entry.groups[len(known) :]
        self.files.update((each.number, each) for each in entry.files)
        self._by_name.update((each.group_id, each) for each in entry.groups)

    def find(self, groups: Sequence[str]) -> list[ExportedGroup]:
        """These groups. Raises `NotFound` for one that has not been exported."""
        if any(name not in self._by_name for name in groups):
            self.refresh()
        for name in groups:
            if name not in self._by_name:
                raise NotFound(f"group {name} has not been exported to {self.store.name}", group_id=name)
        return [self._by_name[name] for name in groups]

    def versions(self, groups: Sequence[str]) -> list[dict[str, Any]]:
        """Runs of sampled tokens of these groups, as the view `token_versions` had them when they were exported."""
        wanted = pa.array(groups, pa.string())
        found: list[dict[str, Any]] = []
        for sha256 in dict.fromkeys(group.versions for group in self.find(groups)):
            table = pa.ipc.open_file(self.store.get(versions_name(sha256), sha256)).read_all()
            found += table.filter(pc.is_in(table.column("group_id"), wanted)).to_pylist()
        return found


@dataclass(frozen=True, slots=True)
class ExportedFiles:
    """Files of rows in a store, for `RowReader`. Picklable."""

    store: Objects
    files: Mapping[int, ExportedFile]

    def place(self, number: int) -> str:
        """As `RowFiles` says."""
        return f"{self.store.name}/{self.files[number].name}"

    def open(self, number: int) -> pa.NativeFile:
        """As `RowFiles` says, in memory. Raises `DamagedLake` where its bytes or the digest of a row are others."""
        file = self.files[number]
        data = self.store.get(file.name, file.sha256)
        check_digests(data, self.place(number))
        return pa.BufferReader(data)

    def only(self, numbers: Collection[int]) -> Self:
        """As `RowFiles` says."""
        return type(self)(self.store, {number: self.files[number] for number in numbers})


def versions_name(sha256: str) -> str:
    """Of the object with weight versions."""
    return f"versions/{sha256}.arrow"


def check_digests(data: pa.Buffer, place: str) -> None:
    """Compute the digest of every row of a file again. Raises `DamagedLake`."""
    reader = pa.ipc.open_file(data)
    for index in range(reader.num_record_batches):
        rows = conform(reader.get_batch(index), ROW)
        kept = (rows.column(name).to_pylist() for name in ("sample_id", "row_digest"))
        for sample_id, digest, made in zip(*kept, row_digests(rows), strict=True):
            if digest != made:
                raise DamagedLake(f"{place}: row {sample_id} does not have its digest: run `tokenlake audit`")
