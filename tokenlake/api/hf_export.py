"""Ready rows as a folder that `datasets.load_from_disk` reads, a group at a time.

Memory holds the rows of one group; the library itself maps what is on disk.
"""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa

from tokenlake import sql
from tokenlake.errors import InvalidInput, MissingExtra
from tokenlake.store.reader import Lake

__all__ = ["save_dataset"]

_NO_GROUP = ""


def save_dataset(lake: Lake, group_id: str | None, target: Path) -> None:
    """Write the ready rows of one group, or of all for None, in the order of publication.

    The folder appears whole or not at all. Raises `MissingExtra` without the library, `InvalidInput` for a folder that
    exists or cannot be written.
    """
    library = _library()
    if target.exists():
        raise InvalidInput(f"{target} exists: name a folder that does not")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
            stream, saved = Path(folder) / "rows.arrow", Path(folder) / "saved"
            _write(lake, group_id, stream)
            library.disable_progress_bars()
            library.Dataset.from_file(str(stream)).save_to_disk(str(saved))
            saved.rename(target)
    except OSError as error:
        raise InvalidInput(f"cannot write {target}: {error.strerror or error}") from error


def _library() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise MissingExtra(
            f"--format hf needs the package {error.name!r}: pip install 'tokenlake[hf]'", package=error.name
        ) from error


def _write(lake: Lake, group_id: str | None, path: Path) -> None:
    if group_id is None:
        groups = [row[0] for row in lake.sql(sql.read("reads/ready_groups"), [None]).fetchall()]
    else:
        groups = [group_id]
    schema = _rows(lake, _NO_GROUP).schema
    with pa.OSFile(str(path), "wb") as out, pa.ipc.new_stream(out, schema) as writer:
        for name in groups:
            writer.write_table(_rows(lake, name))


def _rows(lake: Lake, group_id: str) -> pa.Table:
    return lake.fetch(sql.read("reads/rows"), [group_id])
