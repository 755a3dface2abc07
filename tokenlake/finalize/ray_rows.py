"""Ready rows as a Ray Data dataset: tasks on any node read their share of the row files, when it is asked for.

The caller's process looks up which file holds which group and reads no row. A lake's folder has to be the same one on
every node; from a store that rows were exported to, each task fetches its own.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
from pyarrow import fs

from tokenlake.errors import ConfigError, MissingExtra
from tokenlake.finalize.sources import placed_source
from tokenlake.store.rowreader import Place, RowFiles, RowReader
from tokenlake.store.schema import ROW

try:
    import ray.data
    from ray.data.block import BlockMetadata
except ImportError as error:
    raise MissingExtra("a Ray Data dataset needs Ray: pip install 'tokenlake[ray]'") from error

__all__ = ["read_rows"]

_Blocks = Sequence[Sequence[Place]]


def read_rows(
    path: str | os.PathLike[str],
    *,
    filesystem: fs.FileSystem | None = None,
    purpose: str | None = "train",
    groups: Sequence[str] | None = None,
    groups_per_block: int = 16,
) -> Any:
    """A `ray.data.Dataset` of ready rows with the columns of a row, lazily read.

    `path`: a lake's folder; or where `tokenlake export` put rows, a URI or a path of `filesystem`. `purpose`: `train`,
    `eval`, or None for both, of what is published now; `groups`: these and no others. A block is `groups_per_block`
    whole groups; Ray Data may cut one that is larger than its own bound. Raises `NotFound` for a group that is not
    published; `DamagedLake` where rows are missing, when they are read.
    """
    if groups_per_block < 1:
        raise ConfigError("groups_per_block must be at least 1")
    with contextlib.closing(placed_source(path, filesystem)) as source:
        places = source.places(source.groups(purpose) if groups is None else groups)
        files = source.files
    blocks = [places[start : start + groups_per_block] for start in range(0, len(places), groups_per_block)]
    return ray.data.read_datasource(_Rows(files, blocks or [[]]))


class _Rows(ray.data.Datasource):
    """Blocks of groups, given by where their rows lie."""

    def __init__(self, files: RowFiles, blocks: _Blocks) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]  # Ray is Any here
        self._files = files
        self._blocks = blocks

    def get_name(self) -> str:
        """What Ray calls it."""
        return "Tokenlake"

    def estimate_inmemory_data_size(self) -> int | None:
        """As Ray asks: nobody knows before the files are opened."""
        return None

    def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[Any]:
        """At most `parallelism` tasks, each of which makes blocks that follow one another."""
        size = -(-len(self._blocks) // max(parallelism, 1))
        about = BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None, input_files=None)
        shares = [self._blocks[start : start + size] for start in range(0, len(self._blocks), size)]
        return [ray.data.ReadTask(partial(_read, self._needed(share), share), about, schema=ROW) for share in shares]

    def _needed(self, blocks: _Blocks) -> RowFiles:
        return self._files.only({number for places in blocks for _, number, _ in places})


def _read(files: RowFiles, blocks: _Blocks) -> Iterator[pa.Table]:
    reader = RowReader(files)
    return (reader.read(places) for places in blocks)
